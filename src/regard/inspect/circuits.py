"""Circuits of language models: a logit as a sum over heads and layers, QK and OV circuits, neurons; attention rollout.

The LM head is linear, and so is a normalisation whose scale is held fixed at what it was. A logit is then a sum over
everything that was added to the residual stream: embedding, heads, feed-forward layers and biases. Feed-forward layers
are read as key-value memories (Geva et al. 2021): what activates a neuron, and which tokens it then promotes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.inspect.inputs import task_batches
from regard.inspect.trace import Trace
from regard.inspect.walk import has_plain_blocks
from regard.model import Model
from regard.nn.attention import Attention
from regard.nn.block import Block, Residual
from regard.nn.hooks import ForwardCalls, record, record_calls
from regard.nn.position import NO_POSITION
from regard.nn.transformer import Transformer
from regard.run import Run

MAX_PAIRS = 25_000_000  # entries of a matrix over tokens that are computed at once
CONTEXT = 12  # tokens shown before the one that activates a neuron
PROMOTED = 5  # tokens shown that a neuron promotes


# Direct logit attribution


@dataclass(frozen=True)
class Attribution:
    """The logit of a token as a sum over the parts of a model."""

    token: str
    logit: float
    heads_LH: Tensor
    feed_forward_L: Tensor
    embedding: float
    bias: float  # of all layers and of normalisations

    @property
    def total(self) -> float:
        """The sum of all parts, which is the logit."""
        return float(self.heads_LH.sum() + self.feed_forward_L.sum()) + self.embedding + self.bias

    def table(self) -> list[tuple[str, float]]:
        """The parts by name, those that matter most first."""
        parts = {"embedding": self.embedding, "bias": self.bias}
        for layer, row_H in enumerate(self.heads_LH.tolist()):
            parts |= {f"layer {layer + 1} head {head + 1}": value for head, value in enumerate(row_H)}
            parts[f"layer {layer + 1} feed-forward"] = float(self.feed_forward_L[layer])
        return sorted(parts.items(), key=lambda item: -abs(item[1]))


@torch.no_grad()
def attribute(run: Run, text: str, token: str | None = None, place: int = -1) -> Attribution:
    """The parts of the logit of a token after `text`, or at an earlier position (`place`) in it.

    `token` is one token of the vocabulary; by default the most probable one.
    """
    model = run.model
    decoder = _plain_decoder(model)
    assert model.output is not None
    ids = [run.config.start_id, *run.codec.target.encode([text])[0]]
    with record_calls(model) as calls:
        logits_V = model(torch.tensor([ids], device=model.device), None)[0, place].float()
    index = int(logits_V.argmax()) if token is None else _token_id(run, token)
    stream = _ResidualStream(calls, place, calls.input(decoder.blocks[0])[place])
    for block in decoder.blocks:
        assert isinstance(block, Block)
        stream.add_heads(block)
        stream.add_feed_forward(block)
    stream.normalise(decoder.norm)
    logit_P = stream.x_PD.float() @ model.output.weight[index].float()
    if model.output.bias is not None:
        logit_P[1] += model.output.bias[index]
    heads_LH = torch.zeros(len(decoder.blocks), max(max(numbers) for numbers in stream.head_numbers) + 1)
    for layer, numbers in enumerate(stream.head_numbers):
        heads_LH[layer, list(numbers)] = logit_P[stream.heads[layer]].cpu()
    return Attribution(
        run.codec.target_pieces([index])[0],
        float(logits_V[index]),
        heads_LH,
        logit_P[stream.feed_forwards].cpu(),
        float(logit_P[0]),
        float(logit_P[1]),
    )


class _ResidualStream:
    """The parts that add up to the vector at one position; a normalisation acts on each part, with its scale fixed."""

    def __init__(self, calls: ForwardCalls, position: int, embedded_D: Tensor) -> None:
        self._calls, self._position = calls, position
        self.x_PD = torch.stack((embedded_D, torch.zeros_like(embedded_D)))  # the second part is all biases
        self.heads: list[slice] = []  # parts, by layer
        self.head_numbers: list[tuple[int, ...]] = []
        self.feed_forwards: list[int] = []

    def add_heads(self, block: Block) -> None:
        attention = block.attention
        assert isinstance(attention, Attention) and isinstance(attention.out, nn.Linear)
        z_HE = self._calls.input(attention.out)[self._position].unflatten(0, (attention.heads, -1))
        out_HD = torch.einsum("he,dhe->hd", z_HE, attention.out.weight.unflatten(1, (attention.heads, -1)))
        self.heads.append(slice(len(self.x_PD), len(self.x_PD) + attention.heads))
        self.head_numbers.append(attention.head_numbers)
        self.x_PD = torch.cat((self.x_PD, out_HD))
        self._add_bias(attention.out.bias)
        self._after(block.attention_residual)

    def add_feed_forward(self, block: Block) -> None:
        down = block.feed_forward.down
        out_D = self._calls.output(down)[self._position]
        self.feed_forwards.append(len(self.x_PD))
        self.x_PD = torch.cat((self.x_PD, (out_D if down.bias is None else out_D - down.bias).unsqueeze(0)))
        self._add_bias(down.bias)
        self._after(block.feed_forward_residual)

    def normalise(self, norm: nn.Module) -> None:
        if not isinstance(norm, nn.Identity):
            self.x_PD = _linearised(norm, self.x_PD.sum(0))(self.x_PD)
            self._add_bias(getattr(norm, "bias", None))

    def _after(self, residual: Residual) -> None:
        if not residual.pre:
            self.normalise(residual.norm)

    def _add_bias(self, bias_D: Tensor | None) -> None:
        if bias_D is not None:
            self.x_PD[1] += bias_D


def _linearised(norm: nn.Module, x_D: Tensor) -> Callable[[Tensor], Tensor]:
    """A normalisation without its bias, its scale fixed at what it is for `x_D`: a linear map."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    centred = isinstance(norm, nn.LayerNorm)

    def centre(x_PD: Tensor) -> Tensor:
        return x_PD - x_PD.mean(-1, keepdim=True) if centred else x_PD

    scale = (centre(x_D).pow(2).mean() + (norm.eps or 0.0)).rsqrt()
    return lambda x_PD: centre(x_PD) * scale * norm.weight


# QK and OV circuits


class TokenPair(NamedTuple):
    """An entry of a matrix over tokens."""

    row: str
    column: str
    value: float


@dataclass(frozen=True)
class Circuit:
    """A matrix over tokens as a product of two thin ones: its rank is at most the head width."""

    left_VE: Tensor
    right_VE: Tensor
    names: tuple[str, ...]

    def matrix(self) -> Tensor:
        """The full matrix, (V, V)."""
        if len(self.left_VE) ** 2 > MAX_PAIRS:
            raise UserError(
                f"a matrix over {len(self.left_VE):,} tokens has too many entries to be made whole; ask for the top"
            )
        return self.left_VE @ self.right_VE.T

    def row(self, token: str) -> Tensor:
        """The entries of one token, (V,)."""
        if token not in self.names:
            raise UserError(f"{token!r} is not a token of this vocabulary")
        return self.right_VE @ self.left_VE[self.names.index(token)]

    def top(self, count: int = 20) -> list[TokenPair]:
        """The largest entries; a large matrix is computed some rows at a time."""
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
    """The score that a query token (row) gives a key token (column), both as bare embeddings, without position.

    `layer` counts from 0, `head` is its number from 0, as before any pruning.
    """
    attention, index, x_VD = _head(run, layer, head)
    if not attention.score.is_dot:
        raise UserError("the score of this model is no product of a query and a key")
    q_1HVE = attention.query(x_VD).unflatten(-1, (attention.heads, -1)).transpose(0, 1).unsqueeze(0)
    k_VE, _ = _key_value(attention, x_VD, index)
    return Circuit(attention.score.query(q_1HVE)[0, index] * attention.score.scale, k_VE, _token_names(run))


@torch.no_grad()
def ov(run: Run, layer: int, head: int) -> Circuit:
    """What attending to a token (row) adds to the logit of another (column), up to the last normalisation's scale."""
    model = run.model
    attention, index, x_VD = _head(run, layer, head)
    assert isinstance(attention.out, nn.Linear) and model.output is not None
    _, v_VE = _key_value(attention, x_VD, index)
    out_DE = attention.out.weight.unflatten(1, (attention.heads, -1))[:, index]
    norm, head_VD = _plain_decoder(model).norm, model.output.weight
    if isinstance(norm, nn.LayerNorm):
        out_DE = out_DE - out_DE.mean(0)
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        head_VD = head_VD * norm.weight
    return Circuit(v_VE, head_VD @ out_DE, _token_names(run))


def _head(run: Run, layer: int, head: int) -> tuple[Attention, int, Tensor]:
    """An attention, the index of a head in it, and the embeddings of all tokens as the attention would read them."""
    model = run.model
    decoder = _plain_decoder(model)
    attention = model.attentions().get(f"decoder.blocks.{layer}.attention")
    if attention is None or head not in attention.head_numbers:
        raise UserError(f"no head {head} in layer {layer}, counted from 0")
    block = decoder.blocks[layer]
    assert isinstance(block, Block) and isinstance(attention, Attention) and model.target_embedding is not None
    x_VD = decoder.embed_norm(model.embed(model.target_embedding, torch.arange(run.config.target_vocab)))
    x_VD = block.attention_residual.norm(x_VD) if block.attention_residual.pre else x_VD
    return attention, attention.head_numbers.index(head), x_VD


def _key_value(attention: Attention, x_VD: Tensor, head: int) -> tuple[Tensor, Tensor]:
    group = attention.kv_indices[head]
    k_1GVE, v_1GVE = attention.project_kv(x_VD.unsqueeze(0), torch.zeros(1, len(x_VD), dtype=torch.long), NO_POSITION)
    return k_1GVE[0, group], v_1GVE[0, group]


def _token_names(run: Run) -> tuple[str, ...]:
    return tuple(run.codec.target_pieces(range(run.config.target_vocab)))


def _token_id(run: Run, token: str) -> int:
    ids: list[int] = run.codec.target.encode([token])[0]
    if len(ids) != 1:
        raise UserError(f"{token!r} is {len(ids)} tokens of this vocabulary, not one")
    return ids[0]


def _plain_decoder(model: Model) -> Transformer:
    """The decoder of a language model whose parts add up."""
    decoder = model.decoder
    lm = model.encoder is None and model.output is not None
    if not lm or not isinstance(decoder, Transformer) or not has_plain_blocks(decoder):
        raise UserError("circuits are read off language models: a decoder alone, with plain attention and layers")
    return decoder


# Neurons


class Trigger(NamedTuple):
    """A position in a text at which a neuron was active."""

    context: str  # the text before it
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
    model, decoder = run.model, run.model.decoder
    if model.encoder is not None or not isinstance(decoder, Transformer) or model.output is None:
        raise UserError("neurons are read off language models: a decoder alone")
    if not 0 <= layer < len(decoder.blocks):
        raise UserError(f"no layer {layer}; this model has {len(decoder.blocks)}, the first being 0")
    hook = f"decoder.blocks.{layer}.feed_forward.neurons"
    values, rows = [], list[list[int]]()
    for batch in task_batches(run, text):
        with record(model, hook) as recorded:
            model.hidden(batch.input_BT.to(model.device), None)
        values.append(recorded[hook].flatten(0, 1).float())
        rows += batch.input_BT.tolist()
    value_NF = torch.cat(values)
    width = len(rows[0])
    top_KF = value_NF.topk(min(triggers, len(value_NF)), dim=0)
    # A neuron that is always active says nothing about its triggers.
    surprise_F = (top_KF.values[0] - value_NF.mean(0)) / value_NF.std(0).clamp(min=1e-6)
    surprise_F = surprise_F.masked_fill(top_KF.values[0] <= 0, -1.0)
    chosen = surprise_F.topk(min(count, len(surprise_F))).indices.tolist()
    neurons = []
    for promoted_V, index in zip(_promoted(model, decoder, layer, chosen), chosen, strict=True):
        activations = zip(top_KF.values[:, index].tolist(), top_KF.indices[:, index].tolist(), strict=True)
        strongest = tuple(_trigger(run, rows[n // width], n % width, value) for value, n in activations if value > 0)
        top = promoted_V.topk(min(PROMOTED, len(promoted_V)))
        names = run.codec.target_pieces(top.indices.tolist())
        neurons.append(Neuron(layer, index, strongest, tuple(zip(names, top.values.tolist(), strict=True))))
    return neurons


def _promoted(model: Model, decoder: Transformer, layer: int, neurons: list[int]) -> Tensor:
    """What a unit of each neuron adds to every logit, up to the last normalisation's scale: (neurons, V)."""
    block, norm = decoder.blocks[layer], decoder.norm
    assert isinstance(block, Block) and model.output is not None
    down_ND = block.feed_forward.down.weight.T[neurons]
    if down_ND.shape[1] != model.output.in_features:
        raise UserError("the layers of this model carry two streams; its neurons do not speak to the output directly")
    if isinstance(norm, nn.LayerNorm):
        down_ND = down_ND - down_ND.mean(-1, keepdim=True)
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        down_ND = down_ND * norm.weight
    logits_NV: Tensor = down_ND @ model.output.weight.T
    return logits_NV


def _trigger(run: Run, row: list[int], position: int, value: float) -> Trigger:
    context = run.codec.decode_target(row[max(0, position - CONTEXT) : position])
    return Trigger(context, run.codec.target_pieces([row[position]])[0], value)


# Attention rollout


def rollout(trace: Trace, kind: str | None = None) -> list[np.ndarray]:
    """After each layer, the share of every input in every position, (T, T): the products of (A + I) / 2.

    `kind` is encoder or decoder; by default that of the first map. Half of what a layer passes on is its input, since
    its output is added to it; the other half comes through its heads, of which the mean is taken. Rows sum to one.
    """
    maps = [m for m in trace.maps if m.kind == (kind or trace.maps[0].kind)]
    if not maps or maps[0].rows != maps[0].columns:
        raise UserError(f"there is no self-attention of kind {kind!r} in this trace to roll out")
    shares: list[np.ndarray] = []
    for m in maps:
        mean_TS = m.weights_HTS.mean(0)
        layer_TS = 0.5 * mean_TS / mean_TS.sum(-1, keepdims=True) + 0.5 * np.eye(len(mean_TS))
        shares.append(layer_TS @ shares[-1] if shares else layer_TS)
    return shares
