"""Which heads a model can learn to do without: its gates are trained along with it (Voita et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from regard.batch import Batch
from regard.inspect.importance import Spot
from regard.loss import Objective
from regard.model import Model
from regard.nn.gates import add_gates, expected_open, gated, remove_gates


def learn_gates(
    model: Model,
    batches: Sequence[Batch],
    steps: int,
    *,
    press: float = 0.1,
    lr: float = 3e-4,
    gate_lr: float = 0.1,
    seed: int = 1,
) -> dict[Spot, float]:
    """Train a model with gates for some steps -> the log-odds of every head; then the gates are taken away again.

    `press` is what it costs, in loss per symbol, to keep all heads. The model is changed: it learns to do without the
    heads that are being shut.
    """
    device = next(model.parameters()).device
    weights = list(model.parameters())
    add_gates(model)
    gates = gated(model)
    objective = Objective(model.train(), label_smoothing=0.1)
    odds = [part.odds for part in gates.values()]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": lr}, {"params": odds, "lr": gate_lr}], weight_decay=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        order: list[int] = []
        for _ in range(steps):
            order = order or torch.randperm(len(batches)).tolist()
            batch = batches[order.pop()].to(device)
            optimizer.zero_grad(set_to_none=True)
            (objective(batch).smoothed / batch.tokens + press * expected_open(model)).backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
    remove_gates(model.eval())
    return {(name, head): float(x) for name, part in gates.items() for head, x in enumerate(part.odds.detach())}
