"""Launch facts from the environment: launcher, number of processes, restarts and devices."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit.backwards import MakeRecipe
from regard.errors import UserError
from regard.parallel.ranks import (
    Launch,
    ProcessGroup,
    form_group,
    has_launcher,
    join_group,
    name_lost_connection,
    process_device,
    restart_problem,
)
from regard.training.fit import fit
from regard.training.report import Reporter
from regard.training.trainer import Aborted, Signals

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}
NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", *TORCHRUN)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of a launcher from the environment."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("size", "expected"), [(None, False), ("1", False), ("2", True)])
def test_launcher_is_detected_by_the_world_size(
    size: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert has_launcher() == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK: is not set, although WORLD_SIZE is"),
        ({"WORLD_SIZE": "2", "RANK": "first"}, "RANK: a whole number is expected in the environment, not 'first'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, r"RANK: the last of 2 processes \(WORLD_SIZE\) is 1, not 2"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR: is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, "MASTER_PORT: is not set"),
    ],
)
def test_inconsistent_environment_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        join_group(torch.device("cpu"))


@pytest.mark.parametrize("size", ["abc", "", "-1", "2.5"])
def test_world_size_that_is_no_number_is_refused(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UserError, match="WORLD_SIZE: a whole number"):
        has_launcher()


def test_store_entries_of_an_attempt_are_invisible_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store of the launcher outlives the processes and contains their addresses."""
    launcher = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launcher.port), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    stores: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, store, **settings: stores.append(store))
    for attempt in ("0", "1", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        join_group(torch.device("cpu"))
    stores[0].set("address", "dead")
    assert not stores[1].check(["address"])
    stores[1].set("address", "alive")
    assert stores[2].get("address") == b"alive"


def test_restart_of_one_launcher_counts_for_all() -> None:
    """A launcher whose own processes did not fail does not count the restart."""

    class Two(ProcessGroup):
        def gather_json(self, value: Any) -> list[Any]:
            return [value, ["elsewhere 7", True]]

    assert not Launch.of(ProcessGroup()).restarted
    assert Launch.of(Two(size=2)) == Launch(2, frozenset({"elsewhere 7"}), True)


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({}, True),
        ({"GROUP_WORLD_SIZE": "1"}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),  # as with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    ],
)
def test_store_that_outlives_its_processes_causes_a_warning(
    changes: dict[str, str], warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**TORCHRUN, "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", **changes}.items():
        monkeypatch.setenv(name, value)
    assert (restart_problem() is not None) == warns


def test_restart_resumes_only_runs_of_its_own_launcher(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a restart would resume an existing run that the first attempt has refused."""

    def attempt(number: int, run: str, launcher: int, resume: bool = False) -> int:
        monkeypatch.setattr(os, "getppid", lambda: launcher)
        for name, value in {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": str(number)}.items():
            monkeypatch.setenv(name, value)
        return fit(recipe(steps=2 + number), tmp_path / run, resume, Reporter()).progress.step

    fit(recipe(steps=2), tmp_path / "other", reporter=Reporter())
    for number in (0, 1):
        with pytest.raises(UserError, match="contains a run"):
            attempt(number, "other", 5)
    assert attempt(0, "run", 5) == 2
    assert attempt(1, "run", 5) == 3
    with pytest.raises(UserError, match="contains a run"):
        attempt(2, "run", 6)
    assert attempt(2, "run", 6, resume=True) == 4
    assert attempt(3, "run", 6) == 5


def test_several_processes_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="device: cuda:1 is one GPU for several processes"):
        process_device("cuda:1")


def test_each_process_uses_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the calls of torch, because the test has no GPU."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **settings: calls.append((backend, settings)))
    device = torch.device("cuda", 1)
    group = form_group(1, 2, device, dist.HashStore())  # type: ignore[attr-defined]
    assert calls[0] == device and group.device == device
    assert calls[1][0] == "nccl" and calls[1][1]["device_id"] == device
    form_group(1, 2, device, dist.HashStore(), offload=True)  # type: ignore[attr-defined]
    assert calls[3][0] == "cpu:gloo,cuda:nccl"


def test_wait_for_first_blocks_until_rank_0_arrives() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    first, second = (ProcessGroup(rank, 2, store=store) for rank in range(2))
    rounds: list[int] = []

    def wait() -> None:
        for number in range(2):
            second.wait_for_first()
            rounds.append(number)

    thread = Thread(target=wait)
    thread.start()
    thread.join(0.2)
    assert rounds == []
    first.wait_for_first()
    thread.join(0.2)
    assert rounds == [0]
    first.wait_for_first()
    thread.join(10)
    assert rounds == [0, 1]
    ProcessGroup().wait_for_first()


def test_lost_connections_are_reported_as_the_end_of_another_process() -> None:
    with pytest.raises(UserError, match="another training process has ended"), name_lost_connection():
        raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")
    with pytest.raises(UserError, match="another training process has ended"), name_lost_connection():
        raise dist.DistBackendError("NCCL error")
    with pytest.raises(RuntimeError, match="mine"), name_lost_connection():
        raise RuntimeError("mine")


def test_second_signal_aborts_only_without_a_launcher() -> None:
    """A scheduler signals all processes, and the launcher forwards its own signal."""
    launched, standalone = Signals(launched=True), Signals()
    for signals in (launched, standalone):
        signals._handle(15, None)
        assert signals.received == 15
    launched._handle(15, None)
    with pytest.raises(Aborted):
        standalone._handle(15, None)
