"""Sets of weights beside those being trained: a moving average, and the mean of several checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.run import weights_of


class Ema:
    """An exponential moving average of a model's weights. Early on it forgets faster, or the start would stay in it.

    It looks at the weights some thirty times while it forgets them, which is as good as at every step and costs less.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: x.clone() for name, x in weights_of(model).items()}

    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        every = max(1, round(0.03 / (1 - decay)))
        if step % every == 0:
            torch._foreach_lerp_(list(self.weights.values()), list(weights_of(model).values()), 1 - decay**every)


@contextmanager
def lent(model: nn.Module, weights: dict[str, Tensor] | None) -> Iterator[None]:
    """Let a model have other weights for a while; None leaves it as it is."""
    if weights is None:
        yield
        return
    own = {name: parameter.data for name, parameter in model.named_parameters()}
    try:
        for name, parameter in model.named_parameters():
            parameter.data = weights[name].to(parameter.device)
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.data = own[name]


def mean(sets: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several sets of weights, summed in double precision."""
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for weights in sets:
        count += 1
        for name, x in weights.items():
            dtypes[name] = x.dtype
            total[name] = total[name] + x.double() if name in total else x.double()
    return {name: (x / count).to(dtypes[name]) for name, x in total.items()}
