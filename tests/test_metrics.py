"""Metrics against their definitions, and bootstrap intervals against what must hold for any data."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import metrics

TEXT = st.text("ab ", max_size=6)
PAIRS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=12)


def score(name: str, hyps: list[str], refs: list[str]) -> float:
    return metrics.measure(name, hyps, refs, samples=0).score


def distance(a: str, b: str) -> int:
    """Edit distance by its recursive definition."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y)))
    return row[-1]


@given(PAIRS)
def test_error_rates_are_their_definitions(pairs):
    hyps, refs = [h for h, _ in pairs], [r for _, r in pairs]
    right = sum(h == r for h, r in pairs)
    assert score("accuracy", hyps, refs) == pytest.approx(100 * right / len(pairs))
    assert score("wer", hyps, refs) == pytest.approx(100 - score("accuracy", hyps, refs))
    characters = sum(map(len, refs)) or 1
    assert score("cer", hyps, refs) == pytest.approx(100 * sum(distance(h, r) for h, r in pairs) / characters)


def test_per_counts_tokens_not_characters():
    assert score("per", ["HH AH L OW"], ["HH EH L OW"]) == 25.0
    assert score("per", ["HH  AH L OW "], ["HH AH L OW"]) == 0.0
    assert score("per", [""], ["A B"]) == 100.0


def test_perfect_and_empty():
    same = ["a b c d e", "f g h i j"]
    assert score("bleu", same, same) == pytest.approx(100)
    assert score("chrf", same, same) == pytest.approx(100)
    assert score("ter", same, same) == 0
    assert score("bleu", ["", ""], same) == 0
    with pytest.raises(ValueError, match="at least one example"):
        metrics.measure("wer", [], [])
    with pytest.raises(ValueError, match="no such metric"):
        metrics.measure("blue", ["a"], ["a"])


def test_sacrebleu_numbers_are_sacrebleus_own():
    import sacrebleu

    hyps = ["the cat sat on a mat", "dogs bark at night"]
    refs = ["the cat sat on the mat", "the dogs bark at night"]
    assert score("bleu", hyps, refs) == sacrebleu.corpus_bleu(hyps, [refs]).score
    assert score("chrf", hyps, refs) == sacrebleu.corpus_chrf(hyps, [refs]).score
    assert score("ter", hyps, refs) == sacrebleu.corpus_ter(hyps, [refs]).score
    measured = metrics.measure("bleu", hyps, refs)
    assert "tok:13a" in measured.signature and "bs:1000" in measured.signature


def test_perplexity_is_of_a_uniform_guess():
    assert metrics.measure_perplexity([3 * math.log(1 / 8), 5 * math.log(1 / 8)], [3, 5]).score == pytest.approx(8)
    assert metrics.measure_perplexity([-1e9], [1]).score < math.inf
    measured = metrics.measure_perplexity([-1.0, -4.0, -2.5], [2, 3, 2])
    assert measured.low <= measured.score <= measured.high


@settings(max_examples=25)
@given(PAIRS, st.sampled_from(sorted(metrics.RATIOS)))
def test_intervals_hold_the_score_and_do_not_move(pairs, name):
    hyps, refs = [h for h, _ in pairs], [r for _, r in pairs]
    measured = metrics.measure(name, hyps, refs, samples=200)
    assert measured == metrics.measure(name, hyps, refs, samples=200)
    if len({(h == r) for h, r in pairs}) == 1 and name in ("wer", "accuracy"):  # no variation, no interval
        assert measured.low == measured.high == measured.score
    assert measured.low <= measured.high


@pytest.mark.parametrize("name", ["wer", "per", "bleu", "chrf"])
def test_significance_tells_better_from_same(name):
    refs = [f"a b c d e f g {i}" for i in range(60)]
    bad = ["x y z" if i % 2 else ref for i, ref in enumerate(refs)]
    assert metrics.compare(name, refs, bad, refs, samples=200) < 0.02
    assert metrics.compare(name, bad, bad, refs, samples=200) > 0.9


def test_interval_shrinks_with_examples():
    def width(count):
        refs = ["a"] * count
        hyps = ["a" if i % 3 else "b" for i in range(count)]
        measured = metrics.measure("wer", hyps, refs)
        return measured.high - measured.low

    assert width(900) < width(90) / 2
