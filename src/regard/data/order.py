"""The order of training: which examples make up which batch, as a pure function of (seed, epoch).

Examples are shuffled, sorted by length so that a batch needs little padding, and cut into batches, which are shuffled.
Nothing is remembered between epochs: batch k of epoch e is the same whoever asks, whenever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import UserError

Indices = NDArray[np.int64]
Lengths = NDArray[np.integer[Any]]
PASS = 1  # ends the key of the order of a pass over a corpus, unlike that of an epoch
WINDOW = 1 << 20  # examples sorted together; bounds the memory of sorting


def generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on the key alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key))))


def batches(
    source_lengths: Lengths,
    target_lengths: Lengths,
    seed: int,
    epoch: int,
    batch_tokens: int,
    batch_examples: int | None = None,
    drawn: Indices | None = None,
) -> list[Indices]:
    """Cut an epoch into batches: arrays of example numbers, each number exactly once, or those `drawn`.

    A batch holds at most `batch_examples` rows, and rows times the longest side at most `batch_tokens`; an example
    longer than that is a batch of its own. Lengths count the end token.
    """
    random = generator(seed, epoch)
    shuffled: Indices = random.permutation(len(source_lengths) if drawn is None else drawn)
    cut: list[Indices] = []
    for start in range(0, len(shuffled), WINDOW):
        window = shuffled[start : start + WINDOW]
        source, target = source_lengths[window].astype(np.int64), target_lengths[window].astype(np.int64)
        longer = np.maximum(source, target)
        # By the longer side, then by the difference, up and down in turns, so that neighbours differ little on either
        # side. Stable, so that equals stay shuffled. Which turns go up and where the first cut falls differ by epoch,
        # or large batches would be nearly the same ones each time.
        up = (longer + random.integers(2)) % 2 == 0
        order = np.argsort((longer << 32) + np.where(up, source - target, target - source), kind="stable")
        cut.extend(_cut(window[order], longer[order], batch_tokens, batch_examples, random.uniform(0.5, 1.0)))
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
        raise UserError(f"data.weights: {len(weights)} numbers for {len(sizes)} corpora")
    return [weight / sum(weights) for weight in weights]


def draw(sizes: Sequence[int], shares: Sequence[float], seed: int, epoch: int) -> Indices:
    """The examples of an epoch in which each corpus has its share, as many as there are in all.

    The examples of a corpus follow each other in passes, each in an order of its own; an epoch takes up where the one
    before ended. So an example comes again only when all others of its corpus have come.
    """
    total = sum(sizes)
    ends = [round(end * total) for end in np.cumsum(shares)]
    drawn = []
    for corpus, (size, begin, end) in enumerate(zip(sizes, [0, *ends], ends, strict=False)):
        count, first = end - begin, sum(sizes[:corpus])
        at, stop = epoch * count, (epoch + 1) * count
        while at < stop:
            number, skip = divmod(at, size)
            order = generator(seed, corpus, number, PASS).permutation(size)[skip : skip + stop - at]
            drawn.append(first + order)
            at += len(order)
    return np.concatenate(drawn)


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
