"""Sweeps on Ray Tune: the runs are trials, as many at once as this machine or a cluster has room for."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from regard.device import cores
from regard.engines.ray_data import connected
from regard.errors import UserError, plural
from regard.recipe import Recipe
from regard.training.report import LOG, Reporter
from regard.training.sinks import with_sinks
from regard.training.sweep import Point, Sweep, open_sweep, train_point
from regard.training.trainer import Signals, Stopped

OFF = "off"  # instead of the address of a cluster


def choose_cluster(points: Sequence[Point], asked: str | None) -> str | None:
    """The address of the cluster that trains the runs, or None if they are trained one after the other, here.

    It is what the user asked for (`off` is None). By default it is Ray Tune, if Ray is installed and this machine has
    room for two runs at once: with room for one it could only do the same.
    """
    if asked is not None:
        return None if asked == OFF else asked
    if find_spec("ray") is None:
        return None
    if os.environ.get("RAY_ADDRESS"):
        return "auto"
    cpus, gpus = _resources([point.recipe for point in points])
    room = cores() // cpus
    if torch.cuda.is_available():  # a run takes a GPU by itself, a trial if that is said
        room = torch.cuda.device_count() // gpus if gpus else 0
    return "local" if min(room, len(points)) > 1 else None


def run_on_ray(
    points: Sequence[Point], out: str | Path, resume: bool, display: Reporter, address: str, log: Sequence[str] = ()
) -> Sweep:
    """Train the points as trials of Ray Tune; one that fails is noted in the table, and the others go on.

    All machines of the cluster have the data and the directory of the sweep at the same paths. `log` names the sinks of
    the events of a run. A signal ends runs as a kill does (they go on from their last checkpoints): Stopped is raised.
    """
    sweep, points = open_sweep(points, out, resume)
    processes = plural(_resources([point.recipe for point in points])[0], "process")
    display.say(
        f"Ray Tune trains {plural(len(points), 'run')}, as many at once as there is room for, each with {processes} "
        f"(--ray {OFF}: one after the other); their progress is in {sweep.path}/*/{LOG}"
    )
    try:
        _train(sweep, points, resume, address, log)
    except (SystemExit, KeyboardInterrupt):  # a signal
        display.say("the sweep stopped; the same command with --resume goes on")
        raise
    return sweep


def _resources(recipes: Sequence[Recipe]) -> tuple[int, int]:
    """How many processors and GPUs a run on Ray takes: what the one with the most processes takes."""
    processes = [recipe.train.workers or 1 for recipe in recipes]
    on_gpu = [recipe.train.device.startswith("cuda") for recipe in recipes]
    return max(processes), max(count * gpu for count, gpu in zip(processes, on_gpu, strict=True))


def _train(sweep: Sweep, points: Sequence[Point], resume: bool, address: str, log: Sequence[str]) -> None:
    """Train the points, as many at once as the cluster has processors, or GPUs, for.

    A run that does not say how many processes it takes gets one. Each process gets a processor, and a GPU too if the
    device is cuda.
    """
    path = sweep.path.resolve()
    recipes = [_with_workers(point.recipe, point.recipe.train.workers or 1) for point in points]
    names = [point.name for point in points]
    cpus, gpus = _resources(recipes)
    running: set[int] = set()

    def trial(config: dict[str, Any]) -> None:
        from ray import tune

        recipe, run = recipes[config["index"]], path / names[config["index"]]
        torch.set_num_threads(1)
        tune.report({"row": json.dumps(train_point(recipe, run, resume, with_sinks(Reporter(), log, run)))})

    # What Ray keeps about trials is not needed afterwards; it may still write there until it is shut down.
    with TemporaryDirectory(ignore_cleanup_errors=True) as storage, connected(address) as ray, Signals() as signals:
        from ray import tune

        if address == "local":  # elsewhere machines may join, for which Ray Tune waits
            _require_room(ray.cluster_resources(), cpus, gpus)
        os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # every signal has the same handler, which is ours
        trainable = tune.with_resources(trial, {"cpu": cpus, "gpu": gpus})
        space = {"index": tune.grid_search(list(range(len(points))))}
        table = _table_callback(replace(sweep, path=path), running)
        settings = tune.RunConfig(storage_path=storage, verbose=0, callbacks=[table])
        try:
            with signals.at_once():
                results = list(tune.Tuner(trainable, param_space=space, run_config=settings).fit())
        except (SystemExit, KeyboardInterrupt):
            for index in sorted(running):
                sweep.update(index, state="stopped")
            if signals.received:  # Ray may have made a SystemExit(1) of what the handler raised
                raise Stopped(signals.received) from None
            raise
    _take_results(sweep, results)


def _require_room(resources: Mapping[str, float], cpus: int, gpus: int) -> None:
    """Refuse runs that take more than all there is: Ray Tune would wait for it for ever."""
    for name, noun, wanted in (("CPU", "processor", cpus), ("GPU", "GPU", gpus)):
        if wanted > (there := int(resources.get(name, 0))):
            raise UserError(f"--ray local: a run takes {plural(wanted, noun)}, and this machine has {there}")


def _table_callback(sweep: Sweep, running: set[int]) -> Any:
    """A callback of Ray Tune that writes the row of a trial when it ends, and keeps the indices of those that run.

    With an address ray://HOST:PORT it works on a copy in the cluster, which writes to the same file.
    """
    from ray import tune

    class TableCallback(tune.Callback):
        def on_trial_start(self, *, trial: Any, **_: Any) -> None:
            running.add(trial.config["index"])

        def on_trial_result(self, *, trial: Any, result: dict[str, Any], **_: Any) -> None:
            self._end(trial, **json.loads(result["row"]))

        def on_trial_error(self, *, trial: Any, **_: Any) -> None:
            self._end(trial, state="failed", error="its process has ended")

        def _end(self, trial: Any, **changes: Any) -> None:
            running.discard(trial.config["index"])
            with suppress(UserError):  # a full disk: all rows are written again at the end
                sweep.update(trial.config["index"], **changes)

    return TableCallback()


def _take_results(sweep: Sweep, results: Sequence[Any]) -> None:
    """Write the rows of all trials; one that has neither a row nor an error was stopped, and so was the sweep."""
    for result in results:
        index = (result.config or {}).get("index")
        if index is None:  # it ended before it could say anything
            continue
        if (row := (result.metrics or {}).get("row")) is not None:
            sweep.update(index, **json.loads(row))
        elif result.error is not None:
            lines = str(result.error).strip().splitlines() or [type(result.error).__name__]
            sweep.update(index, state="failed", error=lines[-1])
        else:
            sweep.update(index, state="stopped")
    if any(row.state == "stopped" for row in sweep.rows):
        raise Stopped(signal.SIGINT)


def _with_workers(recipe: Recipe, workers: int) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"workers": workers})})
