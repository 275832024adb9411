"""Recurrent stacks equal the cells of torch, step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regard.config import Stack
from regard.nn.attention import Attention
from regard.nn.cache import EncoderOutput
from regard.nn.recurrent import RecurrentDecoder, RecurrentEncoder

MIXERS = ["gru", "lstm"]


def small(mixer: str = "gru", **changes: object) -> Stack:
    return Stack(**({"mixer": mixer, "width": 8, "layers": 2, "dropout": 0.0, "score": "dot"} | changes))


def lengths(*counts: int) -> Tensor:
    return torch.arange(max(counts)) < torch.tensor(counts)[:, None]


@pytest.mark.parametrize("mixer", MIXERS)
def test_padding_does_not_affect_either_direction(mixer: str) -> None:
    """The backward direction of a padded row starts at the end of that row, not at the end of the longest row."""
    torch.manual_seed(0)
    encoder = RecurrentEncoder(small(mixer))
    x = torch.randn(3, 5, 8)
    keep = lengths(3, 5, 1)
    together = encoder.encode(x, keep)
    for row, length in enumerate((3, 5, 1)):
        alone = encoder.encode(x[row : row + 1, :length], None)
        torch.testing.assert_close(together.states_BSD[row, :length], alone.states_BSD[0], atol=1e-6, rtol=1e-5)
        for a, b in zip(together.final, alone.final, strict=True):
            torch.testing.assert_close(a[row], b[0], atol=1e-6, rtol=1e-5)
    assert not together.states_BSD[~keep].any()


@pytest.mark.parametrize("mixer", MIXERS)
def test_states_of_both_directions_are_concatenated(mixer: str) -> None:
    """One layer, with each direction run separately: forward over the input, backward over the reversed input."""
    encoder = RecurrentEncoder(small(mixer, layers=1))
    x = torch.randn(2, 5, 8)
    cell = encoder.blocks[0]
    kind = nn.GRU if mixer == "gru" else nn.LSTM
    forwards = kind(8, 4, batch_first=True)
    backwards = kind(8, 4, batch_first=True)
    state = cell.state_dict()
    forwards.load_state_dict({name: x for name, x in state.items() if not name.endswith("_reverse")})
    backwards.load_state_dict({name[:-8]: x for name, x in state.items() if name.endswith("_reverse")})
    ahead = forwards(x)[0]
    back = backwards(x.flip(1))[0].flip(1)
    encoded = encoder.encode(x, None)
    torch.testing.assert_close(encoded.states_BSD, torch.cat((ahead, back), -1))
    torch.testing.assert_close(encoded.final[0], torch.cat((ahead[:, -1], back[:, 0]), -1))


def dot_attention(query: Tensor, states: Tensor, keep: Tensor) -> Tensor:
    """Dot attention of one query per row, written out."""
    rows = []
    for b in range(len(query)):
        visible = states[b][keep[b]]
        rows.append(torch.softmax(visible @ query[b], 0) @ visible)
    return torch.stack(rows)


@pytest.mark.parametrize("attend_first", [False, True])
@pytest.mark.parametrize("input_feeding", [False, True])
@pytest.mark.parametrize("mixer", MIXERS)
def test_decoder_equals_its_formulas(mixer: str, input_feeding: bool, attend_first: bool) -> None:
    """Every variant, token by token, from torch's cells and the formulas."""
    torch.manual_seed(1)
    decoder = RecurrentDecoder(small(mixer, input_feeding=input_feeding, attend_first=attend_first))
    source = torch.randn(2, 4, 8)
    keep = lengths(4, 2)
    final_states = (torch.randn(2, 8), torch.randn(2, 8))
    x = torch.randn(2, 3, 8)
    output, _ = decoder(x, decoder.start(EncoderOutput(source, keep, final_states)))

    states = [torch.tanh(bridge(state)) for bridge, state in zip(decoder.bridges, final_states, strict=True)]
    cells = [torch.zeros(2, 8), torch.zeros(2, 8)]
    attentional = torch.zeros(2, 8)
    for t in range(3):
        step = [x[:, t]]
        context = dot_attention(states[-1], source, keep)
        if attend_first:
            step.append(context)
        if input_feeding:
            step.append(attentional)
        value = torch.cat(step, -1)
        for i, block in enumerate(decoder.blocks):
            kind = nn.GRUCell if mixer == "gru" else nn.LSTMCell
            cell = kind(value.shape[-1], 8)
            cell.load_state_dict({name.removesuffix("_l0"): w for name, w in block.cell.state_dict().items()})
            if mixer == "gru":
                states[i] = cell(value, states[i])
            else:
                states[i], cells[i] = cell(value, (states[i], cells[i]))
            value = states[i]
        if not attend_first:
            context = dot_attention(states[-1], source, keep)
        attentional = torch.tanh(decoder.combine(torch.cat((context, states[-1]), -1)))
        torch.testing.assert_close(output[:, t], attentional, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("score", ["additive", "general", "location"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_decoder_without_input_feeding_equals_torch_layer_and_attention(mixer: str, score: str) -> None:
    """All tokens at once: torch's recurrent layer, then attention over the source."""
    decoder = RecurrentDecoder(small(mixer, layers=1, score=score))
    source = torch.randn(2, 4, 8)
    first = torch.randn(2, 8)
    x = torch.randn(2, 3, 8)
    output, _ = decoder(x, decoder.start(EncoderOutput(source, None, (first,))))
    initial = torch.tanh(decoder.bridges[0](first)).unsqueeze(0)
    states = decoder.blocks[0].cell(x, initial if mixer == "gru" else (initial, torch.zeros_like(initial)))[0]
    compare = decoder.cross.score
    q = compare.query(states.unsqueeze(1))
    k = compare.key(source.unsqueeze(1))
    weights = torch.softmax(compare.compare(q, k, torch.arange(4).unsqueeze(0)).squeeze(1), -1)
    expected = torch.tanh(decoder.combine(torch.cat((weights @ source, states), -1)))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("option", ["input_feeding", "attend_first"])
def test_input_feeding_and_attend_first_extend_the_cell_input(option: str) -> None:
    """input_feeding adds the attentional vector of the previous step, attend_first the context of the source."""
    decoder = RecurrentDecoder(small(**{option: True}))
    final_states = (torch.randn(1, 8), torch.randn(1, 8))
    x = torch.randn(1, 3, 8)
    extra_inputs: list[Tensor] = []
    decoder.blocks[0].cell.register_forward_pre_hook(lambda _m, args: extra_inputs.append(args[0][:, 0, 8:]))
    out, _ = decoder(x, decoder.start(EncoderOutput(torch.randn(1, 4, 8), None, final_states)))
    if option == "input_feeding":
        assert not extra_inputs[0].any()
        assert torch.equal(extra_inputs[1], out[:, 0])
        assert torch.equal(extra_inputs[2], out[:, 1])
    else:
        decoder(x[:, :1], decoder.start(EncoderOutput(torch.randn(1, 4, 8), None, final_states)))
        assert (extra_inputs[0] - extra_inputs[3]).abs().max() > 1e-3


@pytest.mark.parametrize("center", ["step", "predicted"])
def test_local_attention_covers_only_its_window(center: str) -> None:
    """A window of 1 covers three positions around the step, and at most three around a predicted position."""
    decoder = RecurrentDecoder(small(cross_window=1, cross_center=center, layers=1))
    weights: list[Tensor] = []
    decoder.cross.weights.register_forward_hook(lambda _m, _i, out: weights.append(out[0, 0]))
    decoder(torch.randn(1, 5, 8), decoder.start(EncoderOutput(torch.randn(1, 7, 8), None, (torch.randn(1, 8),))))
    visible = weights[0] > 0
    if center == "step":
        assert visible.nonzero().tolist() == [[t, s] for t in range(5) for s in range(7) if abs(t - s) <= 1]
    else:
        assert (visible.sum(-1) <= 3).all()
        assert (visible.sum(-1) >= 1).all()


def test_decoder_without_final_states_starts_from_the_first_source_vector() -> None:
    """An attention encoder has no final states; the first source vector initialises every layer."""
    decoder = RecurrentDecoder(small("lstm"))
    states = torch.randn(2, 3, 8)
    state = decoder.start(EncoderOutput(states, None))
    for bridge, (h, c) in zip(decoder.bridges, state.layers, strict=True):
        assert torch.equal(h, torch.tanh(bridge(states[:, 0])))
        assert not c.any()


def test_only_the_last_layer_has_cross_attention() -> None:
    decoder = RecurrentDecoder(small(layers=3))
    assert [name for name, m in decoder.named_modules() if isinstance(m, Attention)] == ["blocks.2.cross"]
