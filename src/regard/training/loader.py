"""Training examples in order, cut into steps: a process's share is a function of (seed, epoch, batch, rank) alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from regard.batch import Batch, GlobalBatch
from regard.config import Config
from regard.data.corpus import Corpus, load
from regard.data.images import Images, Pixels
from regard.data.objectives import TextObjective, image_batch, rows_of
from regard.data.order import Indices, batches, generator
from regard.recipe import Train
from regard.training.distributed import ProcessGroup


class StepBatches(NamedTuple):
    """One step's examples: this process's share of each accumulated batch, and the numbers of the whole step."""

    shares: list[tuple[Batch, float]]  # weight 0: nothing was left for this process, but it must take part
    batches: int
    examples: int
    tokens: int  # target tokens
    symbols: int  # of both sides
    fresh: bool = False  # nothing is remembered from the step before, in models that read on


class DataLoader(ABC):
    """Training data as a sequence of steps; what it is made of is for each kind to say."""

    def __init__(self, train: Train, world: ProcessGroup) -> None:
        self._train = train
        self._world = world
        self._epoch = -1
        self._batches: list[Indices] = []

    @abstractmethod
    def _cut(self, epoch: int) -> list[Indices]:
        """Make the batches of an epoch; a pure function of (seed, epoch)."""

    @abstractmethod
    def _whole(self, epoch: int, batch: int, rows: Indices) -> GlobalBatch:
        """One of them."""

    def batches_in(self, epoch: int) -> int:
        """How many batches an epoch has."""
        return len(self.order(epoch))

    def steps_in(self, epoch: int) -> int:
        return -(-self.batches_in(epoch) // self._train.accumulate)

    def order(self, epoch: int) -> list[Indices]:
        """The batches of an epoch, as numbers of what is in them."""
        if epoch != self._epoch:
            self._batches = self._cut(epoch)
            self._epoch = epoch
        return self._batches

    def portion(self, epoch: int, batch: int) -> StepBatches:
        """The step that begins with this batch of this epoch."""
        group = self.order(epoch)[batch : batch + self._train.accumulate]
        wholes = [self._whole(epoch, batch + index, rows) for index, rows in enumerate(group)]
        tokens = sum(whole.tokens for whole in wholes)
        rank, size = self._world.rank, self._world.size
        shares = []
        for whole in wholes:
            # Rows of a batch come sorted by length: every n-th of them is as much work as every other n-th.
            mine = whole.examples > rank
            part = slice(rank, None, size) if mine else slice(0, 1)
            shares.append((whole.part(part, tokens), float(mine)))
        examples, symbols = (sum(getattr(whole, name) for whole in wholes) for name in ("examples", "all_tokens"))
        return StepBatches(shares, len(group), examples, tokens, symbols, fresh=batch == 0)


class CorpusLoader(DataLoader):
    """Pairs, or texts with labels, in batches of similar length."""

    def __init__(self, corpus: Corpus, config: Config, train: Train, world: ProcessGroup) -> None:
        super().__init__(train, world)
        self._corpus = corpus
        self._config = config

    def _cut(self, epoch: int) -> list[Indices]:
        train, corpus = self._train, self._corpus
        lengths = corpus.source_lengths, corpus.target_lengths
        return batches(*lengths, train.seed, epoch, train.batch_tokens, train.batch_examples)

    def _whole(self, epoch: int, batch: int, rows: Indices) -> GlobalBatch:
        tokens = int(self._corpus.target_lengths[rows].sum())
        symbols = tokens + int(self._corpus.source_lengths[rows].sum())
        return GlobalBatch(
            len(rows), tokens, symbols, lambda part, total: load(self._corpus, rows[part], self._config, total)
        )


class ImageLoader(DataLoader):
    """Images in random order, `batch_examples` at a time."""

    def __init__(self, images: Images, pixels: Pixels, train: Train, world: ProcessGroup) -> None:
        super().__init__(train, world)
        self._images = images
        self._pixels = pixels

    def _cut(self, epoch: int) -> list[Indices]:
        rows = self._train.batch_examples or 64
        order = generator(self._train.seed, epoch).permutation(len(self._images))
        return [order[start : start + rows] for start in range(0, len(order), rows)]

    def _whole(self, epoch: int, batch: int, rows: Indices) -> GlobalBatch:
        return GlobalBatch(
            len(rows),
            len(rows),
            len(rows),
            lambda part, total: image_batch(*self._images.read(rows[part], self._pixels), total),
        )


class WindowLoader(DataLoader):
    """Windows in random order. Where the first one begins differs by epoch, so that every token gets every context."""

    def __init__(self, objective: TextObjective, train: Train, world: ProcessGroup) -> None:
        super().__init__(train, world)
        self._objective = objective

    def _cut(self, epoch: int) -> list[Indices]:
        random, rows, windows = generator(self._train.seed, epoch), rows_of(self._train), self._objective.windows
        starts = random.permutation(windows.starts(int(random.integers(windows.stride))))
        return [starts[at : at + rows] for at in range(0, len(starts), rows)]

    def _whole(self, epoch: int, batch: int, rows: Indices) -> GlobalBatch:
        return self._objective.batch(rows, (self._train.seed, epoch, batch))


class SegmentLoader(WindowLoader):
    """The stream in lanes side by side: a row of a batch goes on where the same row of the batch before ended."""

    def _cut(self, epoch: int) -> list[Indices]:
        windows = self._objective.windows
        offset = int(generator(self._train.seed, epoch).integers(windows.stride))
        return windows.lanes(rows_of(self._train), offset)
