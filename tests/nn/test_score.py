"""Every attention score equals its formula, token by token."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from regard.config import ScoreName, Stack
from regard.nn.attention import Attention, AttentionMask
from regard.nn.position import Position
from regard.nn.score import Score, make_score

NAMES = get_args(ScoreName)
Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def times(row: Vector, matrix: list[Vector]) -> Vector:
    return [dot(row, list(column)) for column in zip(*matrix, strict=True)]


def plus(a: Vector, b: Vector) -> Vector:
    return [x + y for x, y in zip(a, b, strict=True)]


def by_hand(name: str, score: Score, head: int, group: int, q: Vector, k: Vector, s: int) -> float:
    """The score of one query and one key at position `s`."""

    def weight(part: str, index: int = head) -> list[Vector]:
        return getattr(score, part)[index].tolist()

    match name:
        case "dot":
            return dot(q, k)
        case "scaled_dot":
            return dot(q, k) / math.sqrt(len(k))
        case "general":
            return dot(times(q, weight("weight")), k)
        case "cosine":
            angle = dot(q, k) / (math.hypot(*q) * math.hypot(*k))
            return math.exp(score.log_temperature[head].item()) * angle
        case "additive":
            total = plus(
                plus(times(q, weight("query_weight")), times(k, weight("key_weight", group))), weight("bias")[0]
            )
            return dot(weight("v")[0], [math.tanh(a) for a in total])
        case "concat":
            return dot(weight("v")[0], [math.tanh(a) for a in times(q + k, weight("weight"))])
        case "location":
            return times(q, weight("weight"))[s] if s < len(weight("weight")[0]) else -math.inf
    raise AssertionError(name)


def softmax(scores: Vector) -> Vector:
    powers = [math.exp(s - max(scores)) for s in scores]
    return [p / sum(powers) for p in powers]


def randomize(module: torch.nn.Module) -> None:
    """Move every parameter away from its initial value; a zero bias would test nothing."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


SHAPES = [(name, *heads) for name in NAMES for heads in ((1, 1), (3, 3), (4, 2)) if (name, heads) != ("concat", (4, 2))]


@pytest.mark.parametrize(("name", "heads", "kv_heads"), SHAPES)
def test_attention_with_projections_equals_the_formula(name: str, heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    stack = Stack(width=6, heads=heads, kv_heads=kv_heads, head_width=3, score=name, max_length=4, ff=8)
    attention = Attention(stack, 5)
    randomize(attention)
    x = torch.randn(2, 2, 6)
    context = torch.randn(2, 5, 5)
    q = attention.query(x).view(2, 2, heads, 3).tolist()
    keys, values = attention.key_value(context).view(2, 5, 2, kv_heads, 3).unbind(2)
    check(name, attention, x, context, q, keys.tolist(), values.tolist(), heads // kv_heads)


@pytest.mark.parametrize("name", NAMES)
def test_attention_without_projections_equals_the_formula(name: str) -> None:
    """Queries, keys and values are states without projections, as in recurrent decoders."""
    torch.manual_seed(1)
    stack = Stack(mixer="gru", width=4, heads=2, score=name, max_length=4)
    attention = Attention(stack, 4, project=False)
    randomize(attention)
    x = torch.randn(2, 2, 4)
    context = torch.randn(2, 5, 4)
    states = context.unsqueeze(2).tolist()
    check(name, attention, x, context, x.unsqueeze(2).tolist(), states, states, 1)


def check(
    name: str, attention: Attention, x: Tensor, context: Tensor, q: list, keys: list, values: list, group: int
) -> None:
    """Compare the weights and the output of a module with the formula."""
    recorded_weights: list[Tensor] = []
    hook = attention.weights.register_forward_hook(lambda _m, _i, out: recorded_weights.append(out))
    pos = torch.arange(2).unsqueeze(0)
    key_pos = torch.arange(5).unsqueeze(0)
    kv = attention.project_kv(context, key_pos, Position())
    mask = AttentionMask(pos, key_pos, None)
    output = attention(x, kv, mask, Position())
    hook.remove()
    torch.testing.assert_close(attention(x, kv, mask, Position()), output, atol=1e-5, rtol=1e-5)
    expected = torch.zeros(2, 2, attention.heads, len(values[0][0][0]))
    for b in range(2):
        for t in range(2):
            for h in range(attention.heads):
                g = h // group
                scores = [
                    by_hand(name, attention.score, h, g, q[b][t][h], keys[b][s][g], s) for s in range(len(keys[b]))
                ]
                weights = softmax(scores)
                assert recorded_weights[0][b, h, t].tolist() == pytest.approx(weights, abs=1e-5)
                mixed = [0.0] * len(values[b][0][g])
                for s, weight in enumerate(weights):
                    mixed = plus(mixed, [weight * v for v in values[b][s][g]])
                expected[b, t, h] = torch.tensor(mixed)
    torch.testing.assert_close(output, attention.out(expected.flatten(2)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_score_parameter_has_a_gradient(name: str) -> None:
    score = make_score(name, 2, 2, 3, 3, 8)
    q = torch.randn(1, 2, 4, 3, requires_grad=True)
    k = torch.randn(1, 2, 5, 3)
    out = score.compare(score.query(q), score.key(k), torch.arange(5).unsqueeze(0))
    (out * torch.randn_like(out)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in score.parameters())


def test_cosine_score_depends_only_on_the_angle() -> None:
    score = make_score("cosine", 1, 1, 3, 3, 8)
    q = torch.randn(1, 1, 2, 3)
    k = torch.randn(1, 1, 4, 3)
    pos = torch.arange(4).unsqueeze(0)
    once = score.compare(score.query(q), score.key(k), pos)
    again = score.compare(score.query(q * 7), score.key(k * torch.rand(4, 1)), pos)
    torch.testing.assert_close(once, again, atol=1e-5, rtol=1e-5)
