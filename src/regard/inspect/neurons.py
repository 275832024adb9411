"""Feed-forward layers as memories (Geva et al. 2021): what sets a neuron off, and which symbols it then speaks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.inspect.material import batches_of
from regard.inspect.record import record
from regard.nn.block import Block
from regard.nn.transformer import Transformer
from regard.run import Run

BEFORE = 12  # symbols of context that are shown


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
    promotes: tuple[tuple[str, float], ...]  # symbols whose logits it raises most, per unit of its value


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
    device = next(model.parameters()).device
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
