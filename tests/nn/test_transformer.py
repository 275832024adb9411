"""The stack of layers equals torch.nn.Transformer; properties that hold for any weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regard.config import Stack
from regard.nn.attention import Attention
from regard.nn.cache import EncoderOutput, State
from regard.nn.transformer import Transformer

SIZE = {"width": 12, "heads": 3, "ff": 20, "layers": 2, "dropout": 0.0}


def copy_weights(ours: nn.Module, theirs: nn.Module) -> None:
    ours.load_state_dict(theirs.state_dict())


def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    q, kv = theirs.in_proj_weight.split((12, 24))
    q_bias, kv_bias = theirs.in_proj_bias.split((12, 24))
    ours.query.load_state_dict({"weight": q, "bias": q_bias})
    ours.key_value.load_state_dict({"weight": kv, "bias": kv_bias})
    copy_weights(ours.out, theirs.out_proj)


def copy_stack(ours: Transformer, theirs: nn.TransformerEncoder | nn.TransformerDecoder) -> None:
    for block, layer in zip(ours.blocks, theirs.layers, strict=True):
        copy_attention(block.attention, layer.self_attn)
        copy_weights(block.attention_residual.norm, layer.norm1)
        if block.cross is not None:
            copy_attention(block.cross, layer.multihead_attn)
            copy_weights(block.cross_residual.norm, layer.norm2)
        copy_weights(block.feed_forward_residual.norm, layer.norm2 if block.cross is None else layer.norm3)
        copy_weights(block.feed_forward.up, layer.linear1)
        copy_weights(block.feed_forward.down, layer.linear2)
    if theirs.norm is not None:
        copy_weights(ours.norm, theirs.norm)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("pre", [True, False])
def test_equals_torch_transformer(pre: bool, activation: str, padded: bool) -> None:
    torch.manual_seed(0)
    options = {"norm_first": pre, "activation": activation, "batch_first": True, "dropout": 0.0}
    # by default, torch adds a final norm even if every layer ends in a norm
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(12, 3, 20, **options), 2, nn.LayerNorm(12) if pre else None, False
    )
    decoder = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(12, 3, 20, **options), 2, nn.LayerNorm(12) if pre else None
    )
    theirs = nn.Transformer(12, 3, custom_encoder=encoder, custom_decoder=decoder, batch_first=True)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    stack = Stack(**SIZE, norm_at="pre" if pre else "post", activation=activation, position="none")
    our_encoder = Transformer(stack, causal=False)
    our_decoder = Transformer(stack, causal=True, source_width=12)
    copy_stack(our_encoder, encoder)
    copy_stack(our_decoder, decoder)

    x = torch.randn(2, 5, 12)
    y = torch.randn(2, 4, 12)
    keep = torch.arange(5) < torch.tensor([[5], [2]]) if padded else torch.ones(2, 5, dtype=torch.bool)
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    memory = encoder(x, src_key_padding_mask=~keep if padded else None)
    expected = theirs(
        x,
        y,
        tgt_mask=causal,
        src_key_padding_mask=~keep if padded else None,
        memory_key_padding_mask=~keep if padded else None,
    )
    encoded = our_encoder.encode(x, keep if padded else None)
    output, _ = our_decoder(y, our_decoder.start(encoded))
    torch.testing.assert_close(encoded.states_BSD[keep], memory[keep], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"score": "additive"}, {"norm_at": "pre", "norm": "rms", "gated": True}])
def test_encoder_without_positions_is_permutation_equivariant(changes: dict[str, object]) -> None:
    torch.manual_seed(1)
    encoder = Transformer(Stack(**SIZE, position="none", **changes), causal=False)
    x = torch.randn(2, 6, 12)
    order = torch.randperm(6)
    keep = torch.arange(6) < torch.tensor([[6], [4]])
    output = encoder.encode(x[:, order], keep[:, order]).states_BSD
    torch.testing.assert_close(output, encoder.encode(x, keep).states_BSD[:, order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", ["sinusoid", "sinusoid_halves", "learned", "rotary", "alibi", "bucket"])
def test_encoder_with_positions_is_not_permutation_equivariant(position: str) -> None:
    torch.manual_seed(1)
    encoder = Transformer(Stack(**SIZE, position=position), causal=False)
    x = torch.randn(1, 6, 12)
    order = torch.tensor([3, 4, 5, 0, 2, 1])
    output = encoder.encode(x[:, order], None).states_BSD
    assert (output - encoder.encode(x, None).states_BSD[:, order]).abs().max() > 1e-3


@pytest.mark.parametrize("position", ["rotary", "alibi", "bucket", "relative", "none"])
def test_relative_positions_are_shift_invariant(position: str) -> None:
    """A causal stack with a window that excludes the first tokens equals the stack without those tokens."""
    torch.manual_seed(2)
    stack = Stack(**(SIZE | {"layers": 1}), position=position, window=2)
    decoder = Transformer(stack, causal=True)
    x = torch.randn(1, 9, 12)
    whole, _ = decoder(x, State(()))
    late, _ = decoder(x[:, 4:], State(()))
    torch.testing.assert_close(whole[:, 6:], late[:, 2:], atol=1e-5, rtol=1e-5)


def test_dropout_is_applied_where_the_paper_applies_it() -> None:
    """To the sum of embedding and position, and to the output of every sub-layer before the addition."""
    decoder = Transformer(Stack(**(SIZE | {"dropout": 0.25})), causal=True, source_width=12)
    calls: list[str] = []
    for name, module in decoder.named_modules():
        if name.endswith("dropout") and module.rate == 0.25:
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    decoder(torch.randn(1, 2, 12), decoder.start(EncoderOutput(torch.randn(1, 3, 12), None)))
    layer = ["attention_residual.dropout", "cross_residual.dropout", "feed_forward_residual.dropout"]
    assert calls == ["dropout", *(f"blocks.{i}.{part}" for i in range(2) for part in layer)]


@pytest.mark.parametrize("position", ["none", "sinusoid", "learned", "rotary", "alibi", "bucket"])
@pytest.mark.parametrize("padding_only", ["row", "batch"])
def test_gradients_are_finite_for_rows_without_keys(position: str, padding_only: str) -> None:
    """A row of only padding: finite outputs and gradients, and no effect on the other row."""
    torch.manual_seed(3)
    encoder = Transformer(Stack(**SIZE, position=position, kv_heads=1), causal=False).train()
    decoder = Transformer(Stack(**SIZE, position=position), causal=True, source_width=12).train()

    def gradients(keep: Tensor, x: Tensor, y: Tensor, rows: slice) -> list[Tensor]:
        for stack in (encoder, decoder):
            stack.zero_grad()
        out, _ = decoder(y, decoder.start(encoder.encode(x, keep)))
        assert out.isfinite().all()
        out[rows].square().sum().backward()
        grads = [p.grad for stack in (encoder, decoder) for p in stack.parameters() if p.grad is not None]
        assert grads
        assert all(grad.isfinite().all() for grad in grads)
        return grads

    x = torch.randn(2, 4, 12)
    y = torch.randn(2, 3, 12)
    keep = torch.tensor([[padding_only == "row"] * 3 + [False], [False] * 4])
    gradients(keep, x, y, slice(None))
    if padding_only == "row":
        together = gradients(keep, x, y, slice(1))
        alone = gradients(keep[:1], x[:1], y[:1], slice(1))
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
