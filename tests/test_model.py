"""The equalities that every model must keep: fused = eager, cached = full, padded = unpadded, batch = single.

Models with two stacks; tests/nn/test_one_stack.py tests models with only an encoder or a decoder.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kit.families import BOTH, TINY, VOCAB, build, close, left_padded, shrunk, watched
from regard.config import Config, Stack
from regard.model import Model, on_meta
from regard.nn.cache import State
from regard.presets import PRESETS, preset

GRU = {"mixer": "gru"}
LSTM = {"mixer": "lstm"}
MODERN = {"norm": "rms", "norm_at": "pre", "gated": True, "activation": "silu", "bias": "none"}
VARIANTS: dict[str, dict[str, object]] = {
    "rotary gated grouped": MODERN | {"position": "rotary", "heads": 4, "kv_heads": 2, "head_width": 6},
    "alibi one key head": {"position": "alibi", "kv_heads": 1, "norm": "rms", "bias": "ff"},
    "alibi window": {"position": "alibi", "window": 2, "heads": 3},
    "bucket": {"position": "bucket", "norm_at": "pre", "gated": True, "activation": "gelu_tanh"},
    "bucket window": {"position": "bucket", "window": 1, "kv_heads": 1},
    "learned": {"position": "learned", "activation": "gelu", "head_width": 5},
    "no position": {"position": "none", "window": 3},
    "dot": {"score": "dot", "head_width": 3},
    "general": {"score": "general", "kv_heads": 1, "position": "rotary"},
    "additive": {"score": "additive", "kv_heads": 1, "position": "alibi"},
    "concat": {"score": "concat", "position": "rotary"},
    "cosine": {"score": "cosine", "kv_heads": 1},
    "location": {"score": "location", "window": 2},
    "local step": {"cross_window": 1},
    "local predicted": {"cross_window": 2, "cross_center": "predicted"},
    "pruned": {"heads": 4, "kept_heads": ((0, 2), (1,)), "kept_cross_heads": ((3,), (0, 1, 3))},
    "pruned groups": {"position": "alibi", "heads": 4, "kv_heads": 2, "kept_heads": ((0, 1, 2), (0, 3)), "window": 2},
    "pruned rotary": {"position": "rotary", "heads": 6, "kv_heads": 3, "kept_heads": ((1, 2, 3), (0, 1))},
    "gru": GRU,
    "lstm input feeding": LSTM | {"input_feeding": True, "score": "concat"},
    "gru attend first": GRU | {"attend_first": True, "score": "cosine"},
    "lstm attend first input feeding": LSTM | {"attend_first": True, "input_feeding": True, "score": "location"},
    "gru local step": GRU | {"cross_window": 1, "score": "general"},
    "lstm local predicted": LSTM | {"cross_window": 2, "cross_center": "predicted", "input_feeding": True},
}


def config(name: str) -> Config:
    """A small version of a preset, or a variant of both stacks."""
    if name in PRESETS:
        return shrunk(name)
    if name == "attention to gru":
        stacks = {"encoder": Stack(**TINY), "decoder": Stack(**(TINY | GRU | {"input_feeding": True}))}
    elif name == "lstm to wider attention":
        stacks = {"encoder": Stack(**(TINY | LSTM)), "decoder": Stack(**(TINY | {"width": 16, "layers": 1}))}
    else:
        stacks = {stack: Stack(**(TINY | VARIANTS[name])) for stack in ("encoder", "decoder")}
    return Config(source_vocab=VOCAB, target_vocab=VOCAB + 2, **stacks)


EVERY_MODEL = pytest.mark.parametrize("name", [*BOTH, *VARIANTS, "attention to gru", "lstm to wider attention"])
LENGTHS = (5, 3, 1)
SOURCE = torch.tensor([[5, 6, 7, 8, 3], [9, 4, 3, 0, 0], [3, 0, 0, 0, 0]])
KEEP = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
INPUT = torch.tensor([[2, 4, 5, 6, 7, 8], [2, 9, 9, 4, 10, 1], [2, 7, 3, 0, 0, 0]])


def step_by_step(model: Model, tokens: Tensor, state: State) -> tuple[Tensor, State]:
    scores = []
    for column in tokens.unbind(1):
        logits, state = model.step(column, state)
        scores.append(logits)
    return torch.stack(scores, 1), state


@EVERY_MODEL
def test_fused_equals_eager(name: str) -> None:
    model = build(config(name))
    scores, maps = watched(model, SOURCE, KEEP, INPUT)
    close(model(SOURCE, KEEP, INPUT), scores)
    for weights in maps:
        assert ((weights >= 0) & (weights.sum(-1, keepdim=True) < 1 + 1e-5)).all()


@EVERY_MODEL
def test_cached_equals_full(name: str) -> None:
    model = build(config(name))
    full = model(SOURCE, KEEP, INPUT)
    close(step_by_step(model, INPUT, model.encode(SOURCE, KEEP))[0], full)
    state = model.encode(SOURCE, KEEP)
    pieces = []
    for piece in INPUT.split((2, 3, 1), dim=1):
        x, state = model.read(piece, state)
        pieces.append(model.predict(x))
    close(torch.cat(pieces, 1), full)
    assert state.length == 6


@EVERY_MODEL
def test_padded_equals_unpadded(name: str) -> None:
    """Also with more padding than the longest row of the batch requires."""
    model = build(config(name))
    longer = torch.zeros(3, 9, dtype=torch.long)
    longer_keep = torch.zeros(3, 9, dtype=torch.bool)
    longer[:, :5] = SOURCE
    longer_keep[:, :5] = KEEP
    batched = model(SOURCE, KEEP, INPUT)
    padded = model(longer, longer_keep, INPUT)
    for row, length in enumerate(LENGTHS):
        single = model(SOURCE[row : row + 1, :length], None, INPUT[row : row + 1])[0]
        close(batched[row], single)
        close(padded[row], single)


@EVERY_MODEL
def test_batch_equals_single(name: str) -> None:
    """Batches of equal lengths, without padding. Later target tokens do not affect earlier ones."""
    model = build(config(name))
    source = SOURCE[:1].repeat(3, 1).add(torch.arange(3)[:, None] % 2)
    batched = model(source, None, INPUT)
    for row in range(3):
        close(batched[row], model(source[row : row + 1], None, INPUT[row : row + 1])[0])
        close(batched[row, :4], model(source[row : row + 1], None, INPUT[row : row + 1, :4])[0])


@EVERY_MODEL
def test_later_tokens_do_not_affect_earlier_scores(name: str) -> None:
    """Changing a token changes its own scores, and leaves earlier scores bit-identical."""
    model = build(config(name))
    before = model(SOURCE, KEEP, INPUT)
    for place in (2, 5):
        changed = INPUT.clone()
        changed[:, place] = (changed[:, place] + 1) % VOCAB
        after = model(SOURCE, KEEP, changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert ((after[:, place] - before[:, place]).abs().amax(-1) > 1e-4).all()


@EVERY_MODEL
def test_reordering_and_stepping_commute(name: str) -> None:
    model = build(config(name))
    _, state = step_by_step(model, INPUT[:, :3], model.encode(SOURCE, KEEP))
    order = torch.tensor([2, 0, 1])
    tokens = INPUT[:, 3]
    scores, after = model.step(tokens, state)
    reordered, after_reordered = model.step(tokens[order], state.select(order, order))
    close(reordered, scores[order])
    close(model.step(tokens[order], after_reordered)[0], model.step(tokens, after)[0][order])


@EVERY_MODEL
def test_hypotheses_that_share_a_source_equal_repeated_sources(name: str) -> None:
    """Also after hypotheses have been reordered and a sentence has ended."""
    model = build(config(name))
    beam = torch.arange(3).repeat_interleave(2)
    tokens = torch.arange(36).view(6, 6) * 7 % VOCAB
    shared = model.encode(SOURCE, KEEP).select(beam)
    repeated = model.encode(SOURCE[beam], KEEP[beam])
    a, shared = step_by_step(model, tokens[:, :2], shared)
    b, repeated = step_by_step(model, tokens[:, :2], repeated)
    close(a, b)
    rows = torch.tensor([1, 1, 5, 4])  # sentence 0 repeats a hypothesis, sentence 1 has ended, sentence 2 swaps its two
    shared = shared.select(rows, torch.tensor([0, 2]))
    repeated = repeated.select(rows, rows)
    a, _ = step_by_step(model, tokens[:4, 2:], shared)
    b, _ = step_by_step(model, tokens[:4, 2:], repeated)
    close(a, b)


@EVERY_MODEL
def test_beams_read_several_tokens_at_once(name: str) -> None:
    """Hypotheses that share a source read a common prefix in one piece."""
    model = build(config(name))
    beam = torch.arange(3).repeat_interleave(2)
    tokens = torch.arange(24).view(6, 4) % VOCAB
    state = model.encode(SOURCE, KEEP).select(beam)
    expected, _ = step_by_step(model, tokens, state)
    x, _ = model.read(tokens, state)
    close(model.predict(x), expected)


@EVERY_MODEL
def test_left_padded_prefixes_equal_unpadded_prefixes(name: str) -> None:
    """Prefixes of different lengths, padded on the left, then one more token each."""
    model = build(config(name))
    rows = [[2, 5, 6, 7], [2], [2, 9, 4]]
    prefix, keep = left_padded(rows)
    x, state = model.read(prefix, model.encode(SOURCE, KEEP), keep)
    following, _ = model.step(torch.tensor([4, 5, 6]), state)
    for i, row in enumerate(rows):
        single_x, single = model.read(torch.tensor([row]), model.encode(SOURCE[i : i + 1], KEEP[i : i + 1]))
        close(x[i, -len(row) :], single_x[0])
        close(following[i], model.step(torch.tensor([4 + i]), single)[0][0])


@st.composite
def stack_tables(draw: st.DrawFn) -> dict[str, object]:
    heads = draw(st.sampled_from([1, 2, 4]))
    score = draw(st.sampled_from(["scaled_dot", "dot", "general", "additive", "concat", "cosine", "location"]))
    kv = None if score == "concat" else draw(st.sampled_from([None, 1, heads]))
    cross_window = draw(st.sampled_from([None, 1, 3]))
    return {
        "width": 8,
        "layers": draw(st.integers(1, 2)),
        "heads": heads,
        "kv_heads": kv,
        "head_width": draw(st.sampled_from([None, 2, 6])),
        "score": score,
        "window": draw(st.sampled_from([None, 1, 3])),
        "cross_window": cross_window,
        "cross_center": draw(st.sampled_from(["step", "predicted"])) if cross_window else "step",
        "ff": 8,
        "gated": draw(st.booleans()),
        "activation": draw(st.sampled_from(["relu", "gelu", "gelu_tanh", "silu", "tanh"])),
        "norm": draw(st.sampled_from(["layer", "rms"])),
        "norm_at": draw(st.sampled_from(["pre", "post"])),
        "bias": draw(st.sampled_from(["all", "ff", "none"])),
        "position": draw(st.sampled_from(["none", "sinusoid", "learned", "rotary", "alibi", "bucket"])),
        "dropout": 0.0,
    }


@given(stack_tables(), stack_tables(), st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_equalities_hold_for_any_combination_of_settings(
    encoder: dict[str, object], decoder: dict[str, object], tied: bool
) -> None:
    stacks = {"encoder": Stack(**encoder), "decoder": Stack(**decoder)}
    model = build(Config(source_vocab=VOCAB, target_vocab=VOCAB, tie_output=tied, **stacks))
    full = model(SOURCE, KEEP, INPUT)
    assert full.isfinite().all()
    close(watched(model, SOURCE, KEEP, INPUT)[0], full)
    close(step_by_step(model, INPUT, model.encode(SOURCE, KEEP))[0], full)
    for row, length in enumerate(LENGTHS):
        close(model(SOURCE[row : row + 1, :length], None, INPUT[row : row + 1])[0], full[row])


@EVERY_MODEL
def test_every_parameter_is_trained_and_stays_finite(name: str) -> None:
    """Every parameter has a gradient, and training gives no NaN."""
    model = build(config(name)).requires_grad_().train()
    scores = model(SOURCE, KEEP, INPUT)
    (scores * torch.randn_like(scores)).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


def test_embeddings_are_shared_tied_and_scaled_as_configured() -> None:
    model = build(config("transformer-base"))
    assert model.source_embedding is model.target_embedding
    assert model.output.weight is model.target_embedding.weight
    assert len([name for name, _ in model.named_parameters() if "embedding" in name or "output" in name]) == 1
    separate = build(config("rnn-bahdanau"))
    assert separate.source_embedding is not separate.target_embedding
    assert separate.output.weight is not separate.target_embedding.weight
    scaled = build(config("no position"))
    plain = separate
    inputs: list[Tensor] = []
    for each in (scaled, plain):
        each.encoder.dropout.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
        each.encode(SOURCE)
    close(inputs[0], scaled.source_embedding(SOURCE) * 12**0.5)
    close(inputs[1], plain.source_embedding(SOURCE))


@EVERY_MODEL
def test_meta_model_has_the_shapes_of_the_real_model(name: str) -> None:
    real = Model(config(name))
    meta = on_meta(config(name))
    assert all(p.is_meta for p in meta.parameters())
    assert {n: p.shape for n, p in real.named_parameters()} == {n: p.shape for n, p in meta.named_parameters()}


def test_meta_model_draws_no_random_numbers() -> None:
    """Drawing random numbers on the meta device would import a compiler."""
    code = """
import sys
from regard.model import on_meta
from regard.presets import PRESETS, preset
for name in PRESETS:
    on_meta(preset(name, None if "vit" in name else 100))
print(*sys.modules)
"""
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "regard.model" in modules and not {"torch._dynamo", "sympy"} & set(modules)


def test_stacks_property_contains_only_existing_stacks() -> None:
    both = config("transformer-tiny")
    assert both.stacks == {"encoder": both.encoder, "decoder": both.decoder}
    assert list(both.model_copy(update={"encoder": None}).stacks) == ["decoder"]


def test_equal_seeds_give_equal_weights() -> None:
    def weights(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return list(Model(config("rnn-luong")).parameters())

    assert all(torch.equal(a, b) for a, b in zip(weights(1), weights(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(1), weights(2), strict=True))


def test_scaled_embeddings_start_with_unit_variance() -> None:
    model = Model(preset("transformer-tiny", 2000))
    assert model.source_embedding.weight.std().item() * 128**0.5 == pytest.approx(1, abs=0.02)
