"""Encoding sources in parts, and removing finished rows from a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from kit.decoding import NAMES, run_of
from regard.batch import pad
from regard.decode.ensemble import Scorer, States, similar_lengths
from regard.decode.search import select, should_leave
from regard.decode.search_inputs import SearchInput

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@given(lengths, st.integers(1, 200))
def test_parts_of_similar_lengths_are_ordered_complete_and_large_enough(counts: list[int], min_size: int) -> None:
    sources = [[4] * count for count in counts]
    parts = list(similar_lengths(sources, min_size))
    assert [source for part in parts for source in part] == sources
    for part in parts[:-1]:
        assert len(part) * max(map(len, part)) >= min_size
    in_order = sorted(sources, key=len, reverse=True)
    for part in similar_lengths(in_order, 0):
        assert len(part[-1]) * 4 >= len(part[0]) * 3


@pytest.mark.parametrize("name", NAMES)
def test_encoding_in_parts_equals_encoding_in_one_batch(name: str) -> None:
    model = run_of(name, 1).model
    generator = torch.Generator().manual_seed(0)
    counts = [20] * 30 + [11] * 40 + [12, 9] * 20 + [2] * 7
    sources = [[*torch.randint(4, 10, (count,), generator=generator).tolist(), 3] for count in counts]
    assert len(list(similar_lengths(sources))) == 3
    scorer = Scorer([model])
    inputs = [SearchInput((source,), 5) for source in sources]
    with torch.inference_mode():
        (tokens,), states = scorer.start(inputs)
        others: States = (model.encode(*pad(sources, 0)),)
        all_rows = torch.arange(len(inputs))
        for rows, stay in ((all_rows, None), (all_rows[1:], all_rows[1:])):
            states = select(states, rows, stay)
            others = select(others, rows, stay)
            tokens = tokens[rows]
            (logp_NV, states), (expected_NV, others) = scorer.step(tokens, states), scorer.step(tokens, others)
            torch.testing.assert_close(logp_NV, expected_NV, atol=1e-5, rtol=1e-5)
            tokens = expected_NV.argmax(1)


def test_finished_rows_leave_the_batch_together_or_at_their_limit() -> None:
    finished = torch.arange(16) < 1
    none = torch.zeros(16, dtype=torch.bool)
    assert not should_leave(finished, none)
    assert should_leave(torch.arange(16) < 2, none)
    assert should_leave(finished, finished) and not should_leave(finished, ~finished)
