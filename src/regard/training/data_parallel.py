"""Data-parallel training: DDP (every process has all weights) and FSDP2 (every process has a shard of each weight).

Both sum gradients over the processes, because the loss is divided by the tokens of all processes. The libraries for
FSDP2 and its checkpoints take a second to import, so they are imported inside functions.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard.loss import Objective
from regard.model import Model, allocate
from regard.nn.block import Block
from regard.nn.reversible import ReversibleBlock
from regard.parallel.ranks import ProcessGroup
from regard.weight_files import weights_of

Tensors = dict[str, Tensor]


def broadcast_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Copy the weights of rank 0 to all processes, one at a time to save memory."""
    for parameter in parameters:
        dist.broadcast(parameter.detach(), 0)


def distribute(module: nn.Module, bf16: bool) -> DistributedDataParallel:
    """Wrap a module in DDP. With `bf16`, gradients are sent in bfloat16."""
    ddp = DistributedDataParallel(
        _WithUnusedParameter(module),
        init_sync=False,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        # In addition to allowing unused parameters, this keeps torch from rebuilding the buckets after the first step.
        # With three or more processes, rebuilt buckets change the rounding of sums, so a resumed run would differ.
        find_unused_parameters=True,
    )
    # A lambda, because torch compares annotations with types, while the annotations of this module are strings.
    ddp.register_comm_hook(bf16, lambda bf16, bucket: _sum_bucket(bf16, bucket))
    return ddp


def _sum_bucket(bf16: bool, bucket: Any) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients over all processes; DDP by default computes the mean."""
    gradients: Tensor = bucket.buffer()
    sent = gradients.bfloat16() if bf16 else gradients

    def receive(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        (total,) = done.value()
        return gradients.copy_(total) if bf16 else total

    summed: torch.futures.Future[Tensor] = dist.all_reduce(sent, async_op=True).get_future().then(receive)
    return summed


class _WithUnusedParameter(nn.Module):
    """A module with an unused parameter: DDP warns if it looks for unused parameters and finds none."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.unused = nn.Parameter(next(module.parameters()).new_zeros(1))

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


def shard(objective: Objective, group: ProcessGroup, *, bf16: bool, offload: bool) -> None:
    """Distribute the weights of an objective's model over a group, in place; offloaded shards are in CPU memory."""
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    # The warning is about in-place changes of the outputs of layers, which do not happen here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    policy = fsdp.MixedPrecisionPolicy()
    if bf16:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(group.device.type, (group.size,)),
        "offload_policy": fsdp.CPUOffloadPolicy() if offload and group.device.type != "cpu" else fsdp.OffloadPolicy(),
    }
    for block in objective.modules():
        # The backward pass of reversible layers calls their parts separately, so their weights stay in the root unit.
        if isinstance(block, Block) and not isinstance(block, ReversibleBlock):
            # The inputs are in bfloat16 already; masks and positions must keep their types.
            fsdp.fully_shard(block, **settings, mp_policy=replace(policy, cast_forward_inputs=False))
            fsdp.register_fsdp_forward_method(block, "project_source")
            fsdp.register_fsdp_forward_method(block, "project_memory")
    fsdp.fully_shard(objective, **settings, mp_policy=policy)
    for module in objective.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports only sums


# Sharded tensors are recognised by their methods, because importing their class takes as long as a short training.


def local(x: Tensor) -> Tensor:
    """The part of a tensor that this process holds: its shard, or all of an unsharded tensor."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part


def whole(x: Tensor) -> Tensor:
    """A tensor gathered from the shards of all processes; all must call this."""
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full


def whole_weights(weights: Mapping[str, Tensor], keep: bool = True) -> Tensors:
    """Weights gathered on the CPU, one at a time; all processes must call this. Without `keep` the result is empty."""
    gathered = ((name, whole(x).cpu() if hasattr(x, "full_tensor") else x) for name, x in weights.items())
    return {name: x for name, x in gathered if keep}


class Blueprint:
    """The structure of a model before sharding, from which full copies are built."""

    def __init__(self, model: Model) -> None:
        self._device = model.device
        on_meta = {
            id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
            for p in model.parameters()
        }
        self._model: Model = copy.deepcopy(model, dict(on_meta))

    @torch.no_grad()
    def build(self, weights: Mapping[str, Tensor]) -> Model:
        """An unsharded model with these weights; if the weights are sharded, all processes must call this."""
        model = allocate(copy.deepcopy(self._model), self._device)
        for name, x in weights_of(model).items():
            x.copy_(whole(weights[name]))
        return model


def save_shards(tensors: Tensors, path: Path) -> None:
    """Write the shards of this process to a directory; all processes must call this. A failure raises OSError."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    with _errors_as(OSError):
        save(dict(tensors), storage_writer=writer)


def load_shards(tensors: Tensors, path: Path) -> None:
    """Load tensors, sharded or not, from the shards of any number of processes; all must call this."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _errors_as(RuntimeError):
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)))


def saved_names(path: Path) -> set[str]:
    """The names of the tensors in a directory of shards."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return set(HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata)


@contextmanager
def _errors_as(kind: type[Exception]) -> Iterator[None]:
    """Turn an error of the library into this kind, with the message of the first process that failed."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        failures = list(error.failures.items())
        cause = f"process {failures[0][0]}: {failures[0][1][0]}" if failures else str(error)
        raise kind(cause) from None
