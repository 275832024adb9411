"""Resume equals continue: a run killed at any point ends bit-identical to an uninterrupted run."""

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
from regard.training.report import Reporter
from regard.training.trainer import Stopped

CLOCK_FIELDS = ("seconds", "tokens_per_second", "examples_per_second")  # of events
MARK = "REGARD_TEST_RUN"  # in the environment of a training process and of its children


def run_and_kill(recipe: Recipe, run: Path, step: int, delay: float, number: int = signal.SIGKILL) -> int | None:
    """Train in a new process that sends itself a signal `delay` seconds after a step -> its exit status."""
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
    # tensors, not bytes of files: the library for shards writes tensors in any order
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


def training_processes(run: Path) -> list[int]:
    """Ids of the processes that `run_and_kill` has started for a run."""
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
    """Calls a function after a step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._step = step
        self._act = act

    def tick(self, step: int, done: float, seconds: float) -> None:
        if step == self._step:
            self._act()


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("workers", "precision", "strategy"),
    [
        (1, "fp32", "ddp"),
        (3, "fp32", "ddp"),  # the bits of a sum of three numbers depend on the order
        pytest.param(2, "fp32", "fsdp", marks=pytest.mark.slow),
        pytest.param(2, "fp32", "ddp", marks=pytest.mark.slow),
        pytest.param(2, "bf16", "ddp", marks=pytest.mark.slow),
        pytest.param(1, "fp32", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_resume_after_kill_gives_identical_weights(
    recipe: MakeRecipe, tmp_path: Path, ranks: list[Child], workers: int, precision: str, strategy: str
) -> None:
    """The run is killed at a random moment, stopped by SIGTERM, and loses a worker.

    SIGTERM ends the run even while its step waits for a worker that is suspended by SIGSTOP.
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
    while (remaining := training_processes(run)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not remaining, "a worker outlives the first process"

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
    checkpoints = [p.name for p in (run / "training").glob("step-*")]
    assert len(checkpoints) == 1 and checkpoints[0] >= "step-00000016"  # the step was finished
    assert not training_processes(run) and all(rank.poll() is not None for rank in ranks)

    if workers > 1:
        first = len(ranks)
        message = (
            rf"process 1 of {workers} was killed by signal 9 \(out of memory\?\); the last checkpoint is safe, continue"
        )
        with pytest.raises(ChildDied, match=message):
            fit(order, run, resume=True, reporter=CallAfter(20, lambda: ranks[first].kill()))

    fit(order, run, resume=True, reporter=Reporter())
    assert result(run) == result(uninterrupted), f"killed {delay} s after step {at}"


class Crash(BaseException):
    """Simulated crash of the machine: not an Exception, so that no error handler runs."""


@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")  # files left open by the crash
def test_resume_after_a_crash_at_any_write_gives_identical_results(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crash before each file operation in turn, and resume."""
    order = recipe(steps=2, validate_every=1, average=2, log_every=2, ema=0.5)
    fit(order, tmp_path / "uninterrupted", reporter=Reporter())
    uninterrupted = result(tmp_path / "uninterrupted")
    run = tmp_path / "run"
    countdown = 0

    def count_calls(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal countdown
            path = str(args[0])
            if path.startswith(str(run)) and "/data" not in path:  # preparing data has its own tests
                countdown -= 1
                if countdown == 0:
                    raise Crash
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for module, name in ((os, "replace"), (os, "rename"), (os, "unlink"), (os, "mkdir"), (shutil, "rmtree")):
        count_calls(module, name)
    for stop_at in range(1, 200):
        for old in {*run.glob("*.*"), *run.glob(".*"), *run.glob("training/*-*")}:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        countdown = stop_at
        try:
            fit(order, run, reporter=Reporter())
            break
        except Crash:
            countdown = 0
        try:  # the run loads, or the error states that it is incomplete
            Run.load(run)
        except UserError as error:
            assert any(text in str(error) for text in ("no weights yet", "not a run directory", "no such run"))
        fit(order, run, resume=True, reporter=Reporter())
        assert result(run) == uninterrupted, f"crash at write {stop_at}"
    assert stop_at > 15


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_sigint_and_sighup_save_a_checkpoint(
    recipe: MakeRecipe, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    handler = signal.getsignal(number)
    with pytest.raises(Stopped) as stopped:
        fit(recipe(steps=100_000), tmp_path / "run", reporter=CallAfter(5, lambda: send(number)))
    assert stopped.value.code == code
    assert (tmp_path / "run/training/step-00000006").is_dir()
    assert signal.getsignal(number) is handler


def test_ignored_sighup_does_not_stop_training(recipe: MakeRecipe, tmp_path: Path) -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        report = fit(recipe(steps=4), tmp_path / "run", reporter=CallAfter(2, lambda: send(signal.SIGHUP)))
    finally:
        signal.signal(signal.SIGHUP, handler)
    assert report.progress.finished == "steps"


def test_signal_interrupts_validation(recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_second_writer_of_a_run_is_refused(recipe: MakeRecipe, tmp_path: Path) -> None:
    """The error names the process that writes, and nothing changes; the workers of that process may write."""
    order = recipe(steps=6, workers=2)
    run = tmp_path / "run"
    errors = []

    def train_again() -> None:
        for resume in (False, True):
            before = result(run)
            with pytest.raises(UserError, match=rf"run: process {os.getpid()} on .* is writing here") as error:
                fit(order, run, resume=resume, reporter=Reporter())
            errors.append(error)
            assert result(run) == before

    report = fit(order, run, reporter=CallAfter(3, train_again))
    assert len(errors) == 2 and report.progress.finished == "steps"
    assert not (run / "training/lock").exists()
