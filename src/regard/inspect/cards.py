"""What the page shows of a model's computation: cards with a formula and numbers, and heatmaps of position encodings.

The cards of the embedding and of the prediction are here; those of the layers between them are in `walk`. In formulas
`_` and `^` set the next letter low or high, or several in braces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from regard.model import Model
from regard.nn.hooks import ForwardCalls
from regard.nn.position import Alibi, Bucket, Learned, Position, Rotary
from regard.nn.transformer import Transformer

SHOWN_NUMBERS = 8  # of each vector
WALK_TOKENS = 40  # tokens whose walk is kept
HEATMAP_COLUMNS = 256


@dataclass(frozen=True)
class Vector:
    """A vector for each token, or for each head and token: its first numbers, norm and width."""

    label: str
    first: np.ndarray  # (T, SHOWN_NUMBERS) or (H, T, SHOWN_NUMBERS)
    norm: np.ndarray  # (T,) or (H, T)
    width: int

    @classmethod
    def of(cls, label: str, x: Tensor, tokens: int | None = WALK_TOKENS) -> Vector:
        """From (T, D) or (H, T, E)."""
        x = x[..., :tokens, :].float().cpu()
        return cls(label, x[..., :SHOWN_NUMBERS].numpy(), x.norm(dim=-1).numpy(), x.shape[-1])


def vectors_of(tensors: Mapping[str, Tensor]) -> tuple[Vector, ...]:
    """The vectors of a card, by label."""
    return tuple(Vector.of(label, x) for label, x in tensors.items())


@dataclass(frozen=True)
class AttentionScores:
    """What leads from queries to the weights of an attention; the weights themselves are in the map of this name."""

    map: str
    raw_HTS: np.ndarray
    scale: float  # scores are raw * scale
    bias_HTS: np.ndarray | None
    mask_TS: np.ndarray | None  # False: masked; None: nothing is masked
    keys: Vector
    values: Vector


@dataclass(frozen=True)
class Card:
    """One step of a computation."""

    title: str
    formula: str
    text: str
    shape: str = ""
    vectors: tuple[Vector, ...] = ()
    scores: AttentionScores | None = None
    show: str = "vectors"  # vectors, qkv, scores, sum, heads or prediction
    active: float | None = None  # of a feed-forward layer: the share of all neurons that are not zero


@dataclass(frozen=True)
class Walk:
    """The cards of every layer of a stack."""

    name: str
    rows: str  # the token row of the trace that goes through the stack
    layers: tuple[tuple[Card, ...], ...]


def bias_term(name: str, layer: nn.Module | None) -> str:
    """What a formula adds for the bias of a layer: nothing if it has none."""
    return "" if getattr(layer, "bias", None) is None else f" + {name}"


def norm_formula(norm: nn.Module, x: str) -> str:
    """A normalisation with every term that it has; μ and σ are those of the numbers of one vector."""
    scaled = "" if getattr(norm, "weight", None) is None else "γ ∘ "
    if isinstance(norm, nn.RMSNorm):
        return f"{scaled}{x} / √(mean({x}^2) + ε)"
    return f"{scaled}({x} − μ) / √(σ^2 + ε){bias_term('β', norm)}"


def embedding_card(model: Model, name: str, calls: ForwardCalls, ids: Sequence[int] | None) -> Card:
    """The input of the first layer of a stack; without ids it is made from the patches of an image."""
    stack: Transformer = getattr(model, name)
    if ids is None:
        patches, image = model.config.image_patches, model.image
        assert image is not None
        pixels, width = image.project.in_features, image.project.out_features
        embedded_TD = calls.output(image)
        title, formula = "Patch and position", "x_t = W pixels_t + b"
        text = (
            f"The {pixels} pixels of a patch ({patches.channels} × {patches.size} × {patches.size}) through one matrix;"
            " the first vector, the class token, is trained"
        )
        shape = f"1 × {pixels}  ·  {pixels} × {width}  =  1 × {width}"
    else:
        table = model.source_embedding if name == "encoder" else model.target_embedding
        assert table is not None
        width, scaled = table.embedding_dim, model.config.scale_embeddings
        embedded_TD = model.embed(table, torch.tensor(list(ids), device=model.device))
        title, formula = "Embedding and position", f"x_t = {'√d · ' if scaled else ''}E[token_t]"
        text = "The token's row of the embedding table" + (f", times √{width} = {width**0.5:.2f}" if scaled else "")
        shape = f"E: {len(table.weight)} × {width}"
    vectors = {"embedding": embedded_TD}
    if name == "encoder" and model.token_type_embedding is not None:
        vectors["segment"] = model.token_type_embedding.weight[0].expand_as(embedded_TD)
        formula += " + S[0]"
        text += ", plus the vector of the first segment"
    pos_1TD = stack.position.embed(torch.arange(len(embedded_TD), device=model.device).unsqueeze(0))
    if pos_1TD is not None:
        vectors["position"] = pos_1TD[0]
        formula += " + P[t]"
        text += ", plus the vector of its position"
    else:
        text += "; position enters later, in the attention"
    normed = not isinstance(stack.embed_norm, nn.Identity)
    if normed:
        formula = f"e_t{formula.removeprefix('x_t')}    x_t = {norm_formula(stack.embed_norm, 'e_t')}"
        text += ", normalised"
    if normed or len(vectors) > 1:
        vectors["x"] = calls.input(stack.blocks[0])
    return Card(title, formula, text + ".", shape, vectors_of(vectors))


def prediction_card(model: Model, calls: ForwardCalls, norm: nn.Module) -> Card:
    """From the last vector to logits and probabilities."""
    assert model.output is not None
    vocab, width = model.output.weight.shape
    normed = "" if isinstance(norm, nn.Identity) else " after a last normalisation"
    if model.classifies:
        pooled = " and the pooler, tanh(W x + b)," if model.pooler is not None else ""
        text = f"The first vector{normed}{pooled} stands for the whole input, and is compared with every class."
    else:
        side = " of the target" if len(model.config.stacks) == 2 else ""
        tied = f" W is the embedding table{side}, used a second time." if model.config.tie_output else ""
        text = f"The vector of the last layer{normed} is compared with every token of the vocabulary.{tied}"
    last = "" if isinstance(norm, nn.Identity) else f"x_t ← {norm_formula(norm, 'x_t')}    "
    return Card(
        "Prediction: logits and softmax",
        f"{last}logits = x_t W^T{bias_term('b', model.output)}    p = softmax(logits)",
        text,
        f"1 × {width}  ·  {width} × {vocab}  =  1 × {vocab}",
        vectors_of({"x": calls.input(model.output)}),
        show="prediction",
    )


@dataclass(frozen=True)
class PositionHeatmap:
    """A position encoding as a matrix with named axes; `first_column` is the number of the first column."""

    name: str  # of the stack
    caption: str
    rows: str
    columns: str
    values_RC: np.ndarray
    first_column: int = 0


@torch.no_grad()
def position_heatmap(name: str, stack: Transformer, length: int) -> PositionHeatmap | None:
    """The position encoding of a stack for so many positions; None if there is nothing to draw."""
    position: Position = stack.position
    pos_1T = torch.arange(length, device=next(stack.parameters()).device).unsqueeze(0)
    if isinstance(position, Learned):
        pos_1T = pos_1T[:, : position.table.num_embeddings]
    embedded_1TD = position.embed(pos_1T)
    if embedded_1TD is not None:
        kind = "trained, one row per position" if isinstance(position, Learned) else "sines and cosines"
        width = embedded_1TD.shape[-1]
        part = f"; the first {HEATMAP_COLUMNS} of {width} numbers" if width > HEATMAP_COLUMNS else ""
        caption = f"Added to the embeddings of the {name}: {kind}{part}."
        shown_TD = embedded_1TD[0, :, :HEATMAP_COLUMNS].cpu().numpy()
        return PositionHeatmap(name, caption, "position", "dimension", shown_TD)
    if isinstance(position, Rotary):
        unit_11TE = torch.ones(1, 1, length, position.width, device=pos_1T.device)
        unit_11TE[..., position.width // 2 :] = 0.0  # rotated, the first number of every pair is the cosine
        cos_TE = position.rotate(unit_11TE, pos_1T)[0, 0, :, : position.width // 2]
        caption = f"Queries and keys of the {name} are rotated: the cosine of the angle of every pair of dimensions."
        return PositionHeatmap(name, caption, "position", "pair of dimensions", cos_TE.cpu().numpy())
    if isinstance(position, Alibi | Bucket):
        last = length if stack.causal else 2 * length
        key_1S = torch.arange(last + 1, device=pos_1T.device).unsqueeze(0)
        bias_BHTS = position.bias(torch.full_like(key_1S[:, :1], length), key_1S)
        caption = f"Added to the scores of the {name}, by head and by how far the key is from the query."
        return PositionHeatmap(name, caption, "head", "offset", bias_BHTS[0, :, 0].cpu().numpy(), -length)
    return None
