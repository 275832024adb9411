"""The cost of multi-process training per process: memory, communication and time, without building a model.

With ddp, gradients are all-reduced in buckets during the last backward pass of a step. With fsdp, every batch needs
all-gathers and reduce-scatters of each Transformer layer, and of the unit of all other weights.
"""

from __future__ import annotations

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

BF16_BYTES = 2  # of a number
MIN_LAST_BUCKET_BYTES = 1 << 20  # the last bucket, which ddp sends after the backward pass


@dataclass(frozen=True)
class Hardware:
    """The hardware of a process, with achieved rates."""

    flops: float  # per second
    bandwidth: float  # bytes per second of the slowest link, in each direction


@dataclass(frozen=True)
class Memory:
    """Bytes of the process with the largest share."""

    weights: int
    gradients: int
    moments: int
    average: int  # the moving average of the weights
    gathered: int  # fsdp: the weights outside of layers, the current layer, and the next one during its transfer
    # fsdp: gradients of gathered weights, and the send buffer of a layer; ddp: gradients outside of the buckets, and
    # the send buffer in bfloat16
    unreduced: int
    activations: int
    host: int = 0  # offloaded weights, gradients, moments and average, in CPU memory

    @property
    def step(self) -> int:
        """Device memory at the peak of a step."""
        return self.resident + self.gathered + self.unreduced + self.activations

    @property
    def resident(self) -> int:
        """Device memory between two steps."""
        return self.weights + self.moments + self.average + self.gradients - self.host


@dataclass(frozen=True)
class Communication:
    """The sizes in bytes of the tensors that a step reduces or gathers, equal in all processes."""

    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    exposed: int = 0  # the part that does not overlap with computation; an all-reduce counts twice


@dataclass(frozen=True)
class Scaling:
    """The cost of a training step in several processes."""

    ranks: int
    train: Train
    memory: Memory
    communication: Communication
    start: int  # bytes on the device before the model is sharded
    validation: int  # bytes on the device during validation, without the cache of decoding
    flops: float  # per step and process
    overlapping: float  # share of the computation that may overlap with communication
    hardware: Hardware | None = None

    @property
    def sent(self) -> float:
        """Bytes that a process sends (and receives) in a step, by the ring algorithm."""
        sizes = self.communication
        return (self.ranks - 1) / self.ranks * (2 * sizes.all_reduce + sizes.all_gather + sizes.reduce_scatter)

    @property
    def compute_seconds(self) -> float:
        assert self.hardware is not None
        return self.flops / self.hardware.flops

    def seconds(self, overlap: bool = True) -> float:
        """The time of a step: the longer of computation and communication where they overlap."""
        assert self.hardware is not None
        sending = self.sent / self.hardware.bandwidth
        if not overlap:
            return self.compute_seconds + sending
        exposed = (self.ranks - 1) / self.ranks * self.communication.exposed / self.hardware.bandwidth
        overlapping = self.overlapping * self.compute_seconds
        return self.compute_seconds - overlapping + max(overlapping, sending - exposed) + exposed

    def efficiency(self, overlap: bool = True) -> float:
        """The share of the time of a step that is computation."""
        return self.compute_seconds / self.seconds(overlap)

    def to_json(self) -> dict[str, Any]:
        settings = {name: getattr(self.train, name) for name in ("strategy", "precision", "recompute", "offload")}
        memory = {**asdict(self.memory), "step": self.memory.step, "start": self.start, "validation": self.validation}
        collectives = {name: size for name, size in asdict(self.communication).items() if name != "exposed"}
        communication = {**collectives, "sent": self.sent}
        costs = {"memory": memory, "communication": communication, "flops": self.flops}
        numbers = {"ranks": self.ranks, **settings, **costs}
        if self.hardware is None:
            return numbers
        time = {
            **asdict(self.hardware),
            "compute": self.compute_seconds,
            "step": self.seconds(),
            "step_without_overlap": self.seconds(overlap=False),
            "efficiency": self.efficiency(),
            "efficiency_without_overlap": self.efficiency(overlap=False),
        }
        return {**numbers, "time": time}


@dataclass(frozen=True)
class Unit:
    """Weights that fsdp gathers together."""

    tensors: tuple[Tensor, ...]
    gathers: int  # in a forward and a backward pass

    def shard(self, ranks: int) -> int:
        """The size of the first shard, which is the largest; every tensor is split along its first dimension."""
        return sum(-(-len(x) // ranks) * x[0].numel() if x.dim() else 1 for x in self.tensors)

    def padded(self, ranks: int) -> int:
        """The size of the gathered tensors, whose shards are padded to the size of the first."""
        return ranks * self.shard(ranks)


def sharding_units(model: Model) -> tuple[Unit, list[Unit]]:
    """The units of fsdp: the weights outside of layers, and each layer.

    A layer is gathered in the forward and in the backward pass; a layer with cross-attention is gathered again in both,
    because the keys of the source are computed separately.
    """
    blocks = [part for part in model.modules() if isinstance(part, Block) and not isinstance(part, ReversibleBlock)]
    layers = [Unit(tuple(block.parameters()), 2 if block.cross is None else 4) for block in blocks]
    inside = {id(x) for unit in layers for x in unit.tensors}
    return Unit(tuple(x for x in model.parameters() if id(x) not in inside), 1), layers


def plan_scaling(
    config: Config, info: Info, train: Train, ranks: int, hardware: Hardware | None = None, *, on_cpu: bool = False
) -> Scaling:
    """The cost of training with these settings in each of `ranks` processes, if all weights are trained.

    The batch of the workload is the batch of all processes together.
    """
    model = on_meta(config)
    workload = info.workload
    shared = ranks > 1
    sharded = shared and train.strategy == "fsdp"
    bf16 = train.precision == "bf16"
    root, layers = sharding_units(model)
    shard = sum(unit.shard(ranks) for unit in (root, *layers)) if sharded else info.total
    gathered = 0
    unreduced = 0
    communication = Communication()
    if sharded:
        width = BF16_BYTES if bf16 and not on_cpu else BYTES
        largest = max((unit.padded(ranks) for unit in layers), default=0)
        gathered = width * (root.padded(ranks) + min(2, len(layers)) * largest)
        unreduced = width * root.padded(ranks) + (width + BYTES) * largest
        communication = _fsdp(root, layers, ranks, train.accumulate, width)
    elif shared:
        in_bf16 = bf16 and on_cpu
        # The gradients of a single batch are written into the buckets; accumulated gradients need separate memory.
        separate = info.total if train.accumulate > 1 else _computed_at_once(model)
        unreduced = BYTES * separate + BF16_BYTES * in_bf16 * info.total
        communication = _ddp(model, BF16_BYTES if in_bf16 else BYTES)
    tokens = max(1, workload.batch_tokens // ranks)
    average = BYTES * shard if train.ema else 0
    offloaded = sharded and train.offload and not on_cpu
    memory = Memory(
        weights=BYTES * shard,
        gradients=BYTES * shard,
        moments=2 * BYTES * shard,
        average=average,
        gathered=gathered,
        unreduced=unreduced,
        activations=count_activations(
            config, workload.length, tokens, recompute=train.recompute, bf16=bf16 and not on_cpu
        ),
        host=4 * BYTES * shard + average if offloaded else 0,
    )
    passes = 4 if train.recompute else 3
    return Scaling(
        ranks=ranks,
        train=train,
        memory=memory,
        communication=communication,
        start=info.weights,
        validation=memory.resident + (info.weights if sharded else 0),
        flops=passes * info.flops_per_token * workload.batch_tokens / ranks * train.accumulate,
        # ddp communicates only during the last backward pass of a step
        overlapping=1.0 if sharded else (passes - 1) / passes / train.accumulate,
        hardware=hardware,
    )


def _computed_at_once(model: Model) -> int:
    """The largest number of gradients computed together: of one tensor, or of all reversible layers of a stack."""
    stacks = [
        sum(p.numel() for p in stack.blocks.parameters())
        for stack in model.modules()
        if isinstance(stack, Transformer) and stack.reversible
    ]
    return max([*stacks, *(p.numel() for p in model.parameters())])


def _ddp(model: Model, width: int) -> Communication:
    """The collectives of a step: gradients as numbers of `width` bytes, and for every tensor whether it was used.

    The last bucket, with the first parameters, is sent after the computation. It includes the unused parameter that
    `data_parallel.distribute` adds, a single number.
    """
    sizes = list(accumulate((p.numel() for p in model.parameters()), initial=1))
    last = next((size for size in sizes if BYTES * size >= MIN_LAST_BUCKET_BYTES), sizes[-1])
    return Communication(all_reduce=width * sizes[-1] + BYTES * len(sizes), exposed=2 * width * last)


def _fsdp(root: Unit, layers: list[Unit], ranks: int, batches: int, width: int) -> Communication:
    """The collectives of a step of several batches; weights are gathered as numbers of `width` bytes."""
    units = (root, *layers)
    return Communication(
        all_gather=batches * width * sum(unit.gathers * unit.padded(ranks) for unit in units),
        reduce_scatter=batches * BYTES * sum(unit.padded(ranks) for unit in units),
        exposed=batches * (width + BYTES) * root.padded(ranks),
    )
