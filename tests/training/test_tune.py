"""Head gates of a trained model, learned by `learn_gates`."""

from __future__ import annotations

import torch

from kit.models import tiny
from regard.inspect.inputs import pair_batches
from regard.nn.adapters import head_gates
from regard.training.pruning import learn_gates

PAIRS = [([4, 5, 6, 3], [5, 6, 3]), ([7, 3], [4, 4, 4, 4, 3]), ([8, 9, 4, 3], [7, 3])]


def test_cost_closes_the_gates_of_unused_heads() -> None:
    """The gate of a head with zero output closes; with cost 0 its logit stays at the initial value."""
    transformer = tiny()
    name = "encoder.blocks.0.attention"
    batches = pair_batches(PAIRS, transformer.config)
    with torch.no_grad():
        transformer.get_parameter(f"{name}.out.weight")[:, :4] = 0.0
    transformer.requires_grad_(False)  # only the gates learn
    odds = learn_gates(transformer, batches, 40, cost=3.0, lr=1e-3)
    assert odds[name, 0] < 0.0 and len(odds) == 24
    assert not transformer.training and not head_gates(transformer)
    idle = learn_gates(transformer, batches, 5, cost=0.0, lr=1e-3)
    assert idle[name, 0] == 2.0
