"""The decoding state: row selection and the padding mask."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st
from torch import Tensor

from regard.nn.cache import KV, CrossCache, State


def state(rows: int, length: int, keep: Tensor | None = None) -> State:
    memory = (torch.arange(rows).view(-1, 1, 1, 1).expand(-1, 2, length, 3), torch.arange(rows).view(-1, 1))
    return State((memory, memory), length, keep)


@given(st.data(), st.integers(1, 5), st.booleans())
def test_two_selections_equal_their_composition(data: st.DataObject, rows: int, padded: bool) -> None:
    keep = torch.rand(rows, 4) < 0.5 if padded else None
    start = state(rows, 4, keep)
    first = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=6)))
    second = torch.tensor(data.draw(st.lists(st.integers(0, len(first) - 1), min_size=1, max_size=6)))
    twice = start.select(first).select(second)
    once = start.select(first[second])
    for memory_a, memory_b in zip(twice.layers, once.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(memory_a, memory_b, strict=True))
    assert (twice.keep_NP is None) == (keep is None)
    if keep is not None:
        assert torch.equal(twice.keep_NP, keep[first[second]])
    assert once.layers[1][1].flatten().tolist() == first[second].tolist()
    assert twice.length == 4


def test_source_keeps_only_unfinished_sentences() -> None:
    kv = KV(torch.randn(3, 1, 4, 2), torch.randn(3, 1, 4, 2))
    keep = torch.arange(4) < torch.tensor([[4], [1], [2]])
    start = State((), source=CrossCache((kv,), keep, torch.arange(4).unsqueeze(0)))
    assert start.select(torch.tensor([0, 0, 1, 1, 2, 2])).source is start.source
    remaining = start.select(torch.tensor([0, 2]), torch.tensor([0, 2])).source
    assert remaining is not None
    assert torch.equal(remaining.layers[0].k_BGSE, kv.k_BGSE[[0, 2]])
    assert torch.equal(remaining.layers[0].v_BGSE, kv.v_BGSE[[0, 2]])
    assert torch.equal(remaining.keep_BS, keep[[0, 2]])


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=4))
def test_keep_mask_grows_with_the_tokens(pieces: list[tuple[int, bool]]) -> None:
    """Pieces with and without a mask, in any order; tokens without a mask are not padding."""
    current = State(())
    expected = torch.ones(2, 0, dtype=torch.bool)
    for count, masked in pieces:
        keep = torch.rand(2, count) < 0.5 if masked else None
        new = torch.ones(2, count, dtype=torch.bool) if keep is None else keep
        expected = torch.cat((expected, new), 1)
        current = current.advance((), count, keep)
    assert current.length == expected.shape[1]
    if any(masked for _, masked in pieces):
        assert torch.equal(current.keep_NP, expected)
    else:
        assert current.keep_NP is None


def test_advance_and_select_do_not_modify_the_state() -> None:
    start = state(2, 3)
    start.advance((), 2, None)
    start.select(torch.tensor([1]))
    assert start.length == 3
    assert len(start.layers[0][0]) == 2
