"""Trainable additions to a model: LoRA adapters (Hu et al. 2022) and head gates.

Head gates learn by L0 regularisation which heads are needed (hard concrete gates, Louizos et al. 2018): one parameter
per head, its log-odds, and gates that are often exactly 0 or 1 in training and still have a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.nn.attention import Attention
from regard.nn.hooks import Tap

LOW = -0.1  # range of the stretched gate, before it is clipped to 0 and 1
HIGH = 1.1
TEMPERATURE = 1 / 3
INITIAL_LOG_ODDS = 2.0  # open in most samples
LR_FACTOR = 100.0  # learning rate of the gates relative to the weights, because gates have to change more

Tensors = dict[str, Tensor]


class LoraLinear(nn.Linear):
    """W + (alpha / rank) * up @ down with a frozen W. A new adapter has no effect: `lora_up` is zero."""

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
    """The linear layers inside modules with these names, by name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in layers.items() if set(name.split(".")) & set(on)}


def add_adapters(model: nn.Module, rank: int, alpha: float, on: Sequence[str]) -> list[str]:
    """Freeze a model and add adapters to the linear layers inside modules with these names -> their names."""
    model.requires_grad_(False)
    layers = adaptable_layers(model, on)
    for name, inner in layers.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LoraLinear(inner, rank, alpha))
    return list(layers)


@torch.no_grad()
def merge_adapters(model: nn.Module, weights: Tensors) -> tuple[Tensors, Tensors]:
    """Weights with adapters -> the merged weights, and the adapter weights."""
    adapters = {name: x for name, x in weights.items() if name.endswith((".lora_up", ".lora_down"))}
    plain = {name: x for name, x in weights.items() if name not in adapters}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            weight = plain[f"{name}.weight"]
            up = adapters[f"{name}.lora_up"]
            down = adapters[f"{name}.lora_down"]
            merged = weight.double() + module.scale * up.double() @ down.double()
            plain[f"{name}.weight"] = merged.to(weight.dtype)
    return plain, adapters


class HeadGate(Tap):
    """Multiplies the output of each head by its gate; it replaces the tap on that output."""

    def __init__(self, heads: int, device: torch.device) -> None:
        super().__init__()
        self.odds = nn.Parameter(torch.full((heads,), INITIAL_LOG_ODDS, device=device))

    def forward(self, x_BHTE: Tensor) -> Tensor:
        odds_H: Tensor = self.odds
        if self.training:
            noise_H = torch.rand_like(odds_H).clamp(1e-6, 1 - 1e-6)
            odds_H = (odds_H + noise_H.logit()) / TEMPERATURE
        return x_BHTE * gate_value(odds_H).view(-1, 1, 1)


def gate_value(odds_H: Tensor) -> Tensor:
    """The value of gates with these log-odds: 0 is closed, 1 is open."""
    return (torch.sigmoid(odds_H) * (HIGH - LOW) + LOW).clamp(0.0, 1.0)


def head_gates(model: nn.Module) -> dict[str, HeadGate]:
    """The gates of a model by the name of their attention."""
    return {name.removesuffix(".mixed"): part for name, part in model.named_modules() if isinstance(part, HeadGate)}


def add_gates(model: nn.Module) -> None:
    """Add a gate to every head."""
    for attention in [part for part in model.modules() if isinstance(part, Attention)]:
        attention.mixed = HeadGate(attention.heads, next(model.parameters()).device).train(attention.training)


def remove_gates(model: nn.Module) -> None:
    """Remove all gates."""
    for attention in [part for part in model.modules() if isinstance(part, Attention)]:
        attention.mixed = Tap()


def expected_open(model: nn.Module) -> Tensor:
    """The expected share of open gates, with a gradient."""
    shift = TEMPERATURE * math.log(-LOW / HIGH)
    return torch.cat([torch.sigmoid(part.odds - shift) for part in head_gates(model).values()]).mean()


@torch.no_grad()
def fold_gates(model: nn.Module, weights: Tensors) -> Tensors:
    """Fold the gates into the output weights -> the weights of an equal model without gates."""
    plain = dict(weights)
    for name, part in head_gates(model).items():
        out_weight = plain[f"{name}.out.weight"]
        gate_H = gate_value(plain.pop(f"{name}.mixed.odds"))
        plain[f"{name}.out.weight"] = (out_weight.unflatten(1, (len(part.odds), -1)) * gate_H[:, None]).flatten(1)
    return plain
