"""Batches of the tasks that are not pairs: what goes in, what is to be said, and where."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.batch import Batch, collate
from regard.config import Config, Ids
from regard.data.images import Images, Pixels
from regard.data.order import Indices
from regard.data.vocabulary import marks

Rows = NDArray[np.int64]

MASKED, RANDOM = 0.8, 0.1  # of what is to be predicted; the rest stays as it is
SENTINELS = 100  # symbols that stand for hidden stretches


def generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on the key alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key))))


def lm_batch(rows_BW: Rows, total: int) -> Batch:
    """Every symbol but the last is read, every symbol but the first predicted."""
    rows = torch.from_numpy(rows_BW)
    nothing_B0 = rows.new_empty((len(rows), 0))
    return Batch(nothing_B0, None, rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None, _labels(rows), total)


def _labels(rows_BW: Tensor) -> int:
    return rows_BW.shape[0] * (rows_BW.shape[1] - 1)


# Hidden symbols


def hide(
    rows_BW: Rows, rate: float, ids: Ids, text: Rows, random: np.random.Generator
) -> tuple[Rows, NDArray[np.bool]]:
    """Choose symbols to be predicted -> the rows as they are read, and where something is to be predicted.

    Of each row, `rate` of what is text is chosen, at least one symbol: 80 % of those become the mask, 10 % a random
    symbol of `text`, 10 % stay. `text` are the ids that are text, in order.
    """
    assert ids.mask is not None
    chosen = np.zeros(rows_BW.shape, bool)
    allowed = np.isin(rows_BW, text)
    draws = random.random(rows_BW.shape)
    draws[~allowed] = 2.0
    counts = allowed.sum(1)
    wanted = np.where(counts > 0, np.maximum(1, np.round(counts * rate)), 0).astype(np.int64)
    order = np.argsort(draws, axis=1)
    ranks = np.arange(rows_BW.shape[1]) < wanted[:, None]
    np.put_along_axis(chosen, order, ranks, axis=1)
    how = random.random(rows_BW.shape)
    other = random.choice(text, rows_BW.shape)
    read = np.where(chosen & (how < MASKED), ids.mask, rows_BW)
    read = np.where(chosen & (how >= MASKED) & (how < MASKED + RANDOM), other, read)
    return read, chosen


def masked_batch(read_BW: Rows, label_BW: Rows, chosen_BW: NDArray[np.bool], total: int) -> Batch:
    source, label, keep = (torch.from_numpy(np.ascontiguousarray(x)) for x in (read_BW, label_BW, chosen_BW))
    return Batch(source, None, source.new_empty((len(source), 0)), label, keep, int(keep.sum()), total)


# Hidden stretches


def stretches(length: int, rate: float, mean: float, most: int, random: np.random.Generator) -> list[tuple[int, int]]:
    """Where the hidden stretches of a text begin and end: `rate` of it in pieces of `mean` symbols on average.

    Text comes first, a hidden stretch last, and between two there is always some text.
    """
    hidden = min(max(1, round(length * rate)), length - 1)
    count = min(max(1, round(hidden / mean)), hidden, length - hidden, most)
    shown, gone = _parts(length - hidden, count, random), _parts(hidden, count, random)
    ends = np.cumsum(shown + gone)
    return [(int(end - size), int(end)) for end, size in zip(ends, gone, strict=True)]


def _parts(length: int, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Cut `length` into `count` parts, none empty, all ways equally likely."""
    cuts = (
        np.sort(random.choice(np.arange(1, length), count - 1, replace=False)) if count > 1 else np.empty(0, np.int64)
    )
    return np.diff(np.concatenate(([0], cuts, [length]))).astype(np.int64)


def hide_stretches(row: Rows, places: list[tuple[int, int]], first: int) -> tuple[list[int], list[int]]:
    """A row with its stretches replaced -> (what is read, what is to be said), without the end symbol.

    Stretch k is replaced by the symbol `first` - k, and said after that symbol; one more such symbol closes the answer.
    """
    read: list[int] = []
    said: list[int] = []
    at = 0
    for k, (start, end) in enumerate(places):
        read += [*row[at:start].tolist(), first - k]
        said += [first - k, *row[start:end].tolist()]
        at = end
    read += row[at:].tolist()
    return read, [*said, first - len(places)]


def span_batch(pairs: list[tuple[list[int], list[int]]], config: Config, total: int | None = None) -> Batch:
    ids = config.ids
    before, after = marks(config.frame, ids)
    sources = [[*before, *read, *after] for read, _ in pairs]
    return collate(sources, [[*said, ids.eos] for _, said in pairs], config, total)


# Images


def image_batch(images: Images, pixels: Pixels, rows: Indices | slice, total: int | None = None) -> Batch:
    source = torch.from_numpy(pixels(np.asarray(images.images_NCHW[rows])))
    label = torch.from_numpy(images.labels[rows]).unsqueeze(1)
    count = len(label)
    return Batch(source, None, label.new_empty((count, 0)), label, None, count, count if total is None else total)


def text_ids(size: int, special: frozenset[int]) -> Rows:
    """The ids of a vocabulary that are text."""
    return np.asarray([index for index in range(size) if index not in special], np.int64)
