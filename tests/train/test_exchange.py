"""Two processes that exchange their gradients."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.training.distributed import MESSAGE, GradientAllReduce, meet, same_start

WIDTH = 2100  # two matrices of this width are more than one message


def gradient(rank: int, index: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * rank + index))


def parameters(rank: int) -> list[nn.Parameter]:
    torch.manual_seed(rank)
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(5), nn.Linear(WIDTH, 3)])
    made = list(model.parameters())
    made[2].requires_grad_(False)
    return made


def take_part(rank: int, store: str, narrow: bool, out: str) -> None:
    torch.set_num_threads(1)
    with meet(rank, 2, torch.device("cpu"), store):
        mine = parameters(rank)
        same_start(mine)
        exchange = GradientAllReduce(mine, narrow)
        for index, p in enumerate(mine):
            if p.requires_grad and (rank, index) != (1, 3):  # one that the second process has no gradient of
                p.grad = gradient(rank, index, p.shape)
        exchange()
        torch.save([(p.detach(), p.grad) for p in mine], out)


@pytest.mark.parametrize("narrow", [False, True])
def test_everyone_has_the_first_weights_and_the_sum_of_gradients(tmp_path: Path, narrow: bool) -> None:
    outs = [tmp_path / "0", tmp_path / "1"]
    processes = [
        get_context("spawn").Process(target=take_part, args=(rank, str(tmp_path / "store"), narrow, str(out)))
        for rank, out in enumerate(outs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    first, second = (torch.load(out, weights_only=True) for out in outs)
    start = parameters(0)
    assert sum(p.numel() for p in start if p.requires_grad) > MESSAGE
    for index, (p, (weight, grad), (other_weight, other_grad)) in enumerate(zip(start, first, second, strict=True)):
        assert torch.equal(p, weight) and torch.equal(p, other_weight)
        if not p.requires_grad:
            assert grad is None and other_grad is None
            continue
        parts = [gradient(rank, index, p.shape) for rank in (0, 1) if (rank, index) != (1, 3)]
        expected = sum(part.bfloat16() if narrow else part for part in parts)
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(grad, expected.float()) and torch.equal(other_grad, grad)
