"""One training step: forward, backward, all-reduce, update; with the optimizer, the schedule and the moving average.

A batch that does not fit into memory is split, with the same gradient: by the process that it does not fit, while the
others wait, or begin the step again if they have parts of its gradient already.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from regard.batch import Batch
from regard.errors import UserError, is_out_of_memory
from regard.loss import Loss, Objective, join_memories, memory_rows
from regard.model import Model
from regard.nn.adapters import LR_FACTOR, head_gates
from regard.nn.primitives import MaskPool, bf16_matmuls, use_matmuls, use_pool
from regard.nn.transformer import Transformer
from regard.recipe import Train
from regard.run import weights_of
from regard.training.distributed import DDPModule, ProcessGroup, broadcast_weights, local, whole

if TYPE_CHECKING:
    from regard.training.sharding import Blueprint

_RANKS = 4096  # more processes than will ever train together: keeps their random numbers apart
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
SMALLER = (
    "take smaller batches (train.batch_tokens, and train.accumulate to make up for it), let layers be computed again "
    "(train.recompute=true), or use more processes"
)
NOT_SHARDED = f"not enough memory for a batch; with train.strategy=fsdp it cannot be split on the way\n  {SMALLER}"
NOT_GIVEN_UP = f"not enough memory for a batch, nor for trying it again in parts\n  {SMALLER}"


class BatchPart(NamedTuple):
    """Rows of a batch of a step that are read at once."""

    share: int  # the number of the batch
    rows: slice  # of it
    batch: Batch  # these rows alone
    weight: float

    def halves(self) -> list[BatchPart]:
        start, stop = self.rows.start, self.rows.stop
        half = (stop - start) // 2
        parts = ((0, half), (half, stop - start))
        return [
            self._replace(rows=slice(start + first, start + end), batch=self.batch.rows(slice(first, end)))
            for first, end in parts
        ]


@dataclass
class MemoryFailures:
    """How often memory ran out in a step of this process, and the examples that did not fit even alone."""

    count: int = 0
    pieces: int = 0  # that were read in the end
    tokens: int = 0  # labels of the examples that were left out
    examples: list[tuple[int, int]] = field(default_factory=list)  # numbers of the batch, and of the row in it


class Stepper:
    """A model with its objective, its optimizer and, if asked for, the moving average of its weights.

    By default the objective is that of `train`.
    """

    def __init__(self, model: Model, train: Train, group: ProcessGroup, objective: Objective | None = None) -> None:
        self.model = model
        self.train = train
        self.group = group
        self.objective = objective or Objective(model, train.label_smoothing, train.scheduled_sampling, train.l0)
        self.memory_failures = MemoryFailures()  # of the last step
        self._too_large = math.inf  # the size of a batch for which memory ran out; those are split beforehand
        on_cpu = group.device.type == "cpu"
        for module in model.modules():
            if isinstance(module, Transformer):
                module.recompute = train.recompute
        # On a CPU bfloat16 is for the matrix products alone; their gradients lose nothing when sent so.
        self._matmuls = bf16_matmuls(model) if train.precision == "bf16" and on_cpu else {}
        self._ddp: DDPModule | None = None  # of a model that all processes have
        self._blueprint: Blueprint | None = None  # of a model that is sharded
        if group.size > 1:
            broadcast_weights(model.parameters())
        if group.size > 1 and train.strategy == "fsdp":
            from regard.training.sharding import Blueprint, shard  # which takes a second, and few need it

            self._blueprint = Blueprint(model)
            shard(self.objective, group, bf16=train.precision == "bf16" and not on_cpu, offload=train.offload)
        elif group.size > 1:
            self._ddp = DDPModule(self.objective, bf16=bool(self._matmuls))
        self._parameters = list(model.parameters())
        self.optimizer = make_optimizer(model, train)
        self._pool = MaskPool(train.seed * _RANKS + group.rank) if on_cpu else None
        use_pool(model, self._pool)
        self.ema = Ema(model, train.ema) if train.ema else None

    @property
    def sharded(self) -> bool:
        """Whether every process holds only a part of the weights."""
        return self._blueprint is not None

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights that are validated and kept: the moving average if there is one."""
        return weights_of(self.model) if self.ema is None else self.ema.weights

    @contextmanager
    def evaluated(self, weights: dict[str, Tensor] | None = None) -> Iterator[Model]:
        """Inside, the model with these weights, or its own, in eval mode; if it is sharded, a whole copy of it."""
        if self._blueprint is not None:
            yield self._blueprint.build(weights or weights_of(self.model)).eval()
            return
        with swapped_weights(self.model.eval(), weights):
            yield self.model

    def rate(self, step: int, done: float) -> float:
        """The learning rate of a step, with `done` of the budget (0 to 1) used up before it."""
        return learning_rate(self.train, step, done, self.model.config.top.width)

    def backward(self, step: int, shares: Sequence[tuple[Batch, float]]) -> list[float]:
        """Compute the gradients of a step -> [sum of negative log-probabilities, sum of the objective, gradient norm].

        The sums are those of this process, the gradients those of all. Random numbers depend on (seed, step, rank)
        and on how batches had to be split alone. `memory_failures` says what did not fit.
        """
        self.objective.train()
        self.memory_failures = failures = MemoryFailures()
        remembered = self.objective.segment_memory
        pieces = [
            BatchPart(share, slice(0, len(batch.label_BT)), batch, weight)
            for share, (batch, weight) in enumerate(shares)
        ]
        pieces = self._fitting(pieces)
        while True:
            self.objective.segment_memory = remembered
            sums = self._accumulate(step, pieces)
            if failed := isinstance(sums, BatchPart):
                pieces = self._without(pieces, sums)
                with _memory_required():
                    others_know = self._ddp is not None and self._ddp.give_up()
                if not others_know:
                    continue
            numbers = [0.0, 0.0, math.nan] if failed else self._numbers(*sums)
            # A step that one process gives up has gradients of NaN in all of them, and all begin it again.
            if math.isfinite(numbers[-1]) or not any(given_up for (given_up,) in self.group.gather([float(failed)])):
                break
        if failures.examples:
            self.objective.segment_memory = None  # it has fewer rows now
        failures.pieces = len(pieces)
        return numbers

    def _numbers(self, nll: Tensor, smoothed: Tensor) -> list[float]:
        """The sums and the norm of the gradients, by one host sync."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients, foreach=True)).to(self.group.device)
        numbers: list[float] = torch.stack((nll, smoothed, norm)).double().tolist()
        return numbers

    def _accumulate(self, step: int, pieces: Sequence[BatchPart]) -> tuple[Tensor, Tensor] | BatchPart:
        """Add up the gradients of a step -> the sums of both losses, or the piece for which memory ran out."""
        self.optimizer.zero_grad(set_to_none=True)  # also of what came before the piece that failed
        torch.manual_seed((self.train.seed * 1_000_003 + step) * _RANKS + self.group.rank)
        if self._pool is not None:
            self._pool.begin(step)
        if self._ddp is not None:
            self._ddp.begin()
        nll, smoothed = (torch.zeros((), device=self.group.device) for _ in range(2))
        for _, share in groupby(pieces, key=lambda piece: piece.share):
            before, after = self.objective.segment_memory, []
            for piece in share:
                self.objective.segment_memory = memory_rows(before, piece.rows)
                loss = self._backward(piece, last=piece is pieces[-1])
                if loss is None:
                    return piece
                after.append(self.objective.segment_memory)
                nll += piece.weight * loss.nll
                smoothed += piece.weight * loss.smoothed.detach()
            self.objective.segment_memory = join_memories(after)
        if not pieces and self._ddp is not None:
            with _memory_required():
                self._ddp.add_nothing()
        return nll, smoothed

    def _backward(self, piece: BatchPart, last: bool) -> Loss | None:
        """Add the gradient of a piece to those of the step, and after the last those of all processes.

        None if memory ran out.
        """
        device, autocast = self.group.device, self.train.precision == "bf16" and not self._matmuls
        forward = self.objective if self._ddp is None else self._ddp
        sends = nullcontext() if self._ddp is None else self._ddp.sending(last)
        try:
            with sends, use_matmuls(self._matmuls):  # a reversible model computes forward in backward again
                with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                    loss: Loss = forward(piece.batch.to(device))
                # A loss that is not finite makes its gradients NaN, whatever they were: then every process sees it in
                # the norm.
                scale = piece.weight / piece.batch.total + loss.smoothed.detach() * 0
                (loss.smoothed * scale).backward()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if self.sharded:  # the others wait for this process in the middle of a layer
                raise UserError(NOT_SHARDED) from None
            if self._ddp is not None and self._ddp.sent_all:  # the others have gone on with the sums
                raise UserError(NOT_GIVEN_UP) from None
            return None
        return loss

    def _without(self, pieces: Sequence[BatchPart], failed: BatchPart) -> list[BatchPart]:
        """The pieces to try again with after memory ran out for one of them; a single row is left out."""
        self.memory_failures.count += 1
        if failed.rows.stop - failed.rows.start > 1:
            self._too_large = min(self._too_large, failed.batch.size)
            return self._fitting(pieces)
        if failed.weight:
            self.memory_failures.examples.append((failed.share, failed.rows.start))
            self.memory_failures.tokens += failed.batch.tokens
        return [piece for piece in pieces if piece is not failed]

    def _fitting(self, pieces: Sequence[BatchPart]) -> list[BatchPart]:
        """The pieces, split until each is smaller than what did not fit, or a single row."""
        done: list[BatchPart] = []
        waiting = list(reversed(pieces))
        while waiting:
            piece = waiting.pop()
            if piece.batch.size >= self._too_large and piece.rows.stop - piece.rows.start > 1:
                waiting += reversed(piece.halves())
            else:
                done.append(piece)
        return done

    def update(self, step: int, rate: float, norm: float) -> bool:
        """Move the weights, with the gradient clipped; if it is not finite, nothing moves -> whether they moved."""
        if not math.isfinite(norm):
            return False
        excess = max(1.0, norm / self.train.clip) if self.train.clip else 1.0
        # Fused optimizers divide the gradients by this while they read them, which saves a pass over all of them.
        device = local(self._parameters[0]).device  # not that of the group if weights are offloaded
        self.optimizer.grad_scale = torch.tensor(excess, device=device)  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)
        try:
            self.optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"not enough memory for the optimizer, which keeps two numbers for each of {self.model.size:,} "
                "parameters; take a smaller model, or fewer processes (train.workers)"
            ) from None
        if self.ema is not None:
            self.ema.update(self.model, step)
        return True


@contextmanager
def _memory_required() -> Iterator[None]:
    """Inside, memory that runs out is a UserError."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(NOT_GIVEN_UP) from None


def unused_settings(model: Model, train: Train, group: ProcessGroup) -> list[str]:
    """Settings of memory that do nothing here, each with the reason."""
    sharded = train.strategy == "fsdp" and group.size > 1
    unused = []
    if train.strategy == "fsdp" and not sharded:
        unused.append("train.strategy=fsdp: one process holds all weights; use several (--workers, torchrun)")
    if train.offload and not (sharded and group.device.type == "cuda"):
        unused.append("train.offload: moves shards of fsdp off a GPU; here nothing is moved")
    if train.recompute and not any(isinstance(module, Transformer) for module in model.modules()):
        unused.append("train.recompute: the layers of this model keep their activations in any case")
    return unused


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


def prepare_moments(optimizer: torch.optim.Optimizer, model: nn.Module, names: Collection[str]) -> None:
    """Give the optimizer zero moments for those parameters of which `optimizer_tensors` has these names."""
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        if f"{name}:step" in names:
            moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS if moment != "step"}
            optimizer.state[parameter] = {**moments, "step": torch.zeros((), device=local(parameter).device)}


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
            mine = [local(x) for x in self.weights.values()]
            torch._foreach_lerp_(mine, [local(x) for x in weights_of(model).values()], 1 - decay**every)


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
