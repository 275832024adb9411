"""Matrix products in bfloat16 and with packed weights; dropout with a pool of masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.config import Stack
from regard.nn import primitives
from regard.nn.adapters import LoraLinear
from regard.nn.block import FeedForward
from regard.nn.primitives import Dropout, Linear, MaskPool, PackedWeights, bf16_matmuls, linears, use_matmuls, use_pool


def rounded(x: Tensor) -> Tensor:
    return x.detach().bfloat16().double().requires_grad_()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 24), (0, 24), (1, 24)])
def test_bf16_product_equals_product_of_rounded_operands(shape: tuple[int, ...], bias: bool) -> None:
    linear = Linear(24, 10, bias=bias)
    x = torch.randn(shape, requires_grad=True)
    output_gradient = torch.randn(*shape[:-1], 10)
    with use_matmuls(bf16_matmuls(linear)):
        y = linear(x)
    (y * output_gradient).sum().backward()
    exact_x = rounded(x)
    exact_weight = rounded(linear.weight)
    exact = exact_x @ exact_weight.T + (linear.bias.detach().bfloat16().double() if bias else 0)
    (exact * output_gradient.bfloat16()).sum().backward()
    assert y.dtype == x.grad.dtype == linear.weight.grad.dtype == torch.float32
    for ours, theirs in ((y, exact), (x.grad, exact_x.grad), (linear.weight.grad, exact_weight.grad)):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-2, rtol=2**-7)  # the result is rounded too
    if bias:
        torch.testing.assert_close(linear.bias.grad, output_gradient.flatten(0, -2).sum(0))


@pytest.mark.parametrize("gated", [False, True])
def test_activations_inside_a_feed_forward_layer_are_bf16(gated: bool) -> None:
    layer = FeedForward(Stack(width=16, ff=64, heads=2, gated=gated))
    dtypes = []
    layer.neurons.register_forward_hook(lambda _m, _i, out: dtypes.append(out.dtype))
    x = torch.randn(3, 5, 16, requires_grad=True)
    fp32 = layer(x)
    (fp32_gradient,) = torch.autograd.grad(fp32.square().sum(), x)
    with use_matmuls(bf16_matmuls(layer)):
        bf16 = layer(x)
    (bf16_gradient,) = torch.autograd.grad(bf16.square().sum(), x)
    assert dtypes == [torch.float32, torch.bfloat16]
    assert bf16.dtype == bf16_gradient.dtype == torch.float32
    torch.testing.assert_close(bf16, fp32, atol=0.02, rtol=0.02)
    assert torch.cosine_similarity(bf16_gradient.flatten(), fp32_gradient.flatten(), dim=0) > 0.99


def test_frozen_inputs_and_weights_get_no_gradient() -> None:
    linear = Linear(8, 4).requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    with use_matmuls(bf16_matmuls(linear)):
        linear(x).sum().backward()
    assert x.grad is not None
    assert linear.weight.grad is None
    assert linear.bias.grad is None


def test_linears_lists_shared_layers_once_and_skips_adapters() -> None:
    shared = Linear(4, 4)
    adapted = LoraLinear(Linear(4, 4), rank=2, alpha=4.0)
    assert linears(nn.Sequential(shared, nn.ReLU(), adapted, nn.Sequential(shared))) == [shared]


def test_error_with_bf16_restores_the_layer() -> None:
    linear = Linear(4, 4)
    with pytest.raises(RuntimeError), use_matmuls(bf16_matmuls(linear)):
        linear(torch.randn(3, 5))
    assert linear.matmul is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 256), (5, 256), (2, 3, 256), (0, 256)])
def test_packed_weights_give_the_same_product(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], bias: bool
) -> None:
    model = nn.Sequential(Linear(256, 300, bias=bias), Linear(300, 7))
    x = torch.randn(shape)
    with torch.inference_mode():
        expected = model(x)
        for work in (0, primitives.MIN_WORK):  # always, and only for large products
            monkeypatch.setattr(primitives, "MIN_WORK", work)
            with use_matmuls(PackedWeights().matmuls(model)):
                torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert model[0].matmul is None


def replace_weight(linear: Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.detach() * 2)


def replace_data(linear: Linear) -> None:
    linear.weight.data = linear.weight.detach() * 2


CHANGES: dict[str, Callable[[Linear], object]] = {
    "weight in place": lambda linear: linear.weight.detach().mul_(2),
    "bias in place": lambda linear: linear.bias.detach().mul_(2),
    "in inference mode": torch.inference_mode()(lambda linear: linear.weight.mul_(2)),
    "through data": lambda linear: linear.weight.data.mul_(2),
    "new weight": replace_weight,
    "new data": replace_data,
    "load_state_dict": lambda linear: linear.load_state_dict(Linear(256, 300).state_dict()),
    "optimizer step": lambda linear: (linear.weight.sum().backward(), torch.optim.SGD(linear.parameters(), 1.0).step()),
    "dtype round trip": lambda linear: linear.double().float().weight.detach().mul_(2),
}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_packed_weights_are_cached_until_they_change(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Linear], object], bf16: bool
) -> None:
    monkeypatch.setattr(primitives, "MIN_WORK", 0)
    linear = Linear(256, 300)
    x = torch.randn(5, 256)
    packed = PackedWeights()

    def product(owner: PackedWeights) -> Tensor:
        with torch.inference_mode(), use_matmuls(owner.matmuls(linear, bf16)):
            return linear(x)

    before = product(packed)
    first = packed.matmuls(linear, bf16)
    assert torch.equal(product(packed), before) and packed.matmuls(linear, bf16) == first
    change(linear)
    after = product(packed)
    assert torch.equal(after, product(PackedWeights())) and not torch.equal(after, before)


def test_inference_tensors_are_packed_on_every_call() -> None:
    with torch.inference_mode():
        linear = Linear(256, 300)
        packed = PackedWeights()
        assert packed.matmuls(linear) != packed.matmuls(linear)


def test_forward_hooks_run_with_packed_weights() -> None:
    model = Linear(512, 512)
    shapes = []
    model.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    with torch.inference_mode(), use_matmuls(PackedWeights().matmuls(model)):
        model(torch.randn(4, 512))
    assert shapes == [(4, 512)]


def test_error_with_packed_weights_restores_the_layer() -> None:
    model = Linear(512, 512)
    with pytest.raises(RuntimeError), use_matmuls(PackedWeights().matmuls(model)):
        model(torch.randn(4, 511))
    assert model.matmul is None


def test_packed_bf16_rounds_weights_and_inputs() -> None:
    model = nn.Sequential(Linear(64, 32), Linear(32, 7, bias=False))
    x = torch.randn(2, 3, 64)
    with torch.inference_mode():
        with use_matmuls(PackedWeights().matmuls(model, bf16=True)):
            output = model(x)
        inner = F.linear(x.bfloat16(), model[0].weight.bfloat16(), model[0].bias.bfloat16())
        assert output.dtype == torch.float32
        assert torch.equal(output, F.linear(inner, model[1].weight.bfloat16()).float())


def pooled(rate: float, pool: MaskPool) -> Dropout:
    dropout = Dropout(rate)
    use_pool(dropout, pool)
    return dropout


def test_dropout_masks_depend_only_on_seed_and_step() -> None:
    """After `begin`, a used pool gives the same masks as a new one."""
    used = MaskPool(7, size=1000, renew=4)
    fresh = MaskPool(7, size=1000, renew=4)
    x = torch.ones(3, 5)
    for step in (0, 1, 5, 9):
        used.begin(step)
        used.mask(x, 0.3)
        used.mask(torch.ones(40), 0.5)
    for step in (9, 2):
        used.begin(step)
        fresh.begin(step)
        for rate in (0.5, 0.3, 0.5):
            assert torch.equal(used.mask(x, rate), fresh.mask(x, rate))


def test_mask_of_a_large_tensor_does_not_change_later_steps() -> None:
    """A resumed run skips earlier long batches and still uses the same masks."""
    uninterrupted = MaskPool(1, size=100)
    resumed = MaskPool(1, size=100)
    x = torch.ones(10)
    uninterrupted.begin(0)
    uninterrupted.mask(torch.ones(500), 0.5)
    for pool in (uninterrupted, resumed):
        pool.begin(1)
    assert torch.equal(uninterrupted.mask(x, 0.5), resumed.mask(x, 0.5))


def test_masks_of_a_step_with_a_large_tensor_can_be_repeated() -> None:
    pool = MaskPool(3, size=100)
    masks = []
    for _ in range(2):
        pool.begin(5)
        masks.append([pool.mask(torch.ones(n), 0.5) for n in (10, 400, 10)])
    assert all(torch.equal(a, b) for a, b in zip(*masks, strict=True))


@pytest.mark.parametrize("size", [1 << 10, 1 << 18])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_share_and_mean_match_the_rate(rate: float, size: int) -> None:
    """Within five standard deviations for the number of draws, also for a tensor larger than the pool."""
    pool = MaskPool(2, size=size)
    pool.begin(0)
    mask = pool.mask(torch.ones(100, 300), rate)
    deviation = (rate * (1 - rate) / min(mask.numel(), size)) ** 0.5
    assert abs((mask == 0).float().mean().item() - rate) < 5 * deviation
    assert abs(mask.mean().item() - 1) < 5 * deviation / (1 - rate)
    assert mask.max().item() == pytest.approx(1 / (1 - rate))
    assert mask.unique().numel() == 2


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a == 0) == (b == 0)).float().mean().item()


def test_masks_of_layers_steps_seeds_and_rates_are_independent() -> None:
    x = torch.ones(20_000)
    pool = MaskPool(4, size=1 << 18, renew=2)
    pool.begin(0)
    first = pool.mask(x, 0.5)
    layer = pool.mask(x, 0.5)
    other_rate = pool.mask(x, 0.4)
    pool.begin(1)
    step = pool.mask(x, 0.5)
    pool.begin(2)
    renewed = pool.mask(x, 0.5)
    other_seed = MaskPool(5, size=1 << 18)
    other_seed.begin(0)
    for other in (layer, other_rate, step, renewed, other_seed.mask(x, 0.5)):
        assert abs(agreement(first, other) - 0.5) < 0.03


def test_masks_of_two_rates_at_one_offset_are_independent() -> None:
    """If both masks were one draw with two thresholds, the higher rate would drop a superset of the lower rate."""
    pool = MaskPool(6, size=1000)
    shares = []
    for step in range(300):
        pool.begin(step)
        low = pool.mask(torch.ones(400), 0.2) == 0
        pool.begin(step)  # the same offset in the pool
        high = pool.mask(torch.ones(400), 0.6) == 0
        shares.append(high[low].float().mean())
    assert abs(torch.stack(shares).mean().item() - 0.6) < 0.1


def test_dropout_gradient_equals_the_mask() -> None:
    pool = MaskPool(8, size=1000)
    x = torch.randn(6, 7, requires_grad=True)
    dropout = pooled(0.4, pool)
    pool.begin(0)
    out = dropout(x)
    out.sum().backward()
    pool.begin(0)
    mask = pool.mask(x, 0.4)
    assert x.grad is not None
    assert torch.equal(out, x * mask)
    assert torch.equal(x.grad, mask)


def test_dropout_is_off_in_evaluation_and_at_rate_zero() -> None:
    x = torch.randn(50)
    pool = MaskPool(9)
    for dropout in (Dropout(0.5).eval(), Dropout(0.0), pooled(0.5, pool).eval(), pooled(0.0, pool)):
        assert dropout(x) is x


def test_dropout_without_a_pool_equals_torch_dropout() -> None:
    x = torch.randn(50)
    torch.manual_seed(3)
    output = Dropout(0.3)(x)
    torch.manual_seed(3)
    assert torch.equal(output, nn.functional.dropout(x, 0.3))


def test_use_pool_sets_and_removes_the_pool_of_every_dropout() -> None:
    model = nn.Sequential(Dropout(0.1), nn.Sequential(Dropout(0.2)))
    pool = MaskPool(0)
    use_pool(model, pool)
    assert model[0].pool is pool and model[1][0].pool is pool
    use_pool(model, None)
    assert model[0].pool is None and Dropout(0.1).pool is None


def test_masks_have_the_dtype_of_their_tensor() -> None:
    pool = MaskPool(0, size=100)
    pool.begin(0)
    assert pool.mask(torch.ones(4, dtype=torch.bfloat16), 0.5).dtype == torch.bfloat16
