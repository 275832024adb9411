"""Masking and span corruption: proportions, positions and batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from regard.config import Config, SpecialIds, Stack
from regard.data.objectives import (
    SENTINELS,
    corrupt_spans,
    lm_batch,
    mask_every,
    mask_tokens,
    masked_batch,
    sample_spans,
    span_batch,
    text_ids,
)
from regard.data.order import generator

IDS = SpecialIds(mask=4)
TEXT = text_ids(60, frozenset({0, 1, 2, 3, 4, 31}))


def test_shares_of_mask_random_and_unchanged_tokens() -> None:
    rows = np.tile(np.concatenate(([2], np.resize(TEXT, 298), [3])), (200, 1))
    inputs, mask = mask_tokens(rows, 0.15, IDS, TEXT, generator(1, 2, 3))
    assert mask[:, 1:-1].sum(1).tolist() == [round(298 * 0.15)] * 200  # in every row
    assert not mask[:, [0, -1]].any()
    assert (inputs[~mask] == rows[~mask]).all()
    tokens = inputs[mask]
    labels = rows[mask]
    assert np.mean(tokens == IDS.mask) == pytest.approx(0.8, abs=0.02)
    assert np.mean(tokens == labels) == pytest.approx(0.1 + 0.1 / len(TEXT), abs=0.01)
    random_tokens = tokens[(tokens != IDS.mask) & (tokens != labels)]
    assert np.mean((tokens != IDS.mask) & (tokens != labels)) == pytest.approx(0.1, abs=0.01)
    assert set(random_tokens) <= set(TEXT) and len(set(random_tokens)) > 0.9 * len(TEXT)
    where = mask[:, 1:-1].mean(0)  # all positions are equally likely
    assert where.min() > 0.05 and where.max() < 0.26


@given(st.lists(st.integers(0, 59), min_size=1, max_size=30), st.floats(0.01, 0.99), st.integers(0, 99))
def test_special_tokens_are_neither_masked_nor_inserted(row: list[int], rate: float, seed: int) -> None:
    rows = np.asarray([row, row[::-1]])
    inputs, mask = mask_tokens(rows, rate, IDS, TEXT, generator(seed))
    text = np.isin(rows, TEXT)
    assert not (mask & ~text).any()
    assert np.isin(inputs[mask], [*TEXT, IDS.mask]).all()
    assert (mask.sum(1) == np.where(text.sum(1) > 0, np.maximum(1, np.round(text.sum(1) * rate)), 0)).all()
    repeat = mask_tokens(rows, rate, IDS, TEXT, generator(seed))
    assert np.array_equal(inputs, repeat[0]) and np.array_equal(mask, repeat[1])


def test_different_random_keys_mask_different_tokens() -> None:
    rows = np.tile(TEXT, (4, 1))
    masks = [
        mask_tokens(rows, 0.2, IDS, TEXT, generator(*key))[1] for key in ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0))
    ]
    assert all(not np.array_equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_mask_every_masks_every_nth_token_with_a_shift_per_row() -> None:
    rows = np.tile(np.concatenate(([2], TEXT[:12], [3])), (4, 1))
    inputs, mask = mask_every(rows, 3, IDS, TEXT)
    assert mask[0].tolist() == [index % 3 == 1 and index < 13 for index in range(14)]
    assert mask[1].tolist() == [index % 3 == 0 and 0 < index < 13 for index in range(14)]
    assert not mask[:, [0, -1]].any()  # special tokens
    assert (inputs == np.where(mask, IDS.mask, rows)).all()


def test_masked_batch_has_labels_at_the_masked_positions() -> None:
    rows = np.tile(TEXT, (3, 1))
    inputs, mask = mask_tokens(rows, 0.2, IDS, TEXT, generator(1))
    batch = masked_batch(inputs, rows, mask, 99)
    assert batch.tokens == mask.sum() and batch.total == 99
    assert batch.keep_BT is not None and torch.equal(batch.label_BT[batch.keep_BT], torch.from_numpy(rows[mask]))


@given(st.integers(2, 300), st.floats(0.01, 0.9), st.floats(1, 20), st.integers(0, 9))
def test_spans_are_separate_and_cover_the_requested_share(length: int, rate: float, mean: float, seed: int) -> None:
    spans = sample_spans(length, rate, mean, SENTINELS - 1, generator(seed))
    hidden = min(max(1, round(length * rate)), length - 1)
    assert sum(end - start for start, end in spans) == hidden
    assert spans[0][0] > 0 and spans[-1][1] == length
    assert all(b[0] > a[1] for a, b in pairwise(spans))
    assert all(end > start for start, end in spans)
    assert len(spans) == min(max(1, round(hidden / mean)), hidden, length - hidden, SENTINELS - 1)


@given(st.lists(st.integers(5, 59), min_size=2, max_size=200), st.floats(0.05, 0.7), st.integers(0, 9))
def test_span_source_and_target_restore_the_text(row: list[int], rate: float, seed: int) -> None:
    first = 59 + SENTINELS
    spans = sample_spans(len(row), rate, 3.0, SENTINELS - 1, generator(seed))
    source, target = corrupt_spans(np.asarray(row), spans, first)
    spans_by_sentinel: dict[int, list[int]] = {}
    for token in target:
        if token > 59:
            spans_by_sentinel[token] = []
            last = token
        else:
            spans_by_sentinel[last].append(token)
    assert spans_by_sentinel.pop(first - len(spans)) == []  # the final sentinel ends the target
    assert list(spans_by_sentinel) == [first - k for k in range(len(spans))]
    assert [x for token in source for x in (spans_by_sentinel[token] if token > 59 else [token])] == row


def test_span_batch_has_the_layout_of_a_pair_batch() -> None:
    stack = Stack(layers=1, width=8, heads=2)
    config = Config(source_vocab=160, target_vocab=160, encoder=stack, decoder=stack, start="pad")
    batch = span_batch([([5, 159], [159, 6, 7, 158]), ([5, 6, 7, 159, 8], [159, 9, 158])], config)
    assert batch.source_BS.tolist() == [[5, 159, 3, 0, 0, 0], [5, 6, 7, 159, 8, 3]]
    assert batch.label_BT.tolist() == [[159, 6, 7, 158, 3], [159, 9, 158, 3, 0]]
    assert batch.input_BT[:, 0].tolist() == [0, 0] and batch.tokens == 9


def test_lm_batch_labels_are_the_next_tokens() -> None:
    batch = lm_batch(np.asarray([[3, 5, 6], [6, 7, 8]]), 77)
    assert batch.source_BS.shape == (2, 0)
    assert (batch.input_BT.tolist(), batch.label_BT.tolist()) == ([[3, 5], [6, 7]], [[5, 6], [7, 8]])
    assert (batch.tokens, batch.total) == (4, 77)
