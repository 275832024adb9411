"""One step: forward, backward, and the update if all went well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regard.batch import Batch
from regard.loss import Loss, Objective
from regard.model import Model
from regard.nn.dropout import MaskPool, use_pool
from regard.nn.products import bf16_products, replaced
from regard.settings import Train
from regard.train.exchange import Exchange, same_start
from regard.train.optim import make_optimizer, set_rate
from regard.train.world import World

_RANKS = 4096  # more processes than will ever train together: keeps their random numbers apart


class Stepper:
    """A model with its objective and optimizer."""

    def __init__(self, model: Model, train: Train, world: World) -> None:
        self.model = model
        self.train = train
        self.world = world
        self.optimizer = make_optimizer(model, train)
        self._parameters = list(model.parameters())
        self.objective = objective = Objective(model, train.label_smoothing, train.scheduled_sampling, train.l0)
        self._module: nn.Module = objective
        on_processor = world.device.type == "cpu"
        # There bfloat16 is for the matrix products alone; their gradients lose nothing when sent so.
        self._narrow = bf16_products(model) if train.precision == "bf16" and on_processor else []
        self._exchange: Exchange | None = None
        self._averaged_over = 1
        if world.size > 1 and on_processor:
            same_start(self._parameters)
            self._exchange = Exchange(self._parameters, narrow=bool(self._narrow))
        elif world.size > 1:
            self._module = DistributedDataParallel(objective, forward_sync_buffers=False, gradient_as_bucket_view=True)
            self._averaged_over = world.size
        self._pool = MaskPool(train.seed * _RANKS + world.rank) if on_processor else None
        use_pool(model, self._pool)

    def backward(self, step: int, shares: Sequence[tuple[Batch, float]]) -> list[float]:
        """Make the gradients of a step -> [sum of negative log-probabilities, of the objective, norm of the gradient].

        The sums are this process's, the gradients everyone's. Random numbers depend on (seed, step, process) alone.
        """
        self._module.train()
        self.optimizer.zero_grad(set_to_none=True)
        torch.manual_seed((self.train.seed * 1_000_003 + step) * _RANKS + self.world.rank)
        if self._pool is not None:
            self._pool.begin(step)
        nll = torch.zeros((), device=self.world.device)
        smoothed = torch.zeros((), device=self.world.device)
        for index, (batch, weight) in enumerate(shares):
            more = index < len(shares) - 1
            alone = self._module.no_sync() if more and self._module is not self.objective else nullcontext()  # type: ignore[operator]
            with alone, replaced(self._narrow):  # a reversible model computes forward in backward again
                loss = self._loss(batch.to(self.world.device))
                # Averaging over processes, if any, is undone. A loss that is not finite makes its gradients NaN,
                # whatever they were: then everyone sees it in the norm.
                scale = weight * self._averaged_over / batch.total + loss.smoothed.detach() * 0
                (loss.smoothed * scale).backward()
            nll += weight * loss.nll
            smoothed += weight * loss.smoothed.detach()
        if self._exchange is not None:
            self._exchange()
        norm = torch.nn.utils.get_total_norm(self._gradients(), foreach=True)
        sums: list[float] = torch.stack((nll, smoothed, norm)).double().tolist()  # the one wait per step
        return sums

    def _loss(self, batch: Batch) -> Loss:
        bf16 = self.train.precision == "bf16" and not self._narrow
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=bf16):
            loss: Loss = self._module(batch)
        return loss

    def _gradients(self) -> list[Any]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def update(self, rate: float, norm: float) -> bool:
        """Move the weights, with the gradient clipped; if it is not finite, nothing moves -> whether they moved."""
        if not math.isfinite(norm):
            return False
        excess = max(1.0, norm / self.train.clip) if self.train.clip else 1.0
        # Fused optimizers divide the gradients by this while they read them, which saves a pass over all of them.
        self.optimizer.grad_scale = torch.tensor(excess, device=self.world.device)  # type: ignore[attr-defined]
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        return True
