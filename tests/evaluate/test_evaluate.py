"""`evaluate` equals separate decoding, scoring and metrics."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import regard
from regard import metrics
from regard.decode.request import Options
from regard.errors import UserError
from regard.evaluate.evaluator import default_metrics, evaluate
from regard.text.codec import Example


@pytest.fixture(scope="module")
def run(toy):
    return regard.load(toy / "run")


@pytest.fixture(scope="module")
def examples(toy):
    return [Example(*line.split("\t")) for line in (toy / "test.tsv").read_text().splitlines()]


def test_metrics_equal_separate_decoding_and_scoring(run, examples):
    result = evaluate(run, examples, Options(beam=3), samples=0)
    texts = [hypotheses[0].text for hypotheses in run.generate(examples, beam=3)]
    references = [example.target for example in examples]
    assert result.outputs.texts == texts and result.examples == len(examples)
    assert result.metrics["per"].score == metrics.measure("per", texts, references).score
    assert result.metrics["wer"].score == 100 - result.metrics["accuracy"].score
    scored = run.score(examples)
    mean = sum(item.score for item in scored) / sum(len(item.tokens) for item in scored)
    assert result.metrics["perplexity"].score == pytest.approx(math.exp(-mean))


def test_a_run_against_itself_has_p_values_of_one(run, examples):
    result = evaluate(run, examples, metrics=("wer", "perplexity", "chrf"), against=run, samples=50)
    assert all(p == 1 for p in result.p_values.values())
    shape = replace(result, skipped={"empty side": 2}).to_json()
    assert shape["skipped"] == {"empty side": 2}
    assert shape["against"]["wer"]["difference"] == 0 and shape["against"]["chrf"]["p"] == 1


def test_only_the_outputs_or_scores_of_the_metrics_are_computed(run, examples):
    assert evaluate(run, examples[:3], metrics=("perplexity",)).outputs.texts == []
    assert evaluate(run, examples[:3], metrics=("wer",)).outputs.log_probabilities == []


def test_default_metrics_follow_the_task(run):
    assert default_metrics(run, ["AH B"])[:2] == ["wer", "per"]

    class Sentences:
        class task:
            labels = False

        class codec:
            class config:
                target_tokens = "bpe:500"

    assert default_metrics(Sentences, ["ein Satz mit Wörtern"])[0] == "bleu"
    assert default_metrics(Sentences, ["Wort"])[:2] == ["wer", "cer"]
    assert default_metrics(run, ["seven hundred and one", "twelve"])[:2] == ["wer", "word_edits"]
    assert default_metrics(run, ["AH", "EY"])[:2] == ["wer", "per"]


def test_pairs_that_are_too_long_are_skipped_and_reported(run, examples):
    long = Example("ab" * 2000, "AH B")
    skipped = []
    mixed = [examples[0], long, *examples[1:], Example("ab", "AH B " * 3000)]
    result = evaluate(run, mixed, samples=0, against=run, skip=lambda place, reason: skipped.append((place, reason)))
    assert [place for place, _ in skipped] == [1, len(mixed) - 1] and result.examples == len(examples)
    assert "source has 4000 tokens" in skipped[0][1] and "target has" in skipped[1][1]
    assert result.metrics == evaluate(run, examples, samples=0).metrics
    with pytest.raises(UserError, match="no pair is usable"):
        evaluate(run, [long])


def test_unknown_metrics_and_missing_pairs_are_refused(run, examples):
    with pytest.raises(UserError, match="did you mean 'bleu'"):
        evaluate(run, examples, metrics=("blue",))
    with pytest.raises(UserError, match="no pair is usable"):
        evaluate(run, [])
