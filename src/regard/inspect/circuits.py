"""Circuits of language models: logit attribution, QK and OV circuits, neurons; attention rollout.

The LM head is linear, and so is a normalisation with a fixed scale. A logit is therefore a sum of contributions to the
residual stream. Feed-forward layers are treated as key-value memories (Geva et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import UserError, plural, require_type
from regard.inspect.inputs import task_batches
from regard.inspect.trace import Trace
from regard.inspect.walk import has_plain_blocks
from regard.model import Model
from regard.nn.attention import Attention
from regard.nn.block import Block, Residual
from regard.nn.hooks import record, record_calls
from regard.nn.position import NO_POSITION
from regard.nn.transformer import Transformer
from regard.notebook import table, table_of
from regard.run import Run

MAX_PAIRS = 25_000_000  # entries of a token-by-token matrix computed at once
CONTEXT = 12  # tokens shown before a trigger
PROMOTED = 5  # promoted tokens shown per neuron
RUN_REQUIRED = "circuits: takes a run, such as regard.load('runs/lm')"  # start of an error


@dataclass(frozen=True)
class Attribution:
    """The logit of a token as a sum of contributions."""

    token: str
    logit: float
    heads_LH: Tensor
    feed_forward_L: Tensor
    embedding: float
    bias: float  # the sum over layers and normalisations

    def __repr__(self) -> str:
        layers, heads = self.heads_LH.shape
        parts = f"{plural(layers, 'layer')} of {plural(heads, 'head')}"
        return f"Attribution({self.token!r}, logit {self.logit:.3f}, {parts})"

    def _repr_html_(self) -> str:
        rows = [{"part": name, "logit": value} for name, value in self.table()]
        return table_of(rows, f"logit {self.logit:.3f} of {self.token}")

    @property
    def total(self) -> float:
        """The sum of all parts: the logit."""
        return float(self.heads_LH.sum() + self.feed_forward_L.sum()) + self.embedding + self.bias

    def table(self) -> list[tuple[str, float]]:
        """The parts by name, the largest absolute value first."""
        parts = {"embedding": self.embedding, "bias": self.bias}
        for layer, row_H in enumerate(self.heads_LH.tolist()):
            parts |= {f"layer {layer + 1} head {head + 1}": value for head, value in enumerate(row_H)}
            parts[f"layer {layer + 1} feed-forward"] = float(self.feed_forward_L[layer])
        return sorted(parts.items(), key=lambda item: -abs(item[1]))


@torch.no_grad()
def attribute(run: Run, text: str, token: str | None = None, place: int = -1) -> Attribution:
    """The contributions to the logit of a token at a position of `text`; by default of the most probable next token."""
    model, decoder = _plain_decoder(run)
    require_type(text, str, "attribute: takes a text")
    assert model.output is not None
    ids = [run.config.start_id, *run.codec.target.encode([text])[0]]
    if place not in range(-len(ids), len(ids)):
        raise UserError(f"attribute: place is a position from {-len(ids)} to {len(ids) - 1} here, not {place!r}")
    with record_calls(model) as calls:
        logits_V = model(torch.tensor([ids], device=model.device), None)[0, place].float()
    ids = [int(logits_V.argmax())] if token is None else run.codec.target.encode([token])[0]
    if len(ids) != 1:
        raise UserError(f"{token!r} is {len(ids)} tokens of this vocabulary, not one")
    index = ids[0]
    embedded_D = calls.input(decoder.blocks[0])[place]
    x_PD = torch.stack((embedded_D, torch.zeros_like(embedded_D)))  # the second part is the sum of all biases
    sizes = [1, 1]
    head_numbers = []
    for block in decoder.blocks:
        assert isinstance(block, Block) and isinstance(block.attention, Attention)
        attention = block.attention
        out = attention.out
        down = block.feed_forward.down
        assert isinstance(out, nn.Linear)
        z_HE = calls.input(out)[place].unflatten(0, (attention.heads, -1))
        heads_HD = torch.einsum("he,dhe->hd", z_HE, out.weight.unflatten(1, (attention.heads, -1)))
        x_PD = _add_parts(x_PD, heads_HD, out.bias, block.attention_residual)
        down_D = calls.output(down)[place]
        down_D = down_D if down.bias is None else down_D - down.bias
        x_PD = _add_parts(x_PD, down_D.unsqueeze(0), down.bias, block.feed_forward_residual)
        sizes += [attention.heads, 1]
        head_numbers.append(list(attention.head_numbers))
    logit_P = _normalise_parts(x_PD, decoder.norm).float() @ model.output.weight[index].float()
    if model.output.bias is not None:
        logit_P[1] += model.output.bias[index]
    embedding, bias, *layers = logit_P.cpu().split(sizes)
    heads_LH = torch.zeros(len(head_numbers), max(map(max, head_numbers)) + 1)
    for layer, numbers in enumerate(head_numbers):
        heads_LH[layer, numbers] = layers[2 * layer]
    name = run.codec.target_pieces([index])[0]
    return Attribution(name, float(logits_V[index]), heads_LH, torch.cat(layers[1::2]), float(embedding), float(bias))


def _add_parts(x_PD: Tensor, more_PD: Tensor, bias_D: Tensor | None, residual: Residual) -> Tensor:
    """Append the contributions of a sub-layer, and add its bias to the biases."""
    x_PD = torch.cat((x_PD, more_PD))
    if bias_D is not None:
        x_PD[1] += bias_D
    return x_PD if residual.pre else _normalise_parts(x_PD, residual.norm)


def _normalise_parts(x_PD: Tensor, norm: nn.Module) -> Tensor:
    """Normalise each part with the scale of their sum, which makes the normalisation linear."""
    if isinstance(norm, nn.Identity):
        return x_PD
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    sum_and_parts_QD = torch.cat((x_PD.sum(0, keepdim=True), x_PD))
    if isinstance(norm, nn.LayerNorm):
        sum_and_parts_QD -= sum_and_parts_QD.mean(-1, keepdim=True)
    scale = (sum_and_parts_QD[0].pow(2).mean() + (norm.eps or 0.0)).rsqrt()
    x_PD = sum_and_parts_QD[1:] * scale * norm.weight
    if isinstance(norm, nn.LayerNorm) and norm.bias is not None:
        x_PD[1] += norm.bias
    return x_PD


class TokenPair(NamedTuple):
    """An entry of a token-by-token matrix."""

    row: str
    column: str
    value: float


@dataclass(frozen=True)
class Circuit:
    """A token-by-token matrix as a product of two thin matrices; its rank is at most the head width."""

    left_VE: Tensor
    right_VE: Tensor
    names: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Circuit({plural(len(self.names), 'token')}, rank {self.left_VE.shape[1]} or less)"

    def _repr_html_(self) -> str:
        if len(self.names) ** 2 > MAX_PAIRS:  # too slow for a notebook cell
            return table([], caption=f"{self!r}; top() finds the largest entries")
        return table(self.top(), TokenPair._fields, f"{self!r}: the largest entries")

    def matrix(self) -> Tensor:
        """The full matrix, (V, V)."""
        if len(self.names) ** 2 > MAX_PAIRS:
            raise UserError(f"a matrix over {len(self.names):,} tokens is too large to compute in full; use top()")
        return self.left_VE @ self.right_VE.T

    def row(self, token: str) -> Tensor:
        """The entries of one token, (V,)."""
        if token not in self.names:
            raise UserError(f"{token!r} is not a token of this vocabulary")
        return self.right_VE @ self.left_VE[self.names.index(token)]

    def top(self, count: int = 20) -> list[TokenPair]:
        """The largest entries; a large matrix is computed in blocks of rows."""
        best: list[tuple[float, int, int]] = []
        for start in range(0, len(self.left_VE), step := max(1, MAX_PAIRS // len(self.right_VE))):
            rows_NV = self.left_VE[start : start + step] @ self.right_VE.T
            top = rows_NV.flatten().topk(min(count, rows_NV.numel()))
            for value, entry in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                best.append((value, start + entry // rows_NV.shape[1], entry % rows_NV.shape[1]))
        best = sorted(best, reverse=True)[:count]
        return [TokenPair(self.names[row], self.names[column], value) for value, row, column in best]


@torch.no_grad()
def qk(run: Run, layer: int, head: int) -> Circuit:
    """The attention score of a query token (row) for a key token (column), from embeddings without positions.

    `layer` and `head` count from 0; heads keep their numbers when others are pruned.
    """
    attention, index, x_VD, (k_VE, _) = _head(run, layer, head)
    if not attention.score.is_dot:
        raise UserError("the attention score of this model is not a product of query and key")
    q_1HVE = attention.query(x_VD).unflatten(-1, (attention.heads, -1)).transpose(0, 1).unsqueeze(0)
    names = tuple(run.codec.target_pieces(range(run.config.target_vocab)))
    return Circuit(attention.score.query(q_1HVE)[0, index] * attention.score.scale, k_VE, names)


@torch.no_grad()
def ov(run: Run, layer: int, head: int) -> Circuit:
    """The logit of a token (column) added by attending to a token (row), up to the scale of the last normalisation."""
    attention, index, _, (_, v_VE) = _head(run, layer, head)
    model, decoder = _plain_decoder(run)
    norm = decoder.norm
    assert isinstance(attention.out, nn.Linear) and model.output is not None
    out_DE = attention.out.weight.unflatten(1, (attention.heads, -1))[:, index]
    head_VD = model.output.weight
    if isinstance(norm, nn.LayerNorm):
        out_DE = out_DE - out_DE.mean(0)
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        head_VD = head_VD * norm.weight
    return Circuit(v_VE, head_VD @ out_DE, tuple(run.codec.target_pieces(range(run.config.target_vocab))))


def _head(run: Run, layer: int, head: int) -> tuple[Attention, int, Tensor, tuple[Tensor, Tensor]]:
    """An attention, the index of a head in it, its input for every token, and the keys and values of the head."""
    model, decoder = _plain_decoder(run)
    attention = model.attentions().get(f"decoder.blocks.{layer}.attention")
    if attention is None or head not in attention.head_numbers:
        raise UserError(f"no head {head} in layer {layer}, counted from 0")
    block = decoder.blocks[layer]
    assert isinstance(block, Block) and isinstance(attention, Attention) and model.target_embedding is not None
    x_VD = decoder.embed_norm(model.embed(model.target_embedding, torch.arange(run.config.target_vocab)))
    x_VD = block.attention_residual.norm(x_VD) if block.attention_residual.pre else x_VD
    k_1GVE, v_1GVE = attention.project_kv(x_VD.unsqueeze(0), torch.zeros(1, len(x_VD), dtype=torch.long), NO_POSITION)
    index = attention.head_numbers.index(head)
    group = attention.kv_indices[index]
    return attention, index, x_VD, (k_1GVE[0, group], v_1GVE[0, group])


def _plain_decoder(run: Run) -> tuple[Model, Transformer]:
    """The model of a run and its decoder; refuses models whose logits are no sum of contributions."""
    require_type(run, Run, RUN_REQUIRED)
    decoder = run.model.decoder
    if not (run.model.decoder_only and isinstance(decoder, Transformer) and has_plain_blocks(decoder)):
        raise UserError("circuits exist for language models (only a decoder) with plain attention and layers")
    return run.model, decoder


class Trigger(NamedTuple):
    """A position in a text where a neuron is active."""

    context: str  # the text before it
    token: str
    value: float


@dataclass(frozen=True)
class Neuron:
    """One hidden unit of a feed-forward layer."""

    layer: int
    index: int
    triggers: tuple[Trigger, ...]  # the strongest first
    promotes: tuple[tuple[str, float], ...]  # logit added per unit of activation, the largest first


@torch.no_grad()
def top_neurons(run: Run, text: str, layer: int, count: int = 20, triggers: int = 5) -> list[Neuron]:
    """The neurons of a layer (from 0) whose highest activation in a text exceeds their mean the most."""
    require_type(run, Run, RUN_REQUIRED)
    model = run.model
    decoder = model.decoder
    if not (model.decoder_only and isinstance(decoder, Transformer)):
        raise UserError("neurons exist for language models (only a decoder)")
    require_type(text, str, "top_neurons: takes a text")
    if layer not in range(len(decoder.blocks)):
        raise UserError(f"no layer {layer}; this model has {len(decoder.blocks)}, counted from 0")
    block = decoder.blocks[layer]
    assert isinstance(block, Block) and model.output is not None
    down_DF = block.feed_forward.down.weight
    if len(down_DF) != model.output.in_features:
        raise UserError("the layers of this model carry two streams; its neurons do not feed the output directly")
    hook = f"decoder.blocks.{layer}.feed_forward.neurons"
    values = []
    rows: list[list[int]] = []
    for batch in task_batches(run, text):
        with record(model, hook) as recorded:
            model.hidden(batch.input_BT.to(model.device), None)
        values.append(recorded[hook].flatten(0, 1).float())
        rows += batch.input_BT.tolist()
    value_NF = torch.cat(values)
    width = len(rows[0])
    top_KF = value_NF.topk(min(triggers, len(value_NF)), dim=0)
    # The triggers of a neuron that is always active carry no information.
    surprise_F = (top_KF.values[0] - value_NF.mean(0)) / value_NF.std(0).clamp(min=1e-6)
    surprise_F = surprise_F.masked_fill(top_KF.values[0] <= 0, -1.0)
    indices = surprise_F.topk(min(count, len(surprise_F))).indices.tolist()
    down_ND = down_DF.T[indices]
    if isinstance(decoder.norm, nn.LayerNorm):
        down_ND = down_ND - down_ND.mean(-1, keepdim=True)
    if isinstance(decoder.norm, nn.LayerNorm | nn.RMSNorm):
        down_ND = down_ND * decoder.norm.weight
    neurons = []
    for promoted_V, index in zip(down_ND @ model.output.weight.T, indices, strict=True):
        strongest = []
        for value, n in zip(*(x_KF[:, index].tolist() for x_KF in top_KF), strict=True):
            if value > 0:
                row = rows[n // width]
                position = n % width
                context = run.codec.decode_target(row[max(0, position - CONTEXT) : position])
                strongest.append(Trigger(context, run.codec.target_pieces([row[position]])[0], value))
        top = promoted_V.topk(min(PROMOTED, len(promoted_V)))
        names = run.codec.target_pieces(top.indices.tolist())
        neurons.append(Neuron(layer, index, tuple(strongest), tuple(zip(names, top.values.tolist(), strict=True))))
    return neurons


def rollout(trace: Trace, kind: str | None = None) -> list[np.ndarray]:
    """The share of every input in every position after each layer, (T, T): attention rollout, products of (A + I) / 2.

    A is the mean over heads; the identity stands for the residual connection. `kind` is encoder or decoder.
    """
    require_type(trace, Trace, "rollout: takes a trace, such as run.attention('abc')")
    maps = [m for m in trace.maps if m.kind == (kind or trace.maps[0].kind)]
    if not maps or maps[0].rows != maps[0].columns:
        raise UserError(f"there is no self-attention of kind {kind!r} in this trace to roll out")
    shares: list[np.ndarray] = []
    for m in maps:
        mean_TS = m.weights_HTS.mean(0)
        layer_TS = 0.5 * mean_TS / mean_TS.sum(-1, keepdims=True) + 0.5 * np.eye(len(mean_TS))
        shares.append(layer_TS @ shares[-1] if shares else layer_TS)
    return shares
