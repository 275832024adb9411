"""Batches: every id comes out at its position, and nothing else does."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.batch import Batch, collate, pad
from regard.config import Config, Stack

CONFIG = Config(source_vocab=50, target_vocab=50, encoder=Stack(), decoder=Stack())
texts = st.lists(st.integers(4, 49), max_size=6).map(lambda ids: [*ids, 3])
pairs = st.lists(st.tuples(texts, texts), min_size=1, max_size=5)


@given(pairs, st.sampled_from(["sos", "eos"]), st.booleans())
def test_collate(rows: list[tuple[list[int], list[int]]], start: str, arrays: bool) -> None:
    sources, targets = (
        [np.array(ids, dtype=np.uint16) if arrays else ids for ids in side] for side in zip(*rows, strict=True)
    )
    config = CONFIG.model_copy(update={"start": start})
    batch = collate(sources, targets, config)
    for i, (source, target) in enumerate(rows):
        s, t = len(source), len(target)
        assert batch.source_BS[i].tolist() == source + [0] * (batch.source_BS.shape[1] - s)
        assert batch.label_BT[i].tolist() == target + [0] * (batch.label_BT.shape[1] - t)
        assert batch.input_BT[i].tolist() == [config.start_id, *target[:-1]] + [0] * (batch.input_BT.shape[1] - t)
        for keep, length in ((batch.source_keep_BS, s), (batch.keep_BT, t)):
            assert keep is None or keep[i].tolist() == [k < length for k in range(keep.shape[1])]
    assert (batch.source_keep_BS is None) == (len({len(s) for s, _ in rows}) == 1)
    assert (batch.keep_BT is None) == (len({len(t) for _, t in rows}) == 1)
    assert batch.tokens == batch.total == sum(len(t) for _, t in rows)


def test_the_whole_step_may_be_larger_than_the_batch() -> None:
    batch = collate([[5, 3]], [[6, 7, 3]], CONFIG, total=40)
    assert (batch.tokens, batch.total) == (3, 40)


def test_no_two_tensors_share_memory() -> None:
    batch = collate([[5, 3]], [[6, 7, 3]], CONFIG)
    batch.input_BT.fill_(9)
    assert batch.label_BT.tolist() == [[6, 7, 3]]


def test_pad_of_nothing() -> None:
    table, keep = pad([], 0)
    assert table.shape == (0, 0)
    assert keep is None
    table, keep = pad([[], [7]], 0)
    assert table.tolist() == [[0], [7]]
    assert keep is not None
    assert keep.tolist() == [[False], [True]]


def test_sources_may_be_empty_where_there_is_no_encoder() -> None:
    batch = collate([[], []], [[5, 3], [6, 3]], CONFIG)
    assert batch.source_BS.shape == (2, 0)
    assert batch.source_keep_BS is None


def test_moving() -> None:
    batch = collate([[5, 3], [3]], [[6, 7, 3], [3]], CONFIG)
    moved = batch.to("meta")
    assert isinstance(moved, Batch)
    assert all(x.is_meta for x in moved if isinstance(x, torch.Tensor))
    assert (moved.tokens, moved.total) == (4, 4)
    assert collate([[3]], [[3]], CONFIG).to("meta").keep_BT is None
