"""Sweeps: every run equals a separate run, and failed, stopped and finished runs are distinguished."""

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

    def make_recipe(settings: Sequence[str]) -> Recipe:
        new = json.loads(json.dumps(tables))
        for setting in settings:
            assign(new, setting)
        return load_recipe(new)

    return make_recipe


def same_weights(a: Path, b: Path) -> bool:
    first = load_file(a / WEIGHTS)
    second = load_file(b / WEIGHTS)
    return all(first[name].equal(second[name]) for name in first) and first.keys() == second.keys()


def test_values_are_split_at_commas_outside_brackets_and_quotes() -> None:
    assert split_values("1e-3, 5e-4") == ["1e-3", "5e-4"]
    assert split_values('["a", "b"],"c,d",x') == ['["a", "b"]', '"c,d"', "x"]


def test_run_names_are_safe_and_unique(make: Make) -> None:
    points = make_points(["lr=1e-3,5e-4,0.001", "dropout=0.1"], make)
    assert [point.name for point in points] == ["lr=0.001,dropout=0.1", "lr=0.0005,dropout=0.1"]
    odd = [Point((f'train.parts=["{name}"]',), make([])).name for name in ("../a/b", ".. a/b", "x" * 300, "x" * 301)]
    assert len(set(odd)) == 4 and all("/" not in name and len(name) < 140 for name in odd)


def test_random_points_are_a_reproducible_sample_of_the_grid(make: Make) -> None:
    sweeps = ["lr=1e-3,2e-3,3e-3,4e-3", "dropout=0,0.1,0.2"]
    grid = [point.name for point in make_points(sweeps, make)]
    sample = [point.name for point in make_points(sweeps, make, 5)]
    assert len(grid) == 12 and len(sample) == 5 and set(sample) < set(grid)
    assert sample == [point.name for point in make_points(sweeps, make, 5)]
    assert sample != [point.name for point in make_points(sweeps, lambda more: make([*more, "seed=2"]), 5)]
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
def test_invalid_sweeps_are_refused_before_training(make: Make, sweep: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        make_points(sweep, make)
    assert message in str(error.value)


def test_sweep_runs_equal_separate_runs_and_data_is_prepared_once(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = []
    write = preparing._write
    monkeypatch.setattr(preparing, "_write", lambda *arguments: (writes.append(arguments), write(*arguments)))
    points = make_points(["lr=1e-3,1e-2", "seed=1,2"], make)
    sweep = run_sweep(points, tmp_path / "sweep", False, Reporter)
    assert len(writes) == 1 and [row.state for row in sweep.rows] == ["finished"] * 4
    for point in points[1:3]:
        fit(point.recipe, tmp_path / "separate" / point.name, reporter=Reporter())
        assert same_weights(tmp_path / "separate" / point.name, tmp_path / "sweep" / point.name)
    best = min(sweep.rows, key=lambda row: row.value or 0)
    assert sweep.best == best and json.loads((tmp_path / "sweep" / SWEEP).read_text())["best"] == best.run
    # settings that change the data prepare it again
    run_sweep(make_points(["data.max_length=512,511"], make), tmp_path / "lengths", False, Reporter)
    assert len(writes) == 1 + 2 + 2


def test_diverged_run_is_listed_as_failed(make: Make, tmp_path: Path) -> None:
    points = make_points(["lr=1e-3,1e30,1e-2"], lambda more: make([*more, "warmup=0", "steps=6", "clip=0"]))
    sweep = run_sweep(points, tmp_path / "sweep", False, Reporter)
    assert [row.state for row in sweep.rows] == ["finished", "failed", "finished"]
    assert "diverges" in (sweep.rows[1].error or "") and sweep.best in (sweep.rows[0], sweep.rows[2])
    assert "1 run failed" in describe_sweep(sweep)


class SignalInSecondRun(Reporter):
    """Sends a signal after step 2 of the second run."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._second = False

    def say(self, text: str) -> None:
        self._second |= text.startswith("run 2 of ")

    def tick(self, step: int, done: float, seconds: float) -> None:
        if self._second and step == 2:
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_stops_the_sweep_and_resume_gives_identical_weights(
    make: Make, tmp_path: Path, number: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = make_points(["seed=1,2,3"], make)
    with pytest.raises(Stopped) as stop:
        run_sweep(points, tmp_path / "sweep", False, lambda: SignalInSecondRun(number))
    states = [row["state"] for row in json.loads((tmp_path / "sweep" / SWEEP).read_text())["runs"]]
    assert stop.value.code == code and states == ["finished", "stopped", "waiting"]
    with pytest.raises(UserError, match="contains a sweep"):
        run_sweep(points, tmp_path / "sweep", False, Reporter)
    before = (tmp_path / "sweep" / "seed=1" / WEIGHTS).stat().st_mtime_ns
    resumed = run_sweep(points, tmp_path / "sweep", True, Reporter)
    assert (tmp_path / "sweep" / "seed=1" / WEIGHTS).stat().st_mtime_ns == before
    whole = run_sweep(points, tmp_path / "whole", False, Reporter)
    assert [row.value for row in resumed.rows] == [row.value for row in whole.rows]
    assert all(same_weights(tmp_path / "sweep" / each.name, tmp_path / "whole" / each.name) for each in points)


def test_command_line_prints_a_table_of_the_runs(make: Make, tmp_path: Path) -> None:
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


def test_ray_tune_is_chosen_if_it_is_installed_and_runs_fit_in_parallel(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cluster(*settings: str, option: str | None = None, runs: int = 3) -> str | None:
        seeds = ",".join(map(str, range(runs)))
        points = make_points([f"seed={seeds}"], lambda more: make([*more, *settings]))
        return choose_cluster(points, option, tmp_path)

    monkeypatch.setattr(ray_tune, "cores", lambda: 4)
    monkeypatch.setattr(ray_tune, "_is_installed", lambda: False)
    assert (cluster("workers=1"), cluster(option="local"), cluster(option="off")) == (None, "local", None)
    monkeypatch.setattr(ray_tune, "_is_installed", lambda: True)
    assert (cluster(), cluster("workers=2"), cluster("workers=3")) == ("local", "local", None)
    assert (cluster(option="off"), cluster(option="auto"), cluster(runs=1)) == (None, "auto", None)
    monkeypatch.setattr(ray_tune, "choose_device", lambda request: torch.device("cuda"))
    monkeypatch.setattr(ray_tune.torch.cuda, "device_count", lambda: 3)
    assert (cluster(), cluster("device=cpu"), cluster("device=cuda:1")) == (None, "local", None)
    assert (cluster("device=cuda"), cluster("device=cuda", "workers=2")) == ("local", None)
    monkeypatch.setattr(ray_tune, "cores", lambda: 1)
    assert cluster("device=cuda") is None  # a run also needs a core
    for on_ray in (True, False):  # a resumed sweep keeps its choice
        (tmp_path / SWEEP).write_text(json.dumps({"ray": on_ray, "runs": []}))
        assert (cluster(), cluster(option="off"), cluster(option="auto")) == ("local" if on_ray else None, None, "auto")


def test_sweep_trains_sequentially_if_ray_fails_to_start(
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
    explicit = call(*order, "--ray", "local")
    assert explicit.code == 2 and "no cluster there: no shared memory" in explicit.err and not out.exists()
    default = call(*order)
    assert default.code == 0 and "so runs are trained one after the other: --ray local: no cluster" in default.err
    assert states(out) == ["finished"] * 2 and json.loads((out / SWEEP).read_text())["ray"] is False


def test_ray_option_requires_a_sweep_and_the_ray_package(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data,) = make([]).data.train or ()
    order = ("train", "--data", data, "--out", tmp_path / "sweep", "--ray", "local")
    assert "--ray: belongs to --sweep" in call(*order).err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "--ray needs ray, which is not installed" in call(*order, "--sweep", "seed=1,2").err


class FakeRay:
    """Replacement for Ray: runs trials one after the other in this process; each ends according to `endings`.

    "report": the trial trains. "crash": its process dies. "early": its process dies before it reports its config.
    "stopped": it has no result. Name of a signal: the signal is sent, which Ray turns into SystemExit(1).
    """

    def __init__(self, *endings: str, cpus: int = 4, gpus: int = 0) -> None:
        self.endings = endings
        self.resources = {"CPU": cpus, "GPU": gpus}
        self.trial_resources: dict[str, int] = {}
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
        self.trial_resources = resources
        return trainable

    def fit(self, trainable: Any, indices: list[int], callback: Any) -> Iterator[SimpleNamespace]:
        try:
            return iter([self.run(trainable, *each, callback) for each in zip(indices, self.endings, strict=False)])
        except SystemExit:
            raise SystemExit(1) from None

    def run(self, trainable: Any, index: int, ending: str, callback: Any) -> SimpleNamespace:
        config = {"index": index}
        common = {"iteration": 1, "trials": []}
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
        reported_config = config if ending == "crash" else None
        return SimpleNamespace(
            config=reported_config, metrics={}, error=RuntimeError("Traceback:\n  x\nkilled by signal 9")
        )


SetUp = Callable[..., tuple[FakeRay, list[list[str]]]]


def states(sweep: Path) -> list[str]:
    return [row["state"] for row in json.loads((sweep / SWEEP).read_text())["runs"]]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """Factory of FakeRay -> the instance, and a list that gets the states of all runs whenever one is trained."""
    monkeypatch.setenv("TUNE_DISABLE_SIGINT_HANDLER", "0")
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "1")
    history: list[list[str]] = []

    def train(recipe: Recipe, run: Path, resume: bool, reporter: Reporter) -> dict[str, Any]:
        history.append(states(run.parent))
        return {"state": "finished", "metric": "loss", "value": float(recipe.train.seed), "steps": 4}

    def set_up(*endings: str, **resources: int) -> tuple[FakeRay, list[list[str]]]:
        fake = FakeRay(*endings, **resources)
        monkeypatch.setitem(sys.modules, "ray", fake)
        monkeypatch.setattr(ray_tune, "train_point", train)
        return fake, history

    return set_up


def test_sweep_table_on_ray_is_updated_when_trials_end(make: Make, tmp_path: Path, ray: SetUp) -> None:
    fake, history = ray("report", "crash", "early", "report")
    points, out = make_points(["seed=1,2,3,4"], make), tmp_path / "sweep"
    sweep = run_on_ray(points, out, False, Reporter(), "local")
    assert history == [["waiting"] * 4, ["finished", "failed", "failed", "waiting"]]
    assert states(out) == ["finished", "failed", "failed", "finished"] and not fake.connected
    assert [row.error for row in sweep.rows[1:3]] == ["killed by signal 9", "its process died"]
    assert sweep.best is not None and sweep.best.run == "seed=1"


class CollectingReporter(Reporter):
    def __init__(self, messages: list[str]) -> None:
        self._messages = messages

    def say(self, text: str) -> None:
        self._messages.append(text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_a_sweep_on_ray(make: Make, tmp_path: Path, ray: SetUp, number: signal.Signals) -> None:
    handlers = [signal.getsignal(each) for each in (number, signal.SIGINT)]
    messages = []
    fake, _ = ray("report", number.name, "report")
    points, out = make_points(["seed=1,2,3"], make), tmp_path / "sweep"
    with pytest.raises(Stopped) as stop:
        run_on_ray(points, out, False, CollectingReporter(messages), "local")
    assert stop.value.code == 128 + number and not fake.connected
    assert states(out) == ["finished", "stopped", "waiting"]
    assert messages[0].startswith("Ray Tune trains 3 runs, as many at a time as fit, each with 1 process ")
    assert messages[1:] == ["the sweep stopped; continue it by the same command with --resume"]
    assert [signal.getsignal(each) for each in (number, signal.SIGINT)] == handlers
    ray("report", "report", "report")
    run_on_ray(points, out, True, Reporter(), "local")
    assert states(out) == ["finished"] * 3


def test_sinks_receive_events_of_trials_on_ray(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, list[str]] = {}

    class CallSink(Sink):
        name, package, module, command = "sent", "json", "json", ""

        def start(self, library: Any) -> None:
            calls[self.run.name] = []

        def facts(self, facts: Any) -> None:
            calls[self.run.name].append("start")

        def numbers(self, numbers: Any, step: int) -> None:
            calls[self.run.name].append(f"{step}")

        def finish(self) -> None:
            calls[self.run.name].append("end")

    monkeypatch.setattr(logs, "SINKS", {"sent": CallSink})
    monkeypatch.setitem(sys.modules, "ray", FakeRay("report", "report"))
    run_on_ray(make_points(["seed=1,2"], make), tmp_path / "sweep", False, Reporter(), "local", ["sent"])
    assert calls.keys() == {"seed=1", "seed=2"}
    assert all(events[0] == "start" and "4" in events and events[-1] == "end" for events in calls.values())


def test_trials_without_a_result_on_ray_are_stopped(make: Make, tmp_path: Path, ray: SetUp) -> None:
    """Ray Tune returns such trials if it handles an interrupt itself; the last trial has not started."""
    ray("report", "stopped")
    with pytest.raises(Stopped) as stop:
        run_on_ray(make_points(["seed=1,2,3"], make), tmp_path / "sweep", False, Reporter(), "local")
    assert stop.value.code == 130 and states(tmp_path / "sweep") == ["finished", "stopped", "waiting"]


def test_trials_on_ray_request_a_core_and_with_cuda_a_gpu_per_process(make: Make, tmp_path: Path, ray: SetUp) -> None:
    for settings, resources in (
        (["workers=2"], (2, 0)),
        (["workers=2", "device=cuda"], (2, 2)),
        (["workers=0"], (1, 0)),
    ):
        fake, _ = ray("report", gpus=2)
        points = make_points(["seed=1"], lambda more, settings=settings: make([*more, *settings]))
        run_on_ray(points, tmp_path / ",".join(settings), False, Reporter(), "local")
        assert fake.trial_resources == dict(zip(("cpu", "gpu"), resources, strict=True))
    for settings, message in ((["workers=8"], "8 processors, but .* has 4"), (["device=cuda"], "1 GPU, but .* has 0")):
        fake, _ = ray("report")
        points = make_points(["seed=1"], lambda more, settings=settings: make([*more, *settings]))
        with pytest.raises(UserError, match=f"--ray local: a run needs {message}"):
            run_on_ray(points, tmp_path / message[:1], False, Reporter(), "local")
        assert not fake.connected


@pytest.mark.slow
def test_ray_tune_gives_the_runs_of_a_sequential_sweep(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (data,) = make([]).data.train or ()
    order = ["train", "--steps", "4", "--workers", "1", *map(str, small())]
    order += ["--sweep", "seed=1,2", "--sweep", "lr=1e-3,1e30", "--set", "warmup=0", "--set", "clip=0"]
    (tmp_path / "home").mkdir()  # for the files of Ray
    here = ["--data", Path(data).name, "--out", "ray"]  # relative paths; Ray Tune is the default if installed
    process = subprocess.run(
        [sys.executable, "-m", "regard", *order, *here], cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert process.returncode == 0 and "Ray Tune trains 4 runs" in process.stderr, process.stderr
    assert [line.split("\t")[0] for line in process.stdout.splitlines()] == ["seed", "1", "1", "2", "2"]
    outputs = sorted((tmp_path / "ray").glob("*.txt"))
    assert len(outputs) == 4 and all("plan: 4 steps" in path.read_text() for path in outputs)
    assert call(*order, "--data", data, "--out", tmp_path / "sequence", "--ray", "off").code == 0
    rows = [json.loads((tmp_path / name / SWEEP).read_text())["runs"] for name in ("ray", "sequence")]
    for one, other in zip(*rows, strict=True):
        assert {**one, "seconds": None} == {**other, "seconds": None}
        if one["state"] == "finished":
            assert same_weights(tmp_path / "ray" / one["run"], tmp_path / "sequence" / one["run"])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_stops_ray_tune_and_resume_finishes_the_sweep(
    make: Make, tmp_path: Path, number: int, code: int
) -> None:
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
    resumed = subprocess.run(
        [*command, "--resume"], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert resumed.returncode == 0, resumed.stderr
    assert states(out) == ["finished"] * 2
