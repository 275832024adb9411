"""Outputs and scores of a sentence do not depend on its batch: on the other sentences, padding or order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from kit.decoding import NAMES, names, run_of, same, seeds, sources, trained, words
from regard.decode.request import Options, Request
from regard.decode.torch_engine import generate
from regard.run import Run

STRATEGIES: dict[str, dict[str, object]] = {
    "greedy": {},
    "beam": {"beam": 4, "nbest": 3},
    "exact": {"beam": 3, "exact": True, "length_penalty": 0.6},
    "diverse": {"beam": 4, "groups": 2, "nbest": 4},
    "sample": {"sample": True, "nbest": 3, "seed": 5},
    "nucleus": {"sample": True, "top_p": 0.7, "temperature": 1.5},
    "mbr": {"mbr": 5, "utility": "edit"},
    "required": {"beam": 2, "require": ("cab", "ff")},
    "sample-required": {"sample": True, "require": ("cab",)},
    "steered": {"beam": 3, "forbid": ("dd",), "no_repeat_ngram": 3, "repetition_penalty": 1.3, "min_ratio": 0.5},
    "coverage": {"beam": 3, "coverage_penalty": 0.4},
    "alternatives": {"alternatives": 3, "alternatives_at": 1},
}


def decode(run: Run, texts: list[str], batch_tokens: int = 8192, **settings: object) -> list:
    settings = {"max_length": 14, **settings}
    return list(generate(run, texts, Options.of(batch_tokens=batch_tokens, **settings)))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(names, seeds, st.sampled_from(sorted(STRATEGIES)), st.lists(words, min_size=2, max_size=7), st.randoms())
def test_outputs_do_not_depend_on_batch_and_order(
    name: str, seed: int, strategy: str, texts: list[str], rng: random.Random
) -> None:
    run = run_of(name, seed)
    options = STRATEGIES[strategy]
    batched = decode(run, texts, **options)
    order = list(range(len(texts)))
    rng.shuffle(order)
    shuffled = decode(run, [texts[i] for i in order], **options)
    for i, text in enumerate(texts):
        (single,) = decode(run, [text], **options)
        assert same(single, batched[i])
        assert same(single, shuffled[order.index(i)])


@pytest.mark.parametrize("strategy", ["greedy", "beam", "sample"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_equal_for_batch_sizes_1_7_and_64(name: str, strategy: str) -> None:
    texts = sources(9, 64, 9)
    options = {**STRATEGIES[strategy], "max_length": 8}
    for run in (run_of(name, 4), trained(name)):
        by_one, by_seven, all_at_once = (
            [row for i in range(0, 64, size) for row in decode(run, texts[i : i + size], 10**6, **options)]
            for size in (1, 7, 64)
        )
        assert all(map(same, by_one, by_seven))
        assert all(map(same, by_one, all_at_once))


@pytest.mark.parametrize("name", NAMES)
def test_constraints_of_one_request_do_not_affect_others(name: str) -> None:
    run = run_of(name, 2)
    texts = sources(4, 6)
    options = Options(beam=3, nbest=3, max_length=16)
    constraints = [{}, {"prefix": "fa"}, {"require": ("bad",)}, {"forbid": ("a",)}, {"require": ("c", "ee")}, {}]
    requests = [Request(text, **constraint) for text, constraint in zip(texts, constraints, strict=True)]
    batched = list(generate(run, requests, options))
    for request, row in zip(requests, batched, strict=True):
        assert same(next(generate(run, [request], options)), row)
    assert batched[1][0].text.startswith("fa") and "bad" in batched[2][0].text and "a" not in batched[3][0].text
