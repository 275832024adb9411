"""Feed-forward layers as memories (Geva et al. 2021): what sets a neuron off, and which tokens it then speaks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.inspect.importance import Spot
from regard.inspect.inputs import batches_of
from regard.model import Model
from regard.nn.block import Block
from regard.nn.hooks import record
from regard.nn.transformer import Transformer
from regard.run import Run

BEFORE = 12  # tokens of context that are shown


class Trigger(NamedTuple):
    """A place in a text at which a neuron was active."""

    context: str  # what stood before it
    token: str
    value: float


@dataclass(frozen=True)
class Neuron:
    """One hidden unit of a feed-forward layer."""

    layer: int
    index: int
    triggers: tuple[Trigger, ...]  # the strongest first
    promotes: tuple[tuple[str, float], ...]  # tokens whose logits it raises most, per unit of its value


@torch.no_grad()
def top_neurons(run: Run, text: str, layer: int, count: int = 20, triggers: int = 5) -> list[Neuron]:
    """The neurons of a layer (from 0) of a language model that stood out most in a text, each against its own mean."""
    model = run.model
    decoder = model.decoder
    if model.encoder is not None or not isinstance(decoder, Transformer) or model.output is None:
        raise UserError("neurons are read off language models: a decoder alone")
    if not 0 <= layer < len(decoder.blocks):
        raise UserError(f"no layer {layer}; this model has {len(decoder.blocks)}, the first being 0")
    name = f"decoder.blocks.{layer}.feed_forward.neurons"
    device = model.device
    values, tokens = [], []
    for batch in batches_of(run, text):
        with record(model, name) as made:
            model.hidden(batch.input_BT.to(device), None)
        values.append(made[name].flatten(0, 1).float())
        tokens.append(batch.input_BT)
    value_NF = torch.cat(values)
    rows = [row for batch_BT in tokens for row in batch_BT.tolist()]
    width = len(rows[0])
    top_KF = value_NF.topk(min(triggers, len(value_NF)), dim=0)
    # A neuron that is always on tells nothing about its triggers.
    surprise_F = (top_KF.values[0] - value_NF.mean(0)) / value_NF.std(0).clamp(min=1e-6)
    surprise_F = surprise_F.masked_fill(top_KF.values[0] <= 0, -1.0)
    chosen = surprise_F.topk(min(count, len(surprise_F))).indices.tolist()
    promoted_FV = _promoted(run, layer, chosen)
    out = []
    for promoted_V, index in zip(promoted_FV, chosen, strict=True):
        found = [
            _trigger(run, rows[at // width], at % width, value)
            for value, at in zip(top_KF.values[:, index].tolist(), top_KF.indices[:, index].tolist(), strict=True)
            if value > 0
        ]
        best = promoted_V.topk(min(5, len(promoted_V)))
        names = run.codec.target_pieces(best.indices.tolist())
        out.append(Neuron(layer, index, tuple(found), tuple(zip(names, best.values.tolist(), strict=True))))
    return out


def _promoted(run: Run, layer: int, neurons: list[int]) -> Tensor:
    """What a unit of each neuron adds to every logit, but for the last normalisation's scale: (neurons, V)."""
    model = run.model
    assert isinstance(model.decoder, Transformer) and model.output is not None
    block, norm = model.decoder.blocks[layer], model.decoder.norm
    assert isinstance(block, Block)
    down_ND = block.feed_forward.down.weight.T[neurons]
    if down_ND.shape[1] != model.output.in_features:
        raise UserError("the layers of this model carry two streams; its neurons do not speak to the output directly")
    if isinstance(norm, nn.LayerNorm):
        down_ND = down_ND - down_ND.mean(-1, keepdim=True)
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        down_ND = down_ND * norm.weight
    said_NV: Tensor = down_ND @ model.output.weight.T
    return said_NV


def _trigger(run: Run, row: list[int], place: int, value: float) -> Trigger:
    before = run.codec.decode_target(row[max(0, place - BEFORE) : place])
    return Trigger(before, run.codec.target_pieces([row[place]])[0], value)


ROWS = 8
LONGEST = 24  # tokens that are then repeated


@torch.no_grad()
def induction_scores(model: Model, symbols: torch.Tensor | None = None, seed: int = 0) -> dict[Spot, float]:
    """The weight of every head of a language model from a token to what followed it the last time.

    It reads random tokens twice over, so that nothing but the repetition helps. `tokens` are the ids to draw from;
    without them all that are no marks.
    """
    config = model.config
    assert config.decoder is not None and config.encoder is None
    if symbols is None:
        marks = torch.tensor(sorted({x for x in config.ids.model_dump().values() if x is not None}))
        symbols = torch.arange(config.target_vocab)
        symbols = symbols[~torch.isin(symbols, marks)]
    limit = config.decoder.max_length if config.decoder.position == "learned" else 2 * LONGEST + 1
    length = max(1, min(LONGEST, len(symbols), (limit - 1) // 2))
    draws = torch.Generator().manual_seed(seed)
    once_NT = torch.stack([symbols[torch.randperm(len(symbols), generator=draws)[:length]] for _ in range(ROWS)])
    start_N1 = torch.full((ROWS, 1), config.start_id)
    device = model.device
    names = list(model.attentions())
    with record(model, *(f"{name}.weights" for name in names)) as maps:
        model.hidden(torch.cat((start_N1, once_NT, once_NT), dim=1).to(device), None)
    t = torch.arange(length + 1, 2 * length + 1)  # in the second round; what followed stands `length` - 1 before
    out: dict[Spot, float] = {}
    for name in names:
        weight_H = maps[f"{name}.weights"][:, :, t, t - length + 1].float().mean((0, 2))
        out |= {(name, head): float(weight) for head, weight in enumerate(weight_H)}
    return out
