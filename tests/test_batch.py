"""Batches contain every id at its position and padding everywhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from regard.batch import Batch, collate, in_parts, pad
from regard.config import Config, Stack

CONFIG = Config(source_vocab=50, target_vocab=50, encoder=Stack(), decoder=Stack())
texts = st.lists(st.integers(4, 49), max_size=6).map(lambda ids: [*ids, 3])
pairs = st.lists(st.tuples(texts, texts), min_size=1, max_size=5)


@given(pairs, st.sampled_from(["sos", "eos"]), st.booleans())
def test_collate_pads_sources_and_shifts_targets(
    rows: list[tuple[list[int], list[int]]], start: str, arrays: bool
) -> None:
    sources, targets = (
        [np.array(ids, dtype=np.uint16) if arrays else ids for ids in side] for side in zip(*rows, strict=True)
    )
    config = CONFIG.model_copy(update={"start": start})
    batch = collate(sources, targets, config)
    for i, (source, target) in enumerate(rows):
        s = len(source)
        t = len(target)
        assert batch.source_BS[i].tolist() == source + [0] * (batch.source_BS.shape[1] - s)
        assert batch.label_BT[i].tolist() == target + [0] * (batch.label_BT.shape[1] - t)
        assert batch.input_BT[i].tolist() == [config.start_id, *target[:-1]] + [0] * (batch.input_BT.shape[1] - t)
        for keep, length in ((batch.source_keep_BS, s), (batch.keep_BT, t)):
            assert keep is None or keep[i].tolist() == [k < length for k in range(keep.shape[1])]
    assert (batch.source_keep_BS is None) == (len({len(s) for s, _ in rows}) == 1)
    assert (batch.keep_BT is None) == (len({len(t) for _, t in rows}) == 1)
    assert batch.tokens == batch.total == sum(len(t) for _, t in rows)


@given(pairs, st.data())
def test_rows_of_a_batch_equal_a_batch_of_these_examples(
    rows: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    whole, part = (collate(*zip(*examples, strict=True), CONFIG, total=99) for examples in (rows, rows[start:stop]))
    for ours, expected in zip(whole.rows(slice(start, stop)), part, strict=True):
        same = torch.equal(ours, expected) if isinstance(expected, torch.Tensor) else ours == expected
        assert same
    assert part.size == part.source_BS.numel() + part.label_BT.numel()


def test_masked_labels_are_not_padding() -> None:
    label = torch.arange(8).view(2, 4)
    is_masked = torch.tensor([[True, False, False, True], [False, True, False, False]])
    batch = Batch(label, None, label[:, :0], label, is_masked, 3, 3)
    row = batch.rows(slice(1, 2))
    assert (
        row.label_BT.tolist() == [[4, 5, 6, 7]] and row.keep_BT is not None and row.keep_BT.tolist() == [[0, 1, 0, 0]]
    )
    assert row.tokens == 1


@given(st.integers(1, 40), st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_parts_are_halved_until_they_fit(rows: int, capacity: int, too_large: set[int]) -> None:
    def work(part: slice) -> list[int]:
        numbers = list(range(rows))[part]
        if len(numbers) > capacity:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if too_large & set(numbers):
            raise MemoryError
        return numbers

    results = []
    for part, numbers in in_parts(work, rows):
        assert (numbers is None) == (part.stop - part.start == 1 and part.start in too_large)
        results += [part.start] if numbers is None else numbers
    assert results == list(range(rows))


def test_errors_other_than_out_of_memory_are_raised() -> None:
    def work(part: slice) -> int:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        list(in_parts(work, 4))


def test_total_of_a_step_may_exceed_the_tokens_of_a_batch() -> None:
    batch = collate([[5, 3]], [[6, 7, 3]], CONFIG, total=40)
    assert (batch.tokens, batch.total) == (3, 40)


def test_no_two_tensors_share_memory() -> None:
    batch = collate([[5, 3]], [[6, 7, 3]], CONFIG)
    batch.input_BT.fill_(9)
    assert batch.label_BT.tolist() == [[6, 7, 3]]


def test_pad_accepts_no_rows_and_empty_rows() -> None:
    table, keep = pad([], 0)
    assert table.shape == (0, 0)
    assert keep is None
    table, keep = pad([[], [7]], 0)
    assert table.tolist() == [[0], [7]]
    assert keep is not None
    assert keep.tolist() == [[False], [True]]


def test_sources_may_be_empty_without_an_encoder() -> None:
    batch = collate([[], []], [[5, 3], [6, 3]], CONFIG)
    assert batch.source_BS.shape == (2, 0)
    assert batch.source_keep_BS is None


def test_all_tensors_move_to_the_device() -> None:
    batch = collate([[5, 3], [3]], [[6, 7, 3], [3]], CONFIG)
    meta_batch = batch.to("meta")
    assert isinstance(meta_batch, Batch)
    assert all(x.is_meta for x in meta_batch if isinstance(x, torch.Tensor))
    assert (meta_batch.tokens, meta_batch.total) == (4, 4)
    assert collate([[3]], [[3]], CONFIG).to("meta").keep_BT is None
