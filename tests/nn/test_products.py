"""Products in bfloat16 are the same function as in fp32, with its inputs rounded, and so are their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regard.config import Stack
from regard.nn.block import FeedForward
from regard.nn.lora import LoraLinear
from regard.nn.matmul import bf16_products, plain_linears, replaced


def rounded(x: Tensor) -> Tensor:
    return x.detach().bfloat16().double().requires_grad_()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 24), (0, 24), (1, 24)])
def test_value_and_gradients(shape: tuple[int, ...], bias: bool) -> None:
    linear, x, pull = nn.Linear(24, 10, bias=bias), torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 10)
    with replaced(bf16_products(linear)):
        y = linear(x)
    (y * pull).sum().backward()
    exact_x, exact_weight = rounded(x), rounded(linear.weight)
    exact = exact_x @ exact_weight.T + (linear.bias.detach().bfloat16().double() if bias else 0)
    (exact * pull.bfloat16()).sum().backward()
    assert y.dtype == x.grad.dtype == linear.weight.grad.dtype == torch.float32
    for ours, theirs in ((y, exact), (x.grad, exact_x.grad), (linear.weight.grad, exact_weight.grad)):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-2, rtol=2**-7)  # the result is rounded too
    if bias:
        torch.testing.assert_close(linear.bias.grad, pull.flatten(0, -2).sum(0))


@pytest.mark.parametrize("gated", [False, True])
def test_a_feed_forward_layer_stays_narrow_inside(gated: bool) -> None:
    layer, seen = FeedForward(Stack(width=16, ff=64, heads=2, gated=gated)), []
    layer.neurons.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    x = torch.randn(3, 5, 16, requires_grad=True)
    wide = layer(x)
    (expected,) = torch.autograd.grad(wide.square().sum(), x)
    with replaced(bf16_products(layer)):
        narrow = layer(x)
    (found,) = torch.autograd.grad(narrow.square().sum(), x)
    assert seen == [torch.float32, torch.bfloat16]
    assert narrow.dtype == found.dtype == torch.float32
    torch.testing.assert_close(narrow, wide, atol=0.02, rtol=0.02)
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.99


def test_what_needs_no_gradient_gets_none() -> None:
    linear = nn.Linear(8, 4).requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    with replaced(bf16_products(linear)):
        linear(x).sum().backward()
    assert x.grad is not None
    assert linear.weight.grad is None
    assert linear.bias.grad is None


def test_a_shared_layer_counts_once_and_others_are_left_alone() -> None:
    shared = nn.Linear(4, 4)
    adapted = LoraLinear(nn.Linear(4, 4), rank=2, alpha=4.0)
    assert plain_linears(nn.Sequential(shared, nn.ReLU(), adapted), nn.Sequential(shared)) == [shared]


def test_an_error_leaves_nothing_behind() -> None:
    linear = nn.Linear(4, 4)
    with pytest.raises(RuntimeError), replaced(bf16_products(linear)):
        linear(torch.randn(3, 5))
    assert "forward" not in linear.__dict__
