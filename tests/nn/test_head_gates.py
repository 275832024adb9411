from __future__ import annotations

import pytest
import torch

from regard.model import Model
from regard.nn.gates import INITIAL_LOG_ODDS, HeadGate, add_gates, expected_open, fold_gates, head_gates, remove_gates
from regard.presets import preset
from regard.run import weights_of

SOURCE, INPUT = torch.tensor([[4, 5, 6, 3]]), torch.tensor([[2, 7, 8]])
STACK = {"layers": 2, "width": 16, "heads": 4, "ff": 32, "dropout": 0.0}


def made() -> Model:
    torch.manual_seed(0)
    changes = {stack: STACK for stack in ("encoder", "decoder")}
    return Model(preset("transformer-tiny", 12, changes=changes)).eval()


@torch.no_grad()
def test_open_gates_change_nothing_and_closed_ones_ablate() -> None:
    model = made()
    plain = model(SOURCE, None, INPUT)
    add_gates(model)
    gates = head_gates(model)
    assert len(gates) == 6 and all(torch.all(part.odds == INITIAL_LOG_ODDS) for part in gates.values())
    for part in gates.values():
        part.odds.fill_(9.0)
    assert torch.allclose(model(SOURCE, None, INPUT), plain, atol=1e-6)
    gates["decoder.blocks.1.cross"].odds[2] = -9.0
    closed = model(SOURCE, None, INPUT)
    remove_gates(model)
    model.get_parameter("decoder.blocks.1.cross.out.weight")[:, 8:12] = 0.0
    assert torch.allclose(model(SOURCE, None, INPUT), closed, atol=1e-6) and not head_gates(model)


def test_sampled_gates_are_often_exactly_open_or_closed_and_have_gradients() -> None:
    torch.manual_seed(0)
    part = HeadGate(20_000, torch.device("cpu")).train()
    with torch.no_grad():
        part.odds.zero_()
    drawn_H = part(torch.ones(1, 20_000, 1, 1)).flatten()
    assert drawn_H.min() >= 0 and drawn_H.max() <= 1
    closed, open_ = float((drawn_H == 0).float().mean()), float((drawn_H == 1).float().mean())
    assert 0.2 < closed < 0.4 and abs(closed - open_) < 0.03
    drawn_H.sum().backward()
    assert part.odds.grad is not None and (part.odds.grad > 0).any()


@pytest.mark.parametrize("value", [-2.0, 0.0, 2.0])
def test_the_expected_share_is_the_observed_one(value: float) -> None:
    torch.manual_seed(0)
    model = made()
    add_gates(model)
    part = HeadGate(50_000, torch.device("cpu")).train()
    with torch.no_grad():
        for each in (part, *head_gates(model).values()):
            each.odds.fill_(value)
        seen = float((part(torch.ones(1, 50_000, 1, 1)) > 0).float().mean())
    assert float(expected_open(model).detach()) == pytest.approx(seen, abs=0.01)


@torch.no_grad()
def test_folded_gates_say_the_same() -> None:
    model, plain = made(), made()
    add_gates(model)
    for part in head_gates(model).values():
        part.odds.copy_(torch.randn(4) * 3)
    folded = fold_gates(model, weights_of(model))
    assert set(folded) == set(weights_of(plain))
    for name, parameter in plain.named_parameters():
        parameter.copy_(folded[name])
    assert torch.allclose(model(SOURCE, None, INPUT), plain(SOURCE, None, INPUT), atol=1e-6)
