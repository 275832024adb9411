"""The activation memory of a training step, measured by running the step on the meta device.

The meta device computes nothing, but every tensor has a size and is freed with its last reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.config import Config
from regard.model import Model, on_meta
from regard.nn.attention import Attention
from regard.nn.transformer import SegmentMemory, Transformer
from regard.tasks import infer_task

BYTES = 4  # of a number in fp32


def prediction_size(model: Model) -> int:
    """The number of weights of the LM head or classifier, tied or not."""
    return 0 if model.output is None else model.output.weight.numel()


def count_activations(
    config: Config, length: int, batch_tokens: int, *, recompute: bool = False, bf16: bool = False
) -> int:
    """Bytes of the activations of a training batch whose rows have `length` tokens.

    With `recompute`, layers store only their inputs; the larger of two numbers is added: the keys and values of all
    layers (forward) and the activations of one layer (backward). `bf16` is autocast on a GPU: only norms read fp32.
    """
    model = on_meta(config).train()
    rows = max(1, batch_tokens // length)
    ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    if infer_task(config) == "image":
        patches = config.image_patches
        ids = torch.zeros(rows, patches.channels, patches.height, patches.width, device="meta")
        ids = ids.bfloat16() if bf16 else ids
    if bf16:
        _round_to_bf16(model)
    for module in model.modules():
        if isinstance(module, Attention):  # per module: a global mode would end before the backward pass recomputes
            module.forward = partial(_run_fused, module.forward)  # type: ignore[method-assign]
    reversible = any(stack.residual == "reversible" for stack in config.stacks.values())
    stored, x_BTD = _peak(model, ids) if reversible else _saved_for_backward(model, ids, recompute)
    if bf16:
        states = 0 if model.output is None else BYTES * x_BTD.shape[:-1].numel() * len(model.output.weight)
        return stored + states
    # The loss computes its gradients in the forward pass. The peak of reversible layers includes the output.
    return stored + BYTES * ((0 if reversible else x_BTD.numel()) + prediction_size(model))


def _round_to_bf16(model: Model) -> None:
    """Make a model compute in bfloat16 except in its norms, like autocast on a GPU."""
    model.bfloat16()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.float()
            module.register_forward_pre_hook(lambda _, inputs: inputs[0].float())
            module.register_forward_hook(lambda _, inputs, output: output.bfloat16())


def _saved_for_backward(model: Model, ids: Tensor, recompute: bool) -> tuple[int, Tensor]:
    """The bytes that a forward pass stores for the backward pass, and the output."""
    parameters = _storages(model.parameters())
    saved: dict[StorageWeakRef, tuple[Tensor, nn.Module | None]] = {}  # with the layer that saves it
    keys: dict[nn.Module, dict[StorageWeakRef, Tensor]] = {}  # keys and values that layers return, by stack
    layer: nn.Module | None = None

    def save(tensor: Tensor) -> Tensor:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage not in parameters:
            saved.setdefault(storage, (tensor, layer))
        return tensor

    def enter(block: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal layer
        for tensor in tree_leaves(inputs):
            if isinstance(tensor, Tensor):
                save(tensor)
        layer = block

    def leave(stack: nn.Module, block: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
        nonlocal layer
        layer = None
        stack_keys = keys.setdefault(stack, {})
        stack_keys |= {StorageWeakRef(x.untyped_storage()): x for x in tree_leaves(output[1]) if isinstance(x, Tensor)}

    for stack in model.modules():
        if recompute and isinstance(stack, Transformer) and not stack.memory:  # segments are not recomputed
            for block in stack.blocks:
                block.register_forward_pre_hook(enter)
                block.register_forward_hook(partial(leave, stack))
    memory: SegmentMemory = ()
    if model.config.has_memory:  # filled by earlier segments
        top = model.config.top
        dtype = next(model.parameters()).dtype
        empty = torch.empty(len(ids), top.memory, top.width, dtype=dtype, device="meta")
        _, memory = model.read_segment(ids, (empty,) * top.layers)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        x_BTD, new_memory = model.read_segment(ids, memory) if memory else (model.hidden(ids, None, ids), ())
    for tensor in (*memory, *new_memory):  # both are held until the end of the step
        save(tensor)
    sizes: dict[nn.Module | None, int] = {None: 0}
    for tensor, owner in saved.values():
        sizes[owner] = sizes.get(owner, 0) + tensor.untyped_storage().nbytes()
    # The forward pass holds the keys and values of all layers of a stack, the backward pass one recomputed layer.
    forward = [sum(x.untyped_storage().nbytes() for x in stack_keys.values()) for stack_keys in keys.values()]
    return sizes.pop(None) + max([*sizes.values(), *forward], default=0), x_BTD


def _peak(model: Model, ids: Tensor) -> tuple[int, Tensor]:
    """The peak memory in bytes of a forward and a backward pass, and the output."""
    with MemoryTracker() as tracker:
        x_BTD = model.hidden(ids, None, ids)
        x_BTD.backward(torch.empty_like(x_BTD))
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return tracker.peak(without=_storages(model.parameters()) | _storages(gradients)), x_BTD


def _storages(tensors: Iterable[Tensor]) -> set[StorageWeakRef]:
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}


class MemoryTracker(TorchDispatchMode):
    """Tracks the memory of new tensors, from the operation that creates a tensor to the first after its release."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0  # number of operations
        self._held: dict[StorageWeakRef, tuple[int, int]] = {}  # start and bytes
        self._freed: list[tuple[StorageWeakRef, int, int, int]] = []  # start, end and bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._now += 1
        for storage in [storage for storage in self._held if storage.expired()]:
            start, size = self._held.pop(storage)
            self._freed.append((storage, start, self._now, size))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                memory = tensor.untyped_storage()
                self._held.setdefault(StorageWeakRef(memory), (self._now, memory.nbytes()))
        return results

    def peak(self, without: set[StorageWeakRef]) -> int:
        """The peak memory in bytes, excluding the storages `without`."""
        live = [(storage, start, self._now + 1, size) for storage, (start, size) in self._held.items()]
        changes = [0] * (self._now + 2)
        for storage, start, end, size in self._freed + live:
            if storage not in without:
                changes[start] += size
                changes[end] -= size
        return max(accumulate(changes))


def _run_fused(forward: Callable[..., Tensor], *args: Any) -> Tensor:
    with _FusedAttention():
        return forward(*args)


class _FusedAttention(TorchFunctionMode):
    """Selects the fused attention of a CPU: the default on the meta device stores the attention weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        mask = options.get("attn_mask")
        if func is not F.scaled_dot_product_attention or (mask is not None and mask.requires_grad):
            return func(*args, **options)
        q_BHTE, k_BGSE, v_BGSE = args
        groups = q_BHTE.shape[1] // k_BGSE.shape[1]
        k_BHSE, v_BHSE = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k_BGSE, v_BGSE))
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        causal = options.get("is_causal", False)
        return fused(q_BHTE, k_BHSE, v_BHSE, 0.0, causal, attn_mask=mask, scale=options.get("scale"))[0]
