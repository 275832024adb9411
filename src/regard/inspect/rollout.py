"""Attention rollout (Abnar & Zuidema 2020): how much of each input reaches each place through all layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regard.errors import UserError
from regard.inspect.maps import Map
from regard.inspect.trace import Trace


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
