"""What resume needs, on disk: one directory per saved step, complete or absent, and no pickle anywhere.

The order of writing is what makes a kill at any moment harmless. A checkpoint names the best step so far; it is written
first, then model.safetensors, then older checkpoints are removed. So either the best weights are in model.safetensors,
or the checkpoint itself is the best and they are put there when the run goes on.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.config import parse
from regard.errors import UserError
from regard.files import read_json, replace_directory, replace_file, write_json
from regard.train.progress import Progress

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
