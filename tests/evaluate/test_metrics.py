"""Metrics equal their definitions; bootstrap intervals have the properties that hold for any data."""

from __future__ import annotations

import math
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given, settings, strategies as st

from regard import metrics
from regard.errors import UserError
from regard.evaluate.confusions import count_confusions

TEXT = st.text("ab ", max_size=6)
PAIRS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=12)


def score(name: str, hyps: list[str], refs: list[str]) -> float:
    return metrics.measure(name, hyps, refs, samples=0).score


def distance(a: str, b: str) -> int:
    """Edit distance by its recursive definition."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last = row
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y)))
    return row[-1]


@given(PAIRS)
def test_error_rates_equal_their_definitions(pairs):
    hyps = [h for h, _ in pairs]
    refs = [r for _, r in pairs]
    right = sum(h == r for h, r in pairs)
    assert score("accuracy", hyps, refs) == pytest.approx(100 * right / len(pairs))
    assert score("wer", hyps, refs) == pytest.approx(100 - score("accuracy", hyps, refs))
    characters = sum(map(len, refs)) or 1
    assert score("cer", hyps, refs) == pytest.approx(100 * sum(distance(h, r) for h, r in pairs) / characters)


def test_per_counts_tokens_not_characters():
    assert score("per", ["HH AH L OW"], ["HH EH L OW"]) == 25.0
    assert score("per", ["HH  AH L OW "], ["HH AH L OW"]) == 0.0
    assert score("per", [""], ["A B"]) == 100.0


def test_scores_of_perfect_and_empty_outputs_and_errors():
    same = ["a b c d e", "f g h i j"]
    assert score("bleu", same, same) == pytest.approx(100)
    assert score("chrf", same, same) == pytest.approx(100)
    assert score("ter", same, same) == 0
    assert score("bleu", ["", ""], same) == 0
    with pytest.raises(ValueError, match="at least one example"):
        metrics.measure("wer", [], [])
    with pytest.raises(ValueError, match="no such metric"):
        metrics.measure("blue", ["a"], ["a"])


def test_bleu_chrf_and_ter_equal_sacrebleu():
    import sacrebleu

    hyps = ["the cat sat on a mat", "dogs bark at night"]
    refs = ["the cat sat on the mat", "the dogs bark at night"]
    assert score("bleu", hyps, refs) == sacrebleu.corpus_bleu(hyps, [refs]).score
    assert score("chrf", hyps, refs) == sacrebleu.corpus_chrf(hyps, [refs]).score
    assert score("ter", hyps, refs) == sacrebleu.corpus_ter(hyps, [refs]).score
    measured = metrics.measure("bleu", hyps, refs)
    assert "tok:13a" in measured.signature and "bs:1000" in measured.signature


SENTENCE = st.lists(st.sampled_from(["the", "The", "cat", "sat.", "on,", "mat"]), min_size=1, max_size=7).map(" ".join)
SEVERAL = st.lists(
    st.tuples(SENTENCE, st.lists(SENTENCE, min_size=1, max_size=3).map(tuple)), min_size=1, max_size=5
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(SEVERAL, st.booleans(), st.sampled_from(["13a", "intl", "zh", "char", "none"]))
def test_multiple_references_and_settings_equal_sacrebleu(examples, lowercase, tokenize):
    from sacrebleu.metrics import BLEU, CHRF, TER

    hyps = [h for h, _ in examples]
    refs = [r for _, r in examples]
    streams = [[r[i] if i < len(r) else None for r in refs] for i in range(max(map(len, refs)))]
    chosen = metrics.MetricSettings(lowercase=lowercase, bleu_tokenize=tokenize)
    for name, metric in (
        ("bleu", BLEU(lowercase=lowercase, tokenize=tokenize, force=True)),
        ("chrf", CHRF(lowercase=lowercase)),
        ("chrf++", CHRF(lowercase=lowercase, word_order=2)),
        ("ter", TER()),
    ):
        measured = metrics.measure(name, hyps, refs, 0, chosen)
        assert measured.score == metric.corpus_score(hyps, streams).score
        assert measured.signature.replace("|bs:1|seed:12345", "") == str(metric.get_signature())


def test_every_bleu_tokenizer_exists_in_sacrebleu():
    from sacrebleu.metrics import BLEU

    assert set(get_args(metrics.BleuTokenizer)) <= set(BLEU.TOKENIZERS)


@pytest.mark.parametrize(
    ("error", "message"),
    [(RuntimeError("no MeCab"), "pip install 'sacrebleu\\[ja\\]'"), (OSError("offline"), "its model: offline")],
)
def test_an_unavailable_bleu_tokenizer_is_a_user_error(monkeypatch, error, message):
    import sacrebleu.metrics.bleu

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(sacrebleu.metrics.bleu, "BLEU", fail)
    with pytest.raises(UserError, match=message):
        metrics.measure("bleu", ["a"], ["a"], settings=metrics.MetricSettings(bleu_tokenize="ja-mecab"))


@given(st.lists(st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=3).map(tuple)), min_size=1, max_size=8))
def test_the_closest_reference_is_used(examples):
    hyps = [h for h, _ in examples]
    refs = [r for _, r in examples]
    edits, lengths = metrics.ratio("cer", hyps, refs)
    for h, r, count, length in zip(hyps, refs, edits, lengths, strict=True):
        assert count == min(distance(h, each) for each in r)
        assert length == max(len(each) for each in r if distance(h, each) == count)
    assert score("accuracy", hyps, refs) == pytest.approx(100 * sum(h in r for h, r in examples) / len(examples))
    for name in metrics.RATIOS:  # the order has no effect; the output as a reference gives the best score
        assert score(name, hyps, refs) == score(name, hyps, [r[::-1] for r in refs])
        assert score(name, hyps, [(*r, h) for h, r in examples]) == (100 if name == "accuracy" else 0)
        upper = [h.upper() for h in hyps]
        folded = metrics.measure(name, upper, refs, 0, metrics.MetricSettings(lowercase=True))
        assert folded.score == score(name, hyps, refs) and "case:lc" in folded.signature


@given(st.lists(st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=3).map(tuple)), min_size=1, max_size=8))
def test_confusions_contain_every_edit_once(examples):
    hyps = [h for h, _ in examples]
    refs = [r for _, r in examples]
    confusions = count_confusions(hyps, refs, "character", 1000, hyps, list(map(str, range(len(hyps)))))
    assert sum(each.count for each in confusions) == metrics.ratio("cer", hyps, refs)[0].sum()
    balance = {"a": 0, "b": 0, " ": 0}  # edits account for every difference in the number of characters
    for h, r in examples:
        _, closest = metrics.closest(h, r)
        for character in balance:
            balance[character] += h.count(character) - closest.count(character)
    for each in confusions:
        assert each.reference != each.output
        for side, sign in ((each.reference, 1), (each.output, -1)):
            if side is not None:
                balance[side] += sign * each.count
        assert each.example.output == hyps[int(each.example.location)] == each.example.source
        assert each.example.reference in refs[int(each.example.location)]
    assert set(balance.values()) == {0}
    wrong = count_confusions(hyps, [r[0] for r in refs], "label", 1000)
    pairs = Counter((r[0], h) for h, r in examples if h != r[0])
    assert {(each.reference, each.output): each.count for each in wrong} == pairs
    assert [each.count for each in wrong] == sorted(pairs.values(), reverse=True)


def test_perplexity_of_a_uniform_distribution_is_the_number_of_outcomes():
    assert metrics.measure_perplexity([3 * math.log(1 / 8), 5 * math.log(1 / 8)], [3, 5]).score == pytest.approx(8)
    assert metrics.measure_perplexity([-1e9], [1]).score < math.inf
    measured = metrics.measure_perplexity([-1.0, -4.0, -2.5], [2, 3, 2])
    assert measured.low <= measured.score <= measured.high


@settings(max_examples=25)
@given(PAIRS, st.sampled_from(sorted(metrics.RATIOS)))
def test_intervals_are_reproducible_and_collapse_without_variation(pairs, name):
    hyps = [h for h, _ in pairs]
    refs = [r for _, r in pairs]
    measured = metrics.measure(name, hyps, refs, samples=200)
    assert measured == metrics.measure(name, hyps, refs, samples=200)
    if len({(h == r) for h, r in pairs}) == 1 and name in ("wer", "accuracy"):  # no variation, no interval
        assert measured.low == measured.high == measured.score
    assert measured.low <= measured.high


@pytest.mark.parametrize("name", ["wer", "per", "bleu", "chrf"])
def test_better_systems_are_significant_and_equal_ones_are_not(name):
    refs = [f"a b c d e f g {i}" for i in range(60)]
    bad = ["x y z" if i % 2 else ref for i, ref in enumerate(refs)]
    assert metrics.compare(name, refs, bad, refs, samples=200) < 0.02
    assert metrics.compare(name, bad, bad, refs, samples=200) > 0.9


def test_intervals_shrink_with_the_number_of_examples():
    def width(count):
        refs = ["a"] * count
        hyps = ["a" if i % 3 else "b" for i in range(count)]
        measured = metrics.measure("wer", hyps, refs)
        return measured.high - measured.low

    assert width(900) < width(90) / 2
