"""What every head of a model does: how much it is needed, how sharp it looks, how far, and at what."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from regard.data.images import Pictures
from regard.errors import UserError
from regard.inspect.importance import ablation_importance, gradient_importance
from regard.inspect.induction import induction_scores
from regard.inspect.links import Links, alignment_merits
from regard.inspect.looks import MAINLY, look, look_squares
from regard.inspect.material import Material, batches_of, encode_pairs
from regard.inspect.places import attentions, head_numbers, place
from regard.run import Run

NEARLY_BEST = 0.9  # of the best head's merit: enough to align along with it
MOST_ALIGNMENT_HEADS = 4


@dataclass(frozen=True)
class Head:
    """One head of one attention."""

    name: str  # of its attention in the model
    kind: str  # encoder, decoder or cross
    layer: int  # from 0
    head: int  # its number from 0, as before any pruning
    index: int  # its place among the heads that are left
    gradient: float  # expected |dL/dgate| per symbol
    ablation: float | None  # rise of the loss per symbol without it
    confidence: float  # mean of the largest weights
    entropy: float  # bits
    distance: float  # between who looks and what is looked at, by weight: symbols, in an image pixels
    what: str  # what it mainly looks at, in words
    share: float  # of its weight that goes there
    alignment: float | None = None  # cross-attention: agreement with given links, or sharpness times coverage
    induction: float | None = None  # language models: weight on what followed the same symbol before

    def to_json(self) -> dict[str, Any]:
        out = {key: value for key, value in vars(self).items() if value is not None}
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in out.items()}


def measure_heads(
    run: Run,
    material: Material,
    *,
    ablation: bool = True,
    links: Sequence[Links] | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> list[Head]:
    """Judge every head: by pairs, texts with labels, plain text, or images with labels, as the model has it.

    `links` are a given alignment for each pair; `tick` is told about the slow part.
    """
    model, config = run.model, run.config
    both = config.encoder is not None and config.decoder is not None
    if links is not None and not both:
        raise UserError("links are for models with a source and an output, which this is not")
    if links is not None and len(links) != len(material):
        raise UserError(f"{len(links):,} lines of links for {len(material):,} pairs; there must be one for each")
    batches = batches_of(run, material)
    gradient = gradient_importance(model, batches)
    ablated = ablation_importance(model, batches, tick) if ablation else {}
    sums = look_squares(model, batches) if config.patches is not None else look(model, batches)
    merits = {}
    if both and not isinstance(material, str | Pictures):
        pairs = encode_pairs(run, material)
        if links is not None and len(pairs) != len(material):
            raise UserError("pairs with links need a target each")
        merits = alignment_merits(model, pairs, links)
    text = torch.tensor([i for i in range(run.codec.target.size) if i not in run.codec.target.special])
    induced = induction_scores(model, text) if config.encoder is None else {}
    out = []
    for name in attentions(model):
        kind, layer = place(name)
        for index, number in enumerate(head_numbers(model, name)):
            seen, spot = sums[name], (name, index)
            what, share = seen.describe(index)
            out.append(
                Head(
                    name,
                    kind,
                    layer,
                    number,
                    index,
                    gradient[spot],
                    ablated.get(spot),
                    float(seen.confidence_H[index] / seen.queries),
                    float(seen.entropy_H[index] / seen.queries),
                    float(seen.distance_H[index] / seen.queries),
                    what,
                    share,
                    merits.get(spot),
                    induced.get(spot),
                )
            )
    aligning, inducing = best_alignment_heads(out), induction_heads(out)
    named = [replace(h, what="alignment", share=h.alignment or 0.0) if h in aligning else h for h in out]
    return [replace(h, what="induction", share=h.induction or 0.0) if h in inducing else h for h in named]


def induction_heads(heads: Sequence[Head]) -> list[Head]:
    """The heads that mainly look at what followed the same symbol before, the clearest first."""
    return sorted((h for h in heads if (h.induction or 0.0) >= MAINLY), key=lambda h: -(h.induction or 0.0))


def best_alignment_heads(heads: Sequence[Head]) -> list[Head]:
    """The head that aligns best and those that nearly do, in the order of the model."""
    able = sorted((h for h in heads if h.alignment is not None), key=lambda h: -(h.alignment or 0.0))
    if not able:
        return []
    enough = NEARLY_BEST * (able[0].alignment or 0.0)
    chosen = [h for h in able[:MOST_ALIGNMENT_HEADS] if (h.alignment or 0.0) >= enough]
    return sorted(chosen, key=lambda h: (h.layer, h.index))


def grids(heads: Sequence[Head], value: Callable[[Head], float | None]) -> dict[str, np.ndarray]:
    """A number per head as a matrix (layers, heads) for each kind of attention; NaN where there is none."""
    out: dict[str, np.ndarray] = {}
    for kind in dict.fromkeys(h.kind for h in heads):
        these = [h for h in heads if h.kind == kind]
        grid = np.full((max(h.layer for h in these) + 1, max(h.head for h in these) + 1), math.nan)
        for h in these:
            number = value(h)
            grid[h.layer, h.head] = math.nan if number is None else max(0.0, number)
        out[kind] = grid
    return out
