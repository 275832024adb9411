"""The directory of a run in training: the lock of its writer, and whether the run is new, resumed or finished."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard import files
from regard.config import Config, to_toml
from regard.data.prepare import Prepared, is_prepared, open_prepared
from regard.data.statistics import STATISTICS, measure
from regard.device import usable_precision
from regard.errors import UserError
from regard.inspect.prune import restore_unpruned
from regard.recipe import Recipe
from regard.run import CONFIG, HEADS, RECIPE, WEIGHTS, Generation, RunConfig, read_config, require_saved, saved_recipe
from regard.tasks import TASKS
from regard.text.codec import TOKENIZERS
from regard.training.checkpoint import ADAPTERS, TRAINING, Checkpoints, Progress
from regard.training.loader import DataLoader, make_loader
from regard.training.log import LOG, TENSORBOARD
from regard.training.plan import Budget
from regard.training.report import Reporter
from regard.training.summary import CURVE, MODEL_CARD

# Names in the training directory
DATA = "data"
UNCUT = "uncut"  # config and weights before the pruning of heads with closed gates
FRESH = "fresh.json"  # names of weights that the base run does not have
LOCK = "lock"
LAUNCHERS = "launchers.json"  # the torchrun processes that began or resumed the run

BUDGET = ("minutes", "steps", "epochs")
CHANGEABLE = ("train.workers", "data.cache", *(f"train.{name}" for name in BUDGET))  # settings open to change on resume
# The files of a run. Prepared data without them is not a run yet.
FILES = (CONFIG, WEIGHTS, ADAPTERS, RECIPE, LOG, MODEL_CARD, CURVE, HEADS, STATISTICS, files.MANIFEST, *TOKENIZERS)
# Patterns in the training directory that `prepare` and checkpoints would replace or remove
STATE = (DATA, UNCUT, FRESH, "step-*", "weights-*.safetensors")
WRITTEN_BEFORE_CONFIG = {RECIPE, STATISTICS, files.MANIFEST, f"{TRAINING}/{DATA}", f"{TRAINING}/{FRESH}", *TOKENIZERS}


@dataclass(frozen=True)
class _Setup:
    path: Path
    recipe: Recipe
    config: Config
    prepared: Prepared[Any]
    loader: DataLoader
    fresh: tuple[str, ...]  # names of the weights that the base run does not have; always trained


class New(_Setup):
    """A run without a checkpoint: training begins at the first step."""


@dataclass(frozen=True)
class Resumed(_Setup):
    """A run that continues from its last checkpoint."""

    progress: Progress


@dataclass(frozen=True)
class Finished:
    """A run with nothing left to do."""

    path: Path
    recipe: Recipe
    config: Config
    progress: Progress


Setup = New | Resumed | Finished


def write_run(new: New, generation: Generation, launchers: Collection[str]) -> None:
    """Write the files of a new run that are known before training. config.json is written last and makes it a run."""
    path = new.path
    prepared = new.prepared
    remember_launchers(path, launchers)
    if new.fresh:  # the base run may be gone when this run is resumed
        files.write_json(path / TRAINING / FRESH, new.fresh)
    try:
        prepared.codec.save(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror or error}") from None
    save_recipe(new.recipe, path)
    if (statistics := measure(TASKS[new.recipe.task], prepared)) is not None:
        files.write_json(path / STATISTICS, statistics.model_dump(mode="json"))
    run = RunConfig(
        model=new.config,
        text=prepared.codec.config,
        task=new.recipe.task,
        labels=prepared.labels,
        pixels=prepared.pixels,
        generation=generation,
    )
    files.write_json(path / CONFIG, run.model_dump(mode="json"))
    files.update_manifest(path, [CONFIG, RECIPE, STATISTICS, *TOKENIZERS])


def open_run(path: Path) -> Setup:
    """Open a run that another process has set up."""
    return _open(path, saved_recipe(path), Checkpoints(path).progress())


def _open(path: Path, recipe: Recipe, progress: Progress | None) -> Setup:
    config = read_config(path).model
    if progress is not None and is_finished(progress, recipe):
        return Finished(path, recipe, config, progress)
    prepared = open_prepared(path / TRAINING / DATA)
    fresh = path / TRAINING / FRESH
    names = tuple(files.read_json(fresh)) if fresh.is_file() else ()
    parts = (path, recipe, config, prepared, make_loader(recipe, prepared, config), names)
    return New(*parts) if progress is None else Resumed(*parts, progress)


def is_finished(progress: Progress, recipe: Recipe) -> bool:
    """Whether a run has ended and the budget of the recipe leaves nothing to do."""
    done, _ = Budget.of(recipe.train).done(progress.step, progress.epoch, progress.seconds)
    return progress.finished == "patience" or (progress.finished is not None and done >= 1)


def resume_run(requested: Recipe, path: Path, device: torch.device, reporter: Reporter, launched: int) -> Setup:
    """Open an existing run to continue it with the requested budget and `launched` processes."""
    if not is_prepared(path / TRAINING / DATA):
        reason = f"its prepared data is missing ({TRAINING}/{DATA}); start a new run with train.start_from={path}"
        raise UserError(f"{path}: cannot be resumed because {reason}")
    saved = saved_recipe(path)
    require_saved(path, (CONFIG, RECIPE, *TOKENIZERS))
    recipe = resumed_recipe(requested, saved, path)
    old_workers = saved.train.workers
    workers = launched if launched > 1 else recipe.train.workers
    if workers != old_workers:
        if workers > 1 and read_config(path).model.has_memory:
            raise UserError("train.workers: a model with segment memory is trained by one process")
        effect = "the examples of a step stay the same, random numbers (dropout) do not"
        reporter.say(f"processes: {workers}, {old_workers} before; {effect}")
        recipe = recipe.with_train(workers=workers)
    progress = Checkpoints(path).progress()
    if progress is None or not is_finished(progress, recipe):
        restore_unpruned(path, path / TRAINING / UNCUT)
        if requested.train.precision != recipe.train.precision == "fp32":
            reporter.say("precision: fp32, as chosen when the run began")
        # The run may come from another machine. It keeps its precision even if that is slow on this machine.
        recipe = recipe.with_train(precision=usable_precision(recipe.train.precision, device, reporter.say, slow=False))
    if recipe != saved:
        save_recipe(recipe, path)
    return _open(path, recipe, progress)


@contextmanager
def claim_run(path: Path) -> Iterator[bool]:
    """Become the only writer of a run directory -> whether its file system has locks."""
    files.require_no_links(path, (*FILES, TRAINING, TENSORBOARD))
    require_ours(path)
    missing = [directory for directory in (path / TRAINING, path, *path.parents) if not directory.exists()]
    try:
        files.make_directory(path / TRAINING, str(path))
        with files.hold_lock(path / TRAINING / LOCK, str(path), root=path) as locked:
            if is_run(path) or stopped_in_setup(path):
                Checkpoints(path).remove_temporary()
            yield locked
    except BaseException:
        with suppress(OSError):  # not empty
            for directory in missing:
                directory.rmdir()
        raise


def is_run(run: Path) -> bool:
    """Whether a directory contains a run whose setup by training is complete."""
    return (run / CONFIG).is_file() and (run / RECIPE).is_file()


def require_ours(run: Path) -> None:
    """Refuse a directory where training would overwrite files that it did not write."""
    if run.exists() and not run.is_dir():
        raise UserError(f"{run}: is a file, not a directory")
    names = _taken(run)
    if is_run(run) or stopped_in_setup(run) or not names:
        return
    hint = "choose another directory"
    with suppress(UserError):
        read_config(run)
        hint = f"it is a run, but not one that can be resumed; start a new run with train.start_from={run}"
    raise UserError(f"{run}: has {', '.join(names)}, which training would overwrite; {hint}")


def stopped_in_setup(run: Path) -> bool:
    """Whether a training was stopped in this directory between preparing its data and writing config.json."""
    return is_prepared(run / TRAINING / DATA) and WRITTEN_BEFORE_CONFIG.issuperset(_taken(run))


def _taken(run: Path) -> list[str]:
    """The existing files and directories of a run, without empty directories."""
    names = [name for name in FILES if (run / name).exists()]
    for pattern in STATE:
        for path in sorted((run / TRAINING).glob(pattern)):
            if not path.is_dir() or any(path.iterdir()):
                names.append(str(path.relative_to(run)))
    return names


def clear(run: Path, resume: bool) -> None:
    """Remove the files of a training that was stopped in its setup, except its data; without `resume`, refuse."""
    if is_run(run):
        raise UserError(f"{run}: contains a run; continue it with resume=True, or choose another directory")
    taken = _taken(run)
    if not resume and stopped_in_setup(run) and len(taken) > 1:  # prepared data without other files is reused
        advice = "repeat it with resume=True, or choose another directory"
        raise UserError(f"{run}: a training was stopped here before its first step; {advice}")
    for name in WRITTEN_BEFORE_CONFIG.intersection(taken) - {f"{TRAINING}/{DATA}"}:
        files.remove(run / name)


def begun_by(run: Path, launchers: Collection[str]) -> bool:
    """Whether one of these launchers began or resumed the run."""
    file = run / TRAINING / LAUNCHERS
    recorded = files.read_json(file) if launchers and file.is_file() else None
    return isinstance(recorded, list) and any(name in recorded for name in launchers)


def remember_launchers(run: Path, launchers: Collection[str]) -> None:
    """Record the launchers that may resume the run automatically after a failure."""
    file = run / TRAINING / LAUNCHERS
    if launchers:
        files.write_json(file, sorted(launchers))
    else:
        file.unlink(missing_ok=True)


def save_recipe(recipe: Recipe, run: Path) -> None:
    text = to_toml(recipe.model_dump(mode="json"))
    with files.rewriting(run, RECIPE):
        files.replace_file(run / RECIPE, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def resumed_recipe(requested: Recipe, saved: Recipe, run: Path) -> Recipe:
    """The saved recipe with the requested budget and workers; all other settings must equal the saved ones."""
    now = _flat(requested.model_dump(mode="json", exclude_unset=True))
    then = _flat(saved.model_dump(mode="json"))
    # bf16 may have been replaced by fp32 when the run began
    open_choices = [("train.workers", 0), ("train.precision", "bf16")]
    changed = []
    for key, value in now.items():
        left_open = value in ("auto", None) or (key, value) in open_choices or key in CHANGEABLE
        if value != then.get(key) and not left_open:
            of_preset = key.startswith("model.") and key not in then
            changed.append(f"{key}: now {value!r}, then {'as in the preset' if of_preset else repr(then.get(key))}")
    if changed:
        rule = "cannot resume with a changed recipe (only minutes, steps, epochs and workers may change)"
        lines = [f"{run}: {rule}", *changed, "omit these settings, or start a new run in another directory"]
        raise UserError("\n  ".join(lines))
    changes = requested.train.model_dump(include=set(BUDGET))
    if all(value is None for value in changes.values()):
        changes = {}
    if requested.train.workers:
        changes["workers"] = requested.train.workers
    return saved.with_train(**changes)


def _flat(tables: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return flat
