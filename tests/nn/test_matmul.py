"""Other ways to compute a matrix product: in bfloat16 and with packed weights; each leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.config import Stack
from regard.nn import matmul
from regard.nn.block import FeedForward
from regard.nn.lora import LoraLinear
from regard.nn.matmul import Linear, bf16_matmuls, linears, packed_matmuls, use_matmuls


def rounded(x: Tensor) -> Tensor:
    return x.detach().bfloat16().double().requires_grad_()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 24), (0, 24), (1, 24)])
def test_bf16_value_and_gradients(shape: tuple[int, ...], bias: bool) -> None:
    linear, x, pull = Linear(24, 10, bias=bias), torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 10)
    with use_matmuls(bf16_matmuls(linear)):
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
def test_a_feed_forward_layer_stays_in_bf16_inside(gated: bool) -> None:
    layer, seen = FeedForward(Stack(width=16, ff=64, heads=2, gated=gated)), []
    layer.neurons.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    x = torch.randn(3, 5, 16, requires_grad=True)
    wide = layer(x)
    (expected,) = torch.autograd.grad(wide.square().sum(), x)
    with use_matmuls(bf16_matmuls(layer)):
        narrow = layer(x)
    (found,) = torch.autograd.grad(narrow.square().sum(), x)
    assert seen == [torch.float32, torch.bfloat16]
    assert narrow.dtype == found.dtype == torch.float32
    torch.testing.assert_close(narrow, wide, atol=0.02, rtol=0.02)
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.99


def test_what_needs_no_gradient_gets_none() -> None:
    linear = Linear(8, 4).requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    with use_matmuls(bf16_matmuls(linear)):
        linear(x).sum().backward()
    assert x.grad is not None
    assert linear.weight.grad is None
    assert linear.bias.grad is None


def test_a_shared_layer_counts_once_and_others_are_left_alone() -> None:
    shared = Linear(4, 4)
    adapted = LoraLinear(Linear(4, 4), rank=2, alpha=4.0)
    assert linears(nn.Sequential(shared, nn.ReLU(), adapted), nn.Sequential(shared)) == [shared]


def test_an_error_in_bf16_restores_the_layer() -> None:
    linear = Linear(4, 4)
    with pytest.raises(RuntimeError), use_matmuls(bf16_matmuls(linear)):
        linear(torch.randn(3, 5))
    assert linear.matmul is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 256), (5, 256), (2, 3, 256), (0, 256)])
def test_packed_weights_give_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], bias: bool
) -> None:
    model, x = nn.Sequential(Linear(256, 300, bias=bias), Linear(300, 7)), torch.randn(shape)
    with torch.inference_mode():
        expected = model(x)
        for work in (0, matmul.MIN_WORK):  # always, and where it pays
            monkeypatch.setattr(matmul, "MIN_WORK", work)
            with use_matmuls(packed_matmuls([model])):
                torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert model[0].matmul is None


def test_forward_hooks_run_with_packed_weights() -> None:
    model, seen = Linear(512, 512), []
    model.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with torch.inference_mode(), use_matmuls(packed_matmuls([model])):
        model(torch.randn(4, 512))
    assert seen == [(4, 512)]


def test_an_error_with_packed_weights_restores_the_layer() -> None:
    model = Linear(512, 512)
    with pytest.raises(RuntimeError), use_matmuls(packed_matmuls([model])):
        model(torch.randn(4, 511))
    assert model.matmul is None


def test_bf16_is_each_matrix_and_input_rounded() -> None:
    model, x = nn.Sequential(Linear(64, 32), Linear(32, 7, bias=False)), torch.randn(2, 3, 64)
    with torch.inference_mode():
        with use_matmuls(packed_matmuls([model], bf16=True)):
            narrow = model(x)
        inner = F.linear(x.bfloat16(), model[0].weight.bfloat16(), model[0].bias.bfloat16())
        assert narrow.dtype == torch.float32
        assert torch.equal(narrow, F.linear(inner, model[1].weight.bfloat16()).float())
