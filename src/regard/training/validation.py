"""Validation: teacher-forced, without dropout or smoothing, per token, each process on its share of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from regard.batch import Batch
from regard.config import Config
from regard.data.corpus import Corpus, load
from regard.data.images import Images, Pixels
from regard.data.objectives import TextObjective, image_batch, rows_of
from regard.data.order import Indices, batches
from regard.data.plain import Stream
from regard.data.prepare import Prepared
from regard.decode.generate import generate
from regard.decode.options import Options
from regard.loss import Objective
from regard.metrics import measure
from regard.model import Model
from regard.recipe import Recipe, Train
from regard.run import Run
from regard.training.checkpoint import Scores
from regard.training.distributed import ProcessGroup

LOSS_EXAMPLES = 10_000  # validated on so many, at most
LOSS_SYMBOLS = 1 << 18  # of plain text


def spread(count: int, most: int) -> Indices:
    """Numbers of at most `most` out of `count` examples, evenly spread."""
    return np.arange(count) if count <= most else np.arange(most) * count // most


@torch.inference_mode()
def judge(model: Model, made: Iterable[Batch], world: ProcessGroup) -> Scores:
    """The mean negative log-probability of a label, and how many per hundred scored highest, over all processes."""
    objective = Objective(model).eval()
    nll, correct, tokens = 0.0, 0.0, 0.0
    for batch in made:
        loss = objective(batch.to(world.device))
        nll += float(loss.nll)
        correct += float(loss.correct)
        tokens += batch.tokens
    everyone = world.gather([nll, correct, tokens])
    total = max(1.0, sum(row[2] for row in everyone))
    return {
        "loss": sum(row[0] for row in everyone) / total,
        "accuracy": 100 * sum(row[1] for row in everyone) / total,
    }


Make = Callable[[Indices], Batch]


class Valid:
    """Scores a model on batches of validation data."""

    def __init__(self, cut: Sequence[Indices], make: Make, scores: Sequence[str], world: ProcessGroup) -> None:
        self._cut, self._make, self._scores, self._world = cut, make, scores, world

    def __call__(self, model: Model) -> Scores:
        mine = self._cut[self._world.rank :: self._world.size]
        found = judge(model, (self._make(rows) for rows in mine), self._world)
        return {name: found[name] for name in self._scores}


def corpus_valid(
    corpus: Corpus, config: Config, batch_tokens: int, world: ProcessGroup, scores: Sequence[str] = ("loss",)
) -> Valid:
    """On pairs, or on texts with labels."""
    rows = spread(len(corpus), LOSS_EXAMPLES)
    cut = batches(corpus.source_lengths[rows], corpus.target_lengths[rows], 0, 0, batch_tokens)
    return Valid([rows[batch] for batch in cut], lambda batch: load(corpus, batch, config), scores, world)


def image_valid(images: Images, pixels: Pixels, rows: int, world: ProcessGroup) -> Valid:
    order = spread(len(images), LOSS_EXAMPLES)
    return Valid(
        [order[at : at + rows] for at in range(0, len(order), rows)],
        lambda batch: image_batch(*images.read(batch, pixels)),
        ("loss", "accuracy"),
        world,
    )


def text_valid(
    objective: TextObjective, config: Config, train: Train, world: ProcessGroup, scores: Sequence[str] = ("loss",)
) -> Valid:
    """On plain text; the same tokens are masked every time."""
    windows, rows = objective.windows, rows_of(train)
    most = max(1, LOSS_SYMBOLS // windows.stride)
    if config.has_memory:  # lanes that are read from their beginning
        cut = windows.lanes(rows)[: max(1, most // rows)]
    else:
        starts = windows.starts()
        starts = starts[spread(len(starts), most)]
        cut = [starts[at : at + rows] for at in range(0, len(starts), rows)]

    def make(batch: Indices) -> Batch:
        whole = objective.batch(batch, (0, 0, int(batch[0])))
        return whole.part(slice(None), whole.tokens)

    return Valid(cut, make, scores, world)


class LmValid:
    """The loss on plain text, and what it means: perplexity per token, bits per character."""

    def __init__(
        self, stream: Stream, objective: TextObjective, config: Config, train: Train, world: ProcessGroup
    ) -> None:
        self._valid = text_valid(objective, config, train, world)
        self._tokens_per_character = (len(stream) - 1) / max(1, stream.characters)

    def __call__(self, model: Model) -> Scores:
        loss = self._valid(model)["loss"]
        bits = loss / math.log(2) * self._tokens_per_character
        return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "bits_per_char": bits}


DECODED_EXAMPLES = 1_000  # validated by decoding, at most


class Validation:
    """Scores a model on the validation examples, each process on its share."""

    def __init__(self, prepared: Prepared[Corpus], recipe: Recipe, model: Model, world: ProcessGroup) -> None:
        self._codec = prepared.codec
        self._metric = recipe.train.metric
        self._world = world
        # An untrained model never ends; what is longer than any reference by a fifth is wrong whatever follows.
        longest = int(prepared.valid.target_lengths.max()) * 6 // 5 + 5
        self._options = Options(beam=recipe.train.validate_beam, max_length=longest)
        self._loss = corpus_valid(prepared.valid, model.config, recipe.train.batch_tokens, world)
        rows = spread(len(prepared.valid_examples), DECODED_EXAMPLES)
        self._examples = [prepared.valid_examples[row] for row in rows]
        self.signatures: dict[str, str] = {}

    def __call__(self, model: Model) -> Scores:
        scores = self._loss(model)
        if self._metric != "loss":
            result = measure(self._metric, self._decoded(model), [e.target or "" for e in self._examples], samples=0)
            scores[self._metric] = result.score
            if result.signature:
                self.signatures[self._metric] = result.signature
        return scores

    def _decoded(self, model: Model) -> list[str]:
        rank, size = self._world.rank, self._world.size
        run = Run(model.config, self._codec, model, Path())
        mine = [best.text for best, *_ in generate(run, self._examples[rank::size], self._options)]
        texts = [""] * len(self._examples)
        for other, part in enumerate(self._world.gather_json(mine)):
            texts[other::size] = part
        return texts
