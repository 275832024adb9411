"""How the matrix products of a model are computed, changed for a while: in bfloat16, or with weights put in order.

torch's autocast leaves what it multiplied in bfloat16, and then every sum, norm and dropout pays for the conversion,
which on a processor eats up the gain. Here only the products are in bfloat16, and what lies between those of a
feed-forward layer; all else stays as it is.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from regard.nn.block import FeedForward

Forward = Callable[[Tensor], Tensor]


@contextmanager
def replaced(forwards: Sequence[tuple[nn.Linear, Forward]]) -> Iterator[None]:
    """While open, these layers compute so."""
    for linear, forward in forwards:
        linear.__dict__["forward"] = forward  # as an attribute of the object it goes before that of its class
    try:
        yield
    finally:
        for linear, _ in forwards:
            linear.__dict__.pop("forward", None)


def bf16_products(model: nn.Module) -> list[tuple[nn.Linear, Forward]]:
    """The linear layers of a model, each with a way to multiply in bfloat16, forward and backward."""
    stays_narrow = feeding(model)

    def forward_of(linear: nn.Linear) -> Forward:
        kind = torch.bfloat16 if linear in stays_narrow else torch.float32
        return lambda x: _Bf16.apply(x, linear.weight, linear.bias, kind)

    return [(linear, forward_of(linear)) for linear in plain_linears(model)]


def feeding(*models: nn.Module) -> set[nn.Linear]:
    """Layers whose result goes into another product right away."""
    inner = [module for model in models for module in model.modules() if isinstance(module, FeedForward)]
    return {linear for module in inner for linear in (module.up, module.gate) if linear is not None}


def plain_linears(*models: nn.Module) -> list[nn.Linear]:
    """Every layer that is a product and nothing more, once."""
    modules = {id(module): module for model in models for module in model.modules()}.values()
    return [module for module in modules if type(module) is nn.Linear]


class _Bf16(torch.autograd.Function):
    """x W' + b with x, W and b rounded; gradients of the weights come back in fp32, that of x as x came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, kind: torch.dtype) -> Tensor:
        narrow, weight = x.bfloat16(), weight_OI.bfloat16()
        ctx.save_for_backward(narrow, weight)
        ctx.kind = x.dtype
        return F.linear(narrow, weight, None if bias_O is None else bias_O.bfloat16()).to(kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad_NO = grads[0].flatten(0, -2)
        narrow_NO = grad_NO.bfloat16()
        x_grad = (narrow_NO @ weight_OI).to(ctx.kind).view_as(x) if needed[0] else None
        weight_grad = (narrow_NO.T @ x.flatten(0, -2)).float() if needed[1] else None
        return x_grad, weight_grad, grad_NO.sum(0, dtype=torch.float32) if needed[2] else None, None


SMALL, WORK = 1 << 16, 1 << 19  # numbers in a matrix; times rows. Below these the usual way is as fast
ROWS = 32  # what the order is best for; it is good for all


class Packed:
    """The matrices of some models as they are now, each put into order when it is first used, or made narrow."""

    def __init__(self, models: Sequence[nn.Module], bf16: bool = False) -> None:
        linears = plain_linears(*models)
        if bf16:
            stays_narrow = feeding(*models)
            self.forwards = [(linear, _narrow(linear, linear in stays_narrow)) for linear in linears]
        else:
            self.forwards = [(linear, _ordered(linear)) for linear in linears if _can_be_packed(linear)]

    def used(self) -> AbstractContextManager[None]:
        """While open, the models compute with them."""
        return replaced(self.forwards)


def _can_be_packed(linear: nn.Linear) -> bool:
    weight, made_for = linear.weight, ("x86_64", "AMD64")
    known = platform.machine() in made_for and torch.backends.mkldnn.is_available()
    known = known and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= SMALL


def _narrow(linear: nn.Linear, stays_narrow: bool) -> Forward:
    weight = linear.weight.detach().bfloat16()
    bias = None if linear.bias is None else linear.bias.detach().bfloat16()
    kind = torch.bfloat16 if stays_narrow else torch.float32
    return lambda x: F.linear(x.bfloat16(), weight, bias).to(kind)


def _ordered(linear: nn.Linear) -> Forward:
    weight, bias = linear.weight, linear.bias
    packed: Tensor | None = None

    def forward(x: Tensor) -> Tensor:
        nonlocal packed
        if x.numel() // x.shape[-1] * weight.numel() < WORK:
            return F.linear(x, weight, bias)
        if packed is None:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out

    return forward
