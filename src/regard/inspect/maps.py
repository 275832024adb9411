"""Attention as maps with names, and which of them says what an output was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from regard.inspect.places import attentions, head_numbers, place
from regard.model import Model

ROWS = {"encoder": ("source", "source"), "decoder": ("input", "input"), "cross": ("output", "source")}


@dataclass(frozen=True)
class Map:
    """The weights of all heads of one attention: `rows` look at `columns`, both names of token rows of the trace."""

    name: str  # of the attention in the model: decoder.blocks.0.cross
    kind: str  # encoder, decoder or cross
    layer: int
    weights_HTS: np.ndarray
    rows: str
    columns: str
    heads: tuple[int, ...]  # their numbers; pruned models have gaps


def maps_of(model: Model, recorded: Mapping[str, Tensor]) -> tuple[Map, ...]:
    """The maps of one example, from what was recorded of all weights."""
    out = []
    for name in attentions(model):
        kind, layer = place(name)
        weights_HTS = recorded[f"{name}.weights"][0].float().cpu().numpy()
        out.append(Map(name, kind, layer, weights_HTS, *ROWS[kind], head_numbers(model, name)))
    return tuple(out)


def alignments(maps: Sequence[Map], heads: Sequence[tuple[int, int]], length: int) -> dict[str, np.ndarray]:
    """Maps from outputs to the source, the best guess first, then the mean of each layer."""
    cross = {found.layer: found for found in maps if found.kind == "cross"}
    out: dict[str, np.ndarray] = {}
    several = len(cross) > 1 or any(len(found.heads) > 1 for found in cross.values())
    chosen = [(layer, index) for layer, index in heads if layer in cross and index < len(cross[layer].heads)]
    if chosen and several:
        names = ", ".join(f"{layer + 1}.{cross[layer].heads[index] + 1}" for layer, index in chosen)
        out[f"alignment heads {names}"] = np.mean([cross[layer].weights_HTS[i] for layer, i in chosen], axis=0)
    elif several:
        layer, index = best_head({layer: found.weights_HTS for layer, found in cross.items()}, length)
        out[f"sharpest head: {layer + 1}.{cross[layer].heads[index] + 1}"] = cross[layer].weights_HTS[index]
    for layer, found in cross.items():
        out[f"layer {layer + 1}, mean of heads" if several else "attention"] = found.weights_HTS.mean(0)
    if len(cross) > 1:
        out["mean of everything"] = np.mean([found.weights_HTS.mean(0) for found in cross.values()], axis=0)
    return out


def best_head(weights: dict[int, np.ndarray], length: int) -> tuple[int, int]:
    """The head (layer, index) that looks most like an alignment: sharp, and leaving little of the source unseen."""
    scored = {
        (layer, head): alignment_quality(weights_TS, length)
        for layer, weights_HTS in weights.items()
        for head, weights_TS in enumerate(weights_HTS)
    }
    return max(scored, key=lambda place: scored[place])


def alignment_quality(weights_TS: np.ndarray, length: int) -> float:
    """Sharpness times coverage: the mean of the largest weights, and how much of the source but its end is seen."""
    if weights_TS.size == 0:
        return 0.0
    sharpness = weights_TS.max(-1).mean()
    coverage = np.minimum(1.0, weights_TS[:, : max(1, length - 1)].sum(0)).mean()
    return float(sharpness * coverage)
