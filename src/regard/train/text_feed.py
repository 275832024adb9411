"""Plain text as training steps: windows of a stream for each of the tasks that read it."""

from __future__ import annotations

import numpy as np

from regard.config import Config
from regard.data.order import Indices
from regard.data.stream import Stream
from regard.data.vocabulary import marks
from regard.errors import UserError
from regard.settings import CONTEXT, Train
from regard.text.tokenizer import Tokenizer
from regard.train.feed import Feed, Whole
from regard.train.rows import (
    SENTINELS,
    Rows,
    generator,
    hide,
    hide_stretches,
    lm_batch,
    masked_batch,
    span_batch,
    stretches,
    text_ids,
)
from regard.train.world import World


class Windows:
    """How a stream is cut: windows of `length` symbols, each `stride` after the one before."""

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


class TextFeed(Feed):
    """Windows in random order. Where the first one begins differs by epoch, so that every symbol gets every context."""

    def __init__(self, stream: Stream, windows: Windows, train: Train, world: World) -> None:
        super().__init__(train, world)
        self._stream = stream
        self._windows = windows

    def _cut(self, epoch: int) -> list[Indices]:
        random, rows = generator(self._train.seed, epoch), rows_of(self._train)
        starts = random.permutation(self._windows.starts(int(random.integers(self._windows.stride))))
        return [starts[at : at + rows] for at in range(0, len(starts), rows)]

    def _read(self, starts: Indices) -> Rows:
        return self._stream.windows(starts, self._windows.length)


class LmFeed(TextFeed):
    """Each symbol is predicted from those before it in its window."""

    def __init__(self, stream: Stream, train: Train, world: World) -> None:
        super().__init__(stream, lm_windows(stream, context_of(train)), train, world)

    def _whole(self, epoch: int, batch: int, rows: Indices) -> Whole:
        tokens = len(rows) * (self._windows.length - 1)
        return Whole(len(rows), tokens, tokens, lambda part, total: lm_batch(self._read(rows[part]), total))


class LaneFeed(LmFeed):
    """The stream in lanes side by side: a row of a batch goes on where the same row of the batch before ended."""

    def _cut(self, epoch: int) -> list[Indices]:
        offset = int(generator(self._train.seed, epoch).integers(self._windows.stride))
        return lanes(len(self._stream), self._windows, rows_of(self._train), offset)


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


class Masks:
    """Hides symbols in windows of a stream, marks included."""

    def __init__(self, stream: Stream, tokenizer: Tokenizer, config: Config, train: Train) -> None:
        if config.ids.mask is None:
            raise UserError("this vocabulary has no symbol for what is hidden (ids.mask), which task masked needs")
        self._stream, self._config, self._rate = stream, config, train.mask_rate
        self._before, self._after = marks(config.frame, config.ids)
        self.before = len(self._before)
        length = context_of(train) - self.before - len(self._after)
        if length < 1:
            raise UserError(f"train.context: {context_of(train)} symbols leave no room for text beside the marks")
        self.windows = Windows(stream, length, length)
        self._text = text_ids(tokenizer.size, tokenizer.special)

    def whole(self, starts: Indices, key: tuple[int, ...]) -> Whole:
        """A batch in which what is hidden depends on the key."""
        text = self._stream.windows(starts, self.windows.length)
        before, after = (np.tile(np.asarray(mark, np.int64), (len(text), 1)) for mark in (self._before, self._after))
        label = np.concatenate((before, text, after), axis=1)
        read, chosen = hide(label, self._rate, self._config.ids, self._text, generator(*key))
        tokens = max(1, int(chosen.sum()))
        return Whole(
            len(starts),
            tokens,
            label.size,
            lambda part, total: masked_batch(read[part], label[part], chosen[part], total),
        )


class MaskedFeed(TextFeed):
    """Hidden symbols are predicted from all that is around them."""

    def __init__(self, masks: Masks, stream: Stream, train: Train, world: World) -> None:
        super().__init__(stream, masks.windows, train, world)
        self._masks = masks

    def _whole(self, epoch: int, batch: int, rows: Indices) -> Whole:
        return self._masks.whole(rows, (self._train.seed, epoch, batch))


class Spans:
    """Hides stretches in windows of a stream."""

    def __init__(self, stream: Stream, first: int, config: Config, train: Train) -> None:
        """`first` is the symbol for the first hidden stretch; those of the others count down from it."""
        self._stream, self._config, self._train, self._first = stream, config, train, first
        self.windows = Windows(stream, context_of(train), context_of(train))
        if self.windows.length < 2:
            raise UserError("train.context: to hide a part of a text, it needs two symbols at least")

    def places(self, rows: int, key: tuple[int, ...]) -> list[list[tuple[int, int]]]:
        """Where the hidden stretches of each row begin and end, which depends on the key."""
        random, train, length = generator(*key), self._train, self.windows.length
        return [stretches(length, train.span_rate, train.span_mean, SENTINELS - 1, random) for _ in range(rows)]

    def whole(self, starts: Indices, key: tuple[int, ...]) -> Whole:
        rows = self._stream.windows(starts, self.windows.length)
        hidden = zip(rows, self.places(len(rows), key), strict=True)
        pairs = [hide_stretches(row, places, self._first) for row, places in hidden]
        tokens = sum(len(said) + 1 for _, said in pairs)
        symbols = tokens + sum(len(read) for read, _ in pairs)
        return Whole(len(pairs), tokens, symbols, lambda part, total: span_batch(pairs[part], self._config, total))


class SpanFeed(TextFeed):
    """Hidden stretches are said one after the other."""

    def __init__(self, spans: Spans, stream: Stream, train: Train, world: World) -> None:
        super().__init__(stream, spans.windows, train, world)
        self._spans = spans

    def _whole(self, epoch: int, batch: int, rows: Indices) -> Whole:
        return self._spans.whole(rows, (self._train.seed, epoch, batch))
