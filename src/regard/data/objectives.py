"""Training objectives as batches: causal LM, masked language modelling, span corruption, image classification."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.batch import Batch, GlobalBatch, collate
from regard.config import Config, SpecialIds
from regard.data.order import Indices, generator
from regard.data.plain_text import Stream
from regard.errors import UserError, plural
from regard.recipe import Train
from regard.tasks import CONTEXT
from regard.text.codec import Codec

Ids = NDArray[np.int64]
Chosen = NDArray[np.bool]
Spans = list[tuple[int, int]]  # (start, end) of each masked span

MASK_SHARE = 0.8  # of the chosen tokens become the mask
RANDOM_SHARE = 0.1  # become a random token; the rest is not changed
SENTINELS = 100  # sentinel tokens: each replaces a masked span
SENTINEL_NAME = "extra_id"  # part of the names of sentinels in imported vocabularies


def lm_batch(rows_BW: Ids | Tensor, total: int | None = None) -> Batch:
    """The input is every token except the last, the labels are every token except the first."""
    rows = torch.as_tensor(rows_BW)
    label = rows[:, 1:].contiguous()
    tokens = label.numel()
    return Batch(label[:, :0], None, rows[:, :-1].contiguous(), label, None, tokens, tokens if total is None else total)


def masked_batch(read_BW: Ids, label_BW: Ids, chosen_BW: Chosen, total: int | None = None) -> Batch:
    """The input is the masked text; the labels are the original tokens, predicted where `chosen_BW` is true."""
    source, label, keep = (torch.from_numpy(np.ascontiguousarray(x)) for x in (read_BW, label_BW, chosen_BW))
    tokens = int(keep.sum())
    return Batch(source, None, source[:, :0], label, keep, tokens, tokens if total is None else total)


def span_batch(pairs: list[tuple[list[int], list[int]]], config: Config, total: int | None = None) -> Batch:
    """A batch of pairs of corrupted text and target from `corrupt_spans`."""
    before, after = config.ids.around(config.frame)
    sources = [[*before, *read, *after] for read, _ in pairs]
    return collate(sources, [[*target, config.ids.eos] for _, target in pairs], config, total)


def image_batch(scaled_NCHW: NDArray[np.float32], label_N: Ids, total: int | None = None) -> Batch:
    """Images with scaled pixels, and the numbers of their labels."""
    label = torch.from_numpy(label_N).unsqueeze(1)
    count = len(label)
    source = torch.from_numpy(scaled_NCHW).float()
    return Batch(source, None, label[:, :0], label, None, count, count if total is None else total)


def text_ids(size: int, special: frozenset[int]) -> Ids:
    """The ids of a vocabulary that are not special tokens."""
    return np.asarray([index for index in range(size) if index not in special], np.int64)


def mask_tokens(
    rows_BW: Ids, rate: float, ids: SpecialIds, text: Ids, random: np.random.Generator
) -> tuple[Ids, Chosen]:
    """Choose a share `rate` of the tokens in `text`, at least one per row -> the masked rows, and the chosen positions.

    80 % of the chosen tokens become the mask, 10 % a random token of `text`, 10 % are unchanged.
    """
    assert ids.mask is not None
    chosen = np.zeros(rows_BW.shape, bool)
    allowed = np.isin(rows_BW, text)
    draws = random.random(rows_BW.shape)
    draws[~allowed] = 2.0
    counts = allowed.sum(1)
    chosen_counts = np.where(counts > 0, np.maximum(1, np.round(counts * rate)), 0).astype(np.int64)
    order = np.argsort(draws, axis=1)
    np.put_along_axis(chosen, order, np.arange(rows_BW.shape[1]) < chosen_counts[:, None], axis=1)
    change = random.random(rows_BW.shape)
    other = random.choice(text, rows_BW.shape)
    read = np.where(chosen & (change < MASK_SHARE), ids.mask, rows_BW)
    read = np.where(chosen & (change >= MASK_SHARE) & (change < MASK_SHARE + RANDOM_SHARE), other, read)
    return read, chosen


def mask_every(rows_BW: Ids, every: int, ids: SpecialIds, text: Ids) -> tuple[Ids, Chosen]:
    """Mask every n-th position except special tokens, starting one position further left in each row."""
    assert ids.mask is not None
    positions = np.arange(rows_BW.shape[1]) + np.arange(len(rows_BW))[:, None]
    chosen = (positions % every == every // 2) & np.isin(rows_BW, text)
    return np.where(chosen, ids.mask, rows_BW), chosen


def sample_spans(length: int, rate: float, mean: float, limit: int, random: np.random.Generator) -> Spans:
    """Choose at most `limit` separate spans to mask: `rate` of the text, always with its end, `mean` tokens each."""
    masked = min(max(1, round(length * rate)), length - 1)
    count = min(max(1, round(masked / mean)), masked, length - masked, limit)
    gaps = _partition(length - masked, count, random)
    sizes = _partition(masked, count, random)
    ends = np.cumsum(gaps + sizes)
    return list(zip((ends - sizes).tolist(), ends.tolist(), strict=True))


def _partition(length: int, count: int, random: np.random.Generator) -> Ids:
    """Split `length` into `count` parts of at least 1, uniformly at random."""
    cuts = random.choice(np.arange(1, length), count - 1, replace=False).tolist() if count > 1 else []
    return np.diff([0, *sorted(cuts), length]).astype(np.int64)


def corrupt_spans(row: Ids, spans: Spans, first: int) -> tuple[list[int], list[int]]:
    """Replace span k of a row by the sentinel `first` - k -> (text with sentinels, target), without the end token.

    In the target, each span follows its sentinel, and another sentinel comes last.
    """
    read: list[int] = []
    target: list[int] = []
    position = 0
    for k, (start, end) in enumerate(spans):
        read += [*row[position:start].tolist(), first - k]
        target += [first - k, *row[start:end].tolist()]
        position = end
    read += row[position:].tolist()
    return read, [*target, first - len(spans)]


def first_sentinel(codec: Codec, config: Config | None) -> int | None:
    """The sentinel of the first masked span, if the vocabulary has sentinels; later sentinels have lower ids."""
    for index in sorted(codec.target.special, reverse=True):
        if SENTINEL_NAME in codec.target.pieces([index])[0]:
            return index
    if config is not None and config.target_vocab >= codec.target_vocab + SENTINELS:
        return config.target_vocab - 1
    return None


def context_of(train: Train) -> int:
    """The number of tokens of plain text in a row."""
    return train.context or CONTEXT


def rows_of(train: Train) -> int:
    """The number of windows in a batch."""
    return train.batch_examples or max(1, train.batch_tokens // context_of(train))


class Windows:
    """Windows of `length` tokens in a stream at distances of `stride` tokens."""

    def __init__(self, stream: Stream, length: int, stride: int) -> None:
        self.length = min(length, len(stream))
        self.stride = max(1, stride - (length - self.length))
        self.last = len(stream) - self.length  # the last possible start

    def starts(self, offset: int = 0) -> Indices:
        return np.arange(min(offset, self.last), self.last + 1, self.stride)

    def lanes(self, rows: int, offset: int = 0) -> list[Indices]:
        """The starts of batches in which each row continues the previous one; a short text has fewer than `rows`."""
        end = self.last + self.length - 1
        offset = min(offset, max(0, end - self.stride))
        rows = max(1, min(rows, (end - offset) // self.stride))
        length = (end - offset) // rows
        firsts = offset + np.arange(rows) * length
        return [firsts + start for start in range(0, max(1, length - self.stride + 1), self.stride)]


class TextObjective(ABC):
    """Makes batches from the windows of a stream."""

    windows: Windows

    @abstractmethod
    def __init__(self, stream: Stream, codec: Codec, config: Config, train: Train) -> None: ...

    @abstractmethod
    def batch(self, starts: Indices, key: tuple[int, ...]) -> GlobalBatch:
        """The batch of the windows at `starts`; random choices depend only on the key."""


class CausalLM(TextObjective):
    """Each token is predicted from the tokens before it in its window."""

    def __init__(self, stream: Stream, codec: Codec, config: Config, train: Train) -> None:
        self._stream = stream
        self.windows = Windows(stream, context_of(train) + 1, context_of(train))

    def batch(self, starts: Indices, key: tuple[int, ...]) -> GlobalBatch:
        length = self.windows.length
        tokens = len(starts) * (length - 1)
        rows = self._stream.windows
        return GlobalBatch(len(starts), tokens, tokens, lambda part, total: lm_batch(rows(starts[part], length), total))


class TokenMasking(TextObjective):
    """Masked tokens are predicted from their window, which is framed by special tokens (`Config.frame`)."""

    def __init__(self, stream: Stream, codec: Codec, config: Config, train: Train) -> None:
        if config.ids.mask is None:
            raise UserError("this vocabulary has no mask token (ids.mask), which task masked needs")
        self._stream = stream
        self._ids = config.ids
        self._rate = train.mask_rate
        self._before, self._after = config.ids.around(config.frame)
        self.text_offset = len(self._before)  # position of the first token of the text in a row
        length = context_of(train) - self.text_offset - len(self._after)
        if length < 1:
            context = plural(context_of(train), "token")
            raise UserError(f"train.context: {context} leave no room for text between the special tokens")
        self.windows = Windows(stream, length, length)
        self._text = text_ids(codec.source.size, codec.source.special)

    def batch(self, starts: Indices, key: tuple[int, ...]) -> GlobalBatch:
        text = self._stream.windows(starts, self.windows.length)
        before, after = (np.tile(np.asarray(ids, np.int64), (len(text), 1)) for ids in (self._before, self._after))
        label = np.concatenate((before, text, after), axis=1)
        read, chosen = mask_tokens(label, self._rate, self._ids, self._text, generator(*key))
        return GlobalBatch(
            len(starts),
            max(1, int(chosen.sum())),
            label.size,
            lambda part, total: masked_batch(read[part], label[part], chosen[part], total),
        )


class SpanCorruption(TextObjective):
    """The masked spans are predicted in order, each after its sentinel."""

    def __init__(self, stream: Stream, codec: Codec, config: Config, train: Train) -> None:
        first = first_sentinel(codec, config)
        if first is None:
            raise UserError("this vocabulary has no sentinel tokens for masked spans, which task span needs")
        self._stream = stream
        self._first = first
        self._config = config
        self._train = train
        self.windows = Windows(stream, context_of(train), context_of(train))
        if self.windows.length < 2:
            raise UserError("train.context: span corruption needs at least two tokens of text")

    def spans(self, rows: int, key: tuple[int, ...]) -> list[Spans]:
        """The masked spans of each row."""
        rates = (self._train.span_rate, self._train.span_mean)
        random = generator(*key)
        return [sample_spans(self.windows.length, *rates, SENTINELS - 1, random) for _ in range(rows)]

    def batch(self, starts: Indices, key: tuple[int, ...]) -> GlobalBatch:
        rows = self._stream.windows(starts, self.windows.length)
        masked = zip(rows, self.spans(len(rows), key), strict=True)
        pairs = [corrupt_spans(row, spans, self._first) for row, spans in masked]
        tokens = sum(len(target) + 1 for _, target in pairs)
        both = tokens + sum(len(read) for read, _ in pairs)
        return GlobalBatch(len(pairs), tokens, both, lambda part, total: span_batch(pairs[part], self._config, total))


TEXT_OBJECTIVES: dict[str, type[TextObjective]] = {"lm": CausalLM, "masked": TokenMasking, "span": SpanCorruption}
