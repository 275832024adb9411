"""Resume is continue: killed anywhere, a run ends bit for bit as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kit.backwards import MakeRecipe
from regard.errors import UserError
from regard.parallel import children
from regard.parallel.children import Channel, Child, ChildDied
from regard.recipe import Recipe, load_recipe
from regard.run import Run
from regard.training.fit import fit
from regard.training.log import read_log
from regard.training.report import CLOCK_FIELDS, Reporter
from regard.training.trainer import Stopped

MARK = "REGARD_TEST_RUN"  # in the environment of a training process and of all that it starts


def run_and_kill(recipe: Recipe, run: Path, step: int, delay: float, number: int = signal.SIGKILL) -> int | None:
    """Train in a process of its own that sends itself a signal a moment after a step -> its exit status."""
    tables = recipe.model_dump(mode="json", exclude_unset=True)
    settings = {"recipe": tables, "run": str(run), "step": step, "delay": delay, "number": int(number)}
    child = children.spawn("test_resume:train_and_kill", settings, environment={MARK: str(run)})
    try:
        return child.wait(120)
    finally:
        child.close()


def train_and_kill(channel: Channel, settings: dict[str, Any]) -> None:
    def kill() -> None:
        threading.Timer(settings["delay"], os.kill, (os.getpid(), settings["number"])).start()

    run = Path(settings["run"])
    fit(load_recipe(settings["recipe"]), run, resume=True, reporter=CallAfter(settings["step"], kill))


def result(run: Path) -> dict[str, Any]:
    """Everything that must not depend on interruptions."""
    # not the bytes of the files: the library for shards writes tensors in any order
    tensors = {
        f"{path.relative_to(run)} {name}": x.numpy().tobytes()
        for path in run.rglob("*.safetensors")
        for name, x in load_file(path).items()
    }
    log = [
        {key: value for key, value in event.items() if key not in CLOCK_FIELDS} for event in read_log(run / "log.jsonl")
    ]
    names = sorted(str(p.relative_to(run)) for p in run.rglob("*"))
    return {"tensors": tensors, "log": log, "names": names}


def others(run: Path) -> list[int]:
    """The processes that `run_and_kill` has started for a run."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{MARK}={run}".encode() in variables:
            pids.append(int(entry.parent.name))
    return pids


class CallAfter(Reporter):
    """Does something after a step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._step, self._act = step, act

    def tick(self, step: int, done: float, seconds: float) -> None:
        if step == self._step:
            self._act()


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("workers", "precision", "strategy"),
    [
        (1, "fp32", "ddp"),
        (3, "fp32", "ddp"),  # the bits of a sum of three depend on their order
        (2, "fp32", "fsdp"),
        pytest.param(2, "fp32", "ddp", marks=pytest.mark.slow),
        pytest.param(2, "bf16", "ddp", marks=pytest.mark.slow),
        pytest.param(1, "fp32", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_interrupted_runs_end_like_uninterrupted_ones(
    recipe: MakeRecipe, tmp_path: Path, ranks: list[Child], workers: int, precision: str, strategy: str
) -> None:
    """Killed at a random moment, stopped by a signal, left by a worker: the end is the same bit for bit.

    A worker that was stopped itself does not keep the signal waiting, though the step waits for it.
    """
    settings = {"average": 2, "ema": 0.9, "metric": "wer", "accumulate": 2, "precision": precision}
    order = recipe(steps=24, validate_every=6, workers=workers, strategy=strategy, **settings)
    uninterrupted, run = tmp_path / "uninterrupted", tmp_path / "run"
    fit(order, uninterrupted, reporter=Reporter())

    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it if the test fails
    draw = random.Random(seed)
    at, delay = draw.randint(1, 12), draw.random() / 50
    assert run_and_kill(order, run, at, delay) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while (left := others(run)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, "a worker outlives the first process"

    def terminate() -> None:
        ranks[-1].signal(signal.SIGSTOP)
        threading.Timer(0.5, send, (signal.SIGTERM,)).start()

    if workers == 1:
        assert run_and_kill(order, run, 15, 0.0, signal.SIGTERM) == 143
    else:
        with pytest.raises(Stopped) as stopped:
            fit(order, run, resume=True, reporter=CallAfter(15, terminate))
        assert stopped.value.code == 143
        assert signal.set_wakeup_fd(-1) == -1
    saved = [p.name for p in (run / "training").glob("step-*")]
    assert len(saved) == 1 and saved[0] >= "step-00000016"  # the step was finished
    assert not others(run) and all(rank.poll() is not None for rank in ranks)

    if workers > 1:
        first = len(ranks)
        died = rf"process 1 of {workers} was killed by signal 9 \(out of memory\?\); the last checkpoint is safe, go on"
        with pytest.raises(ChildDied, match=died):
            fit(order, run, resume=True, reporter=CallAfter(20, lambda: ranks[first].kill()))

    fit(order, run, resume=True, reporter=Reporter())
    assert result(run) == result(uninterrupted), f"killed {delay} s after step {at}"


class Crash(BaseException):
    """The machine stops here: no clean-up code runs that would only run for errors."""


@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")  # files left open by the crash
def test_a_crash_at_any_write_loses_nothing(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop before each single file operation in turn, and go on."""
    order = recipe(steps=2, validate_every=1, average=2, log_every=2, ema=0.5)
    fit(order, tmp_path / "uninterrupted", reporter=Reporter())
    uninterrupted = result(tmp_path / "uninterrupted")
    run = tmp_path / "run"
    left = 0

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            path = str(args[0])
            if path.startswith(str(run)) and "/data" not in path:  # preparing data has its own tests
                left -= 1
                if left == 0:
                    raise Crash
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for module, name in ((os, "replace"), (os, "rename"), (os, "unlink"), (os, "mkdir"), (shutil, "rmtree")):
        counted(module, name)
    for stop_at in range(1, 200):
        for old in {*run.glob("*.*"), *run.glob(".*"), *run.glob("training/*-*")}:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        left = stop_at
        try:
            fit(order, run, reporter=Reporter())
            break
        except Crash:
            left = 0
        try:  # what is there can be used, or it is plainly not there yet
            Run.load(run)
        except UserError as error:
            assert any(text in str(error) for text in ("no weights yet", "not a run directory", "no such run"))
        fit(order, run, resume=True, reporter=Reporter())
        assert result(run) == uninterrupted, f"crash at write {stop_at}"
    assert stop_at > 15


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_other_signals_save_too(recipe: MakeRecipe, tmp_path: Path, number: signal.Signals, code: int) -> None:
    handler = signal.getsignal(number)
    with pytest.raises(Stopped) as stopped:
        fit(recipe(steps=100_000), tmp_path / "run", reporter=CallAfter(5, lambda: send(number)))
    assert stopped.value.code == code
    assert (tmp_path / "run/training/step-00000006").is_dir()
    assert signal.getsignal(number) is handler


def test_nohup_is_respected(recipe: MakeRecipe, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        report = fit(recipe(steps=4), tmp_path / "run", reporter=CallAfter(2, lambda: send(signal.SIGHUP)))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert report.progress.finished == "steps"


def test_a_signal_during_validation_does_not_wait_for_its_end(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import regard.training.fit

    order = recipe(steps=8, validate_every=4, ema=0.5)
    fit(order, tmp_path / "uninterrupted", reporter=Reporter())
    original = regard.training.validation.PairValidation.__call__

    def endless(self: Any, model: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(regard.training.validation.PairValidation, "__call__", endless)
    with pytest.raises(Stopped):
        fit(order, tmp_path / "run", reporter=Reporter())
    monkeypatch.setattr(regard.training.validation.PairValidation, "__call__", original)
    fit(order, tmp_path / "run", resume=True, reporter=Reporter())
    assert result(tmp_path / "run") == result(tmp_path / "uninterrupted")


def test_a_run_has_one_writer(recipe: MakeRecipe, tmp_path: Path) -> None:
    """While one trains, another is refused with its name and changes nothing; its own workers do not count."""
    order, run, refused = recipe(steps=6, workers=2), tmp_path / "run", []

    def train_there() -> None:
        for resume in (False, True):
            before = result(run)
            with pytest.raises(UserError, match=rf"run: process {os.getpid()} on .* is writing here") as error:
                fit(order, run, resume=resume, reporter=Reporter())
            refused.append(error)
            assert result(run) == before

    report = fit(order, run, reporter=CallAfter(3, train_there))
    assert len(refused) == 2 and report.progress.finished == "steps"
    assert not (run / "training/lock").exists()
