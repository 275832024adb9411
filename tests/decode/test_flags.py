"""Suspicious outputs are flagged with a reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kit.decoding import run_of
from regard.data.statistics import OutputLimits, Statistics, longest_loop
from regard.decode.hypothesis import Alignment, attention_flags, output_flags
from regard.decode.request import Options
from regard.decode.torch_engine import generate
from regard.errors import plural


@given(st.lists(st.integers(4, 9), max_size=4), st.lists(st.integers(4, 9), min_size=1, max_size=3), st.integers(8, 12))
def test_longest_loop_is_found_at_any_position(before: list[int], unit: list[int], turns: int) -> None:
    size, repeats = longest_loop([*before, *unit * turns, 10, 11]) or (0, 0)
    assert size * repeats >= len(unit) * turns - len(unit)


@given(st.permutations(range(4, 24)))
def test_distinct_tokens_are_not_a_loop(ids: list[int]) -> None:
    assert longest_loop(ids) is None and longest_loop([*ids, *ids]) is None


@pytest.mark.parametrize(
    ("ids", "source", "scores", "flag", "reason"),
    [
        ([5, 6] * 9, 18, -0.1, "repetition", "2 tokens repeated 9 times in a row"),
        ([5] * 9, 9, -0.1, "repetition", "1 token repeated 9 times"),
        (list(range(4, 40)), 4, -0.1, "length_ratio", "36 tokens for a source of 4"),
        ([5], 40, -0.1, "length_ratio", "only 1 token for a source of 40"),
        ([], 4, -0.1, "length_ratio", "only 0 tokens for a source of 4"),
        ([5, 6, 7], 3, -4.0, "low_score", "-4.00 per token"),
    ],
)
def test_flags_give_the_reason(ids: list[int], source: int, scores: float, flag: str, reason: str) -> None:
    flags = output_flags(ids, source, [scores] * (len(ids) + 1), OutputLimits())
    assert list(flags) == [flag] and reason in flags[flag]


def test_good_outputs_have_no_flags() -> None:
    assert output_flags([5, 6, 7, 8], 4, [-0.1] * 5, OutputLimits()) == {}
    assert output_flags([5], 5, [-0.1] * 2, OutputLimits()) == {}
    assert output_flags([], 0, [-0.1], OutputLimits()) == {}  # a continuation may be empty


def test_limits_of_a_run_replace_the_default_limits() -> None:
    run = run_of("transformer-tiny", 0)
    inputs = ["abc", "fed" * 5, "a"]
    wide = replace(run, statistics=Statistics(limits=OutputLimits(max_ratio=1e6, min_ratio=0, loop=10**6)))
    narrow = replace(run, statistics=Statistics(limits=OutputLimits(max_ratio=0, min_ratio=1e6, loop=1)))
    options = Options(min_length=11, max_length=12)
    for limited, flagged in ((wide, False), (narrow, True)):
        assert all(("length_ratio" in best.flags) == flagged for best, *_ in generate(limited, inputs, options))


def test_concentrated_and_uniform_attention_are_flagged() -> None:
    source = tuple("abcdefg")
    concentrated = np.full((8, 7), 0.01)
    concentrated[:, 6] = 0.94
    assert "on source token 6 ('g')" in attention_flags(Alignment(concentrated, source, ()))["attention"]
    assert "evenly" in attention_flags(Alignment(np.full((8, 7), 1 / 7), source, ()))["attention"]
    assert attention_flags(Alignment(np.eye(7), source, ())) == {}
    assert attention_flags(Alignment(np.zeros((0, 7)), source, ())) == {}


def test_an_output_that_ends_at_its_limit_is_flagged() -> None:
    run = run_of("transformer-tiny", 0)
    for length in (1, 3):
        (short,) = next(generate(run, ["abc"], Options(max_length=length, min_length=length)))
        assert short.flags["max_length"] == f"ended at the limit of {plural(length, 'token')}"
        assert short.as_dict()["flags"] == short.flags


def test_repr_of_an_alignment_shows_token_counts() -> None:
    assert repr(Alignment(np.ones((1, 2)), ("a", "<eos>"), ("b",))) == "Alignment(1 output token, 2 source tokens)"
