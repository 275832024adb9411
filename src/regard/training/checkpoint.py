"""What resume needs, on disk: one directory per saved step, complete or absent, and no pickle anywhere.

The order of writing is what makes a kill at any moment harmless. A checkpoint names the best step so far; it is written
first, then model.safetensors, then older checkpoints are removed. So either the best weights are in model.safetensors,
or the checkpoint itself is the best and they are put there when the run goes on.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.config import parse
from regard.errors import UserError
from regard.files import read_json, replace_directory, replace_file, write_json
from regard.loss import Objective
from regard.metrics import LOWER_IS_BETTER
from regard.nn.gates import fold_gates
from regard.nn.lora import merge_adapters
from regard.run import WEIGHTS, weights_of
from regard.training.step import Ema, mean, optimizer_tensors, restore_optimizer

TRAINING = "training"
_STEP = re.compile(r"step-(\d{8,})")
Tensors = dict[str, Tensor]


class Checkpoints:
    """The saved steps of a run."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.path = run / TRAINING

    def steps(self) -> list[int]:
        """The steps saved, oldest first."""
        if not self.path.is_dir():
            return []
        return sorted(int(match[1]) for entry in self.path.iterdir() if (match := _STEP.fullmatch(entry.name)))

    def save(self, progress: Progress, parts: dict[str, Tensors]) -> None:
        """Save a step: `parts` are named groups of tensors. If it was saved before, only the numbers can differ."""
        path = self._directory(progress.step)
        if path.is_dir():
            write_json(path / "progress.json", progress.model_dump())
            return

        def write(temporary: Path) -> None:
            for name, tensors in parts.items():
                write_tensors(tensors, temporary / f"{name}.safetensors")
            write_json(temporary / "progress.json", progress.model_dump())

        replace_directory(path, write)

    def prune(self) -> None:
        """Remove all but the last saved step."""
        for step in self.steps()[:-1]:
            shutil.rmtree(self._directory(step), ignore_errors=True)

    def sweep(self) -> None:
        """Remove what interrupted writing left behind."""
        for entry in [*self.run.glob(".*.tmp"), *self.path.glob(".*.tmp")]:
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    def progress(self) -> Progress | None:
        """The progress of the last saved step."""
        steps = self.steps()
        if not steps:
            return None
        path = self._directory(steps[-1]) / "progress.json"
        data = read_json(path)
        return parse(Progress, data if isinstance(data, dict) else {}, str(path))

    def has(self, step: int, part: str) -> bool:
        return (self._directory(step) / f"{part}.safetensors").is_file()

    def tensors(self, step: int, part: str) -> Tensors:
        """One group of tensors of a saved step."""
        return read_tensors(self._directory(step) / f"{part}.safetensors")

    def _directory(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def keep(self, step: int, weights: Tensors) -> None:
        """Keep weights for averaging."""
        replace_file(self._kept(step), lambda temporary: write_tensors(weights, temporary))

    def kept(self, step: int) -> Tensors:
        return read_tensors(self._kept(step))

    def drop_kept(self, steps: list[int]) -> None:
        """Remove all kept weights but those of `steps`."""
        wanted = {self._kept(step) for step in steps}
        for path in self.path.glob("weights-*.safetensors"):
            if path not in wanted:
                path.unlink(missing_ok=True)

    def _kept(self, step: int) -> Path:
        return self.path / f"weights-{step:08d}.safetensors"


def write_tensors(tensors: Tensors, path: Path) -> None:
    """Write tensors; a failure is an OSError, and the permissions are the usual ones, as for any other file."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: x.detach().contiguous().cpu() for name, x in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error).removeprefix("Error while serializing: ").removeprefix("I/O error: ")) from None
    path.chmod(mode)


def replace_tensors(tensors: Tensors, path: Path) -> None:
    """Put tensors in place of `path`, atomically."""
    replace_file(path, lambda temporary: write_tensors(tensors, temporary))


def read_tensors(path: Path) -> Tensors:
    try:
        tensors: Tensors = load_file(path)
        return tensors
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}; the checkpoint is incomplete, start a new run") from None


ADAPTERS = "adapters.safetensors"


class CheckpointManager:
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
        if self._objective.segment_memory is not None:
            parts["carried"] = {f"{layer:04d}": x for layer, x in enumerate(self._objective.segment_memory)}
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
        plain, adapters = merge_adapters(self._model, fold_gates(self._model, weights))
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
            device = self._model.device
            self._objective.segment_memory = tuple(carried[name].to(device) for name in sorted(carried))


def _fill(ours: Tensors, theirs: Tensors) -> None:
    for name, x in ours.items():
        x.copy_(theirs[name])


Scores = dict[str, float]


class Window(BaseModel):
    """Sums over the steps since the last line of the log."""

    model_config = ConfigDict(extra="forbid")

    steps: int = 0
    examples: int = 0
    tokens: int = 0  # target tokens: what the loss is divided by
    symbols: int = 0  # of both sides
    nll: float = 0.0
    smoothed: float = 0.0
    norm: float = 0.0

    def means(self, seconds: float) -> dict[str, float]:
        """Per token, per step, and per second of the `seconds` that the window took."""
        seconds = max(seconds, 1e-9)
        return {
            "loss": self.nll / self.tokens,
            "objective": self.smoothed / self.tokens,
            "norm": self.norm / self.steps,
            "tokens_per_second": round(self.symbols / seconds, 1),
            "examples_per_second": round(self.examples / seconds, 1),
        }


class Best(BaseModel):
    """The best validation so far: the weights of this step are model.safetensors."""

    model_config = ConfigDict(extra="forbid")

    step: int
    value: float
    scores: Scores
    averaged: int = 0  # how many checkpoints were averaged, if it is their mean


class Progress(BaseModel):
    """Where training stands, between two steps."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0  # steps tried, the skipped ones included
    epoch: int = 0
    batch: int = 0  # batches of this epoch that are done
    examples: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of wall-clock time, validation included
    skipped: int = 0
    skipped_in_a_row: int = 0
    window: Window = Window()
    validated: int = 0  # the step of the last validation
    validated_at: float = 0.0  # and when that was, in seconds
    validation_seconds: float = 0.0
    validations_since_best: int = 0
    best: Best | None = None
    kept: list[int] = []  # steps whose weights are kept for averaging
    log_bytes: int = 0
    finished: str | None = None  # what ended the run


def better(metric: str, scores: Scores, best: Best | None) -> bool:
    """Whether scores beat the best so far; among equals the lower loss wins. What is not a number is never better."""
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    value = scores[metric]
    if value != value:
        return False
    if best is None or sign * value > sign * best.value:
        return True
    return value == best.value and scores["loss"] < best.scores["loss"]
