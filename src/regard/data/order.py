"""The order of training: the batches of an epoch as a pure function of (seed, epoch), without state.

Examples are shuffled, sorted by length so that a batch needs little padding, and cut into batches, which are shuffled;
if there are more than WINDOW, in several windows of blocks of consecutive examples, which bounds the memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from regard.errors import UserError, plural

Indices = NDArray[np.int64]
PASS_KEY = 1  # last element of the random key of a pass over a corpus
WINDOW_KEY = 2  # last element of the random key of a window
WINDOW = 1 << 20  # examples sorted together
BLOCK = 64  # consecutive examples that stay together if an epoch has several windows


class Lengths(Protocol):
    """The number of tokens of each example: an array, or an object that reads them from a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Indices, /) -> NDArray[np.integer[Any]]: ...


def generator(*key: int) -> np.random.Generator:
    """A generator whose random numbers depend only on the key."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key))))


class Batches(Sequence[Indices]):
    """The batches of an epoch: arrays of example numbers. Each number occurs once, unless there are `shares`.

    A batch has at most `batch_examples` rows and `batch_tokens` tokens (rows times the longest side, end tokens
    included); a longer example is a batch of its own. `shares` are those of the corpora, whose sizes are `sizes`.
    """

    def __init__(
        self,
        source_lengths: Lengths,
        target_lengths: Lengths,
        seed: int,
        epoch: int,
        batch_tokens: int,
        batch_examples: int | None = None,
        *,
        sizes: Sequence[int] = (),
        shares: Sequence[float] | None = None,
    ) -> None:
        self._source = source_lengths
        self._target = target_lengths
        self._seed = seed
        self._epoch = epoch
        self._batch_tokens = batch_tokens
        self._batch_examples = batch_examples
        self._sizes, self._shares = (sizes, shares) if shares else ([len(source_lengths)], [1.0])
        self._drawn = shares is not None
        self._windows = -(-len(source_lengths) // WINDOW)
        self._current = -1  # number of the window in memory
        self._batches: list[Indices] = []  # of this window
        self._begins = [0]  # number of the first batch of each window, as far as known

    def __len__(self) -> int:
        while len(self._begins) <= self._windows:
            self._window(len(self._begins) - 1)
        return self._begins[-1]

    @overload
    def __getitem__(self, number: int) -> Indices: ...
    @overload
    def __getitem__(self, number: slice) -> list[Indices]: ...
    def __getitem__(self, number: int | slice) -> Indices | list[Indices]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        window = bisect_right(self._begins, number) - 1
        return self._window(window)[number - self._begins[window]]

    def __iter__(self) -> Iterator[Indices]:
        for window in range(self._windows):
            yield from self._window(window)

    def _window(self, number: int) -> list[Indices]:
        """The batches of a window."""
        if number != self._current:
            single = self._windows == 1
            random = generator(self._seed, self._epoch, *(() if single else (number, WINDOW_KEY)))
            if single and not self._drawn:
                rows: Indices = np.arange(len(self._source))
            else:
                part = (number, self._windows)
                rows = draw(self._sizes, self._shares, self._seed, self._epoch, part, 1 if single else BLOCK)
            self._current = -1
            self._batches = []  # free the previous window first
            self._batches = self._make(random.permutation(rows), random)
            self._current = number
            if number == len(self._begins) - 1:
                self._begins.append(self._begins[-1] + len(self._batches))
        return self._batches

    def _make(self, rows: Indices, random: np.random.Generator) -> list[Indices]:
        source, target = (lengths[rows].astype(np.int64) for lengths in (self._source, self._target))
        longer = np.maximum(source, target)
        # Sort by the longer side, then by the difference, alternately ascending and descending, so that neighbours have
        # similar lengths on both sides. A stable sort keeps examples of equal lengths shuffled. The direction and the
        # size of the first batch vary by epoch; otherwise large batches would be nearly equal in all epochs.
        up = (longer + random.integers(2)) % 2 == 0
        order = np.argsort((longer << 32) + np.where(up, source - target, target - source), kind="stable")
        cut = _cut(rows[order], longer[order], self._batch_tokens, self._batch_examples, random.uniform(0.5, 1.0))
        return [cut[index] for index in random.permutation(len(cut))]


def proportions(sizes: Sequence[int], weights: Sequence[float] | None, temperature: float | None) -> list[float] | None:
    """The share of each corpus in an epoch; None if every example occurs once."""
    if weights is None and temperature is None:
        return None
    if weights is not None and (empty := [index for index, size in enumerate(sizes, 1) if not size]):
        raise UserError(f"data.weights: corpus {empty[0]} has no training example that could be drawn")
    if temperature is not None:
        largest = max(sizes)
        weights = [(size / largest) ** (1 / temperature) for size in sizes]
    assert weights is not None
    if len(weights) != len(sizes):
        raise UserError(f"data.weights: {plural(len(weights), 'number')} for {len(sizes)} corpora")
    return [weight / sum(weights) for weight in weights]


def draw(
    sizes: Sequence[int], shares: Sequence[float], seed: int, epoch: int, part: tuple[int, int] = (0, 1), block: int = 1
) -> Indices:
    """The sum(sizes) examples of an epoch in which each corpus has its share; or one `part` of them: (number, count).

    The examples of a corpus are drawn in passes, each in another order, in which `block` consecutive examples stay
    together. An epoch continues the previous pass, so an example is repeated only after all others of its corpus.
    """
    number, parts = part
    total = sum(sizes)
    ends = [round(end * total) for end in np.cumsum(shares)]
    drawn = []
    for corpus, (size, begin, end) in enumerate(zip(sizes, [0, *ends], ends, strict=False)):
        count = end - begin
        first = sum(sizes[:corpus])
        position = epoch * count + count * number // parts
        stop = epoch * count + count * (number + 1) // parts
        while position < stop:
            passes, skip = divmod(position, size)
            random = generator(seed, corpus, passes, PASS_KEY)
            rows = _pass(size, block, random, skip, min(size, skip + stop - position))
            drawn.append(first + rows)
            position += len(rows)
    return np.concatenate(drawn) if drawn else np.empty(0, np.int64)


def _pass(size: int, block: int, random: np.random.Generator, begin: int, end: int) -> Indices:
    """Examples `begin` to `end` of a pass over a corpus. An incomplete last block comes last."""
    whole = size // block
    blocks = np.append(random.permutation(whole), whole)[begin // block : -(-end // block)]
    rows: Indices = (blocks[:, None] * block + np.arange(block)).ravel()
    return rows[begin % block :][: end - begin]


def _cut(indices: Indices, cost: Indices, batch_tokens: int, batch_examples: int | None, first: float) -> list[Indices]:
    """Split a sequence into batches within the budget; the first of several batches uses the share `first` of it."""
    runs = []
    start = 0
    while start < len(indices):
        limit = max(1, batch_tokens // max(1, int(cost[start])))  # the following examples are not shorter
        if batch_examples is not None:
            limit = min(limit, batch_examples)
        padded = cost[start : start + limit] * np.arange(1, min(limit, len(indices) - start) + 1)
        rows = max(1, int(np.searchsorted(padded, batch_tokens, side="right")))
        if not start and rows < len(indices):
            rows = int(np.ceil(rows * first))
        runs.append(indices[start : start + rows])
        start += rows
    return runs
