"""A sweep: one run for each combination of some settings, and a table of what came out.

Runs are trained one after the other, or as trials of Ray Tune on the machines of a cluster.

Every run is a directory of its own below that of the sweep and can be resumed, evaluated and continued like any other.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from regard.data.streams import STDIN
from regard.engines.ray_data import connected
from regard.errors import UserError, is_out_of_memory, plural
from regard.files import write_json
from regard.metrics import LOWER_IS_BETTER
from regard.recipe import FILES, Recipe, split_setting
from regard.training.configure import check_model
from regard.training.fit import TrainingReport, fit
from regard.training.launch import has_launcher
from regard.training.report import Reporter, format_score
from regard.training.start import open_base
from regard.training.trainer import Signals, Stopped

SWEEP = "sweep.json"
CACHE = "data"  # below the directory of the sweep
LONGEST_NAME = 120  # bytes of a directory's name
MOST_RUNS = 10_000
_OPENING, _CLOSING = "[{(", "]})"

State = Literal["waiting", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class Point:
    """One combination of the settings of a sweep."""

    settings: tuple[str, ...]  # as for --set
    recipe: Recipe

    @property
    def name(self) -> str:
        """The name of its directory: the settings, or as much of them as a file system takes, and a hash."""
        name = ",".join(f"{key}={value}" for key, value in self.values().items())
        safe = re.sub(r"[^A-Za-z0-9._=,+-]", "_", name)
        if safe == name and len(name) <= LONGEST_NAME:
            return name
        return f"{safe[:LONGEST_NAME]}-{blake2b(name.encode(), digest_size=4).hexdigest()}"

    def values(self) -> dict[str, str]:
        """The value of every swept key, as it is shown."""
        return {key: _shown(raw) for key, raw in map(split_setting, self.settings)}


@dataclass(frozen=True)
class Row:
    """What has become of a point."""

    run: str  # its directory, below that of the sweep
    settings: dict[str, str]
    state: State = "waiting"
    metric: str | None = None
    value: float | None = None
    steps: int | None = None
    seconds: float | None = None
    parameters: int | None = None
    error: str | None = None


@dataclass
class Sweep:
    """The table of a sweep, written to its directory whenever it changes."""

    path: Path
    rows: list[Row] = field(default_factory=list)

    @property
    def best(self) -> Row | None:
        """The run with the best metric; None if there is none, or if not all were judged by the same."""
        judged = [row for row in self.rows if row.value is not None and row.value == row.value]
        if len({row.metric for row in judged}) != 1:
            return None
        sign = 1 if judged[0].metric in LOWER_IS_BETTER else -1
        return min(judged, key=lambda row: sign * (row.value or 0.0))

    def update(self, index: int, **changes: Any) -> None:
        self.rows[index] = replace(self.rows[index], **changes)
        self.save()

    def save(self) -> None:
        best = self.best
        write_json(self.path / SWEEP, {"best": best and best.run, "runs": [asdict(row) for row in self.rows]})


def make_points(
    sweeps: Sequence[str], make_recipe: Callable[[Sequence[str]], Recipe], sample: int | None = None
) -> list[Point]:
    """All combinations of `key=value,value` settings, or a random `sample` of them, the same for the same seed.

    `make_recipe` makes the recipe of some settings. A mistake in any of them is an error.
    """
    grid: dict[str, list[str]] = {}
    for sweep in sweeps:
        if "=" not in sweep or not sweep.partition("=")[0].strip():
            raise UserError(f"--sweep {sweep}: write it as key=value,value, for example --sweep lr=1e-3,5e-4")
        key, raw = split_setting(sweep)
        values = list({_shown(value): value for value in split_values(raw)}.values())
        if key in grid:
            raise UserError(f"--sweep {key}: is given twice; write all of its values after one --sweep")
        if not all(values):
            raise UserError(f"--sweep {sweep}: a value is missing; write them as {key}=value,value")
        grid[key] = values
    total = 1
    for values in grid.values():
        total *= len(values)
    if total > MOST_RUNS:
        raise UserError(f"--sweep: {total:,} combinations are too many (at most {MOST_RUNS:,}); leave out some values")
    combinations = [
        tuple(f"{key}={value}" for key, value in zip(grid, values, strict=True)) for values in product(*grid.values())
    ]
    if sample is not None and sample < len(combinations):
        seed = make_recipe(combinations[0]).train.seed
        chosen = sorted(random.Random(seed).sample(range(len(combinations)), sample))
        combinations = [combinations[index] for index in chosen]
    points = [Point(settings, make_recipe(settings)) for settings in combinations]
    for point in points:
        _check(point)
    return points


def split_values(text: str) -> list[str]:
    """The values of a list with commas; those inside of brackets or quotes separate nothing."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _OPENING + _CLOSING:
            depth += 1 if character in _OPENING else -1
        if character == "," and not quote and depth <= 0:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def _shown(raw: str) -> str:
    """A value in one form: 1e-3 and 0.001 are the same."""
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except (tomllib.TOMLDecodeError, ValueError, RecursionError):
        return raw
    return repr(value) if isinstance(value, int | float) and not isinstance(value, bool) else raw.strip("\"'")


def _check(point: Point) -> None:
    """Refuse what no run could begin with, before the first one does."""
    if any(STDIN in (getattr(point.recipe.data, name) or ()) for name in FILES):
        raise UserError(
            f"--sweep: every run reads the data, which stdin ({STDIN}) gives once; write it to a file first"
        )
    try:
        check_model(point.recipe, open_base(point.recipe)[0])
    except UserError as error:
        raise UserError(f"{', '.join(point.settings)}: {error}") from None


def run_sweep(
    points: Sequence[Point], out: str | Path, resume: bool, reporter: Callable[[Path], Reporter], ray: str | None = None
) -> Sweep:
    """Train every point; one that fails is noted in the table, and the others go on.

    With `resume`, finished runs are left as they are, and one that was interrupted goes on. `reporter` makes that of a
    run. A signal stops the run as `fit` does, and the sweep: Stopped is raised. `ray` is the address of a cluster to
    train on; there a signal ends runs as a kill does, and they go on from their last checkpoints.
    """
    if has_launcher():
        raise UserError("--sweep: starts its runs itself; under torchrun start one run at a time")
    path = Path(out)
    if not str(out):
        raise UserError("--out: is empty; name the directory that the sweep is written to")
    if not resume and (path / SWEEP).exists():
        raise UserError(f"{path}: there is a sweep already; continue it with --resume, or choose another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot make this directory: {error.strerror or error}") from None
    sweep = Sweep(path, [Row(point.name, point.values()) for point in points])
    sweep.save()
    points = [replace(point, recipe=_with_cache(point.recipe, path / CACHE)) for point in points]
    if ray is not None:
        try:
            _train_on_ray(sweep, points, resume, ray)
        except (SystemExit, KeyboardInterrupt):  # a signal
            reporter(path).say("the sweep stopped; the same command with --resume goes on")
            raise
        return sweep
    for index, point in enumerate(points):
        run = path / point.name
        report = reporter(run)
        report.say(f"run {index + 1} of {len(points)}: {point.name}")
        try:
            sweep.update(index, **_train(point.recipe, run, resume, report))
        except (SystemExit, KeyboardInterrupt):  # a signal
            sweep.update(index, state="stopped")
            report.say(f"the sweep stopped at run {index + 1} of {len(points)}; the same command with --resume goes on")
            raise
    return sweep


def _train(recipe: Recipe, run: Path, resume: bool, reporter: Reporter) -> dict[str, Any]:
    """Train a run -> what its row says, also if it fails."""
    try:
        return _result(fit(recipe, run, resume, reporter))
    except UserError as error:
        problem = str(error)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = f"not enough memory: {error}"
    reporter.say(f"failed: {problem}")
    return {"state": "failed", "error": problem}


def _train_on_ray(sweep: Sweep, points: Sequence[Point], resume: bool, address: str) -> None:
    """Train the points as trials of Ray Tune, as many at once as the cluster has processors, or GPUs, for.

    All machines have the data and the directory of the sweep at the same paths. A run that does not say how many
    processes it takes gets one. Each process gets a processor, and a GPU too if the device is cuda.
    """
    path = sweep.path.resolve()
    recipes = [_with_workers(point.recipe, point.recipe.train.workers or 1) for point in points]
    names = [point.name for point in points]
    cpus = max(recipe.train.workers for recipe in recipes)
    gpus = max(recipe.train.workers * recipe.train.device.startswith("cuda") for recipe in recipes)
    running: set[int] = set()

    def trial(config: dict[str, Any]) -> None:
        import torch
        from ray import tune

        recipe, name = recipes[config["index"]], names[config["index"]]
        torch.set_num_threads(1)
        tune.report({"row": json.dumps(_train(recipe, path / name, resume, Reporter()))})

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


def _with_cache(recipe: Recipe, cache: Path) -> Recipe:
    """Let the runs of a sweep share what is prepared of their data, unless the recipe names a cache."""
    if recipe.data.cache is not None:
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"cache": str(cache.resolve())})})


def _with_workers(recipe: Recipe, workers: int) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"workers": workers})})


def _result(report: TrainingReport) -> dict[str, Any]:
    progress = report.progress
    return {
        "state": "finished",
        "metric": report.metric,
        "value": report.value,
        "steps": progress.step,
        "seconds": progress.seconds,
        "parameters": report.parameters,
    }


def describe_sweep(sweep: Sweep) -> str:
    """Which run is best, and how many failed."""
    failed = sum(row.state == "failed" for row in sweep.rows)
    failures = f"; {plural(failed, 'run')} failed" if failed else ""
    best = sweep.best
    if best is not None and best.metric is not None:
        return f"best: {sweep.path / best.run} ({format_score(best.metric, best.value)}){failures}"
    metrics = sorted({row.metric for row in sweep.rows if row.metric is not None})
    why = f"runs were judged by different metrics ({', '.join(metrics)})" if len(metrics) > 1 else "none has a metric"
    return f"no best run: {why}{failures}"
