"""Checkpoints: everything needed to resume, one directory per saved step, written atomically and without pickle.

The order of writing makes a kill at any moment harmless. The checkpoint, which names the best step so far, is written
first, then model.safetensors; then older checkpoints are removed. So the best weights are in model.safetensors, or in
the last checkpoint, from which they are published when the run is resumed. With train.strategy=fsdp a checkpoint has a
file per process instead of one per group of tensors; any number of processes can read them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from regard.config import parse
from regard.errors import UserError
from regard.files import read_json, remove, replace_directory, require_unchanged, rewriting, update_manifest, write_json
from regard.metrics import LOWER_IS_BETTER
from regard.nn.adapters import fold_gates, merge_adapters
from regard.run import WEIGHTS, save_weights, weights_of, write_tensors
from regard.training.data_parallel import load_shards, save_shards, saved_names, whole_weights
from regard.training.step import Stepper, optimizer_tensors, prepare_moments, restore_optimizer

TRAINING = "training"
ADAPTERS = "adapters.safetensors"
PROGRESS = "progress.json"
_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp(\.old)?|\.tmp\w{6}")  # of regard.files and of the safetensors library
_PREPARING = ("data.tmp", "data.tmp.old")  # temporary names of `prepare`
DAMAGED = "restore it from a copy, or begin a new run with the best weights of this one: --from RUN --out OTHER"
Tensors = dict[str, Tensor]
Parts = dict[str, Tensors]
Scores = dict[str, float]


class Window(BaseModel):
    """Sums over the steps since the last line of the log."""

    model_config = ConfigDict(extra="forbid")

    steps: int = 0
    examples: int = 0
    tokens: int = 0  # target tokens, by which the loss is divided
    symbols: int = 0  # tokens of both sides
    nll: float = 0.0
    smoothed: float = 0.0
    norm: float = 0.0

    def means(self, seconds: float) -> dict[str, float]:
        """Means per token, per step, and per second; `seconds` is the duration of the window."""
        seconds = max(seconds, 1e-9)
        return {
            "loss": self.nll / self.tokens,
            "objective": self.smoothed / self.tokens,
            "norm": self.norm / self.steps,
            "tokens_per_second": round(self.symbols / seconds, 1),
            "examples_per_second": round(self.examples / seconds, 1),
        }


class Best(BaseModel):
    """The best validation so far; model.safetensors has the weights of this step."""

    model_config = ConfigDict(extra="forbid")

    step: int
    value: float
    scores: Scores
    averaged: int = 0  # number of averaged checkpoints, if the weights are a mean


class Progress(BaseModel):
    """The progress of training between two steps; the contents of progress.json."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0  # including skipped steps
    epoch: int = 0
    batch: int = 0  # completed batches of this epoch
    examples: int = 0
    tokens: int = 0
    seconds: float = 0.0  # wall-clock time, including validation
    skipped: int = 0
    skipped_in_a_row: int = 0
    memory_failures: int = 0  # number of times memory ran out and a batch was split
    unfit: int = 0  # examples skipped because a batch of one does not fit into memory
    window: Window = Window()
    validated: int = 0  # the step of the last validation
    validated_at: float = 0.0  # time of the last validation, in seconds
    validation_seconds: float = 0.0
    validations_since_best: int = 0
    best: Best | None = None
    kept: list[int] = []  # steps with weights for averaging
    log_bytes: int = 0
    finished: str | None = None  # the reason why the run ended


def better(metric: str, scores: Scores, best: Best | None) -> bool:
    """Whether scores are better than the best so far; the loss breaks ties. NaN is never better."""
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    value = scores[metric]
    if value != value:
        return False
    if best is None or sign * value > sign * best.value:
        return True
    return value == best.value and scores["loss"] < best.scores["loss"]


class Checkpoints:
    """The files of the saved steps of a run."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.path = run / TRAINING

    def _directory(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def _kept(self, step: int) -> Path:
        return self.path / f"weights-{step:08d}.safetensors"

    def steps(self) -> list[int]:
        """The saved steps, oldest first."""
        if not self.path.is_dir():
            return []
        return sorted(int(match[1]) for entry in self.path.iterdir() if (match := _STEP.fullmatch(entry.name)))

    def progress(self) -> Progress | None:
        """The progress of the last saved step."""
        steps = self.steps()
        if not steps:
            return None
        path = self._directory(steps[-1]) / PROGRESS
        data = read_json(path)
        return parse(Progress, data if isinstance(data, dict) else {}, str(path))

    def save(self, progress: Progress, parts: Parts, write: Callable[[Parts, Path], object] | None = None) -> None:
        """Save a step: `parts` are named groups of tensors, written to a file each or by `write`.

        If the step was saved before, only its progress is updated.
        """
        path = self._directory(progress.step)
        if path.is_dir():
            with rewriting(path, PROGRESS):
                write_json(path / PROGRESS, progress.model_dump())
            return

        def write_all(temporary: Path) -> None:
            (write or write_parts)(parts, temporary)
            write_json(temporary / PROGRESS, progress.model_dump())
            update_manifest(temporary, sorted(file.name for file in temporary.iterdir()))

        replace_directory(path, write_all)

    def shards(self, step: int) -> Path | None:
        """The directory of a saved step if its tensors are sharded."""
        path = self._directory(step)
        return path if any(path.glob("shard-*.safetensors")) else None

    def tensors(self, step: int, part: str, optional: bool = False) -> Tensors:
        """One group of tensors of a saved step; an `optional` one may be missing."""
        path = self._directory(step) / f"{part}.safetensors"
        return {} if optional and not path.is_file() else read_tensors(path)

    def verify(self, step: int) -> None:
        """Raise UserError if a file of a saved step has changed."""
        require_unchanged(self._directory(step), DAMAGED, verify=True)

    def keep(self, step: int, weights: Tensors) -> None:
        """Save weights for averaging."""
        with rewriting(self.path, self._kept(step).name):
            save_weights(weights, self._kept(step))

    def kept(self, step: int) -> Tensors:
        """Load weights for averaging; raise UserError if the file has changed."""
        require_unchanged(self.path, DAMAGED, [self._kept(step).name], verify=True)
        return read_tensors(self._kept(step))

    def remove_old(self, kept: list[int]) -> None:
        """Remove all saved steps except the last, and all weights for averaging except those of the steps `kept`."""
        for step in self.steps()[:-1]:
            shutil.rmtree(self._directory(step), ignore_errors=True)
        for path in set(self.path.glob("weights-*.safetensors")) - set(map(self._kept, kept)):
            remove(path)

    def remove_temporary(self) -> None:
        """Remove temporary files of interrupted writes."""
        for name in _PREPARING:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for directory in (self.run, self.path):
            _sweep(directory)
        for directory in filter(Path.is_dir, list(self.path.iterdir())):
            _sweep(directory)


def _sweep(directory: Path) -> None:
    for entry in list(directory.iterdir()):
        if not _TEMPORARY.fullmatch(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            remove(entry)


def write_parts(parts: Parts, directory: Path) -> None:
    """Write each group of tensors to a file."""
    for name, tensors in parts.items():
        write_tensors(tensors, directory / f"{name}.safetensors")


def read_tensors(path: Path) -> Tensors:
    try:
        tensors: Tensors = load_file(path)
        return tensors
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}; the checkpoint is incomplete, start a new run") from None


class CheckpointManager:
    """Saves and restores a stepper (weights, optimizer, moving average, segment memory) with its progress.

    All processes of a group must call its methods.
    """

    def __init__(self, run: Path, stepper: Stepper) -> None:
        self.files = Checkpoints(run)
        self._stepper = stepper
        self._model = stepper.model
        self._group = stepper.group
        self._in_shards = stepper.train.strategy == "fsdp"

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, and publish its weights if they are the best."""
        if self._in_shards:
            self._save_shards(progress)
        elif self._group.first:
            self.files.save(progress, self._parts())
        self._after_save(progress)

    def _save_shards(self, progress: Progress) -> None:
        """Write a sharded checkpoint: the first process creates the directory and renames it when all have written.

        A failure in any process is raised in all of them.
        """
        parts = self._parts()
        group = self._group
        directory = None
        problem = None

        def write(parts: Parts, temporary: Path) -> None:
            nonlocal directory
            directory = group.broadcast(str(temporary))
            save_shards(joined(parts), temporary)

        if group.first:
            try:
                self.files.save(progress, parts, write)
            except UserError as error:
                problem = str(error)
            if directory is None:  # the step was saved before, or the directory cannot be created
                group.broadcast(None)
        elif directory := group.broadcast(None):
            with suppress(OSError):  # the first process gets and reports the same error
                save_shards(joined(parts), Path(directory))
        if problem := group.broadcast(problem):
            raise UserError(problem)

    def _parts(self) -> Parts:
        """The tensors of a checkpoint, in named groups."""
        stepper = self._stepper
        parts = {"model": weights_of(self._model), "optimizer": optimizer_tensors(stepper.optimizer, self._model)}
        if stepper.ema is not None:
            parts["ema"] = stepper.ema.weights
        if stepper.objective.segment_memory is not None:
            parts["carried"] = {f"{layer:04d}": x for layer, x in enumerate(stepper.objective.segment_memory)}
        return parts

    def _after_save(self, progress: Progress) -> None:
        """Publish the best weights and remove old checkpoints; this is idempotent."""
        best = progress.best
        if best is not None and best.step == progress.step and not best.averaged:
            self.publish(self._stepper.weights)
        if self._group.first:
            self.files.remove_old(progress.kept)

    def keep(self, step: int) -> None:
        """Save the weights of this step for averaging."""
        weights = whole_weights(self._stepper.weights, self._group.first)
        if self._group.first:
            self.files.keep(step, weights)

    def publish(self, weights: Tensors) -> None:
        """Write weights to model.safetensors with gates and adapters merged in; adapters also get their own file."""
        weights = whole_weights(weights, self._group.first)
        if not self._group.first:
            return
        plain, adapters = merge_adapters(self._model, fold_gates(self._model, weights))
        with rewriting(self.files.run, ADAPTERS, WEIGHTS):
            if adapters:
                save_weights(adapters, self.files.run / ADAPTERS)
            save_weights(plain, self.files.run / WEIGHTS)

    def recover(self, progress: Progress) -> None:
        """Complete the save of this progress, which may have been interrupted."""
        self._after_save(progress)

    def restore(self, step: int) -> None:
        """Load the checkpoint of a step."""
        self._verify(step)
        try:
            self._load(step)
        except (KeyError, RuntimeError) as error:  # a wrong name or shape
            raise UserError(f"{self.files.path}: the checkpoint does not fit: {error}; start a new run") from None

    def _verify(self, step: int) -> None:
        """Raise UserError if the checkpoint has changed; the first process reads it for all."""
        problem = None
        if self._group.first:
            try:
                self.files.verify(step)
            except UserError as error:
                problem = str(error)
        if problem := self._group.broadcast(problem):
            raise UserError(problem)

    def _load(self, step: int) -> None:
        stepper, shards = self._stepper, self.files.shards(step)
        if shards is not None:
            names = {name.removeprefix("optimizer/") for name in saved_names(shards)}
            prepare_moments(stepper.optimizer, self._model, names)
            load_shards(joined(self._parts()), shards)
            return
        restore_optimizer(stepper.optimizer, self._model, self.files.tensors(step, "optimizer"))
        _fill(weights_of(self._model), self.files.tensors(step, "model"))
        if stepper.ema is not None:
            _fill(stepper.ema.weights, self.files.tensors(step, "ema"))
        if carried := self.files.tensors(step, "carried", optional=True):
            device = self._model.device
            stepper.objective.segment_memory = tuple(carried[name].to(device) for name in sorted(carried))


def joined(parts: Parts) -> Tensors:
    """Merge named groups of tensors into one."""
    return {f"{part}/{name}": x for part, tensors in parts.items() for name, x in tensors.items()}


def _fill(tensors: Tensors, saved: Tensors) -> None:
    for name, x in tensors.items():
        x.copy_(saved[name])
