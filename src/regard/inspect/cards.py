"""What a walk is made of: cards with a title, a formula and numbers of a few shapes.

Formulas mark what is set low or high by `_` and `^`, with braces around more than one letter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

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
