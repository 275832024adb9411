"""Adapters: nothing at first, trained alone, and merged into plain weights of an equal model."""

from __future__ import annotations

import pytest
import torch

from regard.model import Model
from regard.nn.lora import LoraLinear, add_adapters, merge_adapters
from regard.presets import preset
from regard.run import weights_of

ON = ("attention", "cross", "feed_forward")
TINY = {"layers": 2, "width": 16, "heads": 2, "ff": 24, "dropout": 0.0}


def tiny(name: str = "transformer-tiny") -> Model:
    torch.manual_seed(1)
    return Model(preset(name, 20, changes={"encoder": TINY, "decoder": TINY})).double().eval()


def outputs(model: Model) -> torch.Tensor:
    tokens = torch.arange(24).view(2, 12) % 20
    with torch.no_grad():
        return model(tokens, None, tokens) if model.config.encoder else model(tokens[:, :0], None, tokens)


def stir(model: Model) -> None:
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)


@pytest.mark.parametrize("name", ["transformer-tiny", "llama-tiny", "t5-tiny"])
def test_merged_weights_say_what_adapters_say(name: str) -> None:
    model, plain = tiny(name), tiny(name)
    layers = add_adapters(model, rank=3, alpha=6.0, on=ON)
    assert torch.equal(outputs(model), outputs(plain))  # a new adapter changes nothing
    stir(model)
    before = outputs(plain)
    weights, adapters = merge_adapters(model, weights_of(model))
    assert weights.keys() == weights_of(plain).keys()
    assert set(adapters) == {f"{layer}.lora_{part}" for layer in layers for part in ("up", "down")}
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(outputs(plain), outputs(model), rtol=1e-9, atol=1e-9)
    assert (outputs(plain) - before).abs().max() > 0.1


def test_every_matrix_of_the_parts_named_and_no_other() -> None:
    model = tiny()
    layers = add_adapters(model, 2, 4.0, ON)
    assert len(layers) == 2 * (3 + 2) + 2 * (3 + 3 + 2)
    assert "decoder.blocks.1.cross.key_value" in layers and "encoder.blocks.0.feed_forward.up" in layers
    assert all(isinstance(model.get_submodule(layer), LoraLinear) for layer in layers)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{layer}.{part}" for layer in layers for part in ("lora_up", "lora_down")}
    assert add_adapters(tiny(), 2, 4.0, ("cross",)) == [layer for layer in layers if ".cross." in layer]
    assert add_adapters(tiny(), 2, 4.0, ("crossing",)) == []


def test_gradients_reach_the_adapters_alone() -> None:
    model = tiny()
    add_adapters(model, 2, 4.0, ON)
    tokens = torch.arange(12).view(2, 6)
    model(tokens, None, tokens).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("lora" in name), name


def test_without_adapters_nothing_is_merged() -> None:
    weights, adapters = merge_adapters(tiny(), weights_of(tiny()))
    assert not adapters and all(torch.equal(x, weights_of(tiny())[name]) for name, x in weights.items())
