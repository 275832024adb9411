"""The optimizer, and the learning rate as a pure function of how far training has come."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.nn.gates import FASTER, gated
from regard.settings import Train

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def make_optimizer(model: nn.Module, train: Train) -> torch.optim.Optimizer:
    """Adam or AdamW, fused, of what is not frozen; weights decay, biases and norms do not."""
    odds = [part.odds for part in gated(model).values()]
    apart = set(map(id, odds))
    parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in apart]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        {"params": odds, "weight_decay": 0.0, "faster": FASTER},
    ]
    kind = torch.optim.AdamW if train.optimizer == "adamw" else torch.optim.Adam
    return kind(
        [group for group in groups if group["params"]],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=True,
    )


def learning_rate(train: Train, step: int, done: float, width: int) -> float:
    """The rate of step `step` (the first is 1), with `done` of the budget used up before it.

    noam          lr * width^-0.5 * min(step^-0.5, step * warmup^-1.5)
    inverse_sqrt  lr after `warmup` steps, then falling with the square root of the step
    cosine        lr * (1 + cos(pi * done)) / 2, down to zero at the end of the budget
    linear        lr * (1 - done)
    constant      lr
    All rise linearly over the first `warmup` steps.
    """
    warmup = max(1, train.warmup)
    if train.schedule == "noam":
        return float(train.lr * width**-0.5 * min(step**-0.5, step * warmup**-1.5))
    rising = min(1.0, step / warmup)
    done = min(1.0, max(0.0, done))
    if train.schedule == "inverse_sqrt":
        return train.lr * min(rising, math.sqrt(warmup / step))
    if train.schedule == "cosine":
        return train.lr * rising * 0.5 * (1 + math.cos(math.pi * done))
    if train.schedule == "linear":
        return train.lr * rising * (1 - done)
    return train.lr * rising


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("faster", 1.0)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """What the optimizer remembers, as tensors named after the parameters."""
    return {
        f"{name}:{moment}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give the optimizer back what `optimizer_tensors` told of it; a moment that is missing raises KeyError.

    A parameter that it says nothing of never had a gradient: it is frozen, or nothing was saved before the first step.
    """
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        if not any(f"{name}:{moment}" in tensors for moment in MOMENTS):
            continue
        optimizer.state[parameter] = {
            moment: tensors[f"{name}:{moment}"].to(parameter.device, copy=True) for moment in MOMENTS
        }
