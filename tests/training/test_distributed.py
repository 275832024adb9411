"""The process group: collectives, and the workers that a process starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kit.ranks import run_ranks
from regard.training.distributed import DDPModule, WorkerDied, Workers, broadcast_weights, form_group

WIDTH = 520  # gradients of the first layer, a megabyte, are sent after those of the others
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
    """Two batches; the second process does not use the third layer, and none the fourth."""
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(rank))
    return [lambda: call(x[0], 2), lambda: call(x[1], 2 if rank == 1 else 3)]


def step(layers: Layers, module: DDPModule, rank: int) -> dict[str, torch.Tensor]:
    layers.zero_grad()
    module.begin()
    for loss, last in zip(losses(module, rank), (False, True), strict=True):
        with module.sending(last):
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
            module = DDPModule(layers, bf16)
            steps.append([step(layers, module, rank) for _ in range(3)])
        torch.save(steps, out)


def test_gradients_are_summed_over_all_processes(tmp_path: Path) -> None:
    """To the same bits in every step, also the first: a resumed run takes first steps where another takes later ones.

    What no process uses has no gradient, as in one process alone; what is frozen neither.
    """
    expected = expected_gradients(3)
    ranks = run_ranks(3, take_steps, tmp_path)
    for precision, rtol, atol in ((0, 1e-5, 1e-8), (1, 2e-2, 1e-4)):
        first, *others = (each for steps in ranks for each in steps[precision])
        assert first.keys() == expected.keys() and UNUSED_BY_ONE in first and UNUSED not in first
        for name, x in expected.items():
            torch.testing.assert_close(first[name], x, rtol=rtol, atol=atol)
            assert all(torch.equal(other[name], first[name]) for other in others), name


FAILING = {"1.bias": False, "0.weight": True}  # parameters, and whether others were sent before their gradient is there


def fail_once(rank: int, size: int, store: str, out: str) -> None:
    """The second process fails in the last pass of a step, before it has the gradient of a parameter."""
    torch.set_num_threads(1)
    outcomes = []
    with form_group(rank, size, torch.device("cpu"), store):
        layers = make_layers(0)
        module = DDPModule(layers, bf16=False)
        for name in FAILING:
            if rank == 1:
                calls = iter(range(2))
                hook = layers.get_parameter(name).register_hook(
                    lambda _, calls=calls: run_out() if next(calls) else None
                )
                with pytest.raises(RuntimeError, match="memory"):
                    step(layers, module, rank)
                hook.remove()
                again = module.give_up()
                gradients = {} if again else step(layers, module, rank)
            else:
                gradients = step(layers, module, rank)
                again = any(x.isnan().any().item() for x in gradients.values())
            outcomes.append((again, step(layers, module, rank) if again else gradients))
    torch.save(outcomes, out)


def run_out() -> None:
    torch.empty(1 << 60)  # what torch raises on a CPU


def test_a_process_that_fails_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    """They wait until it has begun again if it had sent nothing; else their gradients are NaN, and all begin again."""
    expected = expected_gradients(2)
    for outcomes in run_ranks(2, fail_once, tmp_path):
        for sent, (again, gradients) in zip(FAILING.values(), outcomes, strict=True):
            assert again == sent
            for name, x in expected.items():
                torch.testing.assert_close(gradients[name], x, rtol=1e-5, atol=1e-8)


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
