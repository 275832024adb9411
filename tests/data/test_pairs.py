"""Held-out examples: enough, not too many, never with a source that is also trained on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.pairs import Splitter, valid_count


def split(sources: list[str], seed: int = 1) -> tuple[int, set[str]]:
    splitter = Splitter(seed)
    for source in sources:
        splitter.see(source)
    count = splitter.choose()
    held = [source for source in sources if splitter.held_out(source)]
    assert len(held) == count
    return count, set(held)


@pytest.mark.parametrize("examples", [2, 10, 100, 250, 999, 8000, 40_000, 60_000])
def test_distinct_sources_give_exactly_what_is_valid_count(examples: int) -> None:
    count, _ = split([f"word {index}" for index in range(examples)])
    assert count == valid_count(examples)
    assert 1 <= count <= min(2000, max(1, examples // 5))
    if 250 <= examples <= 40_000:
        assert count == max(50, examples // 20)


@given(st.lists(st.sampled_from("abcdefghij") | st.text(max_size=3), min_size=1, max_size=60), st.integers(0, 5))
@settings(deadline=None)
def test_sources_stay_together_and_something_is_left(sources: list[str], seed: int) -> None:
    count, held = split(sources, seed)
    if len(set(sources)) == 1:
        assert count == 0
    else:
        assert 0 < count < len(sources)
    assert split(sources[::-1], seed) == (count, held)  # whatever the order


def test_the_seed_decides() -> None:
    sources = [f"word {index}" for index in range(1000)]
    assert split(sources, 1) == split(sources, 1)
    assert split(sources, 1) != split(sources, 2)


def test_many_examples_of_one_source_are_not_taken_by_accident() -> None:
    sources = ["frequent"] * 900 + [f"word {index}" for index in range(100)]
    assert "frequent" not in split(sources)[1]
