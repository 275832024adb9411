"""The parts of a layer equal their formulas; patch embeddings equal a convolution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from regard.config import PatchConfig, Stack
from regard.nn.block import ACTIVATIONS, FeedForward, ImageEmbedding, LmHeadTransform, Residual, make_norm


def small(**changes: object) -> Stack:
    return Stack(**({"width": 6, "heads": 2, "ff": 9, "dropout": 0.0} | changes))


BY_HAND = {
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "tanh": math.tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_equals_its_formula(name: str) -> None:
    values = [-3.0, -0.5, 0.0, 0.1, 2.0]
    assert ACTIVATIONS[name](torch.tensor(values)).tolist() == pytest.approx(
        [BY_HAND[name](v) for v in values], abs=1e-5
    )


@pytest.mark.parametrize("bias", ["all", "ff", "none"])
@pytest.mark.parametrize("gated", [True, False])
def test_feed_forward_equals_its_formula(gated: bool, bias: str) -> None:
    layer = FeedForward(small(gated=gated, bias=bias, activation="silu"))
    x = torch.randn(2, 3, 6)
    assert (layer.up.bias is not None) == (bias != "none")
    zero = torch.zeros(())

    def linear(part: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return x @ part.weight.T + (zero if part.bias is None else part.bias)

    up = linear(layer.up, x)
    gate = linear(layer.gate, x) if gated else up
    hidden = gate * torch.sigmoid(gate) * (up if gated else 1)
    torch.testing.assert_close(layer(x), linear(layer.down, hidden), atol=1e-5, rtol=1e-5)


def test_hook_can_ablate_all_neurons() -> None:
    layer = FeedForward(small())
    x = torch.randn(1, 2, 6)
    layer.neurons.register_forward_hook(lambda _m, _i, out: out * 0)
    torch.testing.assert_close(layer(x), layer.down.bias.expand(1, 2, 6))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norm_equals_its_formula(kind: str) -> None:
    norm = make_norm(small(norm=kind, norm_eps=0.01))
    x = torch.randn(4, 6) * 3 + 1
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.01).sqrt()
    torch.testing.assert_close(norm(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("at", ["pre", "post"])
def test_residual_normalises_before_or_after_the_sublayer(at: str) -> None:
    residual = Residual(small(norm_at=at))
    x = torch.randn(2, 3, 6)

    def sublayer(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    expected = x + sublayer(residual.norm(x)) if at == "pre" else residual.norm(x + sublayer(x))
    assert torch.equal(residual(x, sublayer), expected)


def test_dropout_applies_only_to_the_sublayer_output() -> None:
    residual = Residual(small(norm_at="pre", dropout=0.5))
    x = torch.randn(2, 3, 6)
    out = residual(x, lambda y: torch.full_like(y, 7.0))
    assert set((out - x).round(decimals=3).unique().tolist()) == {0.0, 14.0}


@pytest.mark.parametrize(("height", "width", "channels", "size"), [(6, 4, 3, 2), (4, 4, 1, 4), (3, 9, 2, 3)])
def test_patch_embedding_equals_a_strided_convolution(height: int, width: int, channels: int, size: int) -> None:
    """The weight matrix is the flattened kernel; the class token comes first."""
    torch.manual_seed(0)
    patches = PatchConfig(height=height, width=width, channels=channels, size=size)
    embedding = ImageEmbedding(patches, 5)
    images = torch.randn(2, channels, height, width)
    torch.nn.init.normal_(embedding.first)
    kernel = embedding.project.weight.view(5, channels, size, size)
    expected = F.conv2d(images, kernel, embedding.project.bias, stride=size).flatten(2).transpose(1, 2)
    output = embedding(images)
    assert output.shape == (2, 1 + patches.count, 5)
    assert torch.equal(output[:, 0], embedding.first.expand(2, -1))
    torch.testing.assert_close(output[:, 1:], expected, atol=1e-5, rtol=1e-5)


def test_patch_embedding_depends_only_on_its_pixels() -> None:
    embedding = ImageEmbedding(PatchConfig(height=4, width=6, channels=2, size=2), 3)
    images = torch.randn(1, 2, 4, 6)
    before = embedding(images)
    images[0, 1, 2, 5] += 1  # second row of patches, third column
    changed = (embedding(images) - before).abs().amax(-1)[0] > 0
    assert changed.tolist() == [False] * 6 + [True]


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_lm_head_transform_equals_its_formula(norm: str) -> None:
    torch.manual_seed(1)
    transform = LmHeadTransform(Stack(width=6, heads=2, activation="tanh", norm=norm, norm_eps=0.1))
    x = torch.randn(3, 6)
    hidden = (x @ transform.dense.weight.T + transform.dense.bias).tanh()
    centred = hidden - hidden.mean(-1, keepdim=True) if norm == "layer" else hidden
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(transform(x), expected, atol=1e-5, rtol=1e-5)
