"""Sweeps on Ray Tune: the runs are trials, as many at once as this machine or a cluster has room for."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from regard.device import choose_device
from regard.errors import UserError, missing_extra, plural
from regard.parallel.cores import cores
from regard.parallel.ray_cluster import connected
from regard.recipe import Recipe
from regard.training.report import Lines, Reporter
from regard.training.sinks import with_sinks
from regard.training.sweep import Point, Sweep, check_sweep, open_sweep, train_point, was_on_ray
from regard.training.trainer import Signals, Stopped

OFF = "off"  # instead of the address of a cluster
MESSAGES = ".txt"  # after the name of a run: what it would say on a screen
SINK_VARIABLES = ("MLFLOW_", "WANDB_")  # of the environment, which say where sinks send events


def choose_cluster(points: Sequence[Point], asked: str | None, out: str | Path) -> str | None:
    """The address of the cluster that trains the runs, or None if they are trained one after the other, here.

    It is what the user asked for (`off` is None). By default a sweep goes on as it began. A new one is trained on this
    machine by Ray Tune, if that is installed and there is room for two runs at once; else it could only do the same.
    """
    if asked is not None:
        return None if asked == OFF else asked
    began_on_ray = was_on_ray(out)
    if began_on_ray is None:
        began_on_ray = _room([point.recipe for point in points]) > 1 and len(points) > 1
    return "local" if began_on_ray and _is_installed() else None


def _room(recipes: Sequence[Recipe]) -> int:
    """How many runs this machine can train at once, each with its own processors and GPUs."""
    cpus, gpus = _resources(recipes)
    devices = {recipe.train.device for recipe in recipes}
    if devices == {"cuda"}:
        return min(cores() // cpus, torch.cuda.device_count() // gpus)
    on_cpu = devices == {"cpu"} or (devices <= {"auto", "cpu"} and choose_device("auto").type == "cpu")
    return cores() // cpus if on_cpu else 1  # all would use the same GPU


def _is_installed() -> bool:
    """Whether Ray is installed with all that Ray Tune needs."""
    if find_spec("ray") is None:
        return False
    try:
        import_module("ray.tune")
    except ImportError:
        return False
    return True


def run_on_ray(
    points: Sequence[Point], out: str | Path, resume: bool, display: Reporter, address: str, log: Sequence[str] = ()
) -> Sweep:
    """Train the points as trials of Ray Tune; one that fails is noted in the table, and the others go on.

    All machines of the cluster have the data and the directory of the sweep at the same paths. `log` names the sinks of
    the events of a run. A signal ends runs as a kill does (they go on from their last checkpoints): Stopped is raised.
    Without a cluster NoCluster is raised, and nothing has begun.
    """
    check_sweep(out, resume)  # before a cluster is started
    cpus, gpus = _resources([point.recipe for point in points])
    with connected(address) as ray:
        if address == "local":  # elsewhere machines may join, for which Ray Tune waits
            _require_room(ray.cluster_resources(), cpus, gpus)
        _require_tune()
        sweep, points = open_sweep(points, out, resume, on_ray=True)
        display.say(
            f"Ray Tune trains {plural(len(points), 'run')}, as many at once as there is room for, each with "
            f"{plural(cpus, 'process')} (--ray {OFF}: one after the other); what they say is in "
            f"{sweep.path}/*{MESSAGES}"
        )
        try:
            _take_results(sweep, _train(sweep, points, resume, (cpus, gpus), log))
        except (SystemExit, KeyboardInterrupt):  # a signal
            display.say("the sweep stopped; the same command with --resume goes on")
            raise
    return sweep


def _resources(recipes: Sequence[Recipe]) -> tuple[int, int]:
    """How many processors and GPUs a run on Ray takes: what the one with the most processes takes."""
    processes = [recipe.train.workers or 1 for recipe in recipes]
    on_gpu = [recipe.train.device.startswith("cuda") for recipe in recipes]
    return max(processes), max(count * gpu for count, gpu in zip(processes, on_gpu, strict=True))


def _train(
    sweep: Sweep, points: Sequence[Point], resume: bool, resources: tuple[int, int], log: Sequence[str]
) -> list[Any]:
    """Train the points, as many at once as the cluster has processors, or GPUs, for -> the results of Ray Tune.

    A run that does not say how many processes it takes gets one. Each process gets a processor, and a GPU too if the
    device is cuda.
    """
    from ray import tune

    path, here = sweep.path.resolve(), Path.cwd()
    recipes = [_with_workers(point.recipe, point.recipe.train.workers or 1) for point in points]
    names = [point.name for point in points]
    variables = {name: value for name, value in os.environ.items() if name.startswith(SINK_VARIABLES)}
    running: set[int] = set()

    def trial(config: dict[str, Any]) -> None:
        from ray import tune

        recipe, name = recipes[config["index"]], names[config["index"]]
        with suppress(OSError):  # a machine of a cluster may not have it
            os.chdir(here)  # paths are relative to it; Ray Tune gives each trial a directory of its own
        os.environ.update(variables)
        torch.set_num_threads(1)
        with (path / f"{name}{MESSAGES}").open("a", encoding="utf-8") as stream:
            reporter = with_sinks(Lines(stream), log, path / name)
            tune.report({"row": json.dumps(train_point(recipe, path / name, resume, reporter))})

    # What Ray keeps about trials is not needed afterwards; it may still write there until it is shut down.
    with TemporaryDirectory(ignore_cleanup_errors=True) as storage, Signals() as signals:
        os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # every signal has the same handler, which is ours
        os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # it would print to stdout, even with verbose=0
        trainable = tune.with_resources(trial, dict(zip(("cpu", "gpu"), resources, strict=True)))
        space = {"index": tune.grid_search(list(range(len(points))))}
        table = _table_callback(replace(sweep, path=path), running)
        settings = tune.RunConfig(storage_path=storage, verbose=0, callbacks=[table])
        try:
            with signals.at_once():
                return list(tune.Tuner(trainable, param_space=space, run_config=settings).fit())
        except (SystemExit, KeyboardInterrupt):
            for index in sorted(running):
                sweep.update(index, state="stopped")
            if signals.received:  # Ray may have made a SystemExit(1) of what the handler raised
                raise Stopped(signals.received) from None
            raise


def _require_tune() -> None:
    """Refuse an installation of Ray without the packages that Ray Tune needs."""
    try:
        from ray import tune  # noqa: F401
    except ImportError as error:
        raise missing_extra("--ray: a sweep", error.name or "Ray Tune", "ray") from None


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
