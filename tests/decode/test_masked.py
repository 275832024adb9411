"""Mask filling and embeddings equal direct computations, and mask filling equals transformers."""

from __future__ import annotations

import math
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kit.toy import call, strict_json
from regard.api import LoadedRun
from regard.config import Config, parse
from regard.decode.encoder_only import MaskFiller
from regard.decode.request import Options, Request
from regard.errors import UserError
from regard.model import Model
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer

SCHEMES = ("char", "nfd", "word", "byte", "bpe:300", "unigram:300")
WORDS = ("the", "cat", "sat", "on", "a", "mat", "né")
TEXTS = [" ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 6)) + "." for i in range(1, 40)]


@cache
def encoder(scheme: str = "char", mask: bool = True, **changes: Any) -> LoadedRun:
    """A masked language model with random weights and 24 positions."""
    codec = Codec(Tokenizer.train(scheme, TEXTS, mask=mask), frame="both")
    stack = {"layers": 1, "width": 16, "heads": 2, "ff": 32, "dropout": 0.0, "position": "learned", "max_length": 24}
    size = codec.source_vocab + 3  # three padding rows without tokens
    values = {"source_vocab": size, "target_vocab": size, "encoder": stack, "frame": "both", "tie_output": False}
    torch.manual_seed(1)
    config = parse(Config, values | {"ids": codec.ids.model_dump()} | changes, "test")
    model = Model(config).eval()
    if model.output is not None:
        torch.nn.init.normal_(model.output.weight, std=1.0)
    return LoadedRun(config, codec, model, Path("random"))


def test_candidates_are_ranked_by_the_logits_at_each_mask() -> None:
    run = encoder()
    ((best,),) = run.generate(["the <mask>a<mask>"], top_tokens=4)
    mask = run.config.ids.mask
    t, h, e, space, a = run.codec.source.encode(["the a"])[0]
    row = [run.config.ids.sos, t, h, e, space, mask, a, mask, run.config.ids.eos]
    logp_NV = run.logits([row])[0, [5, 7]].log_softmax(-1)
    logp_NV[:, [*run.codec.source.special, *range(run.codec.source.size, run.config.source_vocab)]] = -math.inf
    for top, logp_V in zip(best.top_tokens, logp_NV, strict=True):
        value, index = logp_V.topk(4)
        assert [token for token, _ in top] == run.codec.source_pieces(index.tolist())
        assert [score for _, score in top] == pytest.approx(value.tolist(), abs=1e-5)
    assert best.ids == tuple(logp_NV.argmax(-1).tolist()) and best.score == pytest.approx(sum(best.token_scores))
    first, second = run.codec.source_pieces(best.ids)
    assert best.text == f"the {first}a{second}" and best.tokens == (first, second)
    assert len(run.generate(["<mask>"])[0][0].top_tokens[0]) == 5
    (json,) = best.as_dict()["top_tokens"][:1]
    assert json[0]["probability"] == pytest.approx(math.exp(best.token_scores[0]))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SCHEMES), st.lists(st.sampled_from(WORDS), min_size=1, max_size=5), st.data())
def test_mask_in_text_replaces_one_token_and_filling_restores_the_text(
    scheme: str, words: list[str], data: Any
) -> None:
    """Masking a token in the text masks one id, and filling the mask with that token restores the text."""
    run = encoder(scheme)
    engine = MaskFiller(run)
    source = run.codec.source
    (ids,) = source.encode([text := " ".join(words)])
    spellings = source.spellings()
    at = data.draw(st.integers(0, len(ids) - 1))
    before = b"".join(spellings[i] for i in ids[:at])
    token = ids[at]
    after = ids[at + 1 :]
    try:
        parts = before.decode(), b"".join(spellings[i] for i in after).decode()
    except UnicodeDecodeError:  # the token boundary is inside a character
        return
    if source.encode(list(parts)) != [ids[:at], after]:  # the parts are tokenised differently
        return
    space = " " if spellings[token].startswith(b" ") and len(spellings[token]) > 1 else ""
    (item,) = engine.prepare([f"{parts[0]}{space}<mask>{parts[1]}"])
    assert item.sources[0] == [run.config.ids.sos, *ids[:at], run.config.ids.mask, *after, run.config.ids.eos]
    assert engine._text(item.parts, [token]) == text  # type: ignore[attr-defined]


def test_filling_does_not_depend_on_the_batch() -> None:
    run = encoder("word")
    texts = ["the <mask> sat", "a <mask>", "<mask> <mask> <mask> on a mat.", "", "no", "the cat <mask> on the mat."]
    batched = MaskFiller(run, Options(batch_tokens=16))(texts)
    for text, (ours,) in zip(texts, batched, strict=True):
        ((single,),) = MaskFiller(run)([text])
        assert (single.text, single.ids, single.flags) == (ours.text, ours.ids, ours.flags)
        assert single.token_scores == pytest.approx(ours.token_scores, abs=1e-5)


def test_texts_that_cannot_be_filled_are_flagged() -> None:
    run = encoder()
    inputs = [
        "no mask",
        " ",
        "a" * 22 + "<mask>",
        Request("<mask>", prefix="a"),
        Example("<mask>", None, "N"),
        "q<mask>",
    ]
    answers = [row[0] for row in run.generate(inputs)]
    reasons = [
        "no <mask> to fill",
        "empty",
        "23 tokens, more than the 22",
        "prefix: not supported",
        "features: not supported",
    ]
    for answer, reason in zip(answers[:5], reasons, strict=True):
        assert answer.text == "" and reason in " ".join(answer.flags.values())
    assert answers[5].flags == {"unknown": "not in the vocabulary: 'q'"} and answers[5].text.startswith("q")
    with pytest.raises(UserError, match=r"beam: no meaning for .* a masked language model"):
        run.generate(["<mask>"], beam=2)
    with pytest.raises(UserError, match="ensemble: no meaning"):
        run.generate(["<mask>"], ensemble=[run])
    with pytest.raises(UserError, match="its vocabulary has no mask token"):
        encoder(mask=False).generate(["<mask>"])
    with pytest.raises(UserError, match="its model has no LM head"):
        encoder(output="none").generate(["<mask>"])


def test_generate_command_fills_masks(tmp_path: Path) -> None:
    run = encoder("word")
    run.save(tmp_path / "run")
    lines = ["the <mask> sat", "nothing", "", "a <mask> on <mask>\tmat"]
    expected = [row[0] for row in run.generate(lines, top_tokens=2)]
    plain = call("generate", tmp_path / "run", stdin="\n".join(lines))
    assert plain.code == 0 and plain.lines == [answer.text for answer in expected]
    assert "stdin:2: there is no <mask> to fill" in plain.err
    rows = [
        line.split("\t") for line in call("generate", tmp_path / "run", "--top-tokens", 2, stdin="\n".join(lines)).lines
    ]
    assert [row[:2] for row in rows] == [["1", "1"]] * 2 + [["2", ""], ["3", ""]] + [["4", "1"]] * 2 + [["4", "2"]] * 2
    tops = [top for answer in expected for row in answer.top_tokens for top in row]
    assert [(row[3], float(row[2])) for row in rows if row[1]] == [
        (token, pytest.approx(math.exp(score), abs=1e-4)) for token, score in tops
    ]
    request = '{"source": "the <mask>", "id": 7}\n{"source": "<mask>", "prefix": "a"}\n'
    first, second = map(strict_json, call("generate", tmp_path / "run", "--jsonl", stdin=request).lines)
    assert first["id"] == 7 and len(first["hypotheses"][0]["top_tokens"][0]) == 5
    assert "stdin:2: prefix: not for this run" in second["error"]
    for option in (["--beam", 2], ["--stream"], ["--workers", 2]):
        refused = call("generate", tmp_path / "run", *option, stdin="<mask>")
        assert (
            refused.code == 2
            and f"{option[0]}: no meaning for {tmp_path / 'run'}, which is a masked language model" in refused.err
        )


def test_filled_masks_equal_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from regard.convert.hf import from_hf

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "on", ".", "mat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
        sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(words), **sizes)).eval()
        tokenizer.save_pretrained(tmp_path / "hf")
        model.save_pretrained(tmp_path / "hf")
        theirs = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=len(words))
        expected = theirs("The [MASK] sat on [MASK].")
    from_hf(tmp_path / "hf", tmp_path / "run", 1, lambda _: None)
    ((ours,),) = LoadedRun.load(tmp_path / "run").generate(["The [MASK] sat on [MASK]."], top_tokens=3)
    for top, candidates in zip(ours.top_tokens, expected, strict=True):
        texts = [each for each in candidates if each["token_str"] not in words[:5]][:3]
        assert [token for token, _ in top] == [words[each["token"]] for each in texts]
        assert [math.exp(score) for _, score in top] == pytest.approx([each["score"] for each in texts], abs=1e-5)


# Embeddings

SHORT = "the cat sat."
LONG = "the cat sat on a mat. " * 3  # 24 positions hold 22 characters and two special tokens


def test_a_long_text_is_truncated_with_a_warning() -> None:
    run = encoder()
    with pytest.warns(UserWarning, match=r"1 text truncated to the 22 tokens .* \(texts\[1\] has 66\)") as warnings_:
        vectors = run.embed([SHORT, LONG])
    assert warnings_[0].filename == __file__
    np.testing.assert_allclose(vectors, run.embed([SHORT, LONG[:22]]), atol=1e-6)


def test_window_embeddings_are_averaged_over_their_tokens() -> None:
    run = encoder()
    texts = [LONG[:50], SHORT, "", LONG[:22]]
    vectors = run.embed(texts, average_windows=True, normalize=False, batch_tokens=40)
    windows = run.codec.encode_source([Example(LONG[start : min(50, start + 22)]) for start in (0, 22, 44)])
    with torch.no_grad():
        states = torch.cat([run.model.hidden(torch.tensor([row]), None)[0] for row in windows])
    np.testing.assert_allclose(vectors[0], states.mean(0), atol=1e-5)
    np.testing.assert_allclose(vectors[1:], run.embed(texts[1:], normalize=False), atol=1e-6)
