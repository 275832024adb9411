"""How much a model needs each of its heads: the gradient of the loss at a gate on the head, and the loss without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from regard.batch import Batch
from regard.loss import Objective
from regard.model import Model
from regard.nn.hooks import Change, patch, without

HeadKey = tuple[str, int]  # the name of an attention, and the index of a head among those it has
HeadGroups = Mapping[str, Sequence[int]]  # indices of heads by the name of their attention


def gradient_importance(
    model: Model, batches: Sequence[Batch], removed: HeadGroups | None = None
) -> dict[HeadKey, float]:
    """The expected |dL/dg| of a gate g = 1 on each head, per token, with one gate for every example of a batch.

    Heads in `removed` are ablated, and not in the result.
    """
    removed = removed or {}
    heads = {name: attention.heads for name, attention in model.attentions().items()}
    device = model.device
    total = {name: torch.zeros(count, device=device) for name, count in heads.items()}
    tokens = 0
    frozen = [p for p in model.parameters() if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        for batch in batches:
            batch = batch.to(device)
            gates = {}
            for name, count in heads.items():
                gate_BH11 = torch.ones(len(batch.label_BT), count, 1, 1, device=device)
                gate_BH11[:, list(removed.get(name, ()))] = 0.0
                gates[name] = gate_BH11.requires_grad_()
            with torch.enable_grad(), patch(model, {f"{name}.mixed": _times(gate) for name, gate in gates.items()}):
                grads = torch.autograd.grad(Objective(model)(batch).smoothed, list(gates.values()))
            for name, grad_BH11 in zip(gates, grads, strict=True):
                total[name] += grad_BH11.abs().sum((0, 2, 3))
            tokens += batch.tokens
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return {(name, head): float(total[name][head] / max(1, tokens)) for name, head in _present_heads(model, removed)}


def ablation_importance(
    model: Model, batches: Sequence[Batch], removed: HeadGroups | None = None
) -> dict[HeadKey, float]:
    """How much the loss per token rises when each head is ablated, one at a time, beside those in `removed`."""
    removed = removed or {}
    loss = mean_loss(model, batches, removed)
    return {
        (name, head): mean_loss(model, batches, {**removed, name: [*removed.get(name, ()), head]}) - loss
        for name, head in _present_heads(model, removed)
    }


Criterion = Literal["gradient", "ablation", "gates"]  # gates are not measured but learned, by training.tune
MEASURES = {"gradient": gradient_importance, "ablation": ablation_importance}


def rank_heads(
    model: Model, batches: Sequence[Batch], by: Criterion, removed: HeadGroups | None = None
) -> dict[HeadKey, float]:
    """Every head with its importance, the least important first."""
    return sort_heads(MEASURES[by](model, batches, removed))


def sort_heads(values: Mapping[HeadKey, float]) -> dict[HeadKey, float]:
    """Heads by a value, the smallest first; equal ones by name and index."""
    return dict(sorted(values.items(), key=lambda item: (item[1], item[0])))


@torch.no_grad()
def mean_loss(model: Model, batches: Sequence[Batch], removed: HeadGroups | None = None) -> float:
    """The loss per token in nats, with some heads ablated."""
    total, tokens = 0.0, 0
    with patch(model, ablation(removed or {})):
        for batch in batches:
            total += float(Objective(model)(batch.to(model.device)).smoothed)
            tokens += batch.tokens
    return total / max(1, tokens)


def ablation(removed: HeadGroups) -> dict[str, Change]:
    """The patch that sets the outputs of heads to zero."""
    return {f"{name}.mixed": without(*heads) for name, heads in removed.items() if len(heads)}


def _present_heads(model: Model, removed: HeadGroups) -> list[HeadKey]:
    heads = [(name, head) for name, attention in model.attentions().items() for head in range(attention.heads)]
    return [(name, head) for name, head in heads if head not in removed.get(name, ())]


def _times(gate_BH11: Tensor) -> Change:
    return lambda x_BHTE: x_BHTE * gate_BH11
