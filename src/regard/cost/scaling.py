"""What training costs in each of several processes: memory, communication and time, counted without building a model.

The collectives are those of `training.step`: with ddp an all-reduce of every bucket of gradients during the last
backward pass of a step; with fsdp, for each batch, all-gathers and reduce-scatters of every Transformer layer, and of
all other weights as one more unit, which stays gathered from the forward to the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from regard.config import Config
from regard.cost.activations import BYTES, count_activations
from regard.cost.describe import Info
from regard.model import Model, on_meta
from regard.nn.block import Block
from regard.nn.reversible import ReversibleBlock
from regard.nn.transformer import Transformer
from regard.recipe import Train

BF16 = 2  # bytes of a number
LAST_BUCKET = 1 << 20  # bytes of gradients, at least, that ddp sends when all are computed


@dataclass(frozen=True)
class Hardware:
    """What a process has: both as they are reached in practice, not the peaks of a data sheet."""

    flops: float  # per second
    bandwidth: float  # bytes per second that it sends to another while it receives as many: of the slowest link


@dataclass(frozen=True)
class Memory:
    """Bytes of the process that holds the most."""

    weights: int
    gradients: int
    moments: int
    average: int  # the moving average of the weights
    gathered: int  # fsdp: the weights outside of layers, one layer, and the next one, which is on its way
    # fsdp: gradients of gathered weights, and of a layer what is sent; ddp: gradients outside of the buckets in which
    # they are summed, and what is sent in bfloat16
    unreduced: int
    activations: int
    host: int = 0  # with offloading: weights, gradients, moments and average are in the memory of the CPU

    @property
    def step(self) -> int:
        """On the device, at the peak of a step."""
        return self.kept + self.gathered + self.unreduced + self.activations

    @property
    def kept(self) -> int:
        """On the device, between two steps."""
        return self.weights + self.moments + self.average + self.gradients - self.host


@dataclass(frozen=True)
class Communication:
    """The sizes of the tensors that a step sums or gathers, in bytes; all processes have the same."""

    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    exposed: int = 0  # of these, what no computation overlaps with; of an all-reduce twice its size

    def sent(self, ranks: int, exposed: bool = False) -> float:
        """Bytes that a process sends in a step, and receives, by the ring algorithm."""
        size = self.exposed if exposed else 2 * self.all_reduce + self.all_gather + self.reduce_scatter
        return (ranks - 1) / ranks * size


@dataclass(frozen=True)
class Scaling:
    """A training step of several processes."""

    ranks: int
    train: Train
    memory: Memory
    communication: Communication
    start: int  # bytes on the device before a model is sharded: all weights
    validation: int  # bytes on the device while validating, without what decoding needs
    flops: float  # of a step, in each process
    overlapping: float  # the share of computing in which something is sent
    hardware: Hardware | None = None

    @property
    def sent(self) -> float:
        """Bytes that a process sends in a step."""
        return self.communication.sent(self.ranks)

    @property
    def compute_seconds(self) -> float:
        assert self.hardware is not None
        return self.flops / self.hardware.flops

    def seconds(self, overlap: bool = True) -> float:
        """The time of a step: of computing and of sending, where they overlap the longer of both."""
        assert self.hardware is not None
        sending = self.sent / self.hardware.bandwidth
        if not overlap:
            return self.compute_seconds + sending
        exposed = self.communication.sent(self.ranks, exposed=True) / self.hardware.bandwidth
        overlapping = self.overlapping * self.compute_seconds
        return self.compute_seconds - overlapping + max(overlapping, sending - exposed) + exposed

    def efficiency(self, overlap: bool = True) -> float:
        """The share of a step in which a process computes."""
        return self.compute_seconds / self.seconds(overlap)

    def to_json(self) -> dict[str, Any]:
        settings = {name: getattr(self.train, name) for name in ("strategy", "precision", "recompute", "offload")}
        memory = {**asdict(self.memory), "step": self.memory.step, "start": self.start, "validation": self.validation}
        collectives = {name: size for name, size in asdict(self.communication).items() if name != "exposed"}
        numbers: dict[str, Any] = {
            "ranks": self.ranks,
            **settings,
            "memory": memory,
            "communication": {**collectives, "sent": self.sent},
            "flops": self.flops,
        }
        if self.hardware is not None:
            numbers["time"] = {
                **asdict(self.hardware),
                "compute": self.compute_seconds,
                "step": self.seconds(),
                "step_without_overlap": self.seconds(overlap=False),
                "efficiency": self.efficiency(),
                "efficiency_without_overlap": self.efficiency(overlap=False),
            }
        return numbers


@dataclass(frozen=True)
class Unit:
    """Weights that fsdp gathers together."""

    tensors: tuple[Tensor, ...]
    gathers: int  # in a forward and a backward pass

    def shard(self, ranks: int) -> int:
        """Numbers that the first process holds, which has the most: every tensor is cut along its first dimension."""
        return sum(-(-len(x) // ranks) * x[0].numel() if x.dim() else 1 for x in self.tensors)

    def padded(self, ranks: int) -> int:
        """Numbers that are gathered: as if all processes held as many as the first."""
        return ranks * self.shard(ranks)


def sharding_units(model: Model) -> tuple[Unit, list[Unit]]:
    """The weights outside of layers, and every layer that fsdp gathers by itself.

    A layer is gathered in the forward and in the backward pass; one with cross-attention twice more, when the keys of
    the source are computed before it.
    """
    units: list[Unit] = []
    seen: set[int] = set()

    def new(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        fresh = tuple(x for x in tensors if id(x) not in seen)
        seen.update(map(id, fresh))
        return fresh

    for block in model.modules():
        if isinstance(block, Block) and not isinstance(block, ReversibleBlock):
            units.append(Unit(new(block.parameters()), 2 if block.cross is None else 4))
    return Unit(new(model.parameters()), 1), units


def plan_scaling(
    config: Config, info: Info, train: Train, ranks: int, hardware: Hardware | None = None, *, on_cpu: bool = False
) -> Scaling:
    """What training as `train` says costs in each of `ranks` processes, when all weights are trained.

    The batch of the workload is that of all processes together.
    """
    model, workload, shared = on_meta(config), info.workload, ranks > 1
    sharded = shared and train.strategy == "fsdp"
    bf16 = train.precision == "bf16"
    root, layers = sharding_units(model)
    held = sum(unit.shard(ranks) for unit in (root, *layers)) if sharded else info.total
    gathered, unreduced = 0, 0
    if sharded:
        width = BF16 if bf16 and not on_cpu else BYTES
        largest = max((unit.padded(ranks) for unit in layers), default=0)
        gathered = width * (root.padded(ranks) + min(2, len(layers)) * largest)
        unreduced = width * root.padded(ranks) + (width + BYTES) * largest
        communication = _fsdp(root, layers, ranks, train.accumulate, width)
    elif shared:
        in_bf16 = bf16 and on_cpu
        # Of one batch a gradient is in its bucket as soon as it is computed; those of earlier batches are kept apart.
        apart = info.total if train.accumulate > 1 else _computed_at_once(model)
        unreduced = BYTES * apart + BF16 * in_bf16 * info.total
        communication = _ddp(list(model.parameters()), BF16 if in_bf16 else BYTES)
    else:
        communication = Communication()
    tokens = max(1, workload.batch_tokens // ranks)
    average = BYTES * held if train.ema else 0
    offloaded = sharded and train.offload and not on_cpu
    memory = Memory(
        weights=BYTES * held,
        gradients=BYTES * held,
        moments=2 * BYTES * held,
        average=average,
        gathered=gathered,
        unreduced=unreduced,
        activations=count_activations(
            config, workload.length, tokens, recompute=train.recompute, bf16=bf16 and not on_cpu
        ),
        host=4 * BYTES * held + average if offloaded else 0,
    )
    passes = 4 if train.recompute else 3
    return Scaling(
        ranks=ranks,
        train=train,
        memory=memory,
        communication=communication,
        start=info.weights,
        validation=memory.kept + (info.weights if sharded else 0),
        flops=passes * info.flops_per_token * workload.batch_tokens / ranks * train.accumulate,
        # ddp sends in the last backward pass of a step, which is all but a forward pass
        overlapping=1.0 if sharded else (passes - 1) / passes / train.accumulate,
        hardware=hardware,
    )


def _computed_at_once(model: Model) -> int:
    """Numbers of the gradients that are computed together: of one tensor, or of all reversible layers of a stack."""
    stacks = [
        sum(p.numel() for p in stack.blocks.parameters())
        for stack in model.modules()
        if isinstance(stack, Transformer) and stack.reversible
    ]
    return max([*stacks, *(p.numel() for p in model.parameters())])


def _ddp(parameters: list[Tensor], width: int) -> Communication:
    """The collectives of a step: gradients as numbers of `width` bytes, and for each tensor whether it was used.

    The last bucket, with the first parameters, is sent when nothing is left to compute. `DDPModule` adds to it a
    parameter of one number, which is not used.
    """
    sizes = list(accumulate((p.numel() for p in parameters), initial=1))
    last = next((size for size in sizes if BYTES * size >= LAST_BUCKET), sizes[-1])
    return Communication(all_reduce=width * sizes[-1] + BYTES * len(sizes), exposed=2 * width * last)


def _fsdp(root: Unit, layers: list[Unit], ranks: int, batches: int, width: int) -> Communication:
    """The collectives of a step of so many batches; weights are gathered as numbers of `width` bytes."""
    units = (root, *layers)
    exposed = (width + BYTES) * root.padded(ranks)
    return Communication(
        all_gather=batches * width * sum(unit.gathers * unit.padded(ranks) for unit in units),
        reduce_scatter=batches * BYTES * sum(unit.padded(ranks) for unit in units),
        exposed=batches * exposed,
    )
