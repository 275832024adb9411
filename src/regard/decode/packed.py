"""Weights as the processor reads them fastest, for as long as a search runs.

A step of decoding multiplies few rows by every matrix of the model. oneDNN, which torch brings along, does that up to
three times as fast when the matrix has been put into its own order beforehand. torch has no public name for this yet,
so where it is missing everything goes the usual way. In bfloat16, on processors that have it, weights need no order.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.nn.products import Forward, feeding, plain_linears, replaced

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
