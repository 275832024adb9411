"""The data loader: the examples of a step are a function of (seed, epoch, batch, rank); it has no state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.batch import Batch, GlobalBatch
from regard.config import Config
from regard.data.images import Images
from regard.data.objectives import TEXT_OBJECTIVES, image_batch, rows_of
from regard.data.order import Batches, Indices, draw, generator, proportions
from regard.data.plain_text import Stream
from regard.data.prepare import Prepared, sources
from regard.data.store import Corpus
from regard.errors import UserError, plural
from regard.recipe import Recipe, Train
from regard.tasks import TASKS

BATCH_IMAGES = 64  # default batch size


class StepBatches(NamedTuple):
    """The batches of one step: the share of this process, and the totals of all processes."""

    shares: list[tuple[Batch, float]]  # with weights; 0: a process without examples must still take part in collectives
    batches: int
    examples: int
    tokens: int  # target tokens
    all_tokens: int  # of both sides
    begins_epoch: bool  # whether segment memory starts empty
    locate: Callable[[int, int], str]  # (index of a share, row) -> location in the data


class DataLoader:
    """Training data as a sequence of steps."""

    def __init__(
        self,
        train: Train,
        examples: int,  # in an epoch
        cut: Callable[[int], Sequence[Indices]],  # epoch -> batches of examples, a pure function of (seed, epoch)
        make: Callable[[int, int, Indices], GlobalBatch],  # (epoch, number of the batch, its examples)
        locate: Callable[[int], str],  # example -> its location in the data
    ) -> None:
        self.examples = examples
        self._train = train
        self._cut = cut
        self._make = make
        self._locate = locate
        self._epoch = -1
        self._batches: Sequence[Indices] = []

    def batches(self, epoch: int) -> Sequence[Indices]:
        """The batches of an epoch, as indices of their examples."""
        if epoch != self._epoch:
            self._batches = self._cut(epoch)
            self._epoch = epoch
        return self._batches

    def step(self, epoch: int, batch: int, rank: int = 0, size: int = 1) -> StepBatches:
        """The step whose first batch is number `batch` of an epoch, with the share of one of `size` processes."""
        indices = self.batches(epoch)[batch : batch + self._train.accumulate]
        global_batches = [self._make(epoch, batch + offset, rows) for offset, rows in enumerate(indices)]
        tokens = sum(each.tokens for each in global_batches)
        shares = []
        for each in global_batches:
            # Rows are sorted by length, so taking every n-th row divides the work evenly.
            has_rows = each.examples > rank
            part = slice(rank, None, size) if has_rows else slice(0, 1)
            shares.append((each.part(part, tokens), float(has_rows)))
        examples = sum(each.examples for each in global_batches)
        all_tokens = sum(each.all_tokens for each in global_batches)

        def locate(share: int, row: int) -> str:
            return self._locate(int(indices[share][rank::size][row]))

        return StepBatches(shares, len(indices), examples, tokens, all_tokens, batch == 0, locate)


def corpus_loader(recipe: Recipe, prepared: Prepared[Corpus], config: Config) -> DataLoader:
    """Pairs, or texts with labels, in batches of similar length."""
    train = recipe.train
    corpus = prepared.train
    source = sources(recipe)[0]
    lengths = corpus.source_lengths, corpus.target_lengths
    shares = proportions(corpus.corpora, recipe.data.weights, recipe.data.temperature)

    def make(epoch: int, batch: int, rows: Indices) -> GlobalBatch:
        tokens = int(corpus.target_lengths[rows].sum())
        all_tokens = tokens + int(corpus.source_lengths[rows].sum())
        return GlobalBatch(len(rows), tokens, all_tokens, lambda part, total: corpus.batch(rows[part], config, total))

    def cut(epoch: int) -> Sequence[Indices]:
        budget = train.batch_tokens, train.batch_examples
        return Batches(*lengths, train.seed, epoch, *budget, sizes=corpus.corpora, shares=shares)

    def locate(row: int) -> str:
        line = corpus.line(row)
        where = f"example {row + 1:,} of {source.name}" if line is None else source.location(line)
        return f"{where} ({len(corpus.source(row)):,} and {len(corpus.target(row)):,} tokens)"

    return DataLoader(train, len(corpus), cut, make, locate)


def image_loader(recipe: Recipe, prepared: Prepared[Images], config: Config) -> DataLoader:
    """Images in random order, `batch_examples` at a time."""
    train = recipe.train
    images = prepared.train
    pixels = prepared.pixels
    assert pixels is not None

    def make(epoch: int, batch: int, rows: Indices) -> GlobalBatch:
        count = len(rows)
        return GlobalBatch(
            count, count, count, lambda part, total: image_batch(*images.read(rows[part], pixels), total)
        )

    def cut(epoch: int) -> list[Indices]:
        return chunks(generator(train.seed, epoch).permutation(len(images)), train.batch_examples or BATCH_IMAGES)

    return DataLoader(train, len(images), cut, make, lambda row: f"image {row:,} of the training data")


def text_loader(recipe: Recipe, prepared: Prepared[Stream], config: Config) -> DataLoader:
    """Windows of plain text in random order with a new offset in each epoch; in lanes for segment memory."""
    train = recipe.train
    lanes = config.has_memory
    objective = TEXT_OBJECTIVES[recipe.task](prepared.train, prepared.codec, config, train)
    windows = objective.windows
    rows = rows_of(train)

    def sizes(starts: Indices) -> list[int]:
        """The number of windows that begin in each corpus."""
        ends = [*np.searchsorted(starts, prepared.train.corpora[:-1]), len(starts)]
        counts: list[int] = np.diff(ends, prepend=0).tolist()
        return counts

    shares = proportions(sizes(windows.starts()), recipe.data.weights, recipe.data.temperature)
    if shares and lanes:
        raise UserError("data.weights, data.temperature: a model with segment memory reads the text in order")

    def cut(epoch: int) -> list[Indices]:
        random = generator(train.seed, epoch)
        offset = int(random.integers(windows.stride))
        if lanes:
            return windows.lanes(rows, offset)
        starts = windows.starts(offset)
        drawn = starts[draw(sizes(starts), shares, train.seed, epoch)] if shares else starts
        return chunks(random.permutation(drawn), rows)

    def make(epoch: int, batch: int, starts: Indices) -> GlobalBatch:
        return objective.batch(starts, (train.seed, epoch, batch))

    def locate(start: int) -> str:
        return f"{plural(windows.length, 'token')} of {sources(recipe)[0].name} from token {start:,} on"

    return DataLoader(train, len(windows.starts(0)), cut, make, locate)


def chunks(indices: Indices, size: int) -> list[Indices]:
    """Split indices into chunks of `size`; the last may be shorter."""
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def make_loader(recipe: Recipe, prepared: Prepared[Any], config: Config) -> DataLoader:
    reads = TASKS[recipe.task].reads
    if reads == "text":
        return text_loader(recipe, prepared, config)
    return (image_loader if reads == "images" else corpus_loader)(recipe, prepared, config)
