"""Low-rank adapters: W + (alpha / rank) * up @ down, where only `up` and `down` are trained.

An adapted layer keeps its weight names, so that a model with adapters can be merged into one without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Tensors = dict[str, Tensor]
UP, DOWN = "lora_up", "lora_down"


class LoraLinear(nn.Linear):
    """A frozen linear layer with a low-rank adapter. A new adapter changes nothing: `lora_up` is zero."""

    def __init__(self, inner: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(inner.in_features, inner.out_features, bias=False, device="meta")
        self.weight = inner.weight
        self.bias = inner.bias
        self.scale = alpha / rank
        self.lora_down = nn.Parameter(inner.weight.new_empty(rank, inner.in_features))
        self.lora_up = nn.Parameter(inner.weight.new_zeros(inner.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.lora_down), self.lora_up) * self.scale


def adaptable_layers(model: nn.Module, on: Sequence[str]) -> dict[str, nn.Linear]:
    """The linear layers inside modules of these names, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and set(name.split(".")) & set(on)
    }


def add_adapters(model: nn.Module, rank: int, alpha: float, on: Sequence[str]) -> list[str]:
    """Freeze a model and add adapters to the linear layers inside modules of these names -> the layers' names."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layers = adaptable_layers(model, on)
    for name, inner in layers.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LoraLinear(inner, rank, alpha))
    return list(layers)


@torch.no_grad()
def merge_adapters(model: nn.Module, weights: Tensors) -> tuple[Tensors, Tensors]:
    """Weights with adapters -> weights of the same model without, and the adapters alone."""
    plain = {name: x for name, x in weights.items() if not name.endswith((UP, DOWN))}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            up, down = (weights[f"{name}.{part}"].double() for part in (UP, DOWN))
            weight = plain[f"{name}.weight"]
            plain[f"{name}.weight"] = (weight.double() + module.scale * up @ down).to(weight.dtype)
    return plain, {name: x for name, x in weights.items() if name not in plain}
