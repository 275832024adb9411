"""One training step: forward, backward, all-reduce, update; with the optimizer, the schedule and the moving average."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard.batch import Batch
from regard.loss import Loss, Objective
from regard.model import Model
from regard.nn.adapters import LR_FACTOR, head_gates
from regard.nn.primitives import MaskPool, bf16_matmuls, use_matmuls, use_pool
from regard.recipe import Train
from regard.run import weights_of
from regard.training.distributed import GradientAllReduce, ProcessGroup, broadcast_weights

_RANKS = 4096  # more processes than will ever train together: keeps their random numbers apart
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Stepper:
    """A model with its objective, its optimizer and, if asked for, the moving average of its weights.

    By default the objective is that of `train`.
    """

    def __init__(self, model: Model, train: Train, group: ProcessGroup, objective: Objective | None = None) -> None:
        self.model = model
        self.train = train
        self.group = group
        self.optimizer = make_optimizer(model, train)
        self.objective = objective or Objective(model, train.label_smoothing, train.scheduled_sampling, train.l0)
        self._parameters = list(model.parameters())
        self._module: nn.Module = self.objective
        on_cpu = group.device.type == "cpu"
        # On a CPU bfloat16 is for the matrix products alone; their gradients lose nothing when sent so.
        self._matmuls = bf16_matmuls(model) if train.precision == "bf16" and on_cpu else {}
        self._all_reduce: GradientAllReduce | None = None
        self._averaged_over = 1
        if group.size > 1 and on_cpu:
            broadcast_weights(self._parameters)
            self._all_reduce = GradientAllReduce(self._parameters, bf16=bool(self._matmuls))
        elif group.size > 1:
            self._module = DistributedDataParallel(
                self.objective, forward_sync_buffers=False, gradient_as_bucket_view=True
            )
            self._averaged_over = group.size
        self._pool = MaskPool(train.seed * _RANKS + group.rank) if on_cpu else None
        use_pool(model, self._pool)
        self.ema = Ema(model, train.ema) if train.ema else None

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights that are validated and kept: the moving average if there is one."""
        return weights_of(self.model) if self.ema is None else self.ema.weights

    def rate(self, step: int, done: float) -> float:
        """The learning rate of a step, with `done` of the budget (0 to 1) used up before it."""
        return learning_rate(self.train, step, done, self.model.config.top.width)

    def backward(self, step: int, shares: Sequence[tuple[Batch, float]]) -> list[float]:
        """Compute the gradients of a step -> [sum of negative log-probabilities, sum of the objective, gradient norm].

        The sums are those of this process, the gradients those of all. Random numbers depend on (seed, step, rank)
        alone.
        """
        self._module.train()
        self.optimizer.zero_grad(set_to_none=True)
        torch.manual_seed((self.train.seed * 1_000_003 + step) * _RANKS + self.group.rank)
        if self._pool is not None:
            self._pool.begin(step)
        nll = torch.zeros((), device=self.group.device)
        smoothed = torch.zeros((), device=self.group.device)
        autocast = self.train.precision == "bf16" and not self._matmuls
        for index, (batch, weight) in enumerate(shares):
            more = index < len(shares) - 1
            no_sync = self._module.no_sync() if more and self._module is not self.objective else nullcontext()  # type: ignore[operator]
            with no_sync, use_matmuls(self._matmuls):  # a reversible model computes forward in backward again
                with torch.autocast(self.group.device.type, torch.bfloat16, enabled=autocast):
                    loss: Loss = self._module(batch.to(self.group.device))
                # DistributedDataParallel averages over processes, which is undone here. A loss that is not finite
                # makes its gradients NaN, whatever they were: then every process sees it in the norm.
                scale = weight * self._averaged_over / batch.total + loss.smoothed.detach() * 0
                (loss.smoothed * scale).backward()
            nll += weight * loss.nll
            smoothed += weight * loss.smoothed.detach()
        if self._all_reduce is not None:
            self._all_reduce()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        sums: list[float] = torch.stack((nll, smoothed, norm)).double().tolist()  # the one host sync per step
        return sums

    def update(self, step: int, rate: float, norm: float) -> bool:
        """Move the weights, with the gradient clipped; if it is not finite, nothing moves -> whether they moved."""
        if not math.isfinite(norm):
            return False
        excess = max(1.0, norm / self.train.clip) if self.train.clip else 1.0
        # Fused optimizers divide the gradients by this while they read them, which saves a pass over all of them.
        self.optimizer.grad_scale = torch.tensor(excess, device=self.group.device)  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model, step)
        return True


def make_optimizer(model: nn.Module, train: Train) -> torch.optim.Optimizer:
    """Adam or AdamW, fused, over what is not frozen; matrices decay, biases and norms do not."""
    odds = [gate.odds for gate in head_gates(model).values()]
    gate_ids = set(map(id, odds))
    parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in gate_ids]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        {"params": odds, "weight_decay": 0.0, "lr_factor": LR_FACTOR},
    ]
    groups = [group for group in groups if group["params"]]
    kind = torch.optim.AdamW if train.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, fused=True)


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


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The state of the optimizer, as tensors named after the parameters."""
    return {
        f"{name}:{moment}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Set the state of the optimizer to that of `optimizer_tensors`; a missing moment raises KeyError.

    A parameter without any moments never had a gradient: it is frozen, or was saved before the first step.
    """
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        if not any(f"{name}:{moment}" in tensors for moment in MOMENTS):
            continue
        optimizer.state[parameter] = {
            moment: tensors[f"{name}:{moment}"].to(parameter.device, copy=True) for moment in MOMENTS
        }


class Ema:
    """An exponential moving average of a model's weights. Early on it decays faster, or the start would stay in it.

    It is updated about thirty times per averaging window, which is as good as at every step and costs less.
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
def swapped_weights(model: nn.Module, weights: dict[str, Tensor] | None) -> Iterator[None]:
    """Inside, the model has other weights; None leaves it as it is."""
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
