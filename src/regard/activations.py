"""The memory that training on a batch takes beside the weights, found by tracing it on the meta device.

Nothing is computed there, but every tensor has its size, and dies when nobody needs it any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.config import Config
from regard.model import Model, on_meta
from regard.nn.attention import Attention

Storages = set[StorageWeakRef]


def count_activations(config: Config, length: int, batch_tokens: int) -> int:
    """Bytes that a training batch of rows of `length` tokens takes."""
    model = on_meta(config).train()
    rows = max(1, batch_tokens // length)
    ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    if (patches := config.patches) is not None:
        ids = torch.zeros(rows, patches.channels, patches.height, patches.width, device="meta")
    reversible = any(stack.residual == "reversible" for stack in config.stacks.values())
    for module in model.modules():
        if isinstance(module, Attention):  # one by one, for a backward pass that runs it again leaves all modes
            module.forward = _fused(module.forward)  # type: ignore[method-assign]
    held, states = (_most_alive if reversible else _kept)(model, ids)
    return held + BYTES * (states + prediction_size(model))  # the gradients that the loss makes on its way


def _kept(model: Model, ids: Tensor) -> tuple[int, int]:
    """Bytes that a forward pass keeps for the backward pass -> these, and how many numbers come out."""
    own = _storages(model.parameters())
    kept: dict[StorageWeakRef, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage not in own:
            kept.setdefault(storage, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x_BTD = model.hidden(ids, None, ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), x_BTD.numel()


def _most_alive(model: Model, ids: Tensor) -> tuple[int, int]:
    """The most bytes alive at once in a forward and a backward pass -> these, and how many numbers come out."""
    with Alive() as alive:
        x_BTD = model.hidden(ids, None, ids)
        x_BTD.backward(torch.empty_like(x_BTD))
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return alive.most(without=_storages(model.parameters()) | _storages(gradients)), 0


def _storages(tensors: Any) -> Storages:
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}


class Alive(TorchDispatchMode):
    """Follows the memory of all tensors that are made, from the operation that makes one to the first without it."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0  # operations so far
        self._alive: dict[StorageWeakRef, tuple[int, int]] = {}  # since when, and how many bytes
        self._past: list[tuple[StorageWeakRef, int, int, int]] = []  # from when, until when, and how many bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._now += 1
        for storage in [storage for storage in self._alive if storage.expired()]:
            start, size = self._alive.pop(storage)
            self._past.append((storage, start, self._now, size))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                memory = tensor.untyped_storage()
                self._alive.setdefault(StorageWeakRef(memory), (self._now, memory.nbytes()))
        return made

    def most(self, without: Storages) -> int:
        """The most bytes at any time, some tensors left out."""
        still = [(storage, start, self._now + 1, size) for storage, (start, size) in self._alive.items()]
        changes = [0] * (self._now + 2)
        for storage, start, end, size in self._past + still:
            if storage not in without:
                changes[start] += size
                changes[end] -= size
        held = most = 0
        for change in changes:
            held += change
            most = max(most, held)
        return most


def _fused(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        with _Fused():
            return forward(*args)

    return run


class _Fused(TorchFunctionMode):
    """Attention as a processor computes it: left alone, the meta device would store the weights of all pairs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        mask = given.get("attn_mask")
        if func is not F.scaled_dot_product_attention or (mask is not None and mask.requires_grad):
            return func(*args, **given)
        q_BHTE, k_BGSE, v_BGSE = args
        groups = q_BHTE.shape[1] // k_BGSE.shape[1]
        k_BHSE, v_BHSE = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k_BGSE, v_BGSE))
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        settings = {name: given.get(name) for name in ("attn_mask", "scale")}
        return fused(q_BHTE, k_BHSE, v_BHSE, 0.0, given.get("is_causal", False), **settings)[0]


BYTES = 4  # of a number in fp32


def prediction_size(model: Model) -> int:
    """Weights of the prediction layer, tied or not."""
    return 0 if model.output is None else model.output.weight.numel()
