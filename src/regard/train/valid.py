"""The validation loss: teacher-forced, without dropout or smoothing, per symbol."""

from __future__ import annotations

import numpy as np
import torch

from regard.config import Config
from regard.data.corpus import Corpus, load
from regard.data.order import Indices, batches
from regard.loss import Objective
from regard.model import Model
from regard.train.world import World

LOSS_EXAMPLES = 10_000  # validated on so many, at most


def spread(count: int, most: int) -> Indices:
    """Numbers of at most `most` out of `count` examples, evenly spread."""
    return np.arange(count) if count <= most else np.arange(most) * count // most


class ValidLoss:
    """Computes the loss on a corpus, each process on its share of batches."""

    def __init__(self, corpus: Corpus, config: Config, batch_tokens: int, world: World) -> None:
        self._corpus, self._config, self._world = corpus, config, world
        rows = spread(len(corpus), LOSS_EXAMPLES)
        cut = batches(corpus.source_lengths[rows], corpus.target_lengths[rows], 0, 0, batch_tokens)
        self._batches = [rows[batch] for batch in cut]

    @torch.inference_mode()
    def __call__(self, model: Model) -> float:
        objective = Objective(model).eval()
        nll, tokens = 0.0, 0
        for rows in self._batches[self._world.rank :: self._world.size]:
            batch = load(self._corpus, rows, self._config).to(self._world.device)
            nll += float(objective(batch).nll)
            tokens += batch.tokens
        everyone = self._world.gather([nll, float(tokens)])
        return sum(row[0] for row in everyone) / sum(row[1] for row in everyone)
