"""Saving that fails or is killed: nothing is lost, nothing succeeds silently, nothing is left behind."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint.filesystem as dcp_files
from backwards import MakeRecipe
from test_resume import result

import regard.run
import regard.training.checkpoint
from regard.errors import UserError
from regard.training.fit import fit
from regard.training.report import Event, Reporter

OPERATIONS: dict[str, list[tuple[Any, str]]] = {
    "write": [(regard.run, "save_file"), (dcp_files.FileSystem, "create_stream")],  # of either strategy
    "fsync": [(os, "fsync")],
    "rename": [(os, "rename")],
}


class AtValidation(Reporter):
    """Does something before the checkpoint of a validation is saved."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._step, self._act = step, act

    def event(self, event: Event) -> None:
        if event["event"] == "valid" and event["step"] == self._step:
            self._act()


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of runs that nothing has happened to, by strategy."""
    return {}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failed_save_is_an_error_and_the_old_checkpoint_loads(
    recipe: MakeRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: dict[str, dict[str, Any]],
    operation: str,
    code: int,
    strategy: str,
) -> None:
    order = recipe(steps=12, validate_every=4, strategy=strategy, ema=0.5)
    if strategy not in ends:
        fit(order, tmp_path / "alone", reporter=Reporter())
        ends[strategy] = result(tmp_path / "alone")
    armed = False

    def arm() -> None:
        nonlocal armed
        armed = True

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if armed:
                raise OSError(code, os.strerror(code))
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for module, name in OPERATIONS[operation]:
            patch.setattr(module, name, failing(getattr(module, name)))
        with pytest.raises(UserError, match=os.strerror(code)):
            fit(order, tmp_path / "run", reporter=AtValidation(8, arm))
    assert [p.name for p in (tmp_path / "run/training").glob("step-*")] == ["step-00000004"]
    fit(order, tmp_path / "run", resume=True, reporter=Reporter())
    again = result(tmp_path / "run")
    assert {what: again[what] for what in ("tensors", "log")} == {
        what: ends[strategy][what] for what in ("tensors", "log")
    }
    assert not [p for p in (tmp_path / "run").rglob("*") if p.name.endswith((".tmp", ".old"))]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kills"), [("ddp", 200), ("fsdp", 200)])
def test_kills_inside_a_save(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, kills: int
) -> None:
    """Each resumed process saves after every step and is killed in one of its saves; the end is always the same."""
    monkeypatch.setattr("regard.training.trainer.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("regard.training.trainer.SAVING_SHARE", 1.0)
    steps = 4 * kills + 10  # a process is killed in its fourth save at the latest
    order = recipe(steps=steps, validate_every=50, strategy=strategy, ema=0.5)
    fit(order, tmp_path / "alone", reporter=Reporter())
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "alone/training/data", run / "training/data")
    killed = 0
    while killed < kills:
        child = os.fork()
        if child == 0:
            _train_and_be_killed(order, run, random.Random(killed))
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        killed += 1
    fit(order, run, resume=True, reporter=Reporter())
    end, alone = result(run), result(tmp_path / "alone")
    assert (end["tensors"], end["log"], end["names"]) == (alone["tensors"], alone["log"], alone["names"])


def _train_and_be_killed(order: Any, run: Path, draw: random.Random) -> None:
    """In a forked process: kill it at a random moment of one of the first saves."""
    save = regard.training.checkpoint.CheckpointManager.save
    number, delay = draw.randint(1, 4), draw.random() * 0.02

    def save_and_die(self: Any, progress: Any) -> None:
        nonlocal number
        number -= 1
        last = number == 0
        if last and os.fork() == 0:  # a process, not a thread: nothing delays it
            os.closerange(3, 1024)  # the lock of the run among them
            time.sleep(delay)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        save(self, progress)
        if last:  # it was quicker than the kill
            time.sleep(1)

    regard.training.checkpoint.CheckpointManager.save = save_and_die  # type: ignore[method-assign]
    try:
        fit(order, run, resume=True, reporter=Reporter())
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
