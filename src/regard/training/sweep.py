"""A sweep: one run for each combination of settings, trained one after the other, and a table of the results."""

from __future__ import annotations

import math
import random
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any, Literal

from regard.data.reader import STDIN
from regard.errors import UserError, is_out_of_memory, plural
from regard.files import make_directory, read_json, require_no_links, write_json
from regard.metrics import LOWER_IS_BETTER
from regard.parallel.ranks import has_launcher
from regard.recipe import FILES, Recipe, split_setting
from regard.training.fit import fit
from regard.training.log import with_sinks
from regard.training.plan import check_model
from regard.training.report import Reporter, format_score
from regard.training.weights import open_base

SWEEP = "sweep.json"
CACHE = "data"  # subdirectory with prepared data
MAX_NAME_LENGTH = 120  # of a directory
MAX_RUNS = 10_000
OPENING = "[{("
CLOSING = "]})"

State = Literal["waiting", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class Point:
    """One combination of the settings of a sweep."""

    settings: tuple[str, ...]  # as for --set
    recipe: Recipe

    @property
    def name(self) -> str:
        """The name of its directory: the settings, cut and with a hash if they are not a valid file name."""
        name = ",".join(f"{key}={value}" for key, value in self.values().items())
        safe = re.sub(r"[^A-Za-z0-9._=,+-]", "_", name)
        if safe == name and len(name) <= MAX_NAME_LENGTH:
            return name
        return f"{safe[:MAX_NAME_LENGTH]}-{blake2b(name.encode(), digest_size=4).hexdigest()}"

    def values(self) -> dict[str, str]:
        """The normalised value of every swept key."""
        return {key: _shown(raw) for key, raw in map(split_setting, self.settings)}


@dataclass(frozen=True)
class Row:
    """The result of a point."""

    run: str  # subdirectory
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
    """The table of a sweep; every change is saved."""

    path: Path
    rows: list[Row] = field(default_factory=list)
    on_ray: bool = False  # a resumed sweep uses Ray again, with the same number of processes per run

    @property
    def best(self) -> Row | None:
        """The run with the best metric; None if no run has a metric, or the runs have different metrics."""
        scored = [row for row in self.rows if row.value is not None and row.value == row.value]
        if len({row.metric for row in scored}) != 1:
            return None
        sign = 1 if scored[0].metric in LOWER_IS_BETTER else -1
        return min(scored, key=lambda row: sign * (row.value or 0.0))

    def update(self, index: int, **changes: Any) -> None:
        self.rows[index] = replace(self.rows[index], **changes)
        self.save()

    def save(self) -> None:
        best = self.best
        runs = [asdict(row) for row in self.rows]
        write_json(self.path / SWEEP, {"best": best and best.run, "ray": self.on_ray, "runs": runs})


def make_points(
    sweeps: Sequence[str], make_recipe: Callable[[Sequence[str]], Recipe], sample: int | None = None
) -> list[Point]:
    """All combinations of `key=value,value` settings, or a random sample of them, drawn with the seed of the recipe."""
    grid: dict[str, list[str]] = {}
    for sweep in sweeps:
        if "=" not in sweep or not sweep.partition("=")[0].strip():
            raise UserError(f"--sweep {sweep}: write it as key=value,value, for example --sweep lr=1e-3,5e-4")
        key, raw = split_setting(sweep)
        values = list({_shown(value): value for value in split_values(raw)}.values())
        if key in grid:
            raise UserError(f"--sweep {key}: is given twice; write all values after one --sweep")
        if not all(values):
            raise UserError(f"--sweep {sweep}: a value is missing; write them as {key}=value,value")
        grid[key] = values
    total = math.prod(map(len, grid.values()))
    if total > MAX_RUNS:
        raise UserError(f"--sweep: {total:,} combinations are too many (at most {MAX_RUNS:,}); leave out some values")
    combinations = list(product(*([f"{key}={value}" for value in values] for key, values in grid.items())))
    if sample is not None and sample < len(combinations):
        seed = make_recipe(combinations[0]).train.seed
        chosen = sorted(random.Random(seed).sample(range(len(combinations)), sample))
        combinations = [combinations[index] for index in chosen]
    points = [Point(settings, make_recipe(settings)) for settings in combinations]
    for point in points:  # mistakes are reported before the first run begins
        if any(STDIN in (getattr(point.recipe.data, name) or ()) for name in FILES):
            raise UserError(f"--sweep: every run reads the data, but stdin ({STDIN}) can be read once; use a file")
        try:
            base = open_base(point.recipe)
            check_model(point.recipe, base and base.config)
        except UserError as error:
            raise UserError(f"{', '.join(point.settings)}: {error}") from None
    return points


def split_values(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
    values = [""]
    depth = 0
    quote = ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in OPENING + CLOSING:
            depth += 1 if character in OPENING else -1
        if character == "," and not quote and depth <= 0:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def _shown(raw: str) -> str:
    """Normalise a value, so that 1e-3 and 0.001 are equal."""
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except (tomllib.TOMLDecodeError, ValueError, RecursionError):
        return raw
    return repr(value) if isinstance(value, int | float) and not isinstance(value, bool) else raw.strip("\"'")


def check_sweep(out: str | Path, resume: bool) -> None:
    """Raise UserError if no sweep can begin in a directory or, with `resume`, continue in it."""
    if has_launcher():
        raise UserError("--sweep: starts its runs itself; with torchrun train one run at a time")
    if not str(out):
        raise UserError("--out: is empty; name the directory for the sweep")
    if not resume and (Path(out) / SWEEP).exists():
        raise UserError(f"{out}: contains a sweep; continue it with --resume, or choose another --out")


def was_on_ray(out: str | Path) -> bool | None:
    """Whether the sweep in a directory was begun on Ray; None without a sweep."""
    path = Path(out) / SWEEP
    return bool(read_json(path).get("ray")) if path.is_file() else None


def open_sweep(
    points: Sequence[Point], out: str | Path, resume: bool, on_ray: bool = False
) -> tuple[Sweep, list[Point]]:
    """Begin or continue a sweep -> its table, and the points with a shared cache for their data."""
    check_sweep(out, resume)
    path = Path(out)
    make_directory(path, str(path))
    require_no_links(path, (SWEEP, CACHE, *(point.name for point in points)))
    sweep = Sweep(path, [Row(point.name, point.values()) for point in points], on_ray)
    sweep.save()
    shared = str((path / CACHE).resolve())
    recipes = [point.recipe.with_data(cache=point.recipe.data.cache or shared) for point in points]
    return sweep, [replace(point, recipe=recipe) for point, recipe in zip(points, recipes, strict=True)]


def run_sweep(
    points: Sequence[Point], out: str | Path, resume: bool, display: Callable[[], Reporter], log: Sequence[str] = ()
) -> Sweep:
    """Train all points in turn; failures go to the table. `display` makes the reporter of a run, `log` names sinks."""
    sweep, points = open_sweep(points, out, resume)
    for index, point in enumerate(points):
        run = sweep.path / point.name
        reporter = with_sinks(display(), log, run)
        reporter.say(f"run {index + 1} of {len(points)}: {point.name}")
        try:
            sweep.update(index, **train_point(point.recipe, run, resume, reporter))
        except (SystemExit, KeyboardInterrupt):  # a signal
            sweep.update(index, state="stopped")
            where = f"run {index + 1} of {len(points)}"
            reporter.say(f"the sweep stopped at {where}; continue it by the same command with --resume")
            raise
    return sweep


def train_point(recipe: Recipe, run: Path, resume: bool, reporter: Reporter) -> dict[str, Any]:
    """Train a run -> the fields of its row, which record a failure."""
    try:
        report = fit(recipe, run, resume, reporter)
        return {
            "state": "finished",
            "metric": report.metric,
            "value": report.value,
            "steps": report.progress.step,
            "seconds": report.progress.seconds,
            "parameters": report.parameters,
        }
    except UserError as error:
        problem = str(error)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = f"not enough memory: {error}"
    reporter.say(f"failed: {problem}")
    return {"state": "failed", "error": problem}


def describe_sweep(sweep: Sweep) -> str:
    """A message with the best run and the number of failed runs."""
    failed = sum(row.state == "failed" for row in sweep.rows)
    failures = f"; {plural(failed, 'run')} failed" if failed else ""
    best = sweep.best
    if best is not None and best.metric is not None:
        return f"best: {sweep.path / best.run} ({format_score(best.metric, best.value)}){failures}"
    metrics = sorted({row.metric for row in sweep.rows if row.metric is not None})
    reason = f"the runs have different metrics ({', '.join(metrics)})" if len(metrics) > 1 else "none has a metric"
    return f"no best run: {reason}{failures}"
