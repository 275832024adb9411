"""Minimum Bayes risk decoding picks the candidate with the highest expected utility."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from kit.decoding import NAMES, run_of, sources
from regard.decode.hypothesis import expected_utility, probability_shares
from regard.decode.request import Options
from regard.decode.torch_engine import generate

UTILITIES = ("chrf", "bleu", "edit", "exact")


@pytest.mark.parametrize("utility", UTILITIES)
@pytest.mark.parametrize("name", NAMES)
def test_mbr_with_one_sample_returns_that_sample(name: str, utility: str) -> None:
    run = run_of(name, 2)
    texts = sources(1, 4)
    samples = list(generate(run, texts, Options(sample=True, seed=3, max_length=9)))
    choices = list(generate(run, texts, Options.of(mbr=1, utility=utility, seed=3, max_length=9)))
    for (sample,), (choice,) in zip(samples, choices, strict=True):
        assert choice.ids == sample.ids and choice.score == pytest.approx(sample.score)
        assert choice.utility == pytest.approx(1.0)


@pytest.mark.parametrize("settings", [{"mbr": 8}, {"mbr": 8, "sample": True, "top_k": 3}, {"mbr": 5, "beam": 5}])
def test_candidates_are_ordered_by_expected_utility(settings: dict[str, object]) -> None:
    run = run_of("rnn-luong", 2)
    for row in generate(run, sources(2, 4), Options.of(utility="edit", nbest=5, max_length=9, **settings)):
        utilities = [h.utility for h in row]
        assert utilities == sorted(utilities, reverse=True) and len({h.text for h in row}) == len(row)
        assert all(0 <= u <= 1 for u in utilities)


def test_best_output_lists_all_candidates() -> None:
    run = run_of("rnn-luong", 2)
    options = {"mbr": 6, "utility": "edit", "max_length": 9}
    best_only, all_ = (list(generate(run, sources(2, 4), Options.of(nbest=n, **options))) for n in (1, 6))
    for (best,), candidates in zip(best_only, all_, strict=True):
        assert [(h.text, h.utility, h.score) for h in best.candidates] == [
            (h.text, h.utility, h.score) for h in candidates
        ]
    assert not any(h.candidates for (h,) in generate(run, ["abc"]))


@pytest.mark.parametrize("utility", UTILITIES)
def test_most_typical_candidate_has_the_highest_utility(utility: str) -> None:
    texts = ["the cat sat on a mat", "the cat sat on the mat", "the cat sat on the mat", "a dog ran away there"]
    values = expected_utility(texts, [0.25] * 4, utility)
    assert max(values) == values[1] == values[2]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab ", max_size=6), min_size=1, max_size=6), st.randoms())
def test_expected_utility_is_a_weighted_mean(texts: list[str], rng: object) -> None:
    weights = [rng.random() + 0.1 for _ in texts]  # type: ignore[attr-defined]
    weights = [w / sum(weights) for w in weights]
    exact = expected_utility(texts, weights, "exact")
    for text, value in zip(texts, exact, strict=True):
        assert value == pytest.approx(sum(w for t, w in zip(texts, weights, strict=True) if t == text))
    for utility in ("edit", "chrf"):
        assert all(
            e - 1e-9 <= u <= 1 + 1e-9 for e, u in zip(exact, expected_utility(texts, weights, utility), strict=True)
        )


def test_edit_utility_counts_tokens_for_spaced_text_and_characters_otherwise() -> None:
    spaced = expected_utility(["AA B", "AX B"], [0.5, 0.5], "edit", spaced=True)
    letters = expected_utility(["AA B", "AX B"], [0.5, 0.5], "edit")
    assert spaced == pytest.approx([0.75, 0.75]) and letters == pytest.approx([0.875, 0.875])


def test_probability_shares_of_tiny_probabilities_sum_to_one() -> None:
    values = probability_shares([-1000.0, -1001.0, -2000.0])
    assert math.fsum(values) == pytest.approx(1) and values[0] / values[1] == pytest.approx(math.e)
