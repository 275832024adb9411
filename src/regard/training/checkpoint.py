"""Checkpoints: everything needed to resume, one directory per saved step, written atomically and without pickle.

A checkpoint is written before model.safetensors and before older checkpoints are removed, so a kill at any moment is
harmless: model.safetensors has the best weights, or a resumed run publishes them from the last checkpoint.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from regard.config import parse
from regard.data.prepare import DAMAGED
from regard.errors import UserError
from regard.files import read_json, remove, replace_directory, require_unchanged, rewriting, update_manifest, write_json
from regard.nn.adapters import fold_gates, merge_adapters
from regard.run import WEIGHTS
from regard.training.data_parallel import load_shards, local, save_shards, saved_names, whole_weights
from regard.training.step import Stepper
from regard.weight_files import save_weights, weights_of, write_tensors

TRAINING = "training"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
ADAPTERS = "adapters.safetensors"
PROGRESS = "progress.json"
_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp(\.old)?|\.tmp\w{6}")  # of regard.files and of the safetensors library
_PREPARING = ("data.tmp", "data.tmp.old")  # temporary directories of `prepare`
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
    validated: int = 0  # step of the last validation
    validated_at: float = 0.0  # time of the last validation in seconds
    validation_seconds: float = 0.0
    validations_since_best: int = 0
    best: Best | None = None
    kept: list[int] = []  # steps with weights for averaging
    log_bytes: int = 0
    finished: str | None = None  # the reason why the run ended


def write_parts(parts: Parts, directory: Path) -> None:
    for name, tensors in parts.items():
        write_tensors(tensors, directory / f"{name}.safetensors")


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
        if not (steps := self.steps()):
            return None
        path = self._directory(steps[-1]) / PROGRESS
        data = read_json(path)
        return parse(Progress, data if isinstance(data, dict) else {}, str(path))

    def save(self, progress: Progress, parts: Parts, write: Callable[[Parts, Path], object] = write_parts) -> None:
        """Save a step: `parts` are named groups of tensors. If the step is saved already, update only its progress."""
        path = self._directory(progress.step)
        if path.is_dir():
            with rewriting(path, PROGRESS):
                write_json(path / PROGRESS, progress.model_dump())
            return

        def write_all(temporary: Path) -> None:
            write(parts, temporary)
            write_json(temporary / PROGRESS, progress.model_dump())
            update_manifest(temporary, sorted(file.name for file in temporary.iterdir()))

        replace_directory(path, write_all)

    def shards(self, step: int) -> Path | None:
        """The directory of a saved step if its tensors are sharded."""
        path = self._directory(step)
        return path if any(path.glob("shard-*.safetensors")) else None

    def tensors(self, step: int, part: str, optional: bool = False) -> Tensors:
        """One group of tensors of a saved step; an `optional` group may be missing."""
        path = self._directory(step) / f"{part}.safetensors"
        return {} if optional and not path.is_file() else read_tensors(path)

    def verify(self, step: int) -> None:
        """Raise UserError if a file of a saved step has changed."""
        require_unchanged(self._directory(step), DAMAGED, verify=True)

    def keep(self, step: int, weights: Tensors) -> None:
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
        if old := set(self.path.glob("weights-*.safetensors")) - set(map(self._kept, kept)):
            with rewriting(self.path, *(path.name for path in old)):
                for path in old:
                    remove(path)

    def remove_temporary(self) -> None:
        """Remove the temporary files of interrupted writes."""
        for name in _PREPARING:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for directory in (*filter(Path.is_dir, self.path.iterdir()), self.path, self.run):
            for entry in list(directory.iterdir()):
                if not _TEMPORARY.fullmatch(entry.name):
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    remove(entry)


def read_tensors(path: Path) -> Tensors:
    try:
        tensors: Tensors = load_file(path)
        return tensors
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}; the checkpoint is incomplete, start a new run") from None


class CheckpointManager:
    """Saves and restores a stepper with its progress; all processes of a group must call its methods."""

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
        self.complete(progress)

    def _save_shards(self, progress: Progress) -> None:
        """Save with all processes: the first makes the directory, renames it at the end, and sends its error to all."""
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
            if directory is None:  # the step is saved already, or the directory cannot be made
                group.broadcast(None)
        elif directory := group.broadcast(None):
            with suppress(OSError):  # the first process has the same error and reports it
                save_shards(joined(parts), Path(directory))
        if problem := group.broadcast(problem):
            raise UserError(problem)

    def _parts(self) -> Parts:
        stepper = self._stepper
        parts = {"model": weights_of(self._model), "optimizer": optimizer_tensors(stepper.optimizer, self._model)}
        if stepper.ema is not None:
            parts["ema"] = stepper.ema.weights
        if stepper.objective.segment_memory is not None:
            parts["carried"] = {f"{layer:04d}": x for layer, x in enumerate(stepper.objective.segment_memory)}
        return parts

    def complete(self, progress: Progress) -> None:
        """Publish the best weights and remove old checkpoints; repeated on resume, because a kill may prevent it."""
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
        """Merge gates and adapters into weights and write model.safetensors; adapters are also written separately."""
        if self._stepper.sharded:
            weights = whole_weights(weights, self._group.first)
        if not self._group.first:
            return
        adapters: Tensors = {}
        if self._stepper.train.l0:
            weights = fold_gates(self._model, weights)
        if self._stepper.train.lora:
            weights, adapters = merge_adapters(self._model, weights)
        with rewriting(self.files.run, ADAPTERS, WEIGHTS):
            if adapters:
                save_weights(adapters, self.files.run / ADAPTERS)
            save_weights(weights, self.files.run / WEIGHTS)

    def restore(self, step: int) -> None:
        """Load a checkpoint after the first process has verified its files."""
        problem = None
        if self._group.first:
            try:
                self.files.verify(step)
            except UserError as error:
                problem = str(error)
        if problem := self._group.broadcast(problem):
            raise UserError(problem)
        try:
            self._load(step)
        except (KeyError, RuntimeError) as error:  # a wrong name or shape
            raise UserError(f"{self.files.path}: the checkpoint does not fit: {error}; start a new run") from None

    def _load(self, step: int) -> None:
        stepper = self._stepper
        shards = self.files.shards(step)
        if shards is not None:
            names = {name.removeprefix("optimizer/") for name in saved_names(shards)}
            prepare_moments(stepper.optimizer, self._model, names)
            load_shards(joined(self._parts()), shards)
            return
        restore_optimizer(stepper.optimizer, self._model, self.files.tensors(step, "optimizer"))
        parts = self._parts()
        for part in ("model", "ema"):
            saved = self.files.tensors(step, part) if part in parts else {}
            for name, x in parts.get(part, {}).items():
                x.copy_(saved[name])
        if carried := self.files.tensors(step, "carried", optional=True):
            device = self._model.device
            stepper.objective.segment_memory = tuple(carried[name].to(device) for name in sorted(carried))


def joined(parts: Parts) -> Tensors:
    """Merge named groups of tensors into one."""
    return {f"{part}/{name}": x for part, tensors in parts.items() for name, x in tensors.items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The state of the optimizer as tensors named after the parameters."""
    return {
        f"{name}:{moment}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Set the state of the optimizer from `optimizer_tensors`; untrained parameters have no moments."""
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        if not any(f"{name}:{moment}" in tensors for moment in MOMENTS):
            continue
        optimizer.state[parameter] = {
            moment: tensors[f"{name}:{moment}"].to(parameter.device, copy=True) for moment in MOMENTS
        }


def prepare_moments(optimizer: torch.optim.Optimizer, model: nn.Module, names: Collection[str]) -> None:
    """Set the moments of the parameters with moments among these names to zero, and remove all others."""
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        if f"{name}:step" in names:
            moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS if moment != "step"}
            optimizer.state[parameter] = {**moments, "step": torch.zeros((), device=local(parameter).device)}
