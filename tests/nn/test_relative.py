"""Relative positions equal the formula of the paper; distances beyond `reach` share one score.

tests/convert/test_transfo_xl.py compares with the reference implementation.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from regard.model import Model
from regard.nn.attention import Attention, AttentionMask
from regard.nn.position import NO_POSITION
from regard.presets import preset

VOCAB = 19
TINY = {"width": 12, "layers": 2, "heads": 2, "ff": 16, "dropout": 0.0}


def build(memory: int = 64, seed: int = 0, reach: int | None = None) -> Model:
    torch.manual_seed(seed)
    changes = {"decoder": TINY | {"memory": memory, "reach": reach}}
    model = Model(preset("xl-tiny", VOCAB, changes=changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def text(length: int, rows: int = 2) -> Tensor:
    return torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(length))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def read(model: Model, tokens: Tensor, *lengths: int) -> Tensor:
    """The output vectors of a text that is read in segments of these lengths."""
    segment_memory = None
    outs = []
    for piece in tokens.split(lengths, dim=1):
        x, segment_memory = model.read_segment(piece, segment_memory)
        outs.append(x)
    return torch.cat(outs, dim=1)


def distance_vector(distance: int, width: int) -> list[float]:
    angles = [distance / 10000 ** (2 * i / width) for i in range(width // 2)]
    return [*map(math.sin, angles), *map(math.cos, angles)]


@pytest.mark.parametrize("past", [0, 3])
def test_attention_weights_equal_the_formula_of_the_paper(past: int) -> None:
    """A = q.k + q.W_R R(i-j) + u.k + v.W_R R(i-j), for each query i and key j <= i, then scaled and normalised."""
    torch.manual_seed(1)
    stack = build().config.decoder
    assert stack is not None
    attention = Attention(stack, stack.width, relative=True).requires_grad_(False)
    relative = attention.relative
    heads = stack.heads
    width = stack.width
    head = stack.head
    assert relative is not None
    for parameter in relative.parameters():
        parameter.normal_()
    x = torch.randn(2, past + 4, width)
    positions = torch.arange(past + 4).unsqueeze(0)
    weights: list[Tensor] = []
    attention.weights.register_forward_hook(lambda _m, _i, out: weights.append(out))
    attention(
        x[:, past:],
        attention.project_kv(x, positions, NO_POSITION),
        AttentionMask(positions[:, past:], positions, None, True),
        NO_POSITION,
    )
    key_matrix = attention.key_value.weight[: heads * head]
    for b in range(2):
        for h in range(heads):
            rows = slice(h * head, (h + 1) * head)
            for i in range(past, past + 4):
                q = attention.query.weight[rows] @ x[b, i]
                scores = []
                for j in range(i + 1):
                    k = key_matrix[rows] @ x[b, j]
                    r = relative.project.weight[rows] @ torch.tensor(distance_vector(i - j, width))
                    parts = (q @ k, q @ r, relative.content[h] @ k, relative.place[h] @ r)
                    scores.append(sum(float(part) for part in parts) / math.sqrt(head))
                total = sum(map(math.exp, scores))
                expected = [math.exp(score) / total for score in scores] + [0.0] * (past + 3 - i)
                assert weights[0][b, h, i - past].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("lengths", [(11,), (4, 4, 3), (1,) * 11, (2, 9)])
def test_segments_with_a_long_memory_equal_one_pass(lengths: tuple[int, ...]) -> None:
    model = build()
    tokens = text(11)
    close(model.predict(read(model, tokens, *lengths)), model(tokens, None))


@pytest.mark.parametrize("memory", [1, 3, 4, 6])
def test_shorter_memory_equals_an_explicit_mask(memory: int) -> None:
    """In one layer, a token attends to its segment up to itself, and to `memory` tokens before the segment."""
    model = build(memory)
    tokens = text(12)
    layer = model.decoder.blocks[0]
    segment_memory = None
    outputs = []
    hook = layer.attention_residual.register_forward_hook(lambda _m, _i, out: outputs.append(out))
    for i, piece in enumerate(tokens.split(4, dim=1)):
        _, segment_memory = model.read_segment(piece, segment_memory)
        assert {x.shape[1] for x in segment_memory} == {min(memory, 4 * (i + 1))}
    hook.remove()
    x = model.target_embedding(tokens) * math.sqrt(12)
    query = torch.arange(12).unsqueeze(1)
    positions = torch.arange(12).unsqueeze(0)
    visible = (positions <= query) & (positions >= query // 4 * 4 - memory)
    mask = AttentionMask(positions, positions, allowed_B1TS=visible[None, None])
    keys = layer.attention.project_kv(x, positions, NO_POSITION)
    close(torch.cat(outputs, dim=1), layer.attention_residual(x, lambda x: layer.attention(x, keys, mask, NO_POSITION)))


def test_tokens_beyond_the_memory_have_no_effect() -> None:
    """Each layer reaches back by the length of the memory; nearer tokens do have an effect."""
    model = build(memory=3)
    tokens = text(16)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    before, after = (read(model, text_tokens, 4, 4, 4, 4) for text_tokens in (tokens, changed))
    assert (before[:, :4] - after[:, :4]).abs().amax() > 1e-3  # the first token is in the same segment
    assert torch.equal(before[:, 12:], after[:, 12:])  # two layers see 2 * 3 tokens before a segment


def test_no_gradient_flows_into_the_segment_memory() -> None:
    model = build()
    tokens = text(8)
    _, segment_memory = model.read_segment(tokens[:, :4])
    assert not any(x.requires_grad for x in segment_memory)
    x, _ = model.read_segment(tokens[:, 4:], segment_memory)
    x.sum().backward()
    gradient = model.target_embedding.weight.grad
    assert gradient is not None
    only_before = set(tokens[:, :4].flatten().tolist()) - set(tokens[:, 4:].flatten().tolist())
    assert only_before
    assert not gradient[sorted(only_before)].any()
    assert gradient[tokens[:, 4:].flatten()].any(-1).all()


@pytest.mark.parametrize("reach", [1, 4, 10])
def test_reach_has_no_effect_on_shorter_distances(reach: int) -> None:
    unlimited = build()
    limited = build(reach=reach)
    tokens = text(11)
    close(limited(tokens, None)[:, : reach + 1], unlimited(tokens, None)[:, : reach + 1])
    beyond = (limited(tokens, None) - unlimited(tokens, None)).abs().amax(-1)[:, reach + 1 :]
    assert (beyond > 1e-4).all()


def test_scores_are_equal_for_distances_beyond_reach() -> None:
    """A key has the same score at all distances of at least `reach`."""
    stack = build(reach=3).config.decoder
    assert stack is not None
    relative = Attention(stack, stack.width, relative=True).requires_grad_(False).relative
    assert relative is not None
    for parameter in relative.parameters():
        parameter.normal_()
    positions = torch.arange(9).unsqueeze(0)
    _, mask = relative(torch.randn(2, 2, 1, 6), AttentionMask(positions[:, -1:], positions, None, True), 1.0)
    scores = mask.bias_BHTS[:, :, 0].flip(-1)  # by distance
    close(scores[..., 3:], scores[..., 3:4].expand(-1, -1, 6))
    assert (scores[..., :4].diff(dim=-1).abs() > 1e-3).all()


@pytest.mark.parametrize("lengths", [(4, 4, 3), (1,) * 11])
def test_reach_is_independent_of_the_segments(lengths: tuple[int, ...]) -> None:
    model = build(reach=2)
    tokens = text(11)
    close(model.predict(read(model, tokens, *lengths)), model(tokens, None))
