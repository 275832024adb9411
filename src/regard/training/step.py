"""A training step: forward, backward, all-reduce, update; the optimizer, the schedule and the moving average."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn

from regard.batch import Batch
from regard.errors import UserError, is_out_of_memory
from regard.loss import Loss, Objective, join_memories, memory_rows
from regard.model import Model
from regard.nn.adapters import LR_FACTOR, head_gates
from regard.nn.primitives import MaskPool, bf16_matmuls, use_matmuls, use_pool
from regard.nn.transformer import Transformer
from regard.parallel.ranks import ProcessGroup
from regard.recipe import Train
from regard.training.data_parallel import Blueprint, broadcast_weights, distribute, local, shard, whole
from regard.weight_files import weights_of

MAX_RANKS = 4096  # a step reserves one random seed per rank


class BatchPart(NamedTuple):
    """Rows of a batch that are computed together."""

    share: int  # the index of the batch in the step
    rows: slice
    batch: Batch  # only these rows
    weight: float

    def halves(self) -> list[BatchPart]:
        size = self.rows.stop - self.rows.start
        half = size // 2
        middle = self.rows.start + half
        first = self._replace(rows=slice(self.rows.start, middle), batch=self.batch.rows(slice(0, half)))
        second = self._replace(rows=slice(middle, self.rows.stop), batch=self.batch.rows(slice(half, size)))
        return [first, second]


@dataclass
class MemoryFailures:
    """The number of times that memory ran out in a step, and the examples that do not fit even in a batch of one."""

    count: int = 0
    pieces: int = 0  # number of pieces that the batches of the step were split into
    tokens: int = 0  # labels of the skipped examples
    examples: list[tuple[int, int]] = field(default_factory=list)  # (index of the batch, row)


class Stepper:
    """A model with its objective, its optimizer and, if configured, the moving average of its weights."""

    def __init__(self, model: Model, train: Train, group: ProcessGroup, objective: Objective | None = None) -> None:
        self.model = model
        self.train = train
        self.group = group
        self.objective = objective or Objective(model, train.label_smoothing, train.scheduled_sampling, train.l0)
        self.memory_failures = MemoryFailures()  # of the last step
        self._too_large = math.inf  # the smallest size that ran out of memory; larger batches are split in advance
        on_cpu = group.device.type == "cpu"
        for module in model.modules():
            if isinstance(module, Transformer):
                module.recompute = train.recompute
        # On a CPU, only matrix products use bfloat16; their gradients lose nothing if they are sent in bfloat16.
        self._matmuls = bf16_matmuls(model) if train.precision == "bf16" and on_cpu else {}
        self.sharded = group.size > 1 and train.strategy == "fsdp"  # every process has only a shard of the weights
        self._ddp: DistributedDataParallel | None = None
        self._blueprint: Blueprint | None = None  # of a model that is sharded
        if group.size > 1:
            broadcast_weights(model.parameters())
            if self.sharded:
                self._blueprint = Blueprint(model)
                shard(self.objective, group, bf16=train.precision == "bf16" and not on_cpu, offload=train.offload)
            else:
                self._ddp = distribute(self.objective, bf16=bool(self._matmuls))
        self._parameters = list(model.parameters())
        self.optimizer = make_optimizer(model, train)
        self._pool = MaskPool(train.seed * MAX_RANKS + group.rank) if on_cpu else None
        use_pool(model, self._pool)
        self.ema = Ema(model, train.ema) if train.ema else None

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights that are validated and saved as the model: the moving average if it is enabled."""
        return weights_of(self.model) if self.ema is None else self.ema.weights

    @contextmanager
    def evaluated(self, weights: dict[str, Tensor] | None = None) -> Iterator[Model]:
        """The model in eval mode, with its own weights by default; a full copy if the model is sharded."""
        if self._blueprint is not None:
            yield self._blueprint.build(weights or weights_of(self.model)).eval()
            return
        with swapped_weights(self.model.eval(), weights):
            yield self.model

    def backward(self, step: int, shares: Sequence[tuple[Batch, float]]) -> list[float]:
        """Compute the gradients of a step -> [nll and objective summed in this process, gradient norm of all]."""
        self.objective.train()
        self.memory_failures = failures = MemoryFailures()
        memory = self.objective.segment_memory
        batches = enumerate(shares)
        pieces = self._split([BatchPart(i, slice(0, len(x.label_BT)), x, weight) for i, (x, weight) in batches])
        while isinstance(sums := self._accumulate(step, pieces), BatchPart):
            pieces = self._without(pieces, sums)
            self.objective.segment_memory = memory
        if failures.examples:
            self.objective.segment_memory = None  # it lacks the rows of the skipped examples
        failures.pieces = len(pieces)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if self.sharded:
            norm = whole(norm).to(self.group.device)
        numbers: list[float] = torch.stack((*sums, norm)).double().tolist()  # one host sync for all
        return numbers

    def _accumulate(self, step: int, pieces: Sequence[BatchPart]) -> tuple[Tensor, Tensor] | BatchPart:
        """Accumulate the gradients of a step -> the sums of both losses, or the piece that ran out of memory."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.manual_seed((self.train.seed * 1_000_003 + step) * MAX_RANKS + self.group.rank)
        if self._pool is not None:
            self._pool.begin(step)
        nll, smoothed = (torch.zeros((), device=self.group.device) for _ in range(2))
        for _, share in groupby(pieces, key=lambda piece: piece.share):
            before = self.objective.segment_memory
            after = []
            for piece in share:
                self.objective.segment_memory = before and memory_rows(before, piece.rows)
                try:
                    loss = self._backward(piece, last=piece is pieces[-1])
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    if self.group.size > 1:
                        raise UserError(self._memory_error()) from None
                    return piece
                after.append(self.objective.segment_memory)
                nll += piece.weight * loss.nll
                smoothed += piece.weight * loss.smoothed.detach()
            self.objective.segment_memory = after[0] if len(after) == 1 else join_memories(after)
        return nll, smoothed

    def _backward(self, piece: BatchPart, last: bool) -> Loss:
        """Accumulate the gradients of a piece; after the last piece, the gradients are summed over processes."""
        device = self.group.device
        autocast = self.train.precision == "bf16" and not self._matmuls
        forward = self.objective if self._ddp is None else self._ddp
        synced = nullcontext() if self._ddp is None or last else self._ddp.no_sync()
        with synced, use_matmuls(self._matmuls):  # the backward pass of a reversible model repeats the forward pass
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss: Loss = forward(piece.batch.to(device))
            # A loss that is not finite makes all its gradients NaN, so the norm shows it to every process.
            scale = piece.weight / piece.batch.total + loss.smoothed.detach() * 0
            (loss.smoothed * scale).backward()
        return loss

    def _memory_error(self) -> str:
        key = "batch_examples" if self.train.batch_examples else "batch_tokens"
        return (
            "not enough memory for a batch, and only a single process splits batches; "
            f"continue with resume=True and train.workers=1,\n  or begin again with a lower train.{key} "
            f"(now {getattr(self.train, key)}; train.accumulate keeps the size of a step) or with train.recompute=true"
        )

    def _without(self, pieces: Sequence[BatchPart], failed: BatchPart) -> list[BatchPart]:
        """The pieces for another attempt after one of them ran out of memory; a single row is skipped."""
        self.memory_failures.count += 1
        if failed.rows.stop - failed.rows.start > 1:
            self._too_large = min(self._too_large, failed.batch.size)
            return self._split(pieces)
        if failed.weight:
            self.memory_failures.examples.append((failed.share, failed.rows.start))
            self.memory_failures.tokens += failed.batch.tokens
        return [piece for piece in pieces if piece is not failed]

    def _split(self, pieces: Sequence[BatchPart]) -> list[BatchPart]:
        """Split pieces until each is a single row, or smaller than the smallest piece that ran out of memory."""
        parts: list[BatchPart] = []
        for piece in pieces:
            single = piece.rows.stop - piece.rows.start == 1
            fits = single or math.isinf(self._too_large) or piece.batch.size < self._too_large
            parts += [piece] if fits else self._split(piece.halves())
        return parts

    def update(self, step: int, rate: float, norm: float) -> bool:
        """Clip the gradient and update the weights -> whether they were updated: False if the norm is not finite."""
        if not math.isfinite(norm):
            return False
        excess = max(1.0, norm / self.train.clip) if self.train.clip else 1.0
        # Fused optimizers divide the gradients by this factor, which saves a pass over all gradients.
        # Offloaded weights are not on the device of the group.
        device = local(self._parameters[0]).device if self.sharded else self.group.device
        self.optimizer.grad_scale = torch.tensor(excess, device=device)  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)
        try:
            self.optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            numbers = f"two numbers for each of {self.model.size:,} parameters"
            advice = "use a smaller model, or fewer processes (train.workers)"
            raise UserError(f"not enough memory for the optimizer, which stores {numbers}; {advice}") from None
        if self.ema is not None:
            self.ema.update(self.model, step)
        return True


def make_optimizer(model: nn.Module, train: Train) -> torch.optim.Optimizer:
    """Fused Adam or AdamW for the parameters that are not frozen, with weight decay only for matrices."""
    odds = [gate.odds for gate in head_gates(model).values()]
    parameters = [p for p in model.parameters() if p.requires_grad and not any(p is gate for gate in odds)]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        {"params": odds, "weight_decay": 0.0, "lr_factor": LR_FACTOR},
    ]
    groups = [group for group in groups if group["params"]]
    kind = torch.optim.AdamW if train.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, fused=True)


def learning_rate(train: Train, step: int, done: float, width: int) -> float:
    """The learning rate of a step (the first is 1), with `done` of the budget used up before it.

    noam          lr * width^-0.5 * min(step^-0.5, step * warmup^-1.5)
    inverse_sqrt  lr after `warmup` steps, then falling with the square root of the step
    cosine        lr * (1 + cos(pi * done)) / 2, down to zero at the end of the budget
    linear        lr * (1 - done)
    constant      lr
    All of them rise linearly over the first `warmup` steps.
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


class Ema:
    """A moving average of weights that decays faster in early steps and is updated about 30 times per window."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: x.clone() for name, x in weights_of(model).items()}

    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        every = max(1, round(0.03 / (1 - decay)))
        if step % every == 0:
            average = get_ema_multi_avg_fn(decay**every)
            average([local(x) for x in self.weights.values()], [local(x) for x in weights_of(model).values()], None)


@contextmanager
def swapped_weights(model: nn.Module, weights: dict[str, Tensor] | None) -> Iterator[None]:
    """Give the model other weights inside the context; None: its own weights."""
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
