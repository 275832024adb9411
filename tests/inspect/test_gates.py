from __future__ import annotations

import pytest
import torch

from regard.inspect.gates import Gates, learn_gates
from regard.inspect.importance import loss, make_batches
from regard.model import Model

PAIRS = [([4, 5, 6, 3], [5, 6, 3]), ([7, 3], [4, 4, 4, 4, 3]), ([8, 9, 4, 3], [7, 3])]


def test_open_gates_change_nothing_and_shut_ones_silence(transformer: Model) -> None:
    batches = make_batches(PAIRS, transformer.config)
    plain = loss(transformer, batches)
    gates = Gates(transformer).eval()
    with torch.no_grad():
        for odds_H in gates.odds:
            odds_H.fill_(9.0)
    with gates.on():
        assert loss(transformer, batches) == pytest.approx(plain, abs=1e-6)
    at = gates.names.index("decoder.blocks.1.cross")
    with torch.no_grad():
        gates.odds[at][2] = -9.0
    expected = loss(transformer, batches, {"decoder.blocks.1.cross": [2]})
    with gates.on():
        assert loss(transformer, batches) == pytest.approx(expected, abs=1e-6)
    assert loss(transformer, batches) == plain, "off again"
    assert min(gates.importance(), key=lambda spot: gates.importance()[spot]) == ("decoder.blocks.1.cross", 2)


def test_drawn_gates_are_often_exactly_open_or_shut_and_have_gradients(transformer: Model) -> None:
    torch.manual_seed(0)
    gates = Gates(transformer).train()
    odds_H = torch.zeros(20_000, requires_grad=True)
    drawn_H = gates._draw(odds_H)
    assert drawn_H.min() >= 0 and drawn_H.max() <= 1
    shut, open_ = float((drawn_H == 0).float().mean()), float((drawn_H == 1).float().mean())
    assert 0.2 < shut < 0.4 and abs(shut - open_) < 0.03
    drawn_H.sum().backward()
    assert odds_H.grad is not None and (odds_H.grad > 0).any()


def test_the_expected_share_is_the_observed_one(transformer: Model) -> None:
    torch.manual_seed(0)
    gates = Gates(transformer).train()
    for value in (-2.0, 0.0, 2.0):
        with torch.no_grad():
            for odds_H in gates.odds:
                odds_H.fill_(value)
        seen = float((gates._draw(torch.full((50_000,), value)) > 0).float().mean())
        assert float(gates.expected_open().detach()) == pytest.approx(seen, abs=0.01)


def test_pressure_shuts_what_is_not_needed(transformer: Model) -> None:
    """A head that says nothing has nothing to hold its gate open; without pressure, nothing shuts."""
    name = "encoder.blocks.0.attention"
    with torch.no_grad():
        attention = transformer.get_submodule(name)
        attention.out.weight[:, :4] = 0.0  # type: ignore[index, operator, union-attr]
    gates = learn_gates(transformer, PAIRS, 40, press=3.0, lr=0.0)
    assert gates.importance()[name, 0] < 0.0
    assert not transformer.training and not any(module._forward_hooks for module in transformer.modules())
    idle = learn_gates(transformer, PAIRS, 5, press=0.0, lr=0.0)
    assert idle.importance()[name, 0] == pytest.approx(2.0)
