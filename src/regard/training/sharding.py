"""Fully sharded data parallelism (FSDP2): every process holds a shard of the weights, gradients and moments.

The layers of a Transformer are gathered one by one while they are used; all other weights are gathered for the whole
step. Checkpoints are written by all processes through torch.distributed.checkpoint, each its shards, as safetensors:
any number of processes can read them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from regard.loss import Objective
from regard.model import Model, allocate
from regard.nn.block import Block
from regard.nn.reversible import ReversibleBlock
from regard.run import weights_of
from regard.training.distributed import ProcessGroup, whole

Tensors = dict[str, Tensor]
NO_POLICY = MixedPrecisionPolicy()


def shard(objective: Objective, group: ProcessGroup, *, bf16: bool, offload: bool) -> None:
    """Distribute the weights of an objective's model over the processes of a group, in place.

    With `bf16`, layers compute with weights rounded to bfloat16, and gradients are summed in fp32. With `offload`,
    shards and moments stay in the memory of the CPU.
    """
    # What a layer returns is never changed in place, which is what the warning is about.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else NO_POLICY
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(group.device.type, (group.size,)),
        "offload_policy": CPUOffloadPolicy() if offload and group.device.type != "cpu" else OffloadPolicy(),
    }
    for block in objective.modules():
        # The backward pass of reversible layers takes them apart, so these are gathered with the rest.
        if isinstance(block, Block) and not isinstance(block, ReversibleBlock):
            # Its inputs come from embeddings and layers in bfloat16; masks and positions are to stay as they are.
            fully_shard(block, **settings, mp_policy=replace(policy, cast_forward_inputs=False))
            register_fsdp_forward_method(block, "project_source")
            register_fsdp_forward_method(block, "project_memory")
    fully_shard(objective, **settings, mp_policy=policy)
    for module in objective.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all processes already
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


class Blueprint:
    """The shape of a model before its weights are sharded, from which whole copies of it are made."""

    def __init__(self, model: Model) -> None:
        self._device = model.device
        on_meta = {
            id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
            for p in model.parameters()
        }
        self._model: Model = copy.deepcopy(model, dict(on_meta))

    @torch.no_grad()
    def build(self, weights: Mapping[str, Tensor]) -> Model:
        """A model that is not sharded; all processes have to call it if the weights are."""
        model = allocate(copy.deepcopy(self._model), self._device)
        for name, x in weights_of(model).items():
            x.copy_(whole(weights[name]))
        return model


# Checkpoints


def save_shards(tensors: Tensors, path: Path) -> None:
    """Write tensors into a directory: every process its shards; all have to call it. A failure is an OSError."""
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    try:
        with _alone_without_warning():
            save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise OSError(_cause(error)) from None


def load_shards(tensors: Tensors, path: Path) -> None:
    """Fill tensors, sharded or not, from what any number of processes has saved; all have to call it."""
    try:
        with _alone_without_warning():
            load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)))
    except CheckpointException as error:
        raise RuntimeError(_cause(error)) from None


def saved_names(path: Path) -> set[str]:
    """The names of the tensors in a directory of shards."""
    return set(HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata)


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """One process without a group is a case of its own for the library, which warns of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _cause(error: CheckpointException) -> str:
    """What went wrong, in the first process for which it did."""
    failures = list(error.failures.items())
    return f"process {failures[0][0]}: {failures[0][1][0]}" if failures else str(error)
