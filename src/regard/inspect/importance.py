"""How much a model needs each of its heads: the gradient of the loss at a gate on it, and the loss without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from regard.batch import Batch
from regard.loss import Loss, Objective
from regard.model import Model
from regard.nn.hooks import Change, patch, without

Spot = tuple[str, int]  # the name of an attention, and the place of a head among those it has
Removed = Mapping[str, Sequence[int]]  # heads that are silenced, by the name of their attention


def gradient_importance(model: Model, batches: Sequence[Batch], removed: Removed | None = None) -> dict[Spot, float]:
    """The expected |dL/dg| of a gate g = 1 on each head, per token, with one gate for every example of a batch.

    Heads in `removed` are silenced, and not in the result.
    """
    removed = removed or {}
    found = model.attentions()
    device = model.device
    total = {name: torch.zeros(attention.heads, device=device) for name, attention in found.items()}
    symbols = 0
    frozen = [p for p in model.parameters() if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        for batch in batches:
            batch = batch.to(device)
            gates = {}
            for name, attention in found.items():
                gate_BH11 = torch.ones(len(batch.label_BT), attention.heads, 1, 1, device=device)
                gate_BH11[:, list(removed.get(name, ()))] = 0.0
                gates[name] = gate_BH11.requires_grad_()
            with torch.enable_grad(), patch(model, {f"{name}.mixed": _times(gate) for name, gate in gates.items()}):
                grads = torch.autograd.grad(_nll(model, batch), list(gates.values()))
            for name, grad_BH11 in zip(gates, grads, strict=True):
                total[name] += grad_BH11.abs().sum((0, 2, 3))
            symbols += batch.tokens
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return {
        (name, head): float(total[name][head] / max(1, symbols))
        for name in found
        for head in range(found[name].heads)
        if head not in removed.get(name, ())
    }


def ablation_importance(
    model: Model, batches: Sequence[Batch], tick: Callable[[int, int], None] | None = None
) -> dict[Spot, float]:
    """How much the loss per token rises when each head is silenced, one at a time."""
    plain = loss(model, batches)
    spots = [(name, head) for name, attention in model.attentions().items() for head in range(attention.heads)]
    out = {}
    for done, (name, head) in enumerate(spots):
        out[name, head] = loss(model, batches, {name: [head]}) - plain
        if tick is not None:
            tick(done + 1, len(spots))
    return out


@torch.no_grad()
def loss(model: Model, batches: Sequence[Batch], removed: Removed | None = None) -> float:
    """The loss per token in nats, with some heads silenced."""
    device = model.device
    total, symbols = 0.0, 0
    with patch(model, silencing(removed or {})):
        for batch in batches:
            total += float(_nll(model, batch.to(device)))
            symbols += batch.tokens
    return total / max(1, symbols)


def silencing(removed: Removed) -> dict[str, Change]:
    """The patch under which heads say nothing."""
    return {f"{name}.mixed": without(*heads) for name, heads in removed.items() if len(heads)}


def _times(gate_BH11: Tensor) -> Change:
    return lambda x_BHTE: x_BHTE * gate_BH11


def _nll(model: Model, batch: Batch) -> Tensor:
    loss: Loss = Objective(model)(batch)
    return loss.smoothed
