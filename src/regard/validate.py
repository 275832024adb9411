"""Validating a model that is being trained on pairs: its loss, and a metric of what it says."""

from __future__ import annotations

from pathlib import Path

from regard.data.prepare import Prepared
from regard.decode.generate import generate
from regard.decode.options import Options
from regard.metrics import measure
from regard.model import Model
from regard.run import Run
from regard.settings import Recipe
from regard.train.progress import Scores
from regard.train.valid import corpus_valid, spread
from regard.train.world import World

DECODED_EXAMPLES = 1_000  # validated by decoding, at most


class Validation:
    """Scores a model on the validation examples, each process on its share."""

    def __init__(self, prepared: Prepared, recipe: Recipe, model: Model, world: World) -> None:
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
