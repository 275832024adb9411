"""Sampling: distribution, truncation, and random numbers that depend only on source and seed."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kit.decoding import NAMES, run_of, sources
from regard.decode.request import Options
from regard.decode.search import Sampler, truncate
from regard.decode.search_inputs import SearchInput
from regard.decode.torch_engine import generate, score


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sample_frequencies_match_probabilities(temperature: float) -> None:
    run = run_of("rnn-luong", 1)
    count = 4000
    options = Options(sample=True, nbest=count, temperature=temperature, max_length=1)
    counts = Counter(h.text for h in next(generate(run, ["fade"], options)))
    weights = {}
    for text in counts:
        (scored,) = score(run, [("fade", text)])
        weights[text] = math.exp(scored.token_scores[0] / temperature)
    total = sum(weights.values())
    assert len(counts) > 3
    for text, weight in weights.items():
        share = weight / total
        assert abs(counts[text] / count - share) < 5 * math.sqrt(share * (1 - share) / count) + 0.01


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=2, max_size=9), st.integers(0, 9), st.floats(0.05, 1.0), st.floats(0, 0.9)
)
def test_truncation_keeps_the_most_probable_tokens(
    weights: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    prob = torch.tensor([sorted(weights, reverse=True)], dtype=torch.float64)
    prob /= prob.sum()
    by_k = (truncate(prob, Options(sample=True, top_k=top_k)) > 0).sum()
    assert by_k == min(top_k or len(weights), len(weights))
    by_p = int((truncate(prob, Options(sample=True, top_p=top_p)) > 0).sum())
    assert by_p >= 1 and prob[0, : by_p - 1].sum() < top_p <= prob[0, :by_p].sum() + 1e-6
    by_min = truncate(prob, Options(sample=True, min_p=min_p))[0]
    assert torch.equal(by_min > 0, prob[0] >= min_p * prob[0, 0])
    every = truncate(prob, Options(sample=True, top_k=top_k, top_p=top_p, min_p=min_p))[0]
    assert every[0] == prob[0, 0] and (every > 0).sum() <= min(int(by_k), by_p, int((by_min > 0).sum()))


@pytest.mark.parametrize("name", NAMES)
def test_truncation_to_one_token_equals_greedy(name: str) -> None:
    run = run_of(name, 3)
    texts = sources(2, 8)
    greedy = [row[0].ids for row in generate(run, texts, Options(max_length=9))]
    low_temperatures = [{"temperature": 10.0**-power} for power in (4, 40, 300)]  # some underflow in single precision
    for truncation in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.9999}, *low_temperatures):
        rows = generate(run, texts, Options.of(sample=True, max_length=9, **truncation))
        assert [row[0].ids for row in rows] == greedy


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_determined_by_the_seed(name: str) -> None:
    run = run_of(name, 3)
    texts = sources(3, 6)

    def draw(**options: object) -> list[list[tuple[int, ...]]]:
        rows = generate(run, texts, Options.of(sample=True, max_length=9, **options))
        return [[h.ids for h in row] for row in rows]

    assert draw(seed=1, nbest=4) == draw(seed=1, nbest=4) != draw(seed=2, nbest=4)
    assert [row[:2] for row in draw(nbest=4)] == draw(nbest=2)  # more samples do not change the first ones
    assert any(len(set(row)) > 1 for row in draw(nbest=4))


def test_random_numbers_depend_on_the_source_and_not_on_its_position() -> None:
    first, second = SearchInput(((4, 3),), 5, key=7), SearchInput(((5, 3),), 8, key=9)
    device = torch.device("cpu")
    one, two = Sampler([first, second], 2, Options(), device), Sampler([second, first], 2, Options(), device)
    assert torch.equal(one.noise_RT[:2, :6], two.noise_RT[2:, :6]) and torch.equal(one.noise_RT[2:], two.noise_RT[:2])
    assert one.noise_RT.min() >= 0 and one.noise_RT.max() < 1
