"""Linear and Dropout with fast paths for CPUs: products in bfloat16 or with packed weights, and pooled masks.

The autocast of torch returns every product in bfloat16, and each sum, norm and dropout converts it back; on a CPU this
costs more than it saves. Here only matrix products and the activations inside a feed-forward layer are in bfloat16.

Dropout takes slices of a pool of masks, because drawing random numbers is slow on a CPU. The pool is a pure function of
(seed, step), so a resumed run uses the same masks.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Matmul = Callable[[Tensor], Tensor]


class Linear(nn.Linear):
    """A linear layer whose matrix product can be replaced, see `use_matmuls`."""

    matmul: Matmul | None = None
    bf16_result = torch.float32  # result type of a product in bfloat16

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) if self.matmul is None else self.matmul(x)


Matmuls = Mapping[Linear, Matmul]


@contextmanager
def use_matmuls(matmuls: Matmuls) -> Iterator[None]:
    """Compute the products of these layers by these functions while the context is open."""
    for linear, matmul in matmuls.items():
        linear.matmul = matmul
    try:
        yield
    finally:
        for linear in matmuls:
            linear.matmul = None


def bf16_matmuls(model: nn.Module) -> Matmuls:
    """Products in bfloat16 for training, forward and backward; weights and weight gradients stay in fp32."""

    def matmul(linear: Linear) -> Matmul:
        return lambda x: _Bf16.apply(x, linear.weight, linear.bias, linear.bf16_result)

    return {linear: matmul(linear) for linear in linears(model)}


class _Bf16(torch.autograd.Function):
    """x W' + b with x, W and b rounded; the gradients of W and b are fp32, the gradient of x has the type of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, result: torch.dtype) -> Tensor:
        x_bf16 = x.bfloat16()
        weight = weight_OI.bfloat16()
        ctx.save_for_backward(x_bf16, weight)
        ctx.dtype = x.dtype
        return F.linear(x_bf16, weight, None if bias_O is None else bias_O.bfloat16()).to(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad_NO = grads[0].flatten(0, -2)
        bf16_NO = grad_NO.bfloat16()
        x_grad = (bf16_NO @ weight_OI).to(ctx.dtype).view_as(x) if needed[0] else None
        weight_grad = (bf16_NO.T @ x.flatten(0, -2)).float() if needed[1] else None
        return x_grad, weight_grad, grad_NO.sum(0, dtype=torch.float32) if needed[2] else None, None


# Smaller matrices, and products with fewer multiplications, are as fast without packing.
MIN_ELEMENTS = 1 << 16
MIN_WORK = 1 << 19
PACKED_ROWS = 32  # number of input rows that the packed layout is tuned for; it works for any number


class PackedWeights:
    """Products for inference, cached while their weights do not change.

    A change is a new tensor, an in-place operation, or a new sum of the elements: writing through `.data` does not
    count as an operation.
    """

    def __init__(self) -> None:
        self._cache: dict[tuple[Linear, bool], tuple[tuple[Any, ...], Matmul]] = {}

    def matmuls(self, model: nn.Module, bf16: bool = False) -> Matmuls:
        """The products of a model with its current weights: packed for oneDNN on first use, or in bfloat16."""
        result: dict[Linear, Matmul] = {}
        cache: dict[tuple[Linear, bool], tuple[tuple[Any, ...], Matmul]] = {}
        for linear in linears(model):
            if not (bf16 or _can_be_packed(linear)):
                continue
            state = (*_state(linear.weight), *_state(linear.bias))
            before, matmul = self._cache.get((linear, bf16), (None, None))
            if matmul is None or before != state:
                matmul = (_bf16_matmul if bf16 else _packed_matmul)(linear)
            result[linear] = matmul
            cache[linear, bf16] = state, matmul
        self._cache = cache  # without layers that no longer exist
        return result


def _state(x: Tensor | None) -> tuple[Any, ...]:
    """A fingerprint of a tensor. An inference tensor counts no changes, so its fingerprint never equals another."""
    if x is None:
        return ()
    version = object() if x.is_inference() else x._version
    return x.data_ptr(), version, x.shape, x.dtype, x.device, float(x.detach().sum())


def linears(model: nn.Module) -> list[Linear]:
    """The layers of a model whose product can be replaced."""
    return [module for module in model.modules() if isinstance(module, Linear)]


def _can_be_packed(linear: Linear) -> bool:
    weight = linear.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() < MIN_ELEMENTS:
        return False
    supported = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()
    return supported and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _bf16_matmul(linear: Linear) -> Matmul:
    weight = linear.weight.detach().bfloat16()
    bias = None if linear.bias is None else linear.bias.detach().bfloat16()
    result = linear.bf16_result
    return lambda x: F.linear(x.bfloat16(), weight, bias).to(result)


def _packed_matmul(linear: Linear) -> Matmul:
    weight = linear.weight.detach()
    bias = None if linear.bias is None else linear.bias.detach()
    packed: Tensor | None = None

    def matmul(x: Tensor) -> Tensor:
        nonlocal packed
        if x.numel() // x.shape[-1] * weight.numel() < MIN_WORK:
            return F.linear(x, weight, bias)
        if packed is None:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out

    return matmul


class MaskPool:
    """The dropout masks of one process, drawn from (seed, step) every `renew` steps."""

    def __init__(self, seed: int, size: int = 1 << 22, renew: int = 64) -> None:
        self.seed = seed
        self.size = size
        self.renew = renew
        self.offsets = random.Random(seed)  # equal offsets within a step give equal masks
        self._masks: dict[float, Tensor] = {}
        self._drawn_for = -1

    def begin(self, step: int) -> None:
        """Begin a training step; its masks depend only on (seed, step) and the order of calls."""
        self.offsets.seed(f"{self.seed} {step}")
        if step // self.renew != self._drawn_for:
            self._drawn_for = step // self.renew
            self._masks.clear()

    def mask(self, like: Tensor, rate: float) -> Tensor:
        """A mask of the shape of `like`: 0 with probability `rate`, else 1 / (1 - rate)."""
        count = like.numel()
        most = self.size // 2
        pieces = [self._piece(min(most, count - start), rate) for start in range(0, count, most)]
        mask = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return mask.view(like.shape).to(like.dtype)

    def _piece(self, count: int, rate: float) -> Tensor:
        masks = self._masks.get(rate)
        if masks is None:
            # The seed includes the rate; otherwise masks of two rates would drop the same elements.
            draws = torch.Generator().manual_seed(hash((self.seed, self._drawn_for, rate)) & (2**63 - 1))
            keep = torch.rand(self.size, generator=draws) >= rate
            masks = self._masks[rate] = keep.to(torch.float32).div_(1 - rate)
        start = self.offsets.randrange(self.size - count)
        return masks[start : start + count]


class Dropout(nn.Module):
    """Dropout with torch's random numbers, or with masks from a pool after `use_pool`."""

    pool: MaskPool | None = None

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        if self.pool is None or not x.is_cpu:
            return F.dropout(x, self.rate)
        return x * self.pool.mask(x, self.rate)

    def extra_repr(self) -> str:
        return f"{self.rate}"


def use_pool(model: nn.Module, pool: MaskPool | None) -> None:
    """Set the mask pool of every dropout of a model."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.pool = pool
