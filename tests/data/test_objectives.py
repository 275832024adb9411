"""Masking: proportions over many tokens, and no token is lost."""

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
    read, chosen = mask_tokens(rows, 0.15, IDS, TEXT, generator(1, 2, 3))
    assert chosen[:, 1:-1].sum(1).tolist() == [round(298 * 0.15)] * 200  # of every row
    assert not chosen[:, [0, -1]].any()
    assert (read[~chosen] == rows[~chosen]).all()
    tokens, labels = read[chosen], rows[chosen]
    assert np.mean(tokens == IDS.mask) == pytest.approx(0.8, abs=0.02)
    assert np.mean(tokens == labels) == pytest.approx(0.1 + 0.1 / len(TEXT), abs=0.01)
    drawn = tokens[(tokens != IDS.mask) & (tokens != labels)]
    assert np.mean((tokens != IDS.mask) & (tokens != labels)) == pytest.approx(0.1, abs=0.01)
    assert set(drawn) <= set(TEXT) and len(set(drawn)) > 0.9 * len(TEXT)
    where = chosen[:, 1:-1].mean(0)  # all positions are equally likely
    assert where.min() > 0.05 and where.max() < 0.26


@given(st.lists(st.integers(0, 59), min_size=1, max_size=30), st.floats(0.01, 0.99), st.integers(0, 99))
def test_special_tokens_are_neither_chosen_nor_drawn(row: list[int], rate: float, seed: int) -> None:
    rows = np.asarray([row, row[::-1]])
    read, chosen = mask_tokens(rows, rate, IDS, TEXT, generator(seed))
    text = np.isin(rows, TEXT)
    assert not (chosen & ~text).any()
    assert np.isin(read[chosen], [*TEXT, IDS.mask]).all()
    assert (chosen.sum(1) == np.where(text.sum(1) > 0, np.maximum(1, np.round(text.sum(1) * rate)), 0)).all()
    again = mask_tokens(rows, rate, IDS, TEXT, generator(seed))
    assert np.array_equal(read, again[0]) and np.array_equal(chosen, again[1])


def test_other_keys_mask_other_tokens() -> None:
    rows = np.tile(TEXT, (4, 1))
    found = [
        mask_tokens(rows, 0.2, IDS, TEXT, generator(*key))[1] for key in ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0))
    ]
    assert all(not np.array_equal(a, b) for i, a in enumerate(found) for b in found[:i])


def test_every_nth_token_is_masked_shifted_by_one_in_each_row() -> None:
    rows = np.tile(np.concatenate(([2], TEXT[:12], [3])), (4, 1))
    read, chosen = mask_every(rows, 3, IDS, TEXT)
    assert chosen[0].tolist() == [index % 3 == 1 and index < 13 for index in range(14)]
    assert chosen[1].tolist() == [index % 3 == 0 and 0 < index < 13 for index in range(14)]
    assert not chosen[:, [0, -1]].any()  # special tokens
    assert (read == np.where(chosen, IDS.mask, rows)).all()


def test_a_batch_of_masked_tokens() -> None:
    rows = np.tile(TEXT, (3, 1))
    read, chosen = mask_tokens(rows, 0.2, IDS, TEXT, generator(1))
    batch = masked_batch(read, rows, chosen, 99)
    assert batch.tokens == chosen.sum() and batch.total == 99
    assert batch.keep_BT is not None and torch.equal(batch.label_BT[batch.keep_BT], torch.from_numpy(rows[chosen]))


@given(st.integers(2, 300), st.floats(0.01, 0.9), st.floats(1, 20), st.integers(0, 9))
def test_spans_do_not_touch_and_cover_their_share(length: int, rate: float, mean: float, seed: int) -> None:
    spans = sample_spans(length, rate, mean, SENTINELS - 1, generator(seed))
    hidden = min(max(1, round(length * rate)), length - 1)
    assert sum(end - start for start, end in spans) == hidden
    assert spans[0][0] > 0 and spans[-1][1] == length
    assert all(b[0] > a[1] for a, b in pairwise(spans))
    assert all(end > start for start, end in spans)
    assert len(spans) == min(max(1, round(hidden / mean)), hidden, length - hidden, SENTINELS - 1)


@given(st.lists(st.integers(5, 59), min_size=2, max_size=200), st.floats(0.05, 0.7), st.integers(0, 9))
def test_source_and_target_together_restore_the_text(row: list[int], rate: float, seed: int) -> None:
    first = 59 + SENTINELS
    spans = sample_spans(len(row), rate, 3.0, SENTINELS - 1, generator(seed))
    read, target = corrupt_spans(np.asarray(row), spans, first)
    found: dict[int, list[int]] = {}
    for token in target:
        if token > 59:
            found[token] = []
            last = token
        else:
            found[last].append(token)
    assert found.pop(first - len(spans)) == []  # closes the answer
    assert list(found) == [first - k for k in range(len(spans))]
    assert [x for token in read for x in (found[token] if token > 59 else [token])] == row


def test_a_batch_of_spans_equals_a_batch_of_pairs() -> None:
    stack = Stack(layers=1, width=8, heads=2)
    config = Config(source_vocab=160, target_vocab=160, encoder=stack, decoder=stack, start="pad")
    batch = span_batch([([5, 159], [159, 6, 7, 158]), ([5, 6, 7, 159, 8], [159, 9, 158])], config)
    assert batch.source_BS.tolist() == [[5, 159, 3, 0, 0, 0], [5, 6, 7, 159, 8, 3]]
    assert batch.label_BT.tolist() == [[159, 6, 7, 158, 3], [159, 9, 158, 3, 0]]
    assert batch.input_BT[:, 0].tolist() == [0, 0] and batch.tokens == 9


def test_a_language_model_predicts_the_next_token() -> None:
    batch = lm_batch(np.asarray([[3, 5, 6], [6, 7, 8]]), 77)
    assert batch.source_BS.shape == (2, 0)
    assert (batch.input_BT.tolist(), batch.label_BT.tolist()) == ([[3, 5], [6, 7]], [[5, 6], [7, 8]])
    assert (batch.tokens, batch.total) == (4, 77)
