"""Batches of the tasks that are not pairs: what goes in, what is to be said, and where."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.batch import Batch, GlobalBatch, collate
from regard.config import Config, SpecialIds
from regard.data.images import Images, Pixels
from regard.data.order import Indices
from regard.data.plain import Stream
from regard.errors import UserError
from regard.recipe import Train
from regard.tasks import CONTEXT
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

Rows = NDArray[np.int64]

MASKED, RANDOM = 0.8, 0.1  # of what is to be predicted; the rest stays as it is
SENTINELS = 100  # tokens that stand for masked spans


def generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on the key alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key))))


def lm_batch(rows_BW: Rows, total: int) -> Batch:
    """Every token but the last is read, every token but the first predicted."""
    rows = torch.from_numpy(rows_BW)
    nothing_B0 = rows.new_empty((len(rows), 0))
    return Batch(nothing_B0, None, rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None, _labels(rows), total)


def _labels(rows_BW: Tensor) -> int:
    return rows_BW.shape[0] * (rows_BW.shape[1] - 1)


# Hidden tokens


def mask_tokens(
    rows_BW: Rows, rate: float, ids: SpecialIds, text: Rows, random: np.random.Generator
) -> tuple[Rows, NDArray[np.bool]]:
    """Choose tokens to be predicted -> the rows as they are read, and where something is to be predicted.

    Of each row, `rate` of what is text is chosen, at least one token: 80 % of those become the mask, 10 % a random
    token of `text`, 10 % stay. `text` are the ids that are text, in order.
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


# Span corruption


def sample_spans(
    length: int, rate: float, mean: float, most: int, random: np.random.Generator
) -> list[tuple[int, int]]:
    """Where the masked spans of a text begin and end: `rate` of it in pieces of `mean` tokens on average.

    Text comes first, a masked span last, and between two there is always some text.
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


def corrupt_spans(row: Rows, places: list[tuple[int, int]], first: int) -> tuple[list[int], list[int]]:
    """A row with its masked spans replaced -> (what is read, what is to be said), without the end token.

    Stretch k is replaced by the token `first` - k, and said after that token; one more such token closes the answer.
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
    before, after = ids.around(config.frame)
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


class Windows:
    """How a stream is cut: windows of `length` tokens, each `stride` after the one before."""

    def __init__(self, stream: Stream, length: int, stride: int) -> None:
        self.length = min(length, len(stream))
        self.stride = max(1, stride - (length - self.length))
        self.last = len(stream) - self.length  # where the last one can begin

    def starts(self, offset: int = 0) -> Indices:
        return np.arange(min(offset, self.last), self.last + 1, self.stride)


def rows_of(train: Train) -> int:
    """How many windows make a batch."""
    return train.batch_examples or max(1, train.batch_tokens // context_of(train))


def context_of(train: Train) -> int:
    return train.context or CONTEXT


def lanes(symbols: int, windows: Windows, rows: int, offset: int = 0) -> list[Indices]:
    """Where the windows of each batch begin; there are fewer lanes if the text is too short for so many."""
    stride = windows.stride
    offset = min(offset, max(0, symbols - 1 - stride))
    room = symbols - 1 - offset
    rows = max(1, min(rows, room // stride))
    length = room // rows
    firsts = offset + np.arange(rows) * length
    return [firsts + start for start in range(0, max(1, length - stride + 1), stride)]


def lm_windows(stream: Stream, context: int) -> Windows:
    return Windows(stream, context + 1, context)


class TokenMasking:
    """Hides tokens in windows of a stream, marks included."""

    def __init__(self, stream: Stream, tokenizer: Tokenizer, config: Config, train: Train) -> None:
        if config.ids.mask is None:
            raise UserError("this vocabulary has no token for what is hidden (ids.mask), which task masked needs")
        self._stream, self._config, self._rate = stream, config, train.mask_rate
        self._before, self._after = config.ids.around(config.frame)
        self.before = len(self._before)
        length = context_of(train) - self.before - len(self._after)
        if length < 1:
            raise UserError(f"train.context: {context_of(train)} tokens leave no room for text beside the marks")
        self.windows = Windows(stream, length, length)
        self._text = text_ids(tokenizer.size, tokenizer.special)

    def whole(self, starts: Indices, key: tuple[int, ...]) -> GlobalBatch:
        """A batch in which what is hidden depends on the key."""
        text = self._stream.windows(starts, self.windows.length)
        before, after = (np.tile(np.asarray(mark, np.int64), (len(text), 1)) for mark in (self._before, self._after))
        label = np.concatenate((before, text, after), axis=1)
        read, chosen = mask_tokens(label, self._rate, self._config.ids, self._text, generator(*key))
        tokens = max(1, int(chosen.sum()))
        return GlobalBatch(
            len(starts),
            tokens,
            label.size,
            lambda part, total: masked_batch(read[part], label[part], chosen[part], total),
        )


class SpanCorruption:
    """Span corruption over windows of a stream."""

    def __init__(self, stream: Stream, first: int, config: Config, train: Train) -> None:
        """`first` is the token for the first masked span; those of the others count down from it."""
        self._stream, self._config, self._train, self._first = stream, config, train, first
        self.windows = Windows(stream, context_of(train), context_of(train))
        if self.windows.length < 2:
            raise UserError("train.context: to mask_tokens a part of a text, it needs two tokens at least")

    def places(self, rows: int, key: tuple[int, ...]) -> list[list[tuple[int, int]]]:
        """Where the masked spans of each row begin and end, which depends on the key."""
        random, train, length = generator(*key), self._train, self.windows.length
        return [sample_spans(length, train.span_rate, train.span_mean, SENTINELS - 1, random) for _ in range(rows)]

    def whole(self, starts: Indices, key: tuple[int, ...]) -> GlobalBatch:
        rows = self._stream.windows(starts, self.windows.length)
        hidden = zip(rows, self.places(len(rows), key), strict=True)
        pairs = [corrupt_spans(row, places, self._first) for row, places in hidden]
        tokens = sum(len(said) + 1 for _, said in pairs)
        symbols = tokens + sum(len(read) for read, _ in pairs)
        return GlobalBatch(
            len(pairs), tokens, symbols, lambda part, total: span_batch(pairs[part], self._config, total)
        )


EXTRA = "extra_id"  # how vocabularies from elsewhere name the tokens for masked spans


def first_sentinel(codec: Codec, config: Config | None) -> int | None:
    """The token for the first masked span, if a vocabulary has such tokens; the others count down from it."""
    special = sorted(codec.target.special)
    named = [index for index, piece in zip(special, codec.target.pieces(special), strict=True) if EXTRA in piece]
    if named:
        return named[-1]
    if config is not None and config.target_vocab >= codec.target_vocab + SENTINELS:
        return config.target_vocab - 1
    return None
