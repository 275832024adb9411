"""Head gates: L0 regularisation learns which heads are needed (hard concrete gates, Louizos et al. 2018).

Each head has one parameter, its log-odds. In training its gate is drawn from a stretched and clipped distribution, so
that it is often exactly 0 or 1 and still has a gradient; the expected share of open gates is added to the loss.
A gate takes the place of the tap on a head's output; its log-odds are saved and averaged like any weight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.nn.attention import Attention
from regard.nn.hooks import Tap

LOW, HIGH = -0.1, 1.1  # of the stretched gate, before it is clipped to 0 and 1
TEMPERATURE = 1 / 3
INITIAL_LOG_ODDS = 2.0  # nearly always open
LR_FACTOR = 100.0  # learning rate of the gates relative to the weights: they are few, and have a long way to go

Tensors = dict[str, Tensor]


class HeadGate(Tap):
    """Multiplies the output of each head by its gate."""

    def __init__(self, heads: int, device: torch.device) -> None:
        super().__init__()
        self.odds = nn.Parameter(torch.full((heads,), INITIAL_LOG_ODDS, device=device))

    def forward(self, x_BHTE: Tensor) -> Tensor:
        return x_BHTE * (self._sample() if self.training else gate_value(self.odds)).view(-1, 1, 1)

    def _sample(self) -> Tensor:
        noise_H = torch.rand_like(self.odds).clamp(1e-6, 1 - 1e-6)
        return gate_value((self.odds + noise_H.logit()) / TEMPERATURE)


def gate_value(odds_H: Tensor) -> Tensor:
    """The value of gates with these log-odds: 0 is closed, 1 open."""
    return (torch.sigmoid(odds_H) * (HIGH - LOW) + LOW).clamp(0.0, 1.0)


def head_gates(model: nn.Module) -> dict[str, HeadGate]:
    """The gates of a model, by the name of their attention."""
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
    """The expected share of gates that are not closed; it has a gradient."""
    shift = TEMPERATURE * math.log(-LOW / HIGH)
    return torch.cat([torch.sigmoid(part.odds - shift) for part in head_gates(model).values()]).mean()


@torch.no_grad()
def fold_gates(model: nn.Module, weights: Tensors) -> Tensors:
    """The weights of a model with gates as those of an equal model without: the outputs of a closed head are zero."""
    plain = dict(weights)
    for name, part in head_gates(model).items():
        out_weight = plain[f"{name}.out.weight"]
        gate_H = gate_value(plain.pop(f"{name}.mixed.odds"))
        plain[f"{name}.out.weight"] = (out_weight.unflatten(1, (len(part.odds), -1)) * gate_H[:, None]).flatten(1)
    return plain
