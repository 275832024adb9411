"""Validation: teacher-forced loss and accuracy without dropout and smoothing and, for pairs, a metric of outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from regard.batch import Batch, in_parts
from regard.config import Config
from regard.data.images import Images
from regard.data.objectives import TEXT_OBJECTIVES, image_batch, rows_of
from regard.data.order import Batches, Indices
from regard.data.plain_text import Stream
from regard.data.prepare import Prepared
from regard.data.store import Corpus
from regard.decode.request import Options
from regard.decode.torch_engine import generate
from regard.errors import UserError, plural
from regard.loss import Loss, Objective, join_memories, memory_rows
from regard.metrics import measure
from regard.model import Model
from regard.parallel.ranks import ProcessGroup
from regard.recipe import Recipe
from regard.run import Run
from regard.tasks import TASKS, Reads
from regard.training.checkpoint import Scores
from regard.training.loader import BATCH_IMAGES, chunks

MAX_LOSS_EXAMPLES = 10_000
MAX_LOSS_TOKENS = 1 << 18  # of plain text
MAX_DECODED_EXAMPLES = 1_000


def spread(count: int, most: int) -> Indices:
    """The indices of at most `most` of `count` examples, at equal distances."""
    return np.arange(count) if count <= most else np.arange(most) * count // most


@torch.inference_mode()
def mean_scores(model: Model, batches: Iterable[Batch], group: ProcessGroup) -> Scores:
    """The mean negative log-probability of a label, and the accuracy in percent, over all processes."""
    objective = Objective(model).eval()
    nll = correct = tokens = 0.0
    for batch in batches:
        for loss in _losses(objective, batch, group.device):
            nll += float(loss.nll)
            correct += float(loss.correct)
        tokens += batch.tokens
    nll, correct, tokens = map(sum, zip(*group.gather([nll, correct, tokens]), strict=True))
    return {"loss": nll / max(1.0, tokens), "accuracy": 100 * correct / max(1.0, tokens)}


def _losses(objective: Objective, batch: Batch, device: torch.device) -> Iterator[Loss]:
    """Yield the loss of a batch, in several parts if memory runs out."""
    before = objective.segment_memory
    after = []

    def read(rows: slice) -> Loss:
        objective.segment_memory = before and memory_rows(before, rows)
        loss: Loss = objective(batch.rows(rows).to(device))
        return loss

    for rows, loss in in_parts(read, len(batch.label_BT)):
        if loss is None:
            size = plural(batch.rows(rows).size, "token")
            raise UserError(f"not enough memory to validate: a single example of {size} does not fit")
        after.append(objective.segment_memory)
        yield loss
    objective.segment_memory = after[0] if len(after) == 1 else join_memories(after)


class Validation:
    """Scores a model on validation data: `cut` holds the indices of each batch, `make` builds a batch from them."""

    signatures: Mapping[str, str] = MappingProxyType({})  # by metric

    def __init__(
        self, task: str, cut: Sequence[Indices], make: Callable[[Indices], Batch], group: ProcessGroup
    ) -> None:
        self._scores = [name for name in ("loss", "accuracy") if name in TASKS[task].metrics]
        self._cut = cut
        self._make = make
        self._group = group

    def __call__(self, model: Model) -> Scores:
        """The scores, equal in all processes, which must all call this."""
        mine = self._cut[self._group.rank :: self._group.size]
        scores = mean_scores(model, (self._make(rows) for rows in mine), self._group)
        return {name: scores[name] for name in self._scores}


class LabelledValidation(Validation):
    """Validation on texts with labels."""

    def __init__(self, recipe: Recipe, prepared: Prepared[Corpus], config: Config, group: ProcessGroup) -> None:
        corpus = prepared.valid
        rows = spread(len(corpus), MAX_LOSS_EXAMPLES)
        cut = Batches(corpus.source_lengths[rows], corpus.target_lengths[rows], 0, 0, recipe.train.batch_tokens)
        super().__init__(recipe.task, [rows[batch] for batch in cut], lambda batch: corpus.batch(batch, config), group)


class PairValidation(LabelledValidation):
    """Validation on pairs: the loss, and the metric of decoded outputs."""

    def __init__(self, recipe: Recipe, prepared: Prepared[Corpus], config: Config, group: ProcessGroup) -> None:
        super().__init__(recipe, prepared, config, group)
        self._scores = ["loss"]  # for pairs, accuracy is a metric of decoded outputs
        self._codec = prepared.codec
        self._metric = recipe.train.metric
        # Untrained models never produce the end token. An output a fifth longer than every reference is wrong anyway.
        longest = prepared.valid.target_lengths.longest * 6 // 5 + 5
        self._options = Options(beam=recipe.train.validate_beam, max_length=longest)
        rows = spread(len(prepared.valid_examples), MAX_DECODED_EXAMPLES)
        self._examples = [prepared.valid_examples[row] for row in rows]

    def __call__(self, model: Model) -> Scores:
        scores = super().__call__(model)
        if self._metric != "loss":
            references = [example.target or "" for example in self._examples]
            result = measure(self._metric, self._decode(model), references, samples=0)
            scores[self._metric] = result.score
            if result.signature:
                self.signatures = {self._metric: result.signature}
        return scores

    def _decode(self, model: Model) -> list[str]:
        rank = self._group.rank
        size = self._group.size
        run = Run(model.config, self._codec, model, Path(), task_name="pairs")
        mine = [best.text for best, *_ in generate(run, self._examples[rank::size], self._options)]
        texts = [""] * len(self._examples)
        for other, part in enumerate(self._group.gather_json(mine)):
            texts[other::size] = part
        return texts


class ImageValidation(Validation):
    """Validation on images with labels."""

    def __init__(self, recipe: Recipe, prepared: Prepared[Images], config: Config, group: ProcessGroup) -> None:
        images = prepared.valid
        pixels = prepared.pixels
        assert pixels is not None
        cut = chunks(spread(len(images), MAX_LOSS_EXAMPLES), recipe.train.batch_examples or BATCH_IMAGES)
        super().__init__(recipe.task, cut, lambda batch: image_batch(*images.read(batch, pixels)), group)


class TextValidation(Validation):
    """Validation on plain text. The same tokens are masked every time."""

    def __init__(self, recipe: Recipe, prepared: Prepared[Stream], config: Config, group: ProcessGroup) -> None:
        stream = prepared.valid
        objective = TEXT_OBJECTIVES[recipe.task](stream, prepared.codec, config, recipe.train)
        windows = objective.windows
        rows = rows_of(recipe.train)
        most = max(1, MAX_LOSS_TOKENS // windows.stride)
        if config.has_memory:  # lanes are read from their beginning
            cut = windows.lanes(rows)[: max(1, most // rows)]
        else:
            starts = windows.starts()
            cut = chunks(starts[spread(len(starts), most)], rows)

        def make(starts: Indices) -> Batch:
            batch = objective.batch(starts, (0, 0, int(starts[0])))
            return batch.part(slice(None), batch.tokens)

        super().__init__(recipe.task, cut, make, group)
        self._per_character = "bits_per_char" in TASKS[recipe.task].evaluation  # the loss is over all tokens
        self._tokens_per_character = (len(stream) - 1) / max(1, stream.characters)

    def __call__(self, model: Model) -> Scores:
        scores = super().__call__(model)
        if not self._per_character:
            return scores
        loss = scores["loss"]
        bits = loss / math.log(2) * self._tokens_per_character
        return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "bits_per_char": bits}


VALIDATIONS: Mapping[Reads, Callable[[Recipe, Prepared[Any], Config, ProcessGroup], Validation]] = MappingProxyType(
    {"pairs": PairValidation, "labelled": LabelledValidation, "text": TextValidation, "images": ImageValidation}
)


def make_validation(recipe: Recipe, prepared: Prepared[Any], config: Config, group: ProcessGroup) -> Validation:
    return VALIDATIONS[TASKS[recipe.task].reads](recipe, prepared, config, group)
