"""Training examples in order, cut into steps: a process's share is a function of (seed, epoch, batch, rank) alone."""

from __future__ import annotations

from typing import NamedTuple

from regard.batch import Batch
from regard.config import Config
from regard.data.corpus import Corpus, load
from regard.data.order import Indices, batches
from regard.settings import Train
from regard.train.world import World


class Portion(NamedTuple):
    """One step's examples: this process's share of each accumulated batch, and the numbers of the whole step."""

    shares: list[tuple[Batch, float]]  # weight 0: nothing was left for this process, but it must take part
    batches: int
    examples: int
    tokens: int  # target symbols
    symbols: int  # of both sides


class Feed:
    """The training corpus as a sequence of steps."""

    def __init__(self, corpus: Corpus, config: Config, train: Train, world: World) -> None:
        self._corpus = corpus
        self._config = config
        self._train = train
        self._world = world
        self._epoch = -1
        self._batches: list[Indices] = []

    def batches_in(self, epoch: int) -> int:
        """How many batches an epoch has."""
        return len(self._order(epoch))

    def steps_in(self, epoch: int) -> int:
        return -(-self.batches_in(epoch) // self._train.accumulate)

    def _order(self, epoch: int) -> list[Indices]:
        if epoch != self._epoch:
            self._batches = batches(
                self._corpus.source_lengths,
                self._corpus.target_lengths,
                self._train.seed,
                epoch,
                self._train.batch_tokens,
                self._train.batch_examples,
            )
            self._epoch = epoch
        return self._batches

    def portion(self, epoch: int, batch: int) -> Portion:
        """The step that begins with this batch of this epoch."""
        group = self._order(epoch)[batch : batch + self._train.accumulate]
        tokens = sum(int(self._corpus.target_lengths[rows].sum()) for rows in group)
        symbols = tokens + sum(int(self._corpus.source_lengths[rows].sum()) for rows in group)
        shares = []
        for rows in group:
            # Rows of a batch come sorted by length: every n-th of them is as much work as every other n-th.
            mine = rows[self._world.rank :: self._world.size]
            weight = 1.0 if len(mine) else 0.0
            shares.append((load(self._corpus, mine if weight else rows[:1], self._config, tokens), weight))
        return Portion(shares, len(group), sum(map(len, group)), tokens, symbols)
