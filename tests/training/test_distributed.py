"""Who we are among several processes, as the environment says."""

from __future__ import annotations

import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from regard.errors import UserError
from regard.training.distributed import (
    CHUNK,
    GradientAllReduce,
    WorkerDied,
    Workers,
    broadcast_weights,
    form_group,
)
from regard.training.launch import has_launcher, join_group

NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "REGARD_STORE")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("size", "others"), [(None, False), ("1", False), ("2", True)])
def test_whether_a_launcher_started_us(size: str | None, others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert has_launcher() == others


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK: is not set, although WORLD_SIZE is"),
        ({"WORLD_SIZE": "2", "RANK": "first"}, "RANK: a whole number is expected in the environment, not 'first'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, r"RANK: of 2 processes \(WORLD_SIZE\) the last is 1, not 2"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR: is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, "MASTER_PORT: is not set"),
    ],
)
def test_an_environment_that_does_not_add_up(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        join_group(torch.device("cpu"))


@pytest.mark.parametrize("size", ["abc", "", "-1", "2.5"])
def test_a_size_that_is_no_number(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UserError, match="WORLD_SIZE: a whole number"):
        has_launcher()


WIDTH = 2100  # two matrices of this width are more than one chunk


def gradient(rank: int, index: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * rank + index))


def parameters(rank: int) -> list[nn.Parameter]:
    torch.manual_seed(rank)
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(5), nn.Linear(WIDTH, 3)])
    made = list(model.parameters())
    made[2].requires_grad_(False)
    return made


def take_part(rank: int, store: str, bf16: bool, out: str) -> None:
    torch.set_num_threads(1)
    with form_group(rank, 2, torch.device("cpu"), store):
        mine = parameters(rank)
        broadcast_weights(mine)
        all_reduce = GradientAllReduce(mine, bf16)
        for index, p in enumerate(mine):
            if p.requires_grad and (rank, index) != (1, 3):  # one that the second process has no gradient of
                p.grad = gradient(rank, index, p.shape)
        all_reduce()
        torch.save([(p.detach(), p.grad) for p in mine], out)


@pytest.mark.parametrize("bf16", [False, True])
def test_all_ranks_have_the_first_weights_and_the_sum_of_gradients(tmp_path: Path, bf16: bool) -> None:
    outs = [tmp_path / "0", tmp_path / "1"]
    processes = [
        get_context("spawn").Process(target=take_part, args=(rank, str(tmp_path / "store"), bf16, str(out)))
        for rank, out in enumerate(outs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    first, second = (torch.load(out, weights_only=True) for out in outs)
    start = parameters(0)
    assert sum(p.numel() for p in start if p.requires_grad) > CHUNK
    for index, (p, (weight, grad), (other_weight, other_grad)) in enumerate(zip(start, first, second, strict=True)):
        assert torch.equal(p, weight) and torch.equal(p, other_weight)
        if not p.requires_grad:
            assert grad is None and other_grad is None
            continue
        parts = [gradient(rank, index, p.shape) for rank in (0, 1) if (rank, index) != (1, 3)]
        expected = sum(part.bfloat16() if bf16 else part for part in parts)
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(grad, expected.float()) and torch.equal(other_grad, grad)


SLEEP = ["-n1", "-r1", "import sys; sys.stdin.read()"]


def test_a_worker_that_cannot_start_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=r"(?s)process [12] of 3 ended with status 1.*No module named regard\.nowhere"):  # noqa: SIM117
        with Workers(3, "regard.nowhere", ["run"]) as workers:
            workers.wait()
    assert time.monotonic() - began < 20


def test_ones_own_error_is_not_blamed_on_a_worker() -> None:
    with pytest.raises(RuntimeError, match="mine"), Workers(2, "timeit", SLEEP) as workers, workers.name_failures():
        raise RuntimeError("mine")


def test_leaving_ends_the_workers() -> None:
    with pytest.raises(KeyError), Workers(2, "timeit", SLEEP) as workers:
        raise KeyError
    assert [process.returncode for process in workers._processes] == [0]  # its standard input was closed


def test_what_an_attempt_leaves_in_the_store_of_the_launcher_is_not_found_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store outlives the processes, whose addresses are in it."""
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
