"""Evaluation of language models, encoders and classifiers, compared with separately computed scores."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from kit.toy import call, strict_json
from regard.config import Config, parse
from regard.data.objectives import SpanCorruption
from regard.data.plain_text import Stream, TokenizedText, read_pieces, tokenize_text
from regard.data.reader import LineCounter, Source
from regard.decode.encoder_only import classify, classify_images
from regard.decode.forced import score_text, scoring_context
from regard.errors import UserError
from regard.evaluate.evaluator import evaluate_text, judge_text
from regard.model import Model
from regard.parallel.ranks import ProcessGroup
from regard.run import Run, saved_recipe
from regard.text.codec import Example
from regard.training.validation import mean_scores

TEXT = "the cat sat on the mat\nand the dog sat on the log\n\n" * 6
TINY = ["width=16", "heads=2", "ff=32", "layers=1", "dropout=0", "attention_dropout=0", "log_every=100", "warmup=2"]


def train(out: Path, *args: object, sets: tuple[str, ...] = ()) -> Path:
    settings = [part for setting in (*TINY, *sets) for part in ("--set", setting)]
    result = call("train", *args, "--out", out, "--steps", 3, "--workers", 1, *settings)
    assert result.code == 0, result.err
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    (path / "text.txt").write_text(TEXT)
    rows = [("ab"[n % 2] * (n % 5 + 1), ("even", "odd")[n % 2]) for n in range(60)]
    (path / "labels.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    draw = np.random.default_rng(1)
    np.savez(path / "images.npz", images=draw.integers(0, 256, (40, 4, 4), np.uint8), labels=np.arange(40) % 3)
    text = ("--data", path / "text.txt", "--source-tokens", "char")
    train(path / "lm", "--task", "lm", *text, sets=("context=8",))
    train(path / "bytes", "--task", "lm", "--data", path / "text.txt", "--source-tokens", "byte", sets=("context=8",))
    train(path / "xl", "--task", "lm", *text, sets=("context=8", "memory=8", "position=relative"))
    train(path / "masked", "--task", "masked", *text, sets=("context=16",))
    train(path / "span", "--task", "span", *text, sets=("context=16", "span_rate=0.3", "span_mean=2"))
    train(path / "classify", "--task", "classify", "--data", path / "labels.tsv", "--source-tokens", "char")
    train(path / "image", "--task", "image", "--data", path / "images.npz")
    return path


def tokenized(run: Run, path: Path) -> TokenizedText:
    return tokenize_text(list(read_pieces(Source((str(path),)), LineCounter())), run.codec.source, "text")


def test_every_token_is_scored_once_with_enough_context(folder: Path) -> None:
    run = Run.load(folder / "lm")
    ids = tokenized(run, folder / "text.txt").ids
    for context in (6, 7, 8, 1000):
        token_scores = score_text(run, ids, context)
        assert token_scores.predicted.sum() == len(ids) - 1 == len(TEXT)
        full = min(context, len(ids) - 1)
        for position in (0, 1, 5, 20, 21, 22, 23, len(ids) - 2):
            nlls = []
            for before in range(1, full + 1):  # the loss with 1, 2, ... preceding tokens
                start = position + 1 - before
                if start >= 0:
                    tokens = torch.from_numpy(ids[start : position + 1].astype(np.int64))[None]
                    logits = run.model(tokens.new_empty((1, 0)), None, tokens)[0, -1].detach()
                    nlls.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor(int(ids[position + 1])))))
            sufficient = nlls[max(0, min(len(nlls), math.ceil(full / 2)) - 1) :]
            assert any(nll == pytest.approx(token_scores.nll[position], abs=1e-4) for nll in sufficient)


def test_loss_perplexity_and_bits_per_character_are_consistent(folder: Path) -> None:
    run = Run.load(folder / "lm")
    scores = judge_text(run, tokenized(run, folder / "text.txt"))
    evaluated = evaluate_text(run, [scores], samples=0).metrics
    nll = score_text(run, tokenized(run, folder / "text.txt").ids, 8).nll.sum()
    assert evaluated["loss"].score == pytest.approx(nll / len(TEXT))
    assert evaluated["perplexity"].score == pytest.approx(math.exp(nll / len(TEXT)))
    assert evaluated["bits_per_char"].score == pytest.approx(nll / len(TEXT) / math.log(2))
    other = Run.load(folder / "bytes")  # other tokens, but the same number of characters
    assert judge_text(other, tokenized(other, folder / "text.txt")).characters.sum() == len(TEXT)


def test_segments_with_full_memory_equal_one_segment(folder: Path) -> None:
    run = Run.load(folder / "xl")
    ids = tokenized(run, folder / "text.txt").ids[:200]
    whole = score_text(run, ids, 1000).nll
    assert np.abs(score_text(run, ids, 8).nll - whole).max() > 1e-4
    run.model.decoder.memory = 1000
    assert score_text(run, ids, 8).nll == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize("memory", [3, 8, 9, 15, 16, 40])
def test_a_longer_memory_than_in_training_equals_explicit_window_and_reach(folder: Path, memory: int) -> None:
    run = Run.load(folder / "xl")  # trained with a memory and a context of 8
    table = run.config.model_dump()
    table["decoder"] |= {"memory": memory} | ({"window": 15, "reach": 8} if memory > 8 else {})
    plain = Run(parse(Config, table, "test"), run.codec, Model(parse(Config, table, "test")).eval(), run.path)
    plain.model.load_state_dict(run.model.state_dict())
    ids = tokenized(run, folder / "text.txt").ids[:200]
    nll = score_text(run, ids, 8, memory).nll
    assert nll == pytest.approx(score_text(plain, ids, 8).nll, abs=1e-5)
    if memory > 15:  # tokens beyond the distances of training have no effect
        assert nll == pytest.approx(score_text(run, ids, 8, 15).nll, abs=1e-5)
    decoder = run.model.decoder  # the model is unchanged
    assert (decoder.memory, decoder.window, decoder.blocks[0].attention.relative.reach) == (8, None, None)


def test_masked_tokens_are_reproducible_and_scored_once(folder: Path) -> None:
    run = Run.load(folder / "masked")
    ids = tokenized(run, folder / "text.txt").ids
    token_scores = score_text(run, ids, 16)
    again = score_text(run, ids, 16)
    assert all(np.array_equal(a, b) for a, b in zip(token_scores, again, strict=True))
    assert token_scores.predicted.mean() == pytest.approx(0.15, abs=0.03)
    assert set(token_scores.predicted.tolist()) == {0, 1}  # no token twice, although the last two windows overlap
    assert (token_scores.nll[token_scores.predicted == 0] == 0).all()
    assert (token_scores.nll[token_scores.predicted == 1] > 0).all()


def test_scores_of_masked_spans_equal_a_training_batch(folder: Path) -> None:
    run = Run.load(folder / "span")
    ids = tokenized(run, folder / "text.txt").ids[: 1 + 16 * 7]
    token_scores = score_text(run, ids, 16)
    train = saved_recipe(folder / "span").train
    assert train.span_rate == 0.3
    spans = SpanCorruption(Stream(ids[1:], 0), run.codec, run.config, train)
    whole = spans.batch(np.arange(0, 16 * 7, 16), (0, 0, 0))
    batch = whole.part(slice(None), whole.tokens)
    scores = mean_scores(run.model, [batch], ProcessGroup())
    assert token_scores.predicted.sum() == batch.tokens
    assert token_scores.nll.sum() / token_scores.predicted.sum() == pytest.approx(scores["loss"], rel=1e-4)
    assert 100 * token_scores.correct.sum() / token_scores.predicted.sum() == pytest.approx(
        scores["accuracy"], rel=1e-4
    )
    text = (batch.label_BT > run.codec.ids.eos) & (batch.label_BT < run.codec.target_vocab)
    hidden = enumerate(spans.spans(7, (0, 0, 0)))
    positions = [
        position for row, pieces in hidden for a, b in pieces for position in range(16 * row + a, 16 * row + b)
    ]
    assert np.flatnonzero(token_scores.predicted).tolist() == positions
    assert ids[1:][positions].tolist() == batch.label_BT[text].tolist()


def test_evaluate_reports_the_metrics_of_the_task(folder: Path) -> None:
    def metrics(*args: object) -> dict:
        files = [folder / arg if (folder / str(arg)).exists() else arg for arg in args]
        result = call("evaluate", *files, "--json", "--bootstrap", 20)
        assert result.code == 0, result.err
        return strict_json(result.out)

    scores = metrics("lm", "text.txt", "--against", folder / "bytes")
    assert list(scores["metrics"]) == ["perplexity", "bits_per_char", "loss"] and scores["examples"] == 18
    assert scores["metrics"]["perplexity"]["low"] < scores["metrics"]["perplexity"]["score"]
    assert set(scores["against"]) == set(scores["metrics"])
    assert list(metrics("masked", "text.txt")["metrics"]) == ["accuracy", "pseudo_perplexity", "loss"]
    scores = metrics("span", "text.txt")
    assert list(scores["metrics"]) == ["accuracy", "perplexity", "loss"] and scores["examples"] == 18
    assert scores == metrics("span", "text.txt")
    assert scores["metrics"]["perplexity"]["score"] == pytest.approx(math.exp(scores["metrics"]["loss"]["score"]))
    shorter, longer = (metrics("xl", "text.txt", "--memory", n)["metrics"]["loss"]["score"] for n in (1, 64))
    assert shorter != longer
    labels = metrics("classify", "labels.tsv")
    outputs = call("generate", folder / "classify", folder / "labels.tsv").lines
    references = [line.split("\t")[1] for line in (folder / "labels.tsv").read_text().splitlines()]
    wrong = Counter((r, o) for r, o in zip(references, outputs, strict=True) if r != o)
    assert wrong == {(row["reference"], row["output"]): row["count"] for row in labels["confusions"]}
    (folder / "outputs.txt").write_text("".join(f"{label}\n" for label in outputs))
    assert labels == metrics("labels.tsv", "--outputs", folder / "outputs.txt")
    against = metrics("classify", "labels.tsv", "--against", folder / "outputs.txt")["against"]
    assert against["accuracy"]["difference"] == 0
    accuracy = labels["metrics"]["accuracy"]
    assert 0 <= accuracy["low"] <= accuracy["score"] <= accuracy["high"] <= 100
    images = metrics("image", "images.npz")
    assert images["examples"] == 40
    (first, *_) = images["confusions"]
    number = int(first["example"]["location"].rpartition(" ")[2])
    assert first["reference"] == str(number % 3) and first["output"] == first["example"]["output"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("lm", "text.txt", "--metric", "bleu"), "metric: 'bleu' is not known"),
        (("lm", "text.txt", "--memory", "9"), "has no memory"),
        (("lm", "text.txt", "--context", "1"), "context: 1 is out of range"),
        (("masked", "text.txt", "--context", "5000"), "from 2 to 512"),
        (("masked", "text.txt", "--memory", "9"), "has no memory"),
        (("span", "text.txt", "--metric", "bits_per_char"), "metric: 'bits_per_char' is not known"),
        (("classify", "labels.tsv", "--context", "5"), "--context: no meaning for"),
        (("classify", "labels.tsv", "--metric", "bleu"), "allowed: accuracy"),
        (("classify", "labels.tsv", "--beam", "5", "--workers", "2"), "--beam, --workers: no meaning for"),
        (("image", "images.npz", "--strict", "--max-source", "5"), "--max-source, --strict: no meaning for"),
        (("lm", "text.txt", "--beam", "3", "--columns", "source"), "which is a language model"),
        (("span", "text.txt", "--target", "x"), "--target: no meaning for"),
        (("image", "labels.tsv"), "not an .npz file"),
        (("lm", "none.txt"), "no such file"),
        (("lm", "text.txt", "--against", "masked"), "is a masked language model"),
        (("lm", "text.txt", "--against", "labels.tsv"), "is compared with another run"),
        (("classify", "labels.tsv", "--lowercase", "--ensemble", "masked"), "--ensemble, --lowercase: no meaning for"),
        (("classify", "none.tsv"), "none.tsv: no such file"),
    ],
)
def test_invalid_options_and_files_are_refused(folder: Path, args: tuple[str, ...], message: str) -> None:
    run, file, *options = args
    result = call(
        "evaluate", folder / run, folder / file, *[folder / o if o in ("masked", "labels.tsv") else o for o in options]
    )
    assert result.code == 2 and message in result.err


def test_label_probabilities_do_not_depend_on_the_batch(folder: Path) -> None:
    run = Run.load(folder / "classify")
    texts = ["a", "bbbb", "aaaaa", ""]
    together = classify(run, texts)
    for text, labelled in zip(texts, together, strict=True):
        assert sum(labelled.probabilities.values()) == pytest.approx(1)
        assert labelled.label == next(iter(labelled.probabilities)) in ("even", "odd")
        assert labelled.probability == max(labelled.probabilities.values())
        (alone,) = classify(run, [text])
        assert alone.probabilities == pytest.approx(labelled.probabilities, abs=1e-5)
    short, long, far = classify(run, ["a", "a" * 600, Example("b" * 9)], max_source=10)
    assert short.probabilities == pytest.approx(together[0].probabilities, abs=1e-5) and not short.flags
    assert long.label == "" and "has 602 tokens, more than 10 (max_source)" in long.flags["too_long"]
    assert "more than 10 (max_source)" in far.flags["too_long"] and math.isnan(far.probability)
    assert far.as_dict() == {"label": None, "probabilities": {}, "flags": far.flags}
    with pytest.raises(UserError, match="reads images"):
        classify(Run.load(folder / "image"), ["a"])


def test_a_classifier_prints_one_label_per_line(folder: Path) -> None:
    run = Run.load(folder / "classify")
    lines = ["aaa", "", "b\todd", "x\ty\tz", "a" * 600, "bß"]
    result = call("generate", folder / "classify", stdin="\n".join(lines))
    expected = [labelled.label for labelled in classify(run, ["aaa", "b", "bß"])]
    assert result.code == 0 and result.lines == [expected[0], "", expected[1], "", "", expected[2]]
    assert "wrong column count (stdin:4)" in result.err
    assert "too long (stdin:5: the text with its special tokens has 602 tokens" in result.err
    assert "1 unknown token" in result.err and "target column" in result.err
    rows = [json.loads(line) for line in call("generate", folder / "classify", "--json", stdin="\n".join(lines)).lines]
    assert [row["label"] for row in rows] == [expected[0], None, expected[1], None, None, expected[2]]
    assert rows[0]["source"] == "aaa" and sum(rows[0]["probabilities"].values()) == pytest.approx(1)
    assert "empty" in rows[1]["flags"] and "too_long" in rows[4]["flags"] and "flags" not in rows[0]
    result = call("generate", folder / "classify", "--beam", 2, "--prefix-column", "--window", 9, stdin="a\n")
    assert (
        result.code == 2
        and "--beam, --prefix-column: " in result.err
        and "--window" in result.err.split("is a text classifier")[1]
    )


def test_an_image_classifier_prints_one_label_per_image(folder: Path) -> None:
    images = np.load(folder / "images.npz")["images"]
    np.savez(folder / "unlabelled.npz", images=images[:5])
    result = call("generate", folder / "image", folder / "unlabelled.npz", "--json")
    assert result.code == 0, result.err
    expected = classify_images(Run.load(folder / "image"), images[:5, None])
    assert [json.loads(line) for line in result.lines] == [labelled.as_dict() for labelled in expected]
    labels = call("generate", folder / "image", folder / "images.npz").lines
    assert labels[:5] == [labelled.label for labelled in expected]
    result = call("generate", folder / "image", folder / "images.npz", "--window", 2)
    assert result.code == 2 and "--window: " in result.err


def test_unknown_tokens_and_labels_are_reported(folder: Path) -> None:
    (folder / "strange.tsv").write_text("ab\teven\nßb\todd\naß\tnever\n" + "a" * 600 + "\teven\n")
    result = call("evaluate", folder / "classify", folder / "strange.tsv", "--json", "--bootstrap", 0)
    report = json.loads(result.out)
    assert report["examples"] == 3 and report["skipped"] == {"too long": 1}
    assert report["unknown"] == {"source": 2, "target": 1}
    assert "strange.tsv:4: the text with its special tokens has 602" in result.err
    assert "unknown label in 1 line: 'never'" in result.err
    strict = call("evaluate", folder / "classify", folder / "strange.tsv", "--strict")
    assert strict.code == 2 and "strange.tsv:4: too long: the text with its special tokens has 602" in strict.err
    np.savez(folder / "strange.npz", images=np.load(folder / "images.npz")["images"][:3], labels=np.array([0, 7, 7]))
    result = call("evaluate", folder / "image", folder / "strange.npz", "--json")
    assert json.loads(result.out)["unknown"] == {"target": 2} and "'7' 2x" in result.err

    (folder / "strange.txt").write_text("the cät\nsat\n")
    metrics = ["perplexity", "loss"]
    for other, prefix in (((), ""), (("--against", folder / "bytes"), f"{folder / 'lm'}: ")):
        result = call("evaluate", folder / "lm", folder / "strange.txt", "--json", *other)
        report = json.loads(result.out)
        assert list(report["metrics"]) == metrics and report["unknown"] == {"source": 1}
        assert result.err.startswith(f"{prefix}8.33 % of the text: 1 unknown token in 1 line: 'ä'")
        assert "bits per character are left out" in result.err
    result = call("evaluate", folder / "lm", folder / "strange.txt", "--metric", "bits_per_char")
    assert result.lines[1].startswith("bits_per_char") and "are too few" in result.err
    result = call("evaluate", folder / "bytes", folder / "strange.txt", "--json")  # bytes have no unknown tokens
    assert "bits_per_char" in json.loads(result.out)["metrics"] and result.err == ""


def test_score_of_a_line_includes_the_end_and_excludes_the_prompt(folder: Path) -> None:
    run = Run.load(folder / "lm")
    result = call("score", folder / "lm", "-", stdin="the cat\nthe\t cat\n\na\tb\tc\n")
    assert result.code == 0, result.err
    whole, rest, blank, wrong = map(float, result.lines)
    ids = tokenize_text(["the cat"], run.codec.source, "text").ids
    ended = np.append(ids, run.codec.ids.eos)
    nll = score_text(run, ended, 100).nll
    assert whole == pytest.approx(-nll.sum(), abs=1e-4)
    nll = score_text(run, ended[1:], 100).nll  # a prompt replaces the start token and is not scored
    assert rest == pytest.approx(-nll[2:].sum(), abs=1e-4)
    assert math.isnan(blank) and math.isnan(wrong)
    for name in ("masked", "classify", "image"):
        result = call("score", folder / name, folder / "labels.tsv")
        assert result.code == 2, result.err


def test_the_context_is_that_of_training_or_of_the_option(folder: Path) -> None:
    assert scoring_context(Run.load(folder / "masked")) == 16
    assert scoring_context(Run.load(folder / "masked"), 20) == 20
    (folder / "masked/recipe.toml").rename(folder / "recipe.toml")
    try:
        assert scoring_context(Run.load(folder / "masked")) == 512
    finally:
        (folder / "recipe.toml").rename(folder / "masked/recipe.toml")
