"""What a walk is made of: cards with a title, a formula and numbers of a few shapes.

Formulas mark what is set low or high by `_` and `^`, with braces around more than one letter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from regard.model import Model
from regard.nn.hooks import ForwardCalls
from regard.nn.transformer import Transformer

NUMBERS = 8  # of a vector that are shown
MOST_STEPS = 40  # tokens that can be walked


@dataclass(frozen=True)
class Vector:
    """A row of numbers for each token (or for each head and token): the first few, the length and the width."""

    label: str
    first: np.ndarray  # (T, NUMBERS) or (H, T, NUMBERS)
    norm: np.ndarray  # (T,) or (H, T)
    width: int

    @classmethod
    def of(cls, label: str, x: Tensor, most: int | None = MOST_STEPS) -> Vector:
        """From (T, D) or (H, T, E)."""
        x = x[..., :most, :].float().cpu()
        return cls(label, x[..., :NUMBERS].numpy(), x.norm(dim=-1).numpy(), x.shape[-1])


@dataclass(frozen=True)
class Scores:
    """What stands between queries and weights. The weights themselves are in the map of this name."""

    map: str
    raw_HTS: np.ndarray
    scale: float  # scores are raw * scale
    bias_HTS: np.ndarray | None
    seen_TS: np.ndarray | None  # False: masked; None: everything is seen
    key_first: Vector  # per head and key
    value_first: Vector


@dataclass(frozen=True)
class Card:
    """One step."""

    title: str
    formula: str
    text: str
    shape: str = ""
    vectors: tuple[Vector, ...] = ()
    scores: Scores | None = None
    show: str = "vectors"  # vectors, qkv, scores, sum, heads or prediction


@dataclass(frozen=True)
class Walk:
    """All cards of a tower, per layer."""

    name: str
    rows: str  # the tokens that walk: a row of the trace
    layers: tuple[tuple[str, tuple[Card, ...]], ...]


def embedding(model: Model, name: str, calls: ForwardCalls, ids: Sequence[int] | None) -> Card:
    """What goes into the first layer of a tower; without ids, patches of an image."""
    tower: Transformer = getattr(model, name)
    device = model.device
    if ids is None:
        assert model.image is not None
        embedded_TD = calls.output(model.image)
        formula, text, shape = _square(model)
    else:
        table = model.source_embedding if name == "encoder" else model.target_embedding
        assert table is not None
        width = table.embedding_dim
        scale = math.sqrt(width) if model.config.scale_embeddings else 1.0
        embedded_TD = table(torch.tensor(list(ids), device=device)) * scale
        formula = f"x_t = {'√d · ' if scale != 1.0 else ''}E[token_t]"
        text = "The token's row of the embedding table" + (f", times √{width} = {scale:.2f}" if scale != 1 else "")
        shape = f"E: {len(table.weight)} × {width}"
    vectors = [Vector.of("embedding", embedded_TD)]
    if name == "encoder" and model.token_type_embedding is not None:
        segment_D: Tensor = model.token_type_embedding.weight[0]
        vectors.append(Vector.of("segment", segment_D.expand_as(embedded_TD)))
        formula += " + S[0]"
        text += ", plus the vector of the first segment"
    pos_1TD = tower.position.embed(torch.arange(len(embedded_TD), device=device).unsqueeze(0))
    if pos_1TD is not None:
        vectors.append(Vector.of("position", pos_1TD[0]))
        formula += " + P[t]"
        text += ", plus the vector of its position"
    else:
        text += "; position enters later, in the attention"
    normed = not isinstance(tower.embed_norm, nn.Identity)
    if normed:
        formula = f"x_t = norm({formula.removeprefix('x_t = ')})"
        text += ", normalised"
    if normed or len(vectors) > 1:
        vectors.append(Vector.of("x", calls.input(tower.blocks[0])))
    title = "Embedding and position" if ids is not None else "Square and position"
    return Card(title, formula, text + ".", shape, tuple(vectors))


def _square(model: Model) -> tuple[str, str, str]:
    patches = model.config.patches
    assert patches is not None and model.image is not None
    numbers, width = model.image.project.in_features, model.image.project.out_features
    text = (
        f"The {numbers} pixels of a square ({patches.channels} × {patches.size} × {patches.size}) through one matrix;"
        " the first vector, which stands for the image, is trained"
    )
    return "x_t = W pixels_t + b", text, f"1 × {numbers}  ·  {numbers} × {width}  =  1 × {width}"


def prediction(model: Model, calls: ForwardCalls, norm: nn.Module) -> Card:
    """From the last vector to logits and probabilities."""
    assert model.output is not None
    x_TD = calls.input(model.output)
    vocab, width = model.output.weight.shape
    normed = "" if isinstance(norm, nn.Identity) else " after a last normalisation"
    if model.config.output == "classes":
        pooled = " and one more layer, tanh(W x + b)," if model.pooler is not None else ""
        text = f"The first vector{normed}{pooled} stands for the whole, and is compared with every class."
    else:
        side = " of the target" if model.encoder is not None else ""
        tied = f" W is the embedding table{side}, used a second time." if model.config.tie_output else ""
        text = f"The vector of the last layer{normed} is compared with every token of the vocabulary.{tied}"
    bias = "" if model.output.bias is None else " + b"
    return Card(
        "Prediction: logits and softmax",
        f"logits = x_t W^T{bias}    p = softmax(logits)",
        text,
        f"1 × {width}  ·  {width} × {vocab}  =  1 × {vocab}",
        (Vector.of("x", x_TD),),
        None,
        "prediction",
    )
