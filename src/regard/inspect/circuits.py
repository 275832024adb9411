"""What the parts of a language model say: the logit of a token, part by part, and what a head does to tokens.

The prediction layer is linear, and so is a normalisation whose scale is held fast at what it was. A logit is then a sum
over everything that was ever added to the vector it is read from: embedding, heads, feed-forwards and biases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.inspect.trace import Map, Trace
from regard.model import Model
from regard.nn.attention import Attention
from regard.nn.block import Block, Residual
from regard.nn.hooks import ForwardCalls, record_calls
from regard.nn.position import NO_POSITION
from regard.nn.transformer import Transformer
from regard.run import Run

MOST_PAIRS = 25_000_000  # entries of a matrix over tokens that are made at once


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
    """Where the logit of a token comes from, after `text` or at an earlier place in it.

    `token` is one token; without it, that which the model finds most probable.
    """
    model = run.model
    decoder = _decoder(model)
    ids = [run.config.start_id, *run.codec.target.encode([text])[0]]
    device = model.device
    with record_calls(model) as calls:
        logits_V = model(torch.tensor([ids], device=device), None)[0, place].float()
    chosen = int(logits_V.argmax()) if token is None else _symbol(run, token)
    parts = _Parts(calls, place, calls.input(decoder.blocks[0])[place])
    for block in decoder.blocks:
        assert isinstance(block, Block)
        parts.add_heads(block)
        parts.add_feed_forward(block)
    parts.normalise(decoder.norm)
    assert model.output is not None
    said = parts.x_PD.float() @ model.output.weight[chosen].float()
    if model.output.bias is not None:
        said[1] += model.output.bias[chosen]
    names = run.codec.target_pieces([chosen])
    heads_LH = torch.zeros(len(decoder.blocks), max(max(numbers) for numbers in parts.numbers) + 1)
    for layer, numbers in enumerate(parts.numbers):
        heads_LH[layer, list(numbers)] = said[parts.heads[layer]].cpu()
    feed_forward_L = said[parts.feed_forwards].cpu()
    return Attribution(names[0], float(logits_V[chosen]), heads_LH, feed_forward_L, float(said[0]), float(said[1]))


class _Parts:
    """Everything that was added up to one vector; a normalisation acts on each part, with its scale held fast."""

    def __init__(self, calls: ForwardCalls, place: int, embedded_D: Tensor) -> None:
        self._calls, self._place = calls, place
        self.x_PD = torch.stack((embedded_D, torch.zeros_like(embedded_D)))  # the second is all biases
        self.heads: list[slice] = []
        self.numbers: list[tuple[int, ...]] = []
        self.feed_forwards: list[int] = []

    def add_heads(self, block: Block) -> None:
        attention = block.attention
        assert isinstance(attention, Attention) and isinstance(attention.out, nn.Linear)
        z_HE = self._calls.input(attention.out)[self._place].unflatten(0, (attention.heads, -1))
        said_HD = torch.einsum("he,dhe->hd", z_HE, attention.out.weight.unflatten(1, (attention.heads, -1)))
        self.heads.append(slice(len(self.x_PD), len(self.x_PD) + attention.heads))
        self.numbers.append(tuple(attention.kept) if attention.kept is not None else tuple(range(attention.heads)))
        self.x_PD = torch.cat((self.x_PD, said_HD))
        self._add_bias(attention.out.bias)
        self._after(block.attention_residual)

    def add_feed_forward(self, block: Block) -> None:
        down = block.feed_forward.down
        said_D = self._calls.output(down)[self._place]
        self.feed_forwards.append(len(self.x_PD))
        self.x_PD = torch.cat((self.x_PD, (said_D if down.bias is None else said_D - down.bias).unsqueeze(0)))
        self._add_bias(down.bias)
        self._after(block.feed_forward_residual)

    def normalise(self, norm: nn.Module) -> None:
        if not isinstance(norm, nn.Identity):
            self.x_PD = _held(norm, self.x_PD.sum(0))(self.x_PD)
            self._add_bias(getattr(norm, "bias", None))

    def _after(self, residual: Residual) -> None:
        if not residual.pre:
            self.normalise(residual.norm)

    def _add_bias(self, bias_D: Tensor | None) -> None:
        if bias_D is not None:
            self.x_PD[1] += bias_D


def _held(norm: nn.Module, x_D: Tensor) -> Callable[[Tensor], Tensor]:
    """A normalisation without its bias, its scale held at what it is for `x_D`: a linear map."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    centred = isinstance(norm, nn.LayerNorm)

    def centre(x_PD: Tensor) -> Tensor:
        return x_PD - x_PD.mean(-1, keepdim=True) if centred else x_PD

    scale = (centre(x_D).pow(2).mean() + (norm.eps or 0.0)).rsqrt()
    return lambda x_PD: centre(x_PD) * scale * norm.weight


# Matrices over tokens


class TokenPair(NamedTuple):
    """An entry of a matrix over tokens."""

    row: str
    column: str
    value: float


@dataclass(frozen=True)
class Circuit:
    """A matrix over tokens as a product of two thin ones: rank at most a head's width, whatever the vocabulary."""

    left_VE: Tensor
    right_VE: Tensor
    names: tuple[str, ...]

    def matrix(self) -> Tensor:
        """The whole of it, (V, V)."""
        if len(self.left_VE) ** 2 > MOST_PAIRS:
            raise UserError(
                f"a matrix over {len(self.left_VE):,} tokens has too many entries to be made whole; ask for the top"
            )
        return self.left_VE @ self.right_VE.T

    def row(self, symbol: str) -> Tensor:
        """The entries of one token, (V,)."""
        if symbol not in self.names:
            raise UserError(f"{symbol!r} is not a token of this vocabulary")
        return self.right_VE @ self.left_VE[self.names.index(symbol)]

    def top(self, count: int = 20) -> list[TokenPair]:
        """The largest entries; a large matrix is gone through a piece at a time."""
        best: list[tuple[float, int, int]] = []
        for start in range(0, len(self.left_VE), step := max(1, MOST_PAIRS // len(self.right_VE))):
            piece_NV = self.left_VE[start : start + step] @ self.right_VE.T
            found = piece_NV.flatten().topk(min(count, piece_NV.numel()))
            for value, at in zip(found.values.tolist(), found.indices.tolist(), strict=True):
                best.append((value, start + at // piece_NV.shape[1], at % piece_NV.shape[1]))
        best = sorted(best, reverse=True)[:count]
        return [TokenPair(self.names[row], self.names[column], value) for value, row, column in best]


@torch.no_grad()
def qk(run: Run, layer: int, head: int) -> Circuit:
    """The score that a token (row) gives another (column), both as bare embeddings, without position.

    `layer` counts from 0, `head` is its number from 0, as before any pruning.
    """
    attention, index, x_VD = _at(run, layer, head)
    if not attention.score.is_dot:
        raise UserError("the score of this model is no product of a query and a key")
    q_1HVE = attention.query(x_VD).unflatten(-1, (attention.heads, -1)).transpose(0, 1).unsqueeze(0)
    k_VE, _ = _key_value(attention, x_VD, index)
    return Circuit(attention.score.query(q_1HVE)[0, index] * attention.score.scale, k_VE, _names(run))


@torch.no_grad()
def ov(run: Run, layer: int, head: int) -> Circuit:
    """What looking at a token (row) adds to the logit of another (column), but for the last normalisation's scale."""
    model = run.model
    attention, index, x_VD = _at(run, layer, head)
    assert isinstance(attention.out, nn.Linear) and model.output is not None
    _, v_VE = _key_value(attention, x_VD, index)
    out_DE = attention.out.weight.unflatten(1, (attention.heads, -1))[:, index]
    norm, read_VD = _decoder(model).norm, model.output.weight
    if isinstance(norm, nn.LayerNorm):
        out_DE = out_DE - out_DE.mean(0)
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        read_VD = read_VD * norm.weight
    return Circuit(v_VE, read_VD @ out_DE, _names(run))


def _at(run: Run, layer: int, head: int) -> tuple[Attention, int, Tensor]:
    """An attention, the place of a head in it, and all tokens as the attention would read them."""
    model = run.model
    decoder = _decoder(model)
    name = f"decoder.blocks.{layer}.attention"
    if name not in model.attentions() or head not in model.attentions()[name].head_numbers:
        raise UserError(f"no head {head} in layer {layer}, counted from 0")
    block = decoder.blocks[layer]
    assert isinstance(block, Block) and isinstance(block.attention, Attention) and model.target_embedding is not None
    x_VD = model._embed(model.target_embedding, torch.arange(run.config.target_vocab))
    x_VD = decoder.embed_norm(x_VD)
    x_VD = block.attention_residual.norm(x_VD) if block.attention_residual.pre else x_VD
    return block.attention, model.attentions()[name].head_numbers.index(head), x_VD


def _key_value(attention: Attention, x_VD: Tensor, head: int) -> tuple[Tensor, Tensor]:
    group = attention.kv_indices[head]
    k_1GVE, v_1GVE = attention.project_kv(x_VD.unsqueeze(0), torch.zeros(1, len(x_VD), dtype=torch.long), NO_POSITION)
    return k_1GVE[0, group], v_1GVE[0, group]


def _names(run: Run) -> tuple[str, ...]:
    return tuple(run.codec.target_pieces(range(run.config.target_vocab)))


def _symbol(run: Run, token: str) -> int:
    ids: Sequence[int] = run.codec.target.encode([token])[0]
    if len(ids) != 1:
        raise UserError(f"{token!r} is {len(ids)} tokens of this vocabulary, not one")
    return ids[0]


def _decoder(model: Model) -> Transformer:
    """The tower of a language model whose parts can be added up."""
    decoder = model.decoder
    plain = isinstance(decoder, Transformer) and all(
        type(block) is Block and isinstance(block.attention, Attention) for block in decoder.blocks
    )
    if model.encoder is not None or not plain or model.output is None:
        raise UserError("circuits are read off language models: a decoder alone, with plain attention and layers")
    assert isinstance(decoder, Transformer)
    return decoder


def rollout(trace: Trace, kind: str | None = None) -> list[np.ndarray]:
    """After each layer, the share of every input in every place, (T, T); rows sum to one.

    `kind` is encoder or decoder; by default that of the first map. Half of what a layer passes on is what it was given,
    since its output is added to its input; the other half comes through its heads, of which the mean is taken.
    """
    maps = [found for found in trace.maps if found.kind == (kind or trace.maps[0].kind)]
    if not maps or maps[0].rows != maps[0].columns:
        raise UserError(f"there is no self-attention of kind {kind!r} in this trace to roll out")
    return roll(maps)


def roll(maps: Sequence[Map]) -> list[np.ndarray]:
    """The products of (A + I) / 2, layer by layer."""
    out: list[np.ndarray] = []
    for found in maps:
        mean_TS = found.weights_HTS.mean(0)
        through_TS = 0.5 * mean_TS / mean_TS.sum(-1, keepdims=True) + 0.5 * np.eye(len(mean_TS))
        out.append(through_TS @ out[-1] if out else through_TS)
    return out
