"""Reversible layers equal their formula; recomputing activations gives the same gradients as storing them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard.config import LshConfig, Stack
from regard.nn import reversible
from regard.nn.attention import AttentionMask
from regard.nn.cache import State
from regard.nn.position import NO_POSITION, Position
from regard.nn.primitives import MaskPool, use_pool
from regard.nn.reversible import ReversibleBlock, run_reversible
from regard.nn.transformer import Transformer


def small(**changes: object) -> Stack:
    shape = {"width": 8, "heads": 2, "ff": 12, "layers": 3, "norm_at": "pre", "residual": "reversible", "dropout": 0.0}
    return Stack(**(shape | {"lsh": LshConfig(hashes=2, chunk=4)} | changes))


def reversible_stack(dtype: torch.dtype = torch.double, **changes: object) -> Transformer:
    torch.manual_seed(0)
    stack = Transformer(small(**changes), causal=True).to(dtype)
    for weight in stack.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return stack


def run_storing_activations(
    blocks: list[ReversibleBlock], x: Tensor, pos: Tensor, mask: AttentionMask, position: Position
) -> Tensor:
    """The layers as an ordinary loop; autograd stores all activations."""
    for block in blocks:
        x, _ = block(x, pos, mask, position)
    return x


def gradients(model: Transformer, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    out, _ = model(x, State(()), keep)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weights).sum().backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert x.grad is not None
    return out.detach(), grads | {"x": x.grad}


def test_block_equals_its_formula() -> None:
    block = ReversibleBlock(small(), None).double()
    x = torch.randn(2, 5, 16).double()
    pos = torch.arange(5)[None]
    mask = AttentionMask(pos, pos, None, causal=True)
    first = x[..., :8]
    second = x[..., 8:]
    normed = block.attention_residual.norm(second)
    first = first + block.attention(normed, block.attention.project_kv(normed, pos, NO_POSITION), mask, NO_POSITION)
    second = second + block.feed_forward(block.feed_forward_residual.norm(first))
    torch.testing.assert_close(block(x, pos, mask, NO_POSITION)[0], torch.cat((first, second), -1))


@pytest.mark.parametrize("mixer", ["attention", "lsh"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.double, 1e-10), (torch.float, 1e-5)])
def test_gradients_equal_those_of_stored_activations(
    monkeypatch: pytest.MonkeyPatch, mixer: str, dropout: float, pooled: bool, dtype: torch.dtype, tolerance: float
) -> None:
    model = reversible_stack(dtype, mixer=mixer, dropout=dropout, attention_dropout=dropout, ff_dropout=dropout).train()
    pool = MaskPool(7, size=1 << 14)
    use_pool(model, pool if pooled else None)
    x = torch.randn(2, 21, 8, dtype=dtype)
    keep = torch.arange(21) < torch.tensor([[21], [13]])
    results = []
    random_states = []
    for run in (run_reversible, run_storing_activations):
        monkeypatch.setattr("regard.nn.transformer.run_reversible", run)
        torch.manual_seed(1)
        pool.begin(0)
        results.append(gradients(model, x, keep))
        random_states.append((torch.rand(1), pool.offsets.getstate()))
    (out, grads), (expected_out, expected) = results
    torch.testing.assert_close(out, expected_out)
    assert grads.keys() == expected.keys() and len(grads) > 20
    for name, grad in expected.items():
        assert grad.any(), name
        error = float((grads[name] - grad).norm() / grad.norm())
        assert error < tolerance, name
    assert random_states[0] == random_states[1]  # both runs leave the same random state
    if dropout:
        torch.manual_seed(2)
        pool.begin(1)
        assert not torch.allclose(gradients(model, x, keep)[0], out)


def test_no_activations_are_stored_between_layers() -> None:
    """Stored memory does not grow with the number of layers, and no mask over all pairs is computed."""
    sizes: list[int] = []
    for layers in (1, 4):
        model = reversible_stack(layers=layers, mixer="lsh").train()
        sizes.append(0)

        def count(x: Tensor) -> Tensor:
            sizes[-1] += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            model(torch.randn(1, 64, 8, dtype=torch.double), State(()))
    assert sizes[0] == sizes[1]


def test_lsh_hashes_are_computed_once_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed inputs differ slightly from the hashed inputs, so the sort order is reused."""
    model = reversible_stack(mixer="lsh").train()
    calls = []
    for block in model.blocks:
        original = block.attention._hash
        monkeypatch.setattr(
            block.attention, "_hash", lambda *arguments, original=original: calls.append(1) or original(*arguments)
        )
    gradients(model, torch.randn(1, 40, 8, dtype=torch.double))
    assert len(calls) == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_reversible_function_is_used_only_for_training(mode: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients or in evaluation the layers run as a plain loop."""
    model = reversible_stack(mixer="lsh")
    x = torch.randn(2, 40, 8, dtype=torch.double)
    expected = model.train()(x, State(()))[0].detach()
    monkeypatch.setattr(reversible, "_Run", None)
    with mode():
        if mode is not torch.enable_grad:
            torch.testing.assert_close(model.train()(x, State(()))[0], expected)
        out, state = model.eval()(x, State(()))
    torch.testing.assert_close(out, expected)
    assert len(state.layers) == 3


def test_frozen_weights_get_no_gradient() -> None:
    model = reversible_stack().train()
    x = torch.randn(2, 6, 8, dtype=torch.double)
    _, expected = gradients(model, x)
    model.blocks[1].attention.requires_grad_(False)
    _, grads = gradients(model, x)
    assert {name for name in expected if name not in grads} == {
        f"blocks.1.attention.{name}" for name, _ in model.blocks[1].attention.named_parameters()
    }
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name])


def test_gradients_under_autocast_are_close_to_fp32() -> None:
    model = reversible_stack(torch.float, mixer="lsh").train()
    x = torch.randn(2, 21, 8)
    _, expected = gradients(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = model(x, State(()))
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    model.zero_grad()
    (out.float() * weights).sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert float((weight.grad - expected[name]).norm() / expected[name].norm()) < 0.2, name


def test_decoding_from_a_training_state_is_refused() -> None:
    model = reversible_stack().train()
    x = torch.randn(1, 6, 8, dtype=torch.double)
    _, state = model(x, State(()))
    with pytest.raises(ValueError, match="store no keys"):
        model(x, state)


def test_reversible_layers_run_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Transformer(small(mixer="lsh"), causal=True).train()
        x = torch.randn(2, 40, 8, requires_grad=True)
    model(x, State(()))[0].sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
