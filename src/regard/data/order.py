"""The order of training: which examples make up which batch, as a pure function of (seed, epoch).

Examples are shuffled, sorted by length so that a batch needs little padding, and cut into batches, which are shuffled.
Nothing is remembered between epochs: batch k of epoch e is the same whoever asks, whenever.

Of a corpus with more examples than WINDOW, some at a time are put in order, so that memory does not grow with it: a
window is made of blocks of consecutive examples from all over the corpus.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from regard.errors import UserError, plural

Indices = NDArray[np.int64]
PASS = 1  # ends the key of the order of a pass over a corpus, unlike that of an epoch
WINDOW_KEY = 2  # ends the key of one of several windows
WINDOW = 1 << 20  # examples sorted together
BLOCK = 64  # consecutive examples that come into the same window, where there are several


class Lengths(Protocol):
    """How many tokens each example has; an array, or what reads it from a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Indices, /) -> NDArray[np.integer[Any]]: ...


def generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on the key alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key))))


class Batches(Sequence[Indices]):
    """The batches of an epoch: arrays of example numbers, each number exactly once, or as `shares` have it.

    A batch holds at most `batch_examples` rows, and rows times the longest side at most `batch_tokens`; an example
    longer than that is a batch of its own. Lengths count the end token. `sizes` are those of the corpora, `shares` the
    part of each in the epoch. In memory are the batches of one window.
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
        self._source, self._target = source_lengths, target_lengths
        self._seed, self._epoch = seed, epoch
        self._batch_tokens, self._batch_examples = batch_tokens, batch_examples
        self._sizes, self._shares = (sizes, shares) if shares else ([len(source_lengths)], [1.0])
        self._drawn = shares is not None
        self._windows = -(-len(source_lengths) // WINDOW)
        self._at, self._cut = -1, list[Indices]()  # a window and its batches
        self._begins = [0]  # numbers of the first batches of windows, as far as they are known

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
            return [self[at] for at in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        window = bisect_right(self._begins, number) - 1
        return self._window(window)[number - self._begins[window]]

    def __iter__(self) -> Iterator[Indices]:
        for window in range(self._windows):
            yield from self._window(window)

    def _window(self, number: int) -> list[Indices]:
        """The batches of a window."""
        if number != self._at:
            alone = self._windows == 1
            random = generator(self._seed, self._epoch, *(() if alone else (number, WINDOW_KEY)))
            if alone and not self._drawn:
                rows: Indices = np.arange(len(self._source))
            else:
                part = (number, self._windows)
                rows = draw(self._sizes, self._shares, self._seed, self._epoch, part, 1 if alone else BLOCK)
            self._at, self._cut = -1, []  # the one before is not needed any more
            self._at, self._cut = number, self._make(random.permutation(rows), random)
            if number == len(self._begins) - 1:
                self._begins.append(self._begins[-1] + len(self._cut))
        return self._cut

    def _make(self, rows: Indices, random: np.random.Generator) -> list[Indices]:
        source, target = (lengths[rows].astype(np.int64) for lengths in (self._source, self._target))
        longer = np.maximum(source, target)
        # By the longer side, then by the difference, up and down in turns, so that neighbours differ little on either
        # side. Stable, so that equals stay shuffled. Which turns go up and where the first cut falls differ by epoch,
        # or large batches would be nearly the same ones each time.
        up = (longer + random.integers(2)) % 2 == 0
        order = np.argsort((longer << 32) + np.where(up, source - target, target - source), kind="stable")
        cut = _cut(rows[order], longer[order], self._batch_tokens, self._batch_examples, random.uniform(0.5, 1.0))
        return [cut[index] for index in random.permutation(len(cut))]


def proportions(sizes: Sequence[int], weights: Sequence[float] | None, temperature: float | None) -> list[float] | None:
    """The share of each corpus in an epoch; None where every example comes once."""
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
    sizes: Sequence[int],
    shares: Sequence[float],
    seed: int,
    epoch: int,
    part: tuple[int, int] = (0, 1),
    block: int = 1,
) -> Indices:
    """The examples of an epoch in which each corpus has its share, as many as there are in all, or a part of them.

    The examples of a corpus follow each other in passes, each in an order of its own, in which a `block` of consecutive
    examples stays together; an epoch takes up where the one before ended. So an example comes again only when all
    others of its corpus have come. `part` is (number, count): the first, second, ... of so many.
    """
    number, parts = part
    total = sum(sizes)
    ends = [round(end * total) for end in np.cumsum(shares)]
    drawn = []
    for corpus, (size, begin, end) in enumerate(zip(sizes, [0, *ends], ends, strict=False)):
        count, first = end - begin, sum(sizes[:corpus])
        at, stop = (epoch * count + count * (number + more) // parts for more in (0, 1))
        while at < stop:
            done, skip = divmod(at, size)
            rows = _pass(size, block, generator(seed, corpus, done, PASS), skip, min(size, skip + stop - at))
            drawn.append(first + rows)
            at += len(rows)
    return np.concatenate(drawn) if drawn else np.empty(0, np.int64)


def _pass(size: int, block: int, random: np.random.Generator, begin: int, end: int) -> Indices:
    """Some examples of a pass over a corpus; those after its last whole block come last."""
    whole = size // block
    blocks = np.append(random.permutation(whole), whole)[begin // block : -(-end // block)]
    rows: Indices = (blocks[:, None] * block + np.arange(block)).ravel()
    return rows[begin % block :][: end - begin]


def _cut(indices: Indices, cost: Indices, batch_tokens: int, batch_examples: int | None, first: float) -> list[Indices]:
    """Cut a sequence into runs that fit the budget; of the first run take only a part unless it is the only one."""
    runs = []
    start = 0
    while start < len(indices):
        most = max(1, batch_tokens // max(1, int(cost[start])))  # the following may be longer, not shorter
        if batch_examples is not None:
            most = min(most, batch_examples)
        padded = cost[start : start + most] * np.arange(1, min(most, len(indices) - start) + 1)
        rows = max(1, int(np.searchsorted(padded, batch_tokens, side="right")))
        if not start and rows < len(indices):
            rows = int(np.ceil(rows * first))
        runs.append(indices[start : start + rows])
        start += rows
    return runs
