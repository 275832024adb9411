"""The process group: collectives, and the workers that a process starts."""

from __future__ import annotations

import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.training.distributed import (
    CHUNK,
    GradientAllReduce,
    WorkerDied,
    Workers,
    broadcast_weights,
    form_group,
)

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
