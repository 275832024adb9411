"""Gates that learn whether a head is needed: almost always open or shut, and pressed to shut (Louizos et al. 2018).

Each head has one number, its log-odds. In training a gate is drawn from a stretched and clipped distribution around it,
so that it is often exactly 0 or 1 and still has a gradient; the expected share of open gates is added to the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.batch import Ids
from regard.inspect.importance import Spot, make_batches
from regard.inspect.places import attentions
from regard.inspect.record import Change, patch
from regard.loss import Objective
from regard.model import Model

LOW, HIGH = -0.1, 1.1  # of the stretched gate, before it is clipped to 0 and 1
TEMPERATURE = 1 / 3
OPEN = 2.0  # log-odds to begin with: open nearly always


class Gates(nn.Module):
    """A gate for every head of a model. The model itself is not changed; gates act while `on` lasts."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = [model]  # in a list: the model's parameters are not the gates'
        device = next(model.parameters()).device
        self.names = list(attentions(model))
        counts = [attention.heads for attention in attentions(model).values()]
        self.odds = nn.ParameterList(nn.Parameter(torch.full((count,), OPEN, device=device)) for count in counts)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Let the gates act: drawn anew at every pass in training, else as they mostly are."""
        changes = {f"{name}.mixed": self._change(odds_H) for name, odds_H in zip(self.names, self.odds, strict=True)}
        with patch(self._model[0], changes):
            yield

    def _change(self, odds_H: Tensor) -> Change:
        return lambda x_BHTE: x_BHTE * self._draw(odds_H).view(-1, 1, 1)

    def _draw(self, odds_H: Tensor) -> Tensor:
        if self.training:
            noise_H = torch.rand_like(odds_H).clamp(1e-6, 1 - 1e-6)
            odds_H = (odds_H + noise_H.logit()) / TEMPERATURE
        return (torch.sigmoid(odds_H) * (HIGH - LOW) + LOW).clamp(0.0, 1.0)

    def expected_open(self) -> Tensor:
        """The share of gates that are expected not to be shut; it has a gradient."""
        shift = TEMPERATURE * math.log(-LOW / HIGH)
        return torch.cat([torch.sigmoid(odds_H - shift) for odds_H in self.odds]).mean()

    def importance(self) -> dict[Spot, float]:
        """The log-odds of every head."""
        return {
            (name, head): float(value)
            for name, odds_H in zip(self.names, self.odds, strict=True)
            for head, value in enumerate(odds_H.detach())
        }


def learn_gates(
    model: Model,
    pairs: Sequence[tuple[Ids, Ids]],
    steps: int,
    *,
    press: float = 0.1,
    lr: float = 3e-4,
    gate_lr: float = 0.1,
    seed: int = 1,
) -> Gates:
    """Train a model and its gates for some steps; `press` is what it costs, in loss per symbol, to keep all heads.

    The model is changed: it learns to do without the heads that are being shut.
    """
    device = next(model.parameters()).device
    gates = Gates(model).train()
    objective = Objective(model.train(), label_smoothing=0.1)
    optimizer = torch.optim.AdamW(
        [{"params": list(model.parameters()), "lr": lr}, {"params": list(gates.parameters()), "lr": gate_lr}],
        weight_decay=0.0,
    )
    batches = make_batches(pairs, model.config, 2048)
    with torch.random.fork_rng(devices=[]), gates.on():
        torch.manual_seed(seed)
        order: list[int] = []
        for _ in range(steps):
            order = order or torch.randperm(len(batches)).tolist()
            batch = batches[order.pop()].to(device)
            optimizer.zero_grad(set_to_none=True)
            (objective(batch).smoothed / batch.tokens + press * gates.expected_open()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    model.eval()
    return gates.eval()
