"""LoRA adapters and head gates: no effect when added; merging or folding them into the weights gives an equal model."""

from __future__ import annotations

import pytest
import torch

from regard.model import Model
from regard.nn.adapters import (
    INITIAL_LOG_ODDS,
    HeadGate,
    LoraLinear,
    add_adapters,
    add_gates,
    expected_open,
    fold_gates,
    head_gates,
    merge_adapters,
    remove_gates,
)
from regard.presets import preset
from regard.weight_files import weights_of

ADAPTED_PARTS = ("attention", "cross", "feed_forward")
TINY = {"layers": 2, "width": 16, "heads": 2, "ff": 24, "dropout": 0.0}


def tiny(name: str = "transformer-tiny") -> Model:
    torch.manual_seed(1)
    return Model(preset(name, 20, changes={"encoder": TINY, "decoder": TINY})).double().eval()


def outputs(model: Model) -> torch.Tensor:
    tokens = torch.arange(24).view(2, 12) % 20
    with torch.no_grad():
        return model(tokens, None, tokens) if model.config.encoder else model(tokens[:, :0], None, tokens)


def randomize_adapters(model: Model) -> None:
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)


@pytest.mark.parametrize("name", ["transformer-tiny", "llama-tiny", "t5-tiny"])
def test_merged_weights_equal_adapters(name: str) -> None:
    model = tiny(name)
    plain = tiny(name)
    layers = add_adapters(model, rank=3, alpha=6.0, on=ADAPTED_PARTS)
    assert torch.equal(outputs(model), outputs(plain))  # a new adapter has no effect
    randomize_adapters(model)
    before = outputs(plain)
    weights, adapters = merge_adapters(model, weights_of(model))
    assert weights.keys() == weights_of(plain).keys()
    assert set(adapters) == {f"{layer}.lora_{part}" for layer in layers for part in ("up", "down")}
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(outputs(plain), outputs(model), rtol=1e-9, atol=1e-9)
    assert (outputs(plain) - before).abs().max() > 0.1


def test_adapters_cover_exactly_the_selected_matrices() -> None:
    model = tiny()
    layers = add_adapters(model, 2, 4.0, ADAPTED_PARTS)
    assert len(layers) == 2 * (3 + 2) + 2 * (3 + 3 + 2)
    assert "decoder.blocks.1.cross.key_value" in layers and "encoder.blocks.0.feed_forward.up" in layers
    assert all(isinstance(model.get_submodule(layer), LoraLinear) for layer in layers)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {f"{layer}.{part}" for layer in layers for part in ("lora_up", "lora_down")}
    assert add_adapters(tiny(), 2, 4.0, ("cross",)) == [layer for layer in layers if ".cross." in layer]
    assert add_adapters(tiny(), 2, 4.0, ("crossing",)) == []


def test_only_adapters_get_gradients() -> None:
    model = tiny()
    add_adapters(model, 2, 4.0, ADAPTED_PARTS)
    tokens = torch.arange(12).view(2, 6)
    model(tokens, None, tokens).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("lora" in name), name


def test_merging_without_adapters_has_no_effect() -> None:
    weights, adapters = merge_adapters(tiny(), weights_of(tiny()))
    assert not adapters and all(torch.equal(x, weights_of(tiny())[name]) for name, x in weights.items())


SOURCE = torch.tensor([[4, 5, 6, 3]])
INPUT = torch.tensor([[2, 7, 8]])
STACK = {"layers": 2, "width": 16, "heads": 4, "ff": 32, "dropout": 0.0}


def small_transformer() -> Model:
    torch.manual_seed(0)
    changes = {stack: STACK for stack in ("encoder", "decoder")}
    return Model(preset("transformer-tiny", 12, changes=changes)).eval()


@torch.no_grad()
def test_open_gates_have_no_effect_and_closed_gates_ablate_heads() -> None:
    model = small_transformer()
    plain = model(SOURCE, None, INPUT)
    add_gates(model)
    gates = head_gates(model)
    assert len(gates) == 6 and all(torch.all(gate.odds == INITIAL_LOG_ODDS) for gate in gates.values())
    for gate in gates.values():
        gate.odds.fill_(9.0)
    assert torch.allclose(model(SOURCE, None, INPUT), plain, atol=1e-6)
    gates["decoder.blocks.1.cross"].odds[2] = -9.0
    ablated = model(SOURCE, None, INPUT)
    remove_gates(model)
    model.get_parameter("decoder.blocks.1.cross.out.weight")[:, 8:12] = 0.0
    assert torch.allclose(model(SOURCE, None, INPUT), ablated, atol=1e-6) and not head_gates(model)


def test_sampled_gates_are_often_exactly_open_or_closed_and_have_gradients() -> None:
    torch.manual_seed(0)
    gate = HeadGate(20_000, torch.device("cpu")).train()
    with torch.no_grad():
        gate.odds.zero_()
    samples_H = gate(torch.ones(1, 20_000, 1, 1)).flatten()
    assert samples_H.min() >= 0 and samples_H.max() <= 1
    closed_share = float((samples_H == 0).float().mean())
    open_share = float((samples_H == 1).float().mean())
    assert 0.2 < closed_share < 0.4 and abs(closed_share - open_share) < 0.03
    samples_H.sum().backward()
    assert gate.odds.grad is not None and (gate.odds.grad > 0).any()


@pytest.mark.parametrize("value", [-2.0, 0.0, 2.0])
def test_expected_share_of_open_gates_equals_observed_share(value: float) -> None:
    torch.manual_seed(0)
    model = small_transformer()
    add_gates(model)
    gate = HeadGate(50_000, torch.device("cpu")).train()
    with torch.no_grad():
        for module in (gate, *head_gates(model).values()):
            module.odds.fill_(value)
        share = float((gate(torch.ones(1, 50_000, 1, 1)) > 0).float().mean())
    assert float(expected_open(model).detach()) == pytest.approx(share, abs=0.01)


@torch.no_grad()
def test_folded_gates_give_the_same_output() -> None:
    model = small_transformer()
    plain = small_transformer()
    add_gates(model)
    for gate in head_gates(model).values():
        gate.odds.copy_(torch.randn(4) * 3)
    weights = fold_gates(model, weights_of(model))
    assert set(weights) == set(weights_of(plain))
    for name, parameter in plain.named_parameters():
        parameter.copy_(weights[name])
    assert torch.allclose(model(SOURCE, None, INPUT), plain(SOURCE, None, INPUT), atol=1e-6)
