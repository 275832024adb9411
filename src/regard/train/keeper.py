"""What is saved of a training run, and how it is found again."""

from __future__ import annotations

from pathlib import Path

import torch

from regard.errors import UserError
from regard.loss import Objective
from regard.nn.gates import fold_gates
from regard.nn.lora import merged
from regard.run import WEIGHTS, weights_of
from regard.train.checkpoint import Checkpoints, Tensors, replace_tensors
from regard.train.optim import optimizer_tensors, restore_optimizer
from regard.train.progress import Progress
from regard.train.weights import Ema, mean

ADAPTERS = "adapters.safetensors"


class Keeper:
    """Saves and restores a model, what it remembers, its optimizer and its moving average, together with progress."""

    def __init__(self, run: Path, objective: Objective, optimizer: torch.optim.Optimizer, ema: Ema | None) -> None:
        self.path = run
        self._objective = objective
        self._model = objective.model
        self._optimizer = optimizer
        self._ema = ema
        self._checkpoints = Checkpoints(run)

    @property
    def weights(self) -> Tensors:
        """The weights that are validated and published: the moving average if there is one."""
        return weights_of(self._model) if self._ema is None else self._ema.weights

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, and the best weights if this step has them."""
        parts = {"model": weights_of(self._model), "optimizer": optimizer_tensors(self._optimizer, self._model)}
        if self._ema is not None:
            parts["ema"] = self._ema.weights
        if self._objective.carried is not None:
            parts["carried"] = {f"{layer:04d}": x for layer, x in enumerate(self._objective.carried)}
        self._checkpoints.save(progress, parts)
        self._follow_up(progress)

    def _follow_up(self, progress: Progress) -> None:
        """What comes after writing a checkpoint; done again, it changes nothing."""
        best = progress.best
        if best is not None and best.step == progress.step and not best.averaged:
            self.publish(self.weights)
        self._checkpoints.prune()
        self._checkpoints.drop_kept(progress.kept)

    def mark(self, progress: Progress) -> None:
        """Change the numbers of the checkpoint that this step has."""
        self._checkpoints.save(progress, {})

    def publish(self, weights: Tensors) -> None:
        """Make weights the run's model; gates and adapters are merged into it, and adapters kept beside it too."""
        plain, adapters = merged(self._model, fold_gates(self._model, weights))
        if adapters:
            replace_tensors(adapters, self.path / ADAPTERS)
        replace_tensors(plain, self.path / WEIGHTS)

    def keep(self, step: int) -> None:
        """Keep this step's weights for averaging."""
        self._checkpoints.keep(step, self.weights)

    def average(self, steps: list[int]) -> Tensors:
        """The mean of kept weights."""
        return mean(self._checkpoints.kept(step) for step in steps)

    def recover(self, progress: Progress) -> None:
        """Make good what a kill may have interrupted."""
        self._checkpoints.sweep()
        self._follow_up(progress)

    def restore(self) -> Progress:
        """Go back to the last checkpoint; without one, to the beginning."""
        progress = self._checkpoints.progress()
        if progress is None:
            return Progress()
        try:
            self._load(progress.step)
        except (KeyError, RuntimeError) as error:  # a name or a shape that is not as it should be
            raise UserError(
                f"{self._checkpoints.path}: the checkpoint does not fit: {error}; start a new run"
            ) from None
        return progress

    def _load(self, step: int) -> None:
        restore_optimizer(self._optimizer, self._model, self._checkpoints.tensors(step, "optimizer"))
        _fill(weights_of(self._model), self._checkpoints.tensors(step, "model"))
        if self._ema is not None:
            _fill(self._ema.weights, self._checkpoints.tensors(step, "ema"))
        carried = self._checkpoints.tensors(step, "carried") if self._checkpoints.has(step, "carried") else None
        if carried is not None:
            device = next(self._model.parameters()).device
            self._objective.carried = tuple(carried[name].to(device) for name in sorted(carried))


def _fill(ours: Tensors, theirs: Tensors) -> None:
    for name, x in ours.items():
        x.copy_(theirs[name])
