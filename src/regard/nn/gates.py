"""Gates that learn whether a head is needed: almost always open or shut, and pressed to shut (Louizos et al. 2018).

Each head has one number, its log-odds. In training a gate is drawn from a stretched and clipped distribution around it,
so that it is often exactly 0 or 1 and still has a gradient; the expected share of open gates is added to the loss.
A gate stands where a head's result passes, as a part of the model; its odds are saved and averaged like any weight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.nn.attention import Attention
from regard.nn.hooks import Tap

LOW, HIGH = -0.1, 1.1  # of the stretched gate, before it is clipped to 0 and 1
TEMPERATURE = 1 / 3
OPEN = 2.0  # log-odds to begin with: open nearly always
FASTER = 100.0  # than weights: gates are few, and have a long way to go

Tensors = dict[str, Tensor]


class Gate(Tap):
    """A place where what each head brings back is multiplied by its gate."""

    def __init__(self, heads: int, device: torch.device) -> None:
        super().__init__()
        self.odds = nn.Parameter(torch.full((heads,), OPEN, device=device))

    def forward(self, x_BHTE: Tensor) -> Tensor:
        return x_BHTE * (self._drawn() if self.training else gate(self.odds)).view(-1, 1, 1)

    def _drawn(self) -> Tensor:
        noise_H = torch.rand_like(self.odds).clamp(1e-6, 1 - 1e-6)
        return gate((self.odds + noise_H.logit()) / TEMPERATURE)


def gate(odds_H: Tensor) -> Tensor:
    """How far gates of these log-odds are open."""
    return (torch.sigmoid(odds_H) * (HIGH - LOW) + LOW).clamp(0.0, 1.0)


def gated(model: nn.Module) -> dict[str, Gate]:
    """The gates of a model, by the name of their attention."""
    suffix = ".mixed"
    return {name.removesuffix(suffix): part for name, part in model.named_modules() if isinstance(part, Gate)}


def add_gates(model: nn.Module) -> None:
    """Put a gate on every head."""
    for attention in [part for part in model.modules() if isinstance(part, Attention)]:
        attention.mixed = Gate(attention.heads, next(model.parameters()).device).train(attention.training)


def remove_gates(model: nn.Module) -> None:
    """Take all gates away; heads pass whole again."""
    for attention in [part for part in model.modules() if isinstance(part, Attention)]:
        attention.mixed = Tap()


def expected_open(model: nn.Module) -> Tensor:
    """The share of gates that are expected not to be shut; it has a gradient."""
    shift = TEMPERATURE * math.log(-LOW / HIGH)
    return torch.cat([torch.sigmoid(part.odds - shift) for part in gated(model).values()]).mean()


@torch.no_grad()
def fold_gates(model: nn.Module, weights: Tensors) -> Tensors:
    """The weights of a model with gates as those of one without, which says the same: a shut head has zeros."""
    plain = dict(weights)
    for name, part in gated(model).items():
        whole = plain[f"{name}.out.weight"]
        open_H = gate(plain.pop(f"{name}.mixed.odds"))
        plain[f"{name}.out.weight"] = (whole.unflatten(1, (len(part.odds), -1)) * open_H[:, None]).flatten(1)
    return plain
