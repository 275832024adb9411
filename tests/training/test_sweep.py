"""Sweeps: every run is what it would be alone; failed, stopped and finished ones are told apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kit.backwards import MakeRecipe
from kit.toy import call, small
from regard.data import prepare as preparing
from regard.errors import UserError
from regard.recipe import Recipe, assign, load_recipe
from regard.run import WEIGHTS
from regard.training import log as logs, ray_tune
from regard.training.fit import fit
from regard.training.log import Sink
from regard.training.ray_tune import choose_cluster, run_on_ray
from regard.training.report import Reporter
from regard.training.sweep import SWEEP, Point, describe_sweep, make_points, run_sweep, split_values
from regard.training.trainer import Stopped

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


quiet = Reporter


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
    monkeypatch.setattr(preparing, "_write", lambda *given: (written.append(given), write(*given)))
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
    """Sends a signal in a step of the second run."""

    def __init__(self, number: int) -> None:
        self._number, self._second = number, False

    def say(self, text: str) -> None:
        self._second |= text.startswith("run 2 of ")

    def tick(self, step: int, done: float, seconds: float) -> None:
        if self._second and step == 2:
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_sweep_and_resuming_ends_it_the_same(
    make: Make, tmp_path: Path, number: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = make_points(["seed=1,2,3"], make)
    with pytest.raises(Stopped) as stop:
        run_sweep(points, tmp_path / "sweep", False, lambda: StopAt(number))
    states = [row["state"] for row in json.loads((tmp_path / "sweep" / SWEEP).read_text())["runs"]]
    assert stop.value.code == code and states == ["finished", "stopped", "waiting"]
    with pytest.raises(UserError, match="contains a sweep"):
        run_sweep(points, tmp_path / "sweep", False, quiet)
    before = (tmp_path / "sweep" / "seed=1" / WEIGHTS).stat().st_mtime_ns
    resumed = run_sweep(points, tmp_path / "sweep", True, quiet)
    assert (tmp_path / "sweep" / "seed=1" / WEIGHTS).stat().st_mtime_ns == before
    whole = run_sweep(points, tmp_path / "whole", False, quiet)
    assert [row.value for row in resumed.rows] == [row.value for row in whole.rows]
    assert all(same_weights(tmp_path / "sweep" / each.name, tmp_path / "whole" / each.name) for each in points)


def test_the_command_line_shows_the_table(make: Make, tmp_path: Path) -> None:
    (data,), out = make([]).data.train or (), tmp_path / "sweep"
    order = ("train", "--data", data, "--out", out, "--steps", 2, "--workers", 1, "--ray", "off", *small())
    result = call(*order, "--sweep", "dropout=0.1,0", "--sweep", "seed=1,2", "--sweep-random", 3)
    assert result.code == 0, result.err
    header, *rows = [line.split("\t") for line in result.lines]
    assert header == ["dropout", "seed", "result", "steps", "time", "run"] and len(rows) == 3
    assert all((out / row[-1] / WEIGHTS).is_file() and row[3] == "2" for row in rows)
    assert f"best: {out}/dropout=" in result.err
    assert "did you mean 'dropout'?" in call(*order, "--sweep", "dropuot=1").err
    order = order[: order.index("--ray")]
    assert "contains a sweep; repeat" in call(*order, "--resume").err
    assert "belongs to --sweep" in call(*order, "--sweep-random", 3).err
    stdin = ("train", "--data", "-", "--out", tmp_path / "stdin", "--sweep", "seed=1,2", "--task", "lm")
    assert "stdin (-) can be read once" in call(*stdin, "--preset", "gpt-tiny").err


def test_ray_tune_is_used_where_it_is_installed_and_pays(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(*settings: str, asked: str | None = None, runs: int = 3) -> str | None:
        seeds = ",".join(map(str, range(runs)))
        points = make_points([f"seed={seeds}"], lambda more: make([*more, *settings]))
        return choose_cluster(points, asked, tmp_path)

    monkeypatch.setattr(ray_tune, "cores", lambda: 4)
    monkeypatch.setattr(ray_tune, "_is_installed", lambda: False)
    assert (chosen("workers=1"), chosen(asked="local"), chosen(asked="off")) == (None, "local", None)
    monkeypatch.setattr(ray_tune, "_is_installed", lambda: True)
    assert (chosen(), chosen("workers=2"), chosen("workers=3")) == ("local", "local", None)
    assert (chosen(asked="off"), chosen(asked="auto"), chosen(runs=1)) == (None, "auto", None)
    monkeypatch.setattr(ray_tune, "choose_device", lambda request: torch.device("cuda"))
    monkeypatch.setattr(ray_tune.torch.cuda, "device_count", lambda: 3)
    assert (chosen(), chosen("device=cpu"), chosen("device=cuda:1")) == (None, "local", None)
    assert (chosen("device=cuda"), chosen("device=cuda", "workers=2")) == ("local", None)
    monkeypatch.setattr(ray_tune, "cores", lambda: 1)
    assert chosen("device=cuda") is None  # a run needs a processor too
    for on_ray in (True, False):  # a sweep goes on as it began
        (tmp_path / SWEEP).write_text(json.dumps({"ray": on_ray, "runs": []}))
        assert (chosen(), chosen(asked="off"), chosen(asked="auto")) == ("local" if on_ray else None, None, "auto")


def test_without_a_cluster_that_was_not_asked_for_runs_are_trained_here(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(**_: Any) -> None:
        raise RuntimeError("no shared memory")

    fake = FakeRay()
    monkeypatch.setattr(fake, "init", no_memory)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_tune, "_is_installed", lambda: True)
    monkeypatch.setattr(ray_tune, "cores", lambda: 2)
    (data,), out = make([]).data.train or (), tmp_path / "sweep"
    order = ("train", "--data", data, "--steps", 2, "--workers", 1, *small(), "--sweep", "seed=1,2", "--out", out)
    refused = call(*order, "--ray", "local")
    assert refused.code == 2 and "no cluster there: no shared memory" in refused.err and not out.exists()
    done = call(*order)
    assert done.code == 0 and "so runs are trained one after the other: --ray local: no cluster" in done.err
    assert states(out) == ["finished"] * 2 and json.loads((out / SWEEP).read_text())["ray"] is False


def test_only_a_sweep_goes_to_a_cluster(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data,) = make([]).data.train or ()
    order = ("train", "--data", data, "--out", tmp_path / "sweep", "--ray", "local")
    assert "--ray: belongs to --sweep" in call(*order).err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "--ray needs ray, which is not installed" in call(*order, "--sweep", "seed=1,2").err


class FakeRay:
    """Stands in for Ray where that is not installed: trials run one after the other, here, and end as `endings` say.

    "report" trains; "crash" is a process that has ended, and "early" one that did so before it said which it is;
    "stopped" has no result; the name of a signal sends it, which the real one makes a SystemExit(1) of.
    """

    def __init__(self, *endings: str, cpus: int = 4, gpus: int = 0) -> None:
        self.endings, self.resources = endings, {"CPU": cpus, "GPU": gpus}
        self.asked: dict[str, int] = {}
        self.connected = False
        self.reported: dict[str, Any] = {}
        self.tune = SimpleNamespace(
            Callback=object,
            RunConfig=SimpleNamespace,
            Tuner=lambda trainable, param_space, run_config: SimpleNamespace(
                fit=lambda: self.fit(trainable, param_space["index"], run_config.callbacks[0])
            ),
            with_resources=self.with_resources,
            grid_search=list,
            report=self.reported.update,
        )

    def init(self, **_: Any) -> None:
        self.connected = True

    def shutdown(self) -> None:
        self.connected = False

    def cluster_resources(self) -> dict[str, int]:
        return self.resources

    def with_resources(self, trainable: Any, resources: dict[str, int]) -> Any:
        self.asked = resources
        return trainable

    def fit(self, trainable: Any, indices: list[int], callback: Any) -> Iterator[SimpleNamespace]:
        try:
            return iter([self.run(trainable, *each, callback) for each in zip(indices, self.endings, strict=False)])
        except SystemExit:
            raise SystemExit(1) from None

    def run(self, trainable: Any, index: int, ending: str, callback: Any) -> SimpleNamespace:
        config, common = {"index": index}, {"iteration": 1, "trials": []}
        trial = SimpleNamespace(config=config)
        callback.on_trial_start(trial=trial, **common)
        if ending.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, ending))
        if ending == "report":
            trainable(config)
            callback.on_trial_result(trial=trial, result=dict(self.reported), **common)
            return SimpleNamespace(config=config, metrics=dict(self.reported), error=None)
        if ending == "stopped":
            return SimpleNamespace(config=config, metrics={"config": config}, error=None)
        callback.on_trial_error(trial=trial, **common)
        known = config if ending == "crash" else None
        return SimpleNamespace(config=known, metrics={}, error=RuntimeError("Traceback:\n  x\nkilled by signal 9"))


SetUp = Callable[..., tuple[FakeRay, list[list[str]]]]


def states(sweep: Path) -> list[str]:
    return [row["state"] for row in json.loads((sweep / SWEEP).read_text())["runs"]]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """A function that sets up a FakeRay with some endings -> it, and the states of all runs whenever one is trained."""
    monkeypatch.setenv("TUNE_DISABLE_SIGINT_HANDLER", "0")
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "1")
    seen: list[list[str]] = []

    def train(recipe: Recipe, run: Path, resume: bool, reporter: Reporter) -> dict[str, Any]:
        seen.append(states(run.parent))
        return {"state": "finished", "metric": "loss", "value": float(recipe.train.seed), "steps": 4}

    def set_up(*endings: str, **resources: int) -> tuple[FakeRay, list[list[str]]]:
        fake = FakeRay(*endings, **resources)
        monkeypatch.setitem(sys.modules, "ray", fake)
        monkeypatch.setattr(ray_tune, "train_point", train)
        return fake, seen

    return set_up


def test_on_ray_rows_are_written_as_trials_end(make: Make, tmp_path: Path, ray: SetUp) -> None:
    fake, seen = ray("report", "crash", "early", "report")
    points, out = make_points(["seed=1,2,3,4"], make), tmp_path / "sweep"
    sweep = run_on_ray(points, out, False, quiet(), "local")
    assert seen == [["waiting"] * 4, ["finished", "failed", "failed", "waiting"]]
    assert states(out) == ["finished", "failed", "failed", "finished"] and not fake.connected
    assert [row.error for row in sweep.rows[1:3]] == ["killed by signal 9", "its process died"]
    assert sweep.best is not None and sweep.best.run == "seed=1"


class Said(Reporter):
    def __init__(self, messages: list[str]) -> None:
        self._messages = messages

    def say(self, text: str) -> None:
        self._messages.append(text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_on_ray_a_signal_stops_the_sweep(make: Make, tmp_path: Path, ray: SetUp, number: signal.Signals) -> None:
    handlers, messages = [signal.getsignal(each) for each in (number, signal.SIGINT)], []
    fake, _ = ray("report", number.name, "report")
    points, out = make_points(["seed=1,2,3"], make), tmp_path / "sweep"
    with pytest.raises(Stopped) as stop:
        run_on_ray(points, out, False, Said(messages), "local")
    assert stop.value.code == 128 + number and not fake.connected
    assert states(out) == ["finished", "stopped", "waiting"]
    assert messages[0].startswith("Ray Tune trains 3 runs, as many at a time as fit, each with 1 process ")
    assert messages[1:] == ["the sweep stopped; continue it by the same command with --resume"]
    assert [signal.getsignal(each) for each in (number, signal.SIGINT)] == handlers
    ray("report", "report", "report")
    run_on_ray(points, out, True, quiet(), "local")
    assert states(out) == ["finished"] * 3


def test_on_ray_events_go_to_sinks(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[str]] = {}

    class Sent(Sink):
        name, package, module, command = "sent", "json", "json", ""

        def start(self, library: Any) -> None:
            seen[self.run.name] = []

        def facts(self, facts: Any) -> None:
            seen[self.run.name].append("start")

        def numbers(self, numbers: Any, step: int) -> None:
            seen[self.run.name].append(f"{step}")

        def finish(self) -> None:
            seen[self.run.name].append("end")

    monkeypatch.setattr(logs, "SINKS", {"sent": Sent})
    monkeypatch.setitem(sys.modules, "ray", FakeRay("report", "report"))
    run_on_ray(make_points(["seed=1,2"], make), tmp_path / "sweep", False, quiet(), "local", ["sent"])
    assert seen.keys() == {"seed=1", "seed=2"}
    assert all(events[0] == "start" and "4" in events and events[-1] == "end" for events in seen.values())


def test_on_ray_trials_without_a_result_were_stopped(make: Make, tmp_path: Path, ray: SetUp) -> None:
    """As Ray Tune returns them when it was interrupted in its own way; the last one had not begun."""
    ray("report", "stopped")
    with pytest.raises(Stopped) as stop:
        run_on_ray(make_points(["seed=1,2,3"], make), tmp_path / "sweep", False, quiet(), "local")
    assert stop.value.code == 130 and states(tmp_path / "sweep") == ["finished", "stopped", "waiting"]


def test_on_ray_a_process_has_a_processor_and_with_cuda_a_gpu(make: Make, tmp_path: Path, ray: SetUp) -> None:
    for settings, wanted in ((["workers=2"], (2, 0)), (["workers=2", "device=cuda"], (2, 2)), (["workers=0"], (1, 0))):
        fake, _ = ray("report", gpus=2)
        points = make_points(["seed=1"], lambda more, settings=settings: make([*more, *settings]))
        run_on_ray(points, tmp_path / ",".join(settings), False, quiet(), "local")
        assert fake.asked == dict(zip(("cpu", "gpu"), wanted, strict=True))
    for settings, message in ((["workers=8"], "8 processors, but .* has 4"), (["device=cuda"], "1 GPU, but .* has 0")):
        fake, _ = ray("report")
        points = make_points(["seed=1"], lambda more, settings=settings: make([*more, *settings]))
        with pytest.raises(UserError, match=f"--ray local: a run needs {message}"):
            run_on_ray(points, tmp_path / message[:1], False, quiet(), "local")
        assert not fake.connected


@pytest.mark.slow
def test_trials_of_ray_tune_are_the_runs_of_the_sequence(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (data,) = make([]).data.train or ()
    order = ["train", "--steps", "4", "--workers", "1", *map(str, small())]
    order += ["--sweep", "seed=1,2", "--sweep", "lr=1e-3,1e30", "--set", "warmup=0", "--set", "clip=0"]
    (tmp_path / "home").mkdir()  # Ray keeps files of its own there
    here = ["--data", Path(data).name, "--out", "ray"]  # relative paths, and Ray Tune because it is installed
    done = subprocess.run(
        [sys.executable, "-m", "regard", *order, *here], cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and "Ray Tune trains 4 runs" in done.stderr, done.stderr
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["seed", "1", "1", "2", "2"]
    said = sorted((tmp_path / "ray").glob("*.txt"))
    assert len(said) == 4 and all("plan: 4 steps" in path.read_text() for path in said)
    assert call(*order, "--data", data, "--out", tmp_path / "sequence", "--ray", "off").code == 0
    rows = [json.loads((tmp_path / name / SWEEP).read_text())["runs"] for name in ("ray", "sequence")]
    for one, other in zip(*rows, strict=True):
        assert {**one, "seconds": None} == {**other, "seconds": None}
        if one["state"] == "finished":
            assert same_weights(tmp_path / "ray" / one["run"], tmp_path / "sequence" / one["run"])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_ray_tune_and_resuming_finishes(make: Make, tmp_path: Path, number: int, code: int) -> None:
    pytest.importorskip("ray")
    (data,), out = make([]).data.train or (), tmp_path / "ray"
    order = ["train", "--data", data, "--steps", "300", "--workers", "1", *map(str, small()), "--sweep", "seed=1,2"]
    command = [sys.executable, "-m", "regard", *order, "--out", out, "--ray", "local"]
    (tmp_path / "home").mkdir()
    environment = {**os.environ, "HOME": str(tmp_path / "home")}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 200
    while not (out / "seed=1" / "log.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, messages = process.communicate(timeout=200)
    assert process.returncode == code, messages
    assert states(out)[0] == "stopped" and "failed" not in states(out)
    assert "the sweep stopped; continue it by the same command with --resume" in messages
    done = subprocess.run(
        [*command, "--resume"], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert states(out) == ["finished"] * 2
