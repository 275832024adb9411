"""Sweeps on Ray Tune: runs are trials, which run concurrently on this machine or a cluster."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch

from regard.device import choose_device
from regard.errors import UserError, missing_extra, plural
from regard.files import open_file, scratch_directory
from regard.parallel.cores import cores
from regard.parallel.ray_cluster import connected
from regard.recipe import Recipe
from regard.training.log import with_sinks
from regard.training.report import Lines, Reporter
from regard.training.sweep import Point, Sweep, check_sweep, open_sweep, train_point, was_on_ray
from regard.training.trainer import Signals, Stopped

OFF = "off"  # in place of the address of a cluster: train without Ray
MESSAGES_SUFFIX = ".txt"  # of the file with the messages of a run
SINK_VARIABLES = ("MLFLOW_", "WANDB_")  # prefixes of environment variables that configure sinks


def choose_cluster(points: Sequence[Point], requested: str | None, out: str | Path) -> str | None:
    """The address of the cluster, or None to train without Ray; by default, a sweep continues where it began."""
    if requested is not None:
        return None if requested == OFF else requested
    began_on_ray = was_on_ray(out)
    if began_on_ray is None:
        began_on_ray = _room([point.recipe for point in points]) > 1 and len(points) > 1
    return "local" if began_on_ray and _is_installed() else None


def _room(recipes: Sequence[Recipe]) -> int:
    """The number of runs that this machine can train concurrently, each with its own processors and GPUs."""
    cpus, gpus = _resources(recipes)
    devices = {recipe.train.device for recipe in recipes}
    if devices == {"cuda"}:
        return min(cores() // cpus, torch.cuda.device_count() // gpus)
    on_cpu = devices == {"cpu"} or (devices <= {"auto", "cpu"} and choose_device("auto").type == "cpu")
    return cores() // cpus if on_cpu else 1  # otherwise all runs would use the same GPU


def _is_installed() -> bool:
    """Whether Ray Tune and its dependencies are installed."""
    try:
        import_module("ray.tune")
    except ImportError:
        return False
    return True


def run_on_ray(
    points: Sequence[Point], out: str | Path, resume: bool, display: Reporter, address: str, log: Sequence[str] = ()
) -> Sweep:
    """Train the points as trials of Ray Tune. Failures are recorded in the table and do not stop the sweep.

    Data and directory must have the same paths on all machines of the cluster. `log` names sinks. A signal kills the
    runs, which can be resumed from their last checkpoints, and raises Stopped.
    """
    check_sweep(out, resume)  # before a cluster is started
    cpus, gpus = _resources([point.recipe for point in points])
    with connected(address) as ray:
        if address == "local":  # a cluster may get more machines later, which Ray Tune waits for
            _require_room(ray.cluster_resources(), cpus, gpus)
        try:
            from ray import tune  # noqa: F401  Ray may be installed without the dependencies of Ray Tune
        except ImportError as error:
            raise missing_extra("--ray: a sweep", error.name or "Ray Tune", "ray") from None
        sweep, points = open_sweep(points, out, resume, on_ray=True)
        how = f"as many at a time as fit, each with {plural(cpus, 'process')} (--ray {OFF}: one after the other)"
        messages = f"their messages are in {sweep.path}/*{MESSAGES_SUFFIX}"
        display.say(f"Ray Tune trains {plural(len(points), 'run')}, {how}; {messages}")
        try:
            _take_results(sweep, _train(sweep, points, resume, (cpus, gpus), log))
        except (SystemExit, KeyboardInterrupt):  # a signal
            display.say("the sweep stopped; continue it by the same command with --resume")
            raise
    return sweep


def _resources(recipes: Sequence[Recipe]) -> tuple[int, int]:
    """The numbers of processors and GPUs that the largest run needs, which are reserved for every run."""
    processes = [recipe.train.workers or 1 for recipe in recipes]
    on_gpu = [recipe.train.device.startswith("cuda") for recipe in recipes]
    return max(processes), max(count * gpu for count, gpu in zip(processes, on_gpu, strict=True))


def _train(
    sweep: Sweep, points: Sequence[Point], resume: bool, resources: tuple[int, int], log: Sequence[str]
) -> list[Any]:
    """Train the points, as many concurrently as fit into the cluster -> the results of Ray Tune."""
    from ray import tune

    path = sweep.path.resolve()
    directory = Path.cwd()
    recipes = [point.recipe.with_train(workers=point.recipe.train.workers or 1) for point in points]
    names = [point.name for point in points]
    variables = {name: value for name, value in os.environ.items() if name.startswith(SINK_VARIABLES)}
    running: set[int] = set()

    def trial(config: dict[str, Any]) -> None:
        from ray import tune

        recipe = recipes[config["index"]]
        name = names[config["index"]]
        with suppress(OSError):  # the directory may not exist on another machine
            os.chdir(directory)  # Ray Tune changes the directory of a trial, but the recipe may have relative paths
        os.environ.update(variables)
        torch.set_num_threads(1)
        with TextIOWrapper(open_file(path / f"{name}{MESSAGES_SUFFIX}", "ab"), encoding="utf-8") as stream:
            reporter = with_sinks(Lines(stream), log, path / name)
            tune.report({"row": json.dumps(train_point(recipe, path / name, resume, reporter))})

    # The records of Ray are temporary. Ray may still write to them until it is shut down.
    with scratch_directory() as storage, Signals().caught() as signals:
        os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # our handler receives all signals
        os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # otherwise Ray prints to stdout, even with verbose=0
        trainable = tune.with_resources(trial, dict(zip(("cpu", "gpu"), resources, strict=True)))
        space = {"index": tune.grid_search(list(range(len(points))))}
        table = _table_callback(replace(sweep, path=path), running)
        settings = tune.RunConfig(storage_path=str(storage), verbose=0, callbacks=[table])
        try:
            with signals.immediate():
                return list(tune.Tuner(trainable, param_space=space, run_config=settings).fit())
        except (SystemExit, KeyboardInterrupt):
            for index in sorted(running):
                sweep.update(index, state="stopped")
            if signals.received:  # Ray may have replaced the exception by SystemExit(1)
                raise Stopped(signals.received) from None
            raise


def _require_room(resources: Mapping[str, float], cpus: int, gpus: int) -> None:
    """Raise UserError if a run needs more than this machine has: Ray Tune would wait forever."""
    for name, noun, required in (("CPU", "processor", cpus), ("GPU", "GPU", gpus)):
        if required > (available := int(resources.get(name, 0))):
            raise UserError(f"--ray local: a run needs {plural(required, noun)}, but this machine has {available}")


def _table_callback(sweep: Sweep, running: set[int]) -> Any:
    """A callback of Ray Tune that writes the rows of finished trials and tracks the indices of running trials."""
    from ray import tune

    class TableCallback(tune.Callback):
        def on_trial_start(self, *, trial: Any, **_: Any) -> None:
            running.add(trial.config["index"])

        def on_trial_result(self, *, trial: Any, result: dict[str, Any], **_: Any) -> None:
            self._end(trial, **json.loads(result["row"]))

        def on_trial_error(self, *, trial: Any, **_: Any) -> None:
            self._end(trial, state="failed", error="its process died")

        def _end(self, trial: Any, **changes: Any) -> None:
            running.discard(trial.config["index"])
            with suppress(UserError):  # for example, a full disk; all rows are written again at the end
                sweep.update(trial.config["index"], **changes)

    return TableCallback()


def _take_results(sweep: Sweep, results: Sequence[Any]) -> None:
    """Write the rows of all trials. A trial with neither a row nor an error was stopped; then raise Stopped."""
    for result in results:
        index = (result.config or {}).get("index")
        if index is None:  # the trial never started
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
