"""Sweeps: every run is what it would be alone; failed, stopped and finished ones are told apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from backwards import MakeRecipe
from safetensors.torch import load_file

from regard.data import prepare as preparing
from regard.errors import UserError
from regard.recipe import Recipe, assign, load_recipe
from regard.run import WEIGHTS
from regard.training.fit import fit
from regard.training.report import Reporter
from regard.training.sweep import SWEEP, Point, describe_sweep, make_points, run_sweep, split_values
from regard.training.trainer import Stopped
from toykit import call, small

Make = Callable[[Sequence[str]], Recipe]


@pytest.fixture
def make(recipe: MakeRecipe) -> Make:
    tables = recipe(steps=4).model_dump(mode="json", exclude_unset=True)

    def changed(settings: Sequence[str]) -> Recipe:
        new = json.loads(json.dumps(tables))
        for setting in settings:
            assign(new, setting)
        return load_recipe(new)

    return changed


def quiet(run: Path) -> Reporter:
    return Reporter()


def same_weights(a: Path, b: Path) -> bool:
    first, second = load_file(a / WEIGHTS), load_file(b / WEIGHTS)
    return all(first[name].equal(second[name]) for name in first) and first.keys() == second.keys()


def test_values_are_split_at_commas_outside_of_brackets_and_quotes() -> None:
    assert split_values("1e-3, 5e-4") == ["1e-3", "5e-4"]
    assert split_values('["a", "b"],"c,d",x') == ['["a", "b"]', '"c,d"', "x"]


def test_names_of_runs_are_safe_and_differ(make: Make) -> None:
    points = make_points(["lr=1e-3,5e-4,0.001", "dropout=0.1"], make)
    assert [point.name for point in points] == ["lr=0.001,dropout=0.1", "lr=0.0005,dropout=0.1"]
    odd = [Point((f'train.parts=["{name}"]',), make([])).name for name in ("../a/b", ".. a/b", "x" * 300, "x" * 301)]
    assert len(set(odd)) == 4 and all("/" not in name and len(name) < 140 for name in odd)


def test_random_points_are_of_the_grid_and_the_same_again(make: Make) -> None:
    sweeps = ["lr=1e-3,2e-3,3e-3,4e-3", "dropout=0,0.1,0.2"]
    grid = [point.name for point in make_points(sweeps, make)]
    some = [point.name for point in make_points(sweeps, make, 5)]
    assert len(grid) == 12 and len(some) == 5 and set(some) < set(grid)
    assert some == [point.name for point in make_points(sweeps, make, 5)]
    assert some != [point.name for point in make_points(sweeps, lambda more: make([*more, "seed=2"]), 5)]
    assert grid == [point.name for point in make_points(sweeps, make, 99)]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (["lr"], "--sweep lr: write it as key=value,value"),
        (["lrr=1"], "did you mean 'lr'?"),
        (["lr=1e-3,"], "a value is missing"),
        (["lr=1", "lr=2"], "is given twice"),
        (["lr=1e-3,-1"], "train.lr"),
        (["heads=2,3"], "heads=3: "),
        ([f"seed={','.join(map(str, range(200)))}", f"steps={','.join(map(str, range(1, 200)))}"], "too many"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(make: Make, sweep: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        make_points(sweep, make)
    assert message in str(error.value)


def test_runs_are_those_that_are_trained_alone_and_data_is_prepared_once(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    write = preparing._write
    monkeypatch.setattr(preparing, "_write", lambda **given: (written.append(given["path"]), write(**given)))
    points = make_points(["lr=1e-3,1e-2", "seed=1,2"], make)
    sweep = run_sweep(points, tmp_path / "sweep", False, quiet)
    assert len(written) == 1 and [row.state for row in sweep.rows] == ["finished"] * 4
    for point in points[1:3]:
        fit(point.recipe, tmp_path / "alone" / point.name, reporter=Reporter())
        assert same_weights(tmp_path / "alone" / point.name, tmp_path / "sweep" / point.name)
    best = min(sweep.rows, key=lambda row: row.value or 0)
    assert sweep.best == best and json.loads((tmp_path / "sweep" / SWEEP).read_text())["best"] == best.run
    # other data is prepared for itself
    run_sweep(make_points(["data.max_length=512,511"], make), tmp_path / "lengths", False, quiet)
    assert len(written) == 1 + 2 + 2


def test_a_run_that_diverges_is_a_row(make: Make, tmp_path: Path) -> None:
    points = make_points(["lr=1e-3,1e30,1e-2"], lambda more: make([*more, "warmup=0", "steps=6", "clip=0"]))
    sweep = run_sweep(points, tmp_path / "sweep", False, quiet)
    assert [row.state for row in sweep.rows] == ["finished", "failed", "finished"]
    assert "diverges" in (sweep.rows[1].error or "") and sweep.best in (sweep.rows[0], sweep.rows[2])
    assert "1 run failed" in describe_sweep(sweep)


class StopAt(Reporter):
    """Sends a signal in a step of one of the runs."""

    def __init__(self, run: Path, number: int) -> None:
        self._number = number if run.name == "seed=2" else 0

    def tick(self, step: int, done: float, seconds: float) -> None:
        if self._number and step == 2:
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_sweep_and_resuming_ends_it_the_same(
    make: Make, tmp_path: Path, number: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = make_points(["seed=1,2,3"], make)
    with pytest.raises(Stopped) as stop:
        run_sweep(points, tmp_path / "sweep", False, lambda run: StopAt(run, number))
    states = [row["state"] for row in json.loads((tmp_path / "sweep" / SWEEP).read_text())["runs"]]
    assert stop.value.code == code and states == ["finished", "stopped", "waiting"]
    with pytest.raises(UserError, match="there is a sweep already"):
        run_sweep(points, tmp_path / "sweep", False, quiet)
    before = (tmp_path / "sweep" / "seed=1" / WEIGHTS).stat().st_mtime_ns
    resumed = run_sweep(points, tmp_path / "sweep", True, quiet)
    assert (tmp_path / "sweep" / "seed=1" / WEIGHTS).stat().st_mtime_ns == before
    whole = run_sweep(points, tmp_path / "whole", False, quiet)
    assert [row.value for row in resumed.rows] == [row.value for row in whole.rows]
    assert all(same_weights(tmp_path / "sweep" / each.name, tmp_path / "whole" / each.name) for each in points)


def test_the_command_line_shows_the_table(make: Make, tmp_path: Path) -> None:
    (data,), out = make([]).data.train or (), tmp_path / "sweep"
    order = ("train", "--data", data, "--out", out, "--steps", 2, "--workers", 1, *small())
    result = call(*order, "--sweep", "dropout=0.1,0", "--sweep", "seed=1,2", "--sweep-random", 3)
    assert result.code == 0, result.err
    header, *rows = [line.split("\t") for line in result.lines]
    assert header == ["dropout", "seed", "result", "steps", "time", "run"] and len(rows) == 3
    assert all((out / row[-1] / WEIGHTS).is_file() and row[3] == "2" for row in rows)
    assert f"best: {out}/dropout=" in result.err
    assert "holds a sweep" in call(*order, "--resume").err
    assert "did you mean 'dropout'?" in call(*order, "--sweep", "dropuot=1").err
    assert "belongs to --sweep" in call(*order, "--sweep-random", 3).err
    stdin = ("train", "--data", "-", "--out", tmp_path / "stdin", "--sweep", "seed=1,2", "--task", "lm")
    assert "which stdin (-) gives once" in call(*stdin, "--preset", "gpt-tiny").err


def test_only_a_sweep_goes_to_a_cluster(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data,) = make([]).data.train or ()
    order = ("train", "--data", data, "--out", tmp_path / "sweep", "--ray", "local")
    assert "--ray: belongs to --sweep" in call(*order).err
    assert "--log: runs on a Ray cluster" in call(*order, "--sweep", "seed=1,2", "--log", "tensorboard").err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "--ray needs ray, which is not installed" in call(*order, "--sweep", "seed=1,2").err


@pytest.mark.slow
def test_trials_of_ray_tune_are_the_runs_of_the_sequence(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (data,) = make([]).data.train or ()
    order = ["train", "--data", data, "--steps", "4", "--workers", "1", *map(str, small())]
    order += ["--sweep", "seed=1,2", "--sweep", "lr=1e-3,1e30", "--set", "warmup=0", "--set", "clip=0"]
    (tmp_path / "home").mkdir()  # Ray keeps files of its own there
    done = subprocess.run(
        [sys.executable, "-m", "regard", *order, "--out", tmp_path / "ray", "--ray", "local"],
        env={**os.environ, "HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert call(*order, "--out", tmp_path / "sequence").code == 0
    rows = [json.loads((tmp_path / name / SWEEP).read_text())["runs"] for name in ("ray", "sequence")]
    for one, other in zip(*rows, strict=True):
        assert {**one, "seconds": None} == {**other, "seconds": None}
        if one["state"] == "finished":
            assert same_weights(tmp_path / "ray" / one["run"], tmp_path / "sequence" / one["run"])
