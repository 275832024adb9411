"""Attention equals explicit formulas and torch's MultiheadAttention; its fused path equals its eager path."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from regard.config import Stack
from regard.nn.attention import Attention, AttentionMask, masked_softmax
from regard.nn.cache import KV
from regard.nn.position import NO_POSITION


def small(**changes: object) -> Stack:
    return Stack(**({"width": 12, "heads": 3, "layers": 1, "ff": 8, "dropout": 0.0} | changes))


def positions(length: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + length).unsqueeze(0)


def run(
    attention: Attention, x: Tensor, context: Tensor, keep: Tensor | None = None, **mask: object
) -> tuple[Tensor, Tensor]:
    """The output and the weights of the eager path, after checking that the fused output is equal."""
    pos = positions(x.shape[1])
    key_pos = positions(context.shape[1])

    def attend() -> Tensor:
        kv = attention.project_kv(context, key_pos, NO_POSITION)
        return attention(x, kv, AttentionMask(pos, key_pos, keep, **mask), NO_POSITION)

    fused = attend()
    weights = []
    hook = attention.weights.register_forward_hook(lambda _m, _i, out: weights.append(out))
    eager = attend()
    hook.remove()
    torch.testing.assert_close(fused, eager, atol=1e-5, rtol=1e-5)
    return eager, weights[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_torch_multihead_attention(causal: bool, padded: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    ours = Attention(small(), 12)
    with torch.no_grad():
        theirs.in_proj_bias.normal_()
        theirs.out_proj.bias.normal_()
        ours.query.weight.copy_(theirs.in_proj_weight[:12])
        ours.query.bias.copy_(theirs.in_proj_bias[:12])
        ours.key_value.weight.copy_(theirs.in_proj_weight[12:])
        ours.key_value.bias.copy_(theirs.in_proj_bias[12:])
        ours.out.load_state_dict(theirs.out_proj.state_dict())
    x = torch.randn(2, 5, 12)
    keep = torch.arange(5) < torch.tensor([[5], [3]]) if padded else None
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected, weights = theirs(
        x, x, x, ~keep if padded else None, attn_mask=future if causal else None, average_attn_weights=False
    )
    output, ours_weights = run(ours, x, x, keep, causal=causal)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours_weights, weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("score", ["scaled_dot", "dot", "general", "cosine"])
def test_grouped_heads_equal_repeated_key_heads(kv_heads: int, score: str) -> None:
    """Grouped key heads equal full heads whose keys and values are repeated within each group of neighbours."""
    torch.manual_seed(1)
    grouped = Attention(small(width=8, heads=4, kv_heads=kv_heads, score=score), 8)
    full = Attention(small(width=8, heads=4, score=score), 8)
    state = grouped.state_dict()
    for name in ("key_value.weight", "key_value.bias"):
        rows = state[name].unflatten(0, (2, kv_heads, 2))  # keys and values, heads, head width
        state[name] = rows.repeat_interleave(4 // kv_heads, dim=1).flatten(0, 2)
    full.load_state_dict(state)
    x = torch.randn(2, 3, 8)
    context = torch.randn(2, 5, 8)
    torch.testing.assert_close(run(grouped, x, context)[0], run(full, x, context)[0], atol=1e-5, rtol=1e-5)


def test_head_width_is_independent_of_the_model_width() -> None:
    attention = Attention(small(head_width=5), 7)
    assert attention.query.weight.shape == (15, 12)
    assert attention.key_value.weight.shape == (30, 7)
    assert attention.out.weight.shape == (12, 15)
    assert run(attention, torch.randn(2, 3, 12), torch.randn(2, 4, 7))[0].shape == (2, 3, 12)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, 1), (True, 2), (False, None)])
def test_mask_follows_positions(causal: bool, window: int | None) -> None:
    """Padding, causality and window together, with positions that are neither sorted nor contiguous."""
    q = torch.tensor([[3, 7], [0, 4]])
    k = torch.tensor([[0, 2, 3, 6, 9], [4, 3, 0, 1, 5]])
    keep = torch.tensor([[True] * 5, [True, False, True, True, True]])
    mask = AttentionMask(q, k, keep, causal, window).mask_B1TS
    assert mask is not None
    for b in range(2):
        for t in range(2):
            for s in range(5):
                offset = int(k[b, s] - q[b, t])
                visible = bool(keep[b, s]) and not (causal and offset > 0) and not (window and abs(offset) > window)
                assert mask.expand(2, 1, 2, 5)[b, 0, t, s] == visible


def test_no_mask_is_built_without_restrictions() -> None:
    assert AttentionMask(positions(4), positions(4), None).mask_B1TS is None
    assert AttentionMask(positions(1, start=3), positions(4), None, causal=True).mask_B1TS is None
    assert AttentionMask(positions(4), positions(4), None).additive(torch.float32) is None


def test_additive_mask_combines_mask_and_bias() -> None:
    mask = torch.tensor([[True, False], [True, True]])[None, None]
    bias = torch.randn(1, 3, 2, 2)
    both = AttentionMask(positions(2), positions(2), bias_BHTS=bias, allowed_B1TS=mask).additive(torch.float32)
    assert both is not None
    for h in range(3):
        for t in range(2):
            for s in range(2):
                assert both[0, h, t, s] == (bias[0, h, t, s] if mask[0, 0, t, s] else -math.inf)
    assert torch.equal(AttentionMask(positions(2), positions(2), bias_BHTS=bias).additive(torch.float64), bias.double())


def test_masked_softmax_is_softmax_or_zero() -> None:
    scores = torch.randn(2, 1, 3, 4)
    scores[0, 0, 1] = -math.inf
    scores[1, 0, 2, 1:] = -math.inf
    scores.requires_grad_()
    weights = masked_softmax(scores)
    (weights * torch.randn_like(weights)).sum().backward()
    assert torch.equal(weights[0, 0, 1], torch.zeros(4))
    assert torch.equal(weights[1, 0, 2], torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(weights[1, 0, 0], torch.softmax(scores[1, 0, 0], -1))
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert not scores.grad[0, 0, 1].any()


@pytest.mark.parametrize("score", ["scaled_dot", "cosine", "additive", "location"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("window", [None, 2])
def test_query_without_keys_gets_zeros_and_finite_gradients(
    score: str, dropout: float, watched: bool, window: int | None
) -> None:
    torch.manual_seed(2)
    local = {"cross_window": window, "cross_center": "predicted" if window else "step"}
    attention = Attention(small(score=score, attention_dropout=dropout, kv_heads=1, **local), 12, cross=True)
    attention.train()
    if watched:
        attention.weights.register_forward_hook(lambda *_: None)
    mixed: list[Tensor] = []
    attention.mixed.register_forward_hook(lambda _m, _i, out: mixed.append(out))
    x, context = (torch.randn(2, t, 12, requires_grad=True) for t in (3, 4))
    keep = torch.tensor([[True, True, False, False], [False] * 4])
    kv = attention.project_kv(context, positions(4), NO_POSITION)
    out = attention(x, kv, AttentionMask(positions(3), positions(4), keep), NO_POSITION)
    (out * torch.randn_like(out)).sum().backward()
    assert out.isfinite().all()
    assert mixed[0][0].any()
    assert not mixed[0][1].any()
    for grad in (x.grad, context.grad, *(p.grad for p in attention.parameters())):
        assert grad is not None
        assert grad.isfinite().all()
    assert x.grad is not None and context.grad is not None
    assert not x.grad[1].any()
    assert not context.grad[1].any()
    assert not context.grad[0, 2:].any()


def test_queries_beyond_the_window_get_zero_weights() -> None:
    """Queries more than a window beyond the end of a short source have no visible key."""
    attention = Attention(small(), 12)
    x = torch.randn(1, 6, 12, requires_grad=True)
    context = torch.randn(1, 2, 12, requires_grad=True)
    out, weights = run(attention, x, context, window=1)
    out.sum().backward()
    assert (weights[0, :, :3].sum(-1) - 1).abs().max() < 1e-5
    assert not weights[0, :, 3:].any()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    torch.testing.assert_close(out[0, 3:], attention.out.bias.expand(3, -1))


@pytest.mark.parametrize("project", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_predicted_center_equals_its_formula(project: bool, padded: bool) -> None:
    """p = S sigmoid(v . tanh(W q)); softmax over [p - D, p + D], times exp(-(s - p)^2 / (2 (D/2)^2))."""
    torch.manual_seed(3)
    window = 2
    lengths = [7, 4] if padded else [7, 7]
    stack = small(score="dot", cross_window=window, cross_center="predicted")
    attention = Attention(stack, 12, project=project, cross=True).requires_grad_(False)
    x = torch.randn(2, 3, 12)
    context = torch.randn(2, 7, 12)
    keep = torch.arange(7) < torch.tensor(lengths)[:, None] if padded else None
    _, weights = run(attention, x, context, keep)
    heads, width = (3, 4) if project else (1, 12)
    q = attention.query(x).view(2, 3, heads, width)
    kv = attention.key_value(context).view(2, 7, 2, heads, width)[:, :, 0] if project else context[:, :, None]
    assert attention.center is not None
    inside = outside = 0
    for b in range(2):
        for t in range(3):
            for h in range(heads):
                hidden = [
                    math.tanh(sum(float(q[b, t, h, i] * attention.center.hidden[h, i, j]) for i in range(width)))
                    for j in range(width)
                ]
                logit = sum(a * float(v) for a, v in zip(hidden, attention.center.v[h, :, 0], strict=True))
                center = lengths[b] / (1 + math.exp(-logit))
                window_keys = [s for s in range(lengths[b]) if abs(s - center) <= window]
                scores = {s: float(q[b, t, h] @ kv[b, s, h]) for s in window_keys}
                total = sum(math.exp(a) for a in scores.values())
                inside += len(window_keys)
                outside += 7 - len(window_keys)
                for s in range(7):
                    fade = math.exp(-((s - center) ** 2) / (2 * (window / 2) ** 2))
                    expected = math.exp(scores[s]) / total * fade if s in window_keys else 0.0
                    assert float(weights[b, h, t, s]) == pytest.approx(expected, abs=1e-5)
    assert inside and outside


@pytest.mark.parametrize("padded", [True, False])
def test_hypotheses_share_the_keys_of_their_sentence(padded: bool) -> None:
    """Attending to the keys of the sentence equals attending to keys repeated for each hypothesis."""
    torch.manual_seed(4)
    attention = Attention(small(), 12)
    x = torch.randn(6, 2, 12)
    context = torch.randn(2, 4, 12)
    keep = torch.arange(4) < torch.tensor([[4], [2]]) if padded else None
    kv = attention.project_kv(context, positions(4), NO_POSITION)
    rows = torch.arange(2).repeat_interleave(3)
    output = attention(x, kv, AttentionMask(positions(2), positions(4), keep), NO_POSITION)
    keep_of_rows = None if keep is None else keep[rows]
    expected = attention(x, kv.select(rows), AttentionMask(positions(2), positions(4), keep_of_rows), NO_POSITION)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_extended_cache_equals_cache_of_all_keys() -> None:
    attention = Attention(small(), 12)
    context = torch.randn(2, 5, 12)
    whole = attention.project_kv(context, positions(5), NO_POSITION)
    extended = attention.project_kv(context[:, :2], positions(2), NO_POSITION).extend(
        attention.project_kv(context[:, 2:], positions(3, start=2), NO_POSITION)
    )
    for a, b in zip(whole, extended, strict=True):
        torch.testing.assert_close(a, b)
    kv = KV(*(x[torch.tensor([1, 0, 1])] for x in whole))
    assert all(torch.equal(a, b) for a, b in zip(kv, whole.select(torch.tensor([1, 0, 1])), strict=True))


def select_heads(x: Tensor, heads: tuple[int, ...], of: int, dim: int = 0) -> Tensor:
    """The slices of a tensor that belong to some of its heads."""
    return x.unflatten(dim, (of, -1)).index_select(dim, torch.tensor(heads)).flatten(dim, dim + 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kept_heads"),
    [(4, 4, (0, 2)), (4, 2, (0, 3)), (4, 2, (0, 1, 2)), (4, 2, (2, 3)), (6, 2, (1, 2, 3))],
)
@pytest.mark.parametrize("score", ["scaled_dot", "general", "cosine", "additive", "location", "concat"])
def test_pruned_attention_equals_full_attention_with_ablated_heads(
    score: str, heads: int, kv_heads: int, kept_heads: tuple[int, ...]
) -> None:
    torch.manual_seed(5)
    kv_heads = heads if score == "concat" else kv_heads
    stack = small(heads=heads, kv_heads=kv_heads, head_width=2, score=score)
    full = Attention(stack, 12)
    pruned = Attention(stack, 12, kept=kept_heads)
    groups = tuple(sorted({head * kv_heads // heads for head in kept_heads}))
    keys_and_values = groups + tuple(kv_heads + g for g in groups)
    state = full.state_dict()
    for name, x in state.items():
        if name.startswith("query"):
            state[name] = select_heads(x, kept_heads, heads)
        elif name.startswith("key_value"):
            state[name] = select_heads(x, keys_and_values, 2 * kv_heads)
        elif name == "out.weight":
            state[name] = select_heads(x, kept_heads, heads, dim=1)
        elif name.startswith("score"):
            state[name] = x[list(groups if name.endswith("key_weight") else kept_heads)]
    pruned.load_state_dict(state)
    ablated = torch.tensor([head not in kept_heads for head in range(heads)]).view(1, -1, 1, 1)
    full.mixed.register_forward_hook(lambda _m, _i, out: out.masked_fill(ablated, 0.0))
    x = torch.randn(2, 3, 12)
    context = torch.randn(2, 5, 12)
    bias = torch.randn(1, heads, 3, 5)
    for mask in ({}, {"window": 1}, {"bias_BHTS": bias}):
        output, expected = (run(attention, x, context, **mask)[0] for attention in (pruned, full))
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_hooks_can_record_and_replace_activations() -> None:
    attention = Attention(small(), 12)
    x = torch.randn(1, 4, 12)
    kv = attention.project_kv(x, positions(4), NO_POSITION)
    mask = AttentionMask(positions(4), positions(4), None)
    shapes = []
    attention.mixed.register_forward_hook(lambda _m, _i, out: shapes.append(tuple(out.shape)))
    attention.weights.register_forward_hook(lambda _m, _i, out: torch.ones_like(out) / 4)
    output = attention(x, kv, mask, NO_POSITION)
    mean = kv.v_BGSE.mean(2, keepdim=True).expand(-1, -1, 4, -1)
    torch.testing.assert_close(output, attention.out(mean.transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-5)
    assert shapes == [(1, 3, 4, 4)]
