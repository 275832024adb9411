"""Gradients of DDP as used in training, and local rank processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kit.preloaded import new_interpreter
from kit.ranks import run_ranks
from regard.errors import UserError
from regard.parallel import children
from regard.parallel.children import NO_FORK, Channel, Child, ChildDied
from regard.parallel.ranks import ProcessGroup, form_group, join_local_group, local_group
from regard.training.data_parallel import broadcast_weights, distribute

WIDTH = 520  # the gradient of the first layer (1 MB) is sent after the others
UNUSED_BY_ONE, UNUSED = "2.weight", "3.weight"


class Layers(nn.ModuleList):
    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        for layer in list(self)[:used]:
            x = layer(x)
        return x.square().mean()


def make_layers(seed: int) -> Layers:
    torch.manual_seed(seed)
    layers = Layers(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    layers[0].bias.requires_grad_(False)
    return layers


def losses(call: Callable[[torch.Tensor, int], Any], rank: int) -> list[Callable[[], Any]]:
    """Losses of two batches; rank 1 does not use the third layer, and no rank uses the fourth."""
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(rank))
    return [lambda: call(x[0], 2), lambda: call(x[1], 2 if rank == 1 else 3)]


def step(layers: Layers, ddp: DistributedDataParallel, rank: int) -> dict[str, torch.Tensor]:
    layers.zero_grad()
    for loss, last in zip(losses(ddp, rank), (False, True), strict=True):
        with nullcontext() if last else ddp.no_sync():
            loss().backward()
    return {name: p.grad.clone() for name, p in layers.named_parameters() if p.grad is not None}


def expected_gradients(ranks: int) -> dict[str, torch.Tensor]:
    layers = make_layers(0)
    for rank in range(ranks):
        for loss in losses(layers, rank):
            loss().backward()
    return {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}


def take_steps(rank: int, size: int, store: str, out: str) -> None:
    """Three equal steps in fp32, and three in bfloat16."""
    torch.set_num_threads(1)
    with form_group(rank, size, torch.device("cpu"), store):
        steps = []
        for bf16 in (False, True):
            layers = make_layers(rank)
            broadcast_weights(layers.parameters())
            ddp = distribute(layers, bf16)
            steps.append([step(layers, ddp, rank) for _ in range(3)])
        torch.save(steps, out)


def test_gradients_are_summed_over_all_processes(tmp_path: Path) -> None:
    """The bits are equal in every step, including the first, so that a resumed run equals an uninterrupted one.

    Frozen parameters, and those that no rank uses, have no gradient, as in a single process.
    """
    expected = expected_gradients(3)
    ranks = run_ranks(3, take_steps, tmp_path)
    for precision, rtol, atol in ((0, 1e-5, 1e-8), (1, 2e-2, 1e-4)):
        first, *others = (each for steps in ranks for each in steps[precision])
        assert first.keys() == expected.keys() and UNUSED_BY_ONE in first and UNUSED not in first
        for name, x in expected.items():
            torch.testing.assert_close(first[name], x, rtol=rtol, atol=atol)
            assert all(torch.equal(other[name], first[name]) for other in others), name


# Local ranks


def use_group(channel: Channel, settings: dict[str, Any]) -> None:
    """Work of a rank: two gathers; between them it fails or dies if `end` is set."""
    with join_local_group(channel, settings, torch.device("cpu")) as group:
        group.gather([float(group.rank)])
        if settings["end"] == "error":
            raise UserError("no room")
        if settings["end"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        group.gather([0.0])


def local(size: int, end: str = "", work: str = "use_group") -> AbstractContextManager[ProcessGroup]:
    return local_group(f"test_data_parallel:{work}", {"end": end}, size, torch.device("cpu"))


def test_local_ranks_form_a_group_and_exit_with_it(ranks: list[Child]) -> None:
    with local(3) as group:
        assert group.gather([float(group.rank)]) == [[0.0], [1.0], [2.0]]
        group.gather([0.0])
    assert [rank.poll() is not None for rank in ranks] == [True, True]


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("error", "ended with status 2; the last checkpoint is safe, continue with resume=True\n  no room"),
        ("kill", r"was killed by signal 9 \(out of memory\?\); the last checkpoint is safe, continue with resume=True"),
    ],
)
def test_error_names_the_rank_that_ended(end: str, message: str) -> None:
    with pytest.raises(ChildDied, match=f"training process 1 of 2 {message}"), local(2, end) as group:
        group.gather([0.0])
        group.gather([0.0])


def test_rank_that_cannot_start_fails_without_a_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(ChildDied, match=r"(?s)process 1 of 3 ended with status 1.*has no attribute 'nothing'"):
        local(3, work="nothing").__enter__()
    assert time.monotonic() - start < 20


def test_error_of_rank_0_is_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="mine"), local(2):
        raise RuntimeError("mine")


def test_error_inside_the_context_ends_the_ranks(ranks: list[Child]) -> None:
    with pytest.raises(KeyError), local(2):
        raise KeyError
    assert ranks[0].poll() is not None


def test_ranks_are_spawned_if_fork_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_FORK, "1")
    monkeypatch.setattr(children, "spawn", new_interpreter)
    with local(2) as group:
        assert group.gather([float(group.rank)]) == [[0.0], [1.0]]
        group.gather([0.0])


def test_importing_the_modules_of_ranks_does_not_import_torch() -> None:
    code = "import sys, regard.parallel.ranks, regard.parallel.children, regard.parallel.cores; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" not in modules and "numpy" not in modules
