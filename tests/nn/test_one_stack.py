"""Models with one stack: decoding equals the full pass; batching, padding and saving do not change the output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kit.families import BOTH, DECODERS, ENCODERS, TINY, VOCAB, build, close, left_padded, pixels, shrunk, watched
from regard.config import Config, Stack
from regard.errors import UserError
from regard.model import Model, allocate, on_meta
from regard.nn.cache import State
from regard.weight_files import load_weights, save_weights, weights_of

PRE_NORM = {"norm": "rms", "norm_at": "pre", "gated": True, "activation": "silu", "bias": "none"}
VARIANTS: dict[str, dict[str, object]] = {
    "alibi window": {"position": "alibi", "window": 2, "heads": 3},
    "bucket": PRE_NORM | {"position": "bucket"},
    "no position": {"position": "none", "window": 3},
    "relative pre-norm": {"position": "relative", "norm_at": "pre", "kv_heads": 1, "bias": "all"},
    "relative window": {"position": "relative", "window": 2, "score": "dot"},
    "relative pruned": {"position": "relative", "heads": 4, "kept_heads": ((0, 2), (1,))},
    "rotary scaled": {"position": "rotary", "rotary": {"factor": 8.0, "original": 16}},
    "sinusoid halves": {"position": "sinusoid_halves"},
    "reversible": {"residual": "reversible", "norm_at": "pre", "position": "rotary"},
    "lsh": {"mixer": "lsh", "position": "none"},
    "embedding norm": {"embed_norm": True, "position": "learned"},
    "additive": {"score": "additive", "kv_heads": 1, "position": "alibi"},
    "cosine": {"score": "cosine", "kv_heads": 1, "position": "relative"},
}
every_decoder = pytest.mark.parametrize("name", [*DECODERS, *VARIANTS])
ROWS = [[5, 6, 7, 8, 9], [4, 10], [3]]
TEXT = torch.tensor([[2, 4, 5, 6, 7, 8], [2, 9, 9, 4, 10, 1], [2, 7, 3, 3, 5, 4]])


def decoder(name: str, **changes: object) -> Model:
    if name in DECODERS:
        return build(shrunk(name, changes={"decoder": changes}))
    stack = Stack(**(TINY | VARIANTS[name] | changes))
    return build(Config(source_vocab=VOCAB, target_vocab=VOCAB, decoder=stack, tie_output=stack.residual == "add"))


@every_decoder
def test_fused_path_equals_eager_path(name: str) -> None:
    model = decoder(name)
    tokens, keep = left_padded(ROWS)
    for inputs in ((tokens, keep), (TEXT, None)):
        scores, recorded_weights = watched(model, *inputs)
        close(model(*inputs), scores)
        for weights in recorded_weights:
            assert ((weights >= 0) & (weights.sum(-1, keepdim=True) < 1 + 1e-5)).all()


@every_decoder
def test_cached_decoding_equals_full_pass(name: str) -> None:
    """Token by token and in pieces; reordering hypotheses in between reorders their prefixes."""
    model = decoder(name)
    full = model(TEXT, None)
    order = torch.tensor([2, 0, 0])
    for sizes in ((1,) * 6, (2, 3, 1)):
        state = State(())
        pieces = []
        for piece in TEXT.split(sizes, dim=1):
            x, state = model.read(piece, state)
            pieces.append(model.predict(x))
        close(torch.cat(pieces, 1), full)
        assert state.length == 6
    _, state = model.read(TEXT[:, :3], State(()))
    for t in range(3, 6):
        scores, state = model.step(TEXT[order, t], state if t > 3 else state.select(order))
        close(scores, full[order, t])


@every_decoder
def test_padding_does_not_change_the_output(name: str) -> None:
    """With padding on the left, also while decoding continues, and with padding on the right."""
    model = decoder(name)
    tokens, keep = left_padded(ROWS)
    x, state = model.read(tokens, State(()), keep)
    close(model(tokens, keep), model.predict(x))
    right = model(tokens.flip(1).where(keep.flip(1), 0), keep.flip(1))
    following, state = model.read(torch.tensor([[1, 2], [2, 3], [3, 4]]), state)
    last, _ = model.step(torch.tensor([5, 6, 7]), state)
    for i, row in enumerate(ROWS):
        whole = model(torch.tensor([[*row, 1 + i, 2 + i, 5 + i]]), None)[0]
        close(model.predict(x[i, -len(row) :]), whole[: len(row)])
        close(model.predict(following[i]), whole[-3:-1])
        close(last[i], whole[-1])
        close(right[i, : len(row)], model(torch.tensor([row[::-1]]), None)[0])


@every_decoder
def test_batch_equals_single_rows(name: str) -> None:
    model = decoder(name)
    together = model(TEXT, None)
    for row in range(3):
        close(together[row], model(TEXT[row : row + 1], None)[0])
        close(together[row, :4], model(TEXT[row : row + 1, :4], None)[0])


@every_decoder
def test_later_tokens_do_not_affect_earlier_ones(name: str) -> None:
    """Changing a token leaves all earlier logits bit-identical and changes its own."""
    model = decoder(name)
    before = model(TEXT, None)
    for position in (2, 5):
        changed = TEXT.clone()
        changed[:, position] = (changed[:, position] + 1) % VOCAB
        after = model(changed, None)
        assert torch.equal(after[:, :position], before[:, :position])
        assert ((after[:, position] - before[:, position]).abs().amax(-1) > 1e-4).all()


WITH_MEMORY = {
    "none": {"position": "none"},
    "relative": {"position": "relative"},
    "relative pre-norm": {"position": "relative", "norm_at": "pre"},
    "rotary": {"position": "rotary", **PRE_NORM, "kv_heads": 1},
    "alibi": {"position": "alibi"},
    "bucket": {"position": "bucket", "norm_at": "pre"},
}


@pytest.mark.parametrize("name", WITH_MEMORY)
@pytest.mark.parametrize("sizes", [(3, 3), (2, 1, 3), (6,)])
def test_segments_equal_one_pass(name: str, sizes: tuple[int, ...]) -> None:
    """If the memory holds the whole text, for every relative position encoding."""
    stack = Stack(**(TINY | WITH_MEMORY[name] | {"memory": 9}))
    model = build(Config(source_vocab=VOCAB, target_vocab=VOCAB, decoder=stack))
    segment_memory = None
    pieces = []
    for piece in TEXT.split(sizes, dim=1):
        x, segment_memory = model.read_segment(piece, segment_memory)
        pieces.append(model.predict(x))
    close(torch.cat(pieces, 1), model(TEXT, None))


@st.composite
def stack_settings(draw: st.DrawFn) -> dict[str, object]:
    mixer = draw(st.sampled_from(["attention", "lsh"]))
    residual = draw(st.sampled_from(["add", "reversible"]))
    heads = draw(st.sampled_from([1, 2, 4]))
    plain = mixer == "attention"
    positions = ["none", "sinusoid_halves", "learned", "axial", "rotary"]
    positions += ["alibi", "relative"] if plain else []
    positions += ["bucket"] if plain and residual == "add" else []
    position = draw(st.sampled_from(positions))
    has_memory = residual == "add" and plain and position in ("none", "rotary", "alibi", "bucket", "relative")
    return {
        "mixer": mixer,
        "layers": draw(st.integers(1, 2)),
        "width": 8,
        "heads": heads,
        "kv_heads": draw(st.sampled_from([None, 1])) if plain else None,
        "head_width": draw(st.sampled_from([None, 6])),
        "score": draw(st.sampled_from(["scaled_dot", "dot", "general", "cosine", "additive"]))
        if plain
        else "scaled_dot",
        "window": draw(st.sampled_from([None, 2])) if plain else None,
        "ff": 8,
        "norm": draw(st.sampled_from(["layer", "rms"])),
        "norm_at": draw(st.sampled_from(["pre", "post"])) if residual == "add" else "pre",
        "bias": draw(st.sampled_from(["all", "ff", "none"])),
        "residual": residual,
        "embed_norm": draw(st.booleans()),
        "position": position,
        "rotary": {"factor": draw(st.sampled_from([1.0, 4.0])), "original": 16},
        "axial": {"rows": 3, "columns": 4, "row_width": 3} if position == "axial" else None,
        "memory": draw(st.sampled_from([0, 12])) if has_memory else 0,
        "max_length": 12,
        "dropout": 0.0,
    }


@given(stack_settings(), st.booleans())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_decoder_config_satisfies_all_equalities(settings: dict[str, object], output_bias: bool) -> None:
    stack = Stack(**settings)
    tied = stack.out_width == stack.width
    model = build(
        Config(source_vocab=VOCAB, target_vocab=VOCAB, decoder=stack, tie_output=tied, output_bias=output_bias), seed=1
    )
    full = model(TEXT, None)
    assert full.isfinite().all()
    close(watched(model, TEXT, None)[0], full)
    state = State(())
    scores = []
    for column in TEXT.unbind(1):
        logits, state = model.step(column, state)
        scores.append(logits)
    close(torch.stack(scores, 1), full)
    tokens, keep = left_padded(ROWS)
    padded = model(tokens, keep)
    for i, row in enumerate(ROWS):
        close(padded[i, -len(row) :], model(torch.tensor([row]), None)[0])
    if stack.memory:
        first, segment_memory = model.read_segment(TEXT[:, :4])
        second, _ = model.read_segment(TEXT[:, 4:], segment_memory)
        close(model.predict(torch.cat((first, second), 1)), full)


@every_decoder
def test_every_parameter_has_a_gradient(name: str) -> None:
    """Gradients are finite even if a row contains only padding."""
    model = decoder(name).requires_grad_().train()
    scores = model(TEXT, torch.tensor([[True] * 6, [False] * 6, [False] * 3 + [True] * 3]))
    (scores * torch.randn_like(scores)).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


SOURCE = torch.tensor([[5, 6, 7, 8, 3], [9, 4, 3, 0, 0], [3, 0, 0, 0, 0]])
LENGTHS = (5, 3, 1)
KEEP = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
TEXT_ENCODERS = [name for name in ENCODERS if not shrunk(name).patches]
IMAGE_ENCODERS = [name for name in ENCODERS if shrunk(name).patches]
OUTPUTS: dict[str, dict[str, object]] = {
    "tokens": {},
    "classes": {"output": "classes", "classes": 4, "output_bias": True, "pooler": True},
    "vectors": {"output": "none"},
}


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("name", TEXT_ENCODERS)
def test_encoder_padding_does_not_change_the_output(name: str, output: str) -> None:
    """For logits of tokens, logits of classes and hidden states; the fused path also equals the eager path."""
    model = build(shrunk(name, changes=OUTPUTS[output]))
    together = model(SOURCE, KEEP)
    assert together.shape == {"tokens": (3, 5, VOCAB), "classes": (3, 1, 4), "vectors": (3, 5, 12)}[output]
    close(watched(model, SOURCE, KEEP)[0], together)
    for row, length in enumerate(LENGTHS):
        count = 1 if output == "classes" else length
        close(together[row, :count], model(SOURCE[row : row + 1, :length], None)[0])
    with pytest.raises(UserError, match="an encoder and a decoder"):
        model.encode(SOURCE)


@pytest.mark.parametrize("changes", [{}, {"mixer": "gru"}, PRE_NORM | {"position": "bucket"}, {"embed_norm": True}])
def test_padding_does_not_change_the_output_of_other_encoders(changes: dict[str, object]) -> None:
    model = build(Config(source_vocab=VOCAB, target_vocab=VOCAB, encoder=Stack(**(TINY | changes))))
    together = model(SOURCE, KEEP)
    for row, length in enumerate(LENGTHS):
        close(together[row, :length], model(SOURCE[row : row + 1, :length], None)[0])


@pytest.mark.parametrize("name", IMAGE_ENCODERS)
def test_image_batch_equals_single_images(name: str) -> None:
    model = build(shrunk(name))
    images = pixels()
    together = model(images, None)
    assert together.shape == (3, 1, 7)
    close(watched(model, images, None)[0], together)
    for row in range(3):
        close(together[row], model(images[row : row + 1], None)[0])
    assert (together[0] - together[1]).abs().amax() > 1e-3


@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder_parameter_has_a_gradient(name: str) -> None:
    model = build(shrunk(name)).requires_grad_().train()
    keep = None if name in IMAGE_ENCODERS else torch.tensor([[True] * 5, [False] * 5, [True, False] * 2 + [False]])
    scores = model(pixels() if name in IMAGE_ENCODERS else SOURCE, keep)
    (scores * torch.randn_like(scores)).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


def test_token_types_are_added_before_the_norm() -> None:
    model = build(shrunk("bert-base"))
    types = torch.tensor([[0, 0, 1, 1, 1]] * 3)
    tables = model.source_embedding(SOURCE), model.token_type_embedding(types), model.encoder.position.table.weight[:5]
    inputs: list[Tensor] = []
    model.encoder.dropout.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    x = model.hidden(SOURCE, KEEP, types_BS=types)
    close(inputs[0], torch.nn.functional.layer_norm(sum(tables), (12,), *model.encoder.embed_norm.parameters(), 1e-12))
    assert (x - model.hidden(SOURCE, KEEP)).abs().amax() > 1e-3
    assert torch.equal(model.hidden(SOURCE, KEEP), model.hidden(SOURCE, KEEP, types_BS=torch.zeros_like(types)))


def test_pooler_uses_the_first_position() -> None:
    """Classes are predicted from tanh(W x_0 + b); without a pooler, from x_0."""
    model = build(shrunk("bert-base", changes=OUTPUTS["classes"]))
    x = model.encoder.encode(model._embed_source(SOURCE, None), KEEP).states_BSD
    expected = (x[:, 0] @ model.pooler.weight.T + model.pooler.bias).tanh()
    close(model.pool(x), expected)
    close(model(SOURCE, KEEP)[:, 0], expected @ model.output.weight.T + model.output.bias)
    assert torch.equal(build(shrunk("vit-base")).pool(x), x[:, 0])


def test_masked_language_model_head_equals_its_formula() -> None:
    """norm(gelu(W x + b)), then the transposed embedding table and a separate bias."""
    model = build(shrunk("bert-base"))
    x = torch.randn(4, 12)
    dense = model.transform.dense
    hidden = torch.nn.functional.gelu(x @ dense.weight.T + dense.bias)
    hidden = torch.nn.functional.layer_norm(hidden, (12,), *model.transform.norm.parameters(), 1e-12)
    close(model.predict(x), hidden @ model.source_embedding.weight.T + model.output.bias)


@pytest.mark.parametrize("name", [*BOTH, *DECODERS, *ENCODERS])
def test_saved_weights_load_bit_identically(name: str, tmp_path: Path) -> None:
    """The weights are loaded into an uninitialised model; tied parameters are saved once."""
    model = build(shrunk(name))
    save_weights(weights_of(model), tmp_path / "w.safetensors")
    loaded = allocate(on_meta(shrunk(name))).eval().requires_grad_(False)
    load_weights(loaded, tmp_path / "w.safetensors")
    inputs = (pixels(), None) if name in IMAGE_ENCODERS else (SOURCE, KEEP)
    inputs += (TEXT,) if name in BOTH else ()
    assert torch.equal(loaded(*inputs), model(*inputs))
    assert weights_of(model).keys() == weights_of(loaded).keys()
