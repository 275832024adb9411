"""Weights in the order in which the processor reads them, for as long as a search runs.

A step of decoding multiplies few rows by every matrix of the model. oneDNN, which torch brings along, does that up to
three times as fast when the matrix has been put into its own order beforehand. torch has no public name for this yet,
so where it is missing everything goes the usual way.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALL, WORK = 1 << 16, 1 << 19  # numbers in a matrix; times rows. Below these the usual way is as fast
ROWS = 32  # what the order is best for; it is good for all


class Packed:
    """The matrices of some models as they are now, each put into order when it is first used."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = {id(module): module for model in models for module in model.modules()}.values()
        linears = [module for module in modules if type(module) is nn.Linear and _can_be_packed(module)]
        self.forwards = [(linear, _forward(linear)) for linear in linears]

    @contextmanager
    def used(self) -> Iterator[None]:
        """While open, the models compute with them."""
        for linear, forward in self.forwards:
            linear.__dict__["forward"] = forward  # as an attribute of the object it goes before that of its class
        try:
            yield
        finally:
            for linear, _ in self.forwards:
                linear.__dict__.pop("forward", None)


def _can_be_packed(linear: nn.Linear) -> bool:
    weight, made_for = linear.weight, ("x86_64", "AMD64")
    known = platform.machine() in made_for and torch.backends.mkldnn.is_available()
    known = known and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= SMALL


def _forward(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
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
