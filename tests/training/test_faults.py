"""Failed and killed saves: the error is reported, no checkpoint is lost, no temporary file remains."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint.filesystem as dcp_files
from test_resume import result

import regard.parallel.ranks
import regard.weight_files
from kit.backwards import MakeRecipe
from regard.errors import UserError
from regard.recipe import Recipe
from regard.training.checkpoint import CheckpointManager
from regard.training.fit import fit
from regard.training.report import Reporter

OPERATIONS: dict[str, list[tuple[Any, str]]] = {
    "write": [(regard.weight_files, "save_file"), (dcp_files.FileSystem, "create_stream")],  # DDP and FSDP
    "fsync": [(os, "fsync")],
    "rename": [(os, "rename")],
}
KILLED = "killed"
MAX_SECONDS = 300  # a training process that takes longer is deadlocked
Save = Callable[[CheckpointManager, Any], None]


def train(order: Recipe, run: Path, processes: int, saving: Callable[[int, Save], Save] | None = None) -> list[str]:
    """Train or resume in forked processes -> the error message of each rank, "" or KILLED.

    `saving` may replace the function that saves a checkpoint in a rank.
    """
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(processes):
            if not (child := os.fork()):
                message = _take_part(order, run, rank, processes, f"{directory}/store", saving)
                Path(directory, f"{rank}.txt").write_text(message)
                os._exit(0)
            children.append(child)
        statuses = [_wait(child, children) for child in children]
        return [
            KILLED if os.WIFSIGNALED(status) else Path(directory, f"{rank}.txt").read_text()
            for rank, status in enumerate(statuses)
        ]


def _wait(child: int, children: list[int]) -> int:
    """The exit status of a process; after a timeout all processes are killed."""
    deadline = time.monotonic() + MAX_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    for each in children:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    pytest.fail(f"a training process has not ended after {MAX_SECONDS} seconds")


def _take_part(
    order: Recipe, run: Path, rank: int, processes: int, store: str, saving: Callable[[int, Save], Save] | None
) -> str:
    if processes > 1:
        os.environ.update({"WORLD_SIZE": str(processes), "RANK": str(rank), "MASTER_ADDR": "-", "MASTER_PORT": "0"})
        regard.parallel.ranks.launcher_store = lambda: store
    if saving is not None:
        CheckpointManager.save = saving(rank, CheckpointManager.save)  # type: ignore[method-assign]
    try:
        fit(order, run, resume=True, reporter=Reporter())
    except UserError as error:
        return str(error)
    except BaseException:
        return traceback.format_exc()
    return ""


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, int], dict[str, Any]]:
    """Results of uninterrupted runs by (strategy, number of processes)."""
    return {}


def cases() -> list[Any]:
    """All failures in one process; in two, those of each rank that writes (with DDP only rank 0 does)."""
    one = [
        (1, 0, strategy, operation, code) for strategy in ("ddp", "fsdp") for operation in OPERATIONS for code in CODES
    ]
    two = [(2, 0, "ddp", operation, errno.ENOSPC) for operation in OPERATIONS]
    two += [(2, rank, "fsdp", operation, errno.EIO) for operation, rank in (("write", 1), ("fsync", 1), ("rename", 0))]
    many = [
        (2, rank, strategy, operation, code)
        for strategy, ranks in (("ddp", (0,)), ("fsdp", (0, 1)))
        for rank in ranks
        for operation in OPERATIONS
        for code in CODES
        if (operation, rank) != ("rename", 1)
    ]
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in many if case not in two]
    return [*one, *two, *slow]


CODES = (errno.ENOSPC, errno.EIO, errno.EACCES)


@pytest.mark.parametrize(("processes", "failing", "strategy", "operation", "code"), cases())
def test_failed_save_is_an_error_and_the_previous_checkpoint_resumes(
    recipe: MakeRecipe,
    tmp_path: Path,
    references: dict[tuple[str, int], dict[str, Any]],
    processes: int,
    failing: int,
    strategy: str,
    operation: str,
    code: int,
) -> None:
    order = recipe(steps=12, validate_every=4, strategy=strategy, ema=0.5, workers=processes)
    kind = (strategy, processes)
    run = tmp_path / "run"
    if kind not in references:
        assert train(order, tmp_path / "uninterrupted", processes) == [""] * processes
        references[kind] = result(tmp_path / "uninterrupted")

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    def saving(rank: int, save: Save) -> Save:
        def save_or_fail(manager: CheckpointManager, progress: Any) -> None:
            if rank == failing and progress.step == 8:
                for module, name in OPERATIONS[operation]:
                    setattr(module, name, fail)
            save(manager, progress)

        return save_or_fail

    messages = train(order, run, processes, saving)
    assert os.strerror(code) in messages[0], messages
    assert all(message and "Traceback" not in message for message in messages), messages
    assert [p.name for p in (run / "training").glob("step-*")] == ["step-00000004"]
    assert train(order, run, processes) == [""] * processes
    resumed = result(run)
    assert {key: resumed[key] for key in ("tensors", "log")} == {
        key: references[kind][key] for key in ("tensors", "log")
    }
    assert not [p for p in run.rglob("*") if p.name.endswith((".tmp", ".old"))]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("processes", [1, 2])
def test_resume_after_kills_during_saves_gives_identical_results(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, strategy: str
) -> None:
    """Each attempt saves after every step, and one process is killed in a save; the result does not change."""
    monkeypatch.setattr("regard.training.trainer.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("regard.training.trainer.SAVING_SHARE", 1.0)
    kills = 200
    steps = 4 * kills + 10  # a process is killed in its fourth save at the latest
    order = recipe(steps=steps, validate_every=50, strategy=strategy, ema=0.5, workers=processes)
    assert train(order, tmp_path / "uninterrupted", processes) == [""] * processes
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "uninterrupted/training/data", run / "training/data")
    for kill in range(kills):
        draw = random.Random(kill)
        victim, dying = draw.randrange(processes), partial(_kill_in_save, draw.randint(1, 4), draw.random() * 0.02)
        outcomes = train(order, run, processes, partial(_in_process, victim, dying))
        assert outcomes[victim] == KILLED, outcomes
        assert all("another training process has ended" in other for other in outcomes if other != KILLED), outcomes
    assert train(order, run, processes) == [""] * processes
    end = result(run)
    uninterrupted = result(tmp_path / "uninterrupted")
    for key in ("tensors", "log", "names"):
        assert end[key] == uninterrupted[key]


def _in_process(victim: int, dying: Callable[[Save], Save], rank: int, save: Save) -> Save:
    return dying(save) if rank == victim else save


def _kill_in_save(number: int, delay: float, save: Save) -> Save:
    """Wrap `save`: the process is killed `delay` seconds after the start of the save with this number."""

    def save_and_die(manager: CheckpointManager, progress: Any) -> None:
        nonlocal number
        number -= 1
        last = number == 0
        if last and os.fork() == 0:  # a process, because a thread might be delayed
            os.closerange(3, 1024)  # includes the lock of the run
            time.sleep(delay)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        save(manager, progress)
        if last:  # the save was quicker than the kill
            time.sleep(1)

    return save_and_die
