"""What looks wrong about an output, with the reason: for people and scripts to look at, never to change the output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regard.decode.hypothesis import Alignment

TURNS, COVERED = 4, 8  # a unit so often in a row, over so many symbols, is a loop
LONG, SHORT, SHORTEST = 4.0, 0.2, 10  # output symbols per source symbol; short only matters for longer sources
LOW = -2.5  # mean log-probability per symbol: the model was guessing
PARKED, TOKENS = 0.9, 6  # share of all attention on one source symbol, over so many output symbols
BLUR = 0.95  # of the entropy of looking everywhere alike


def degenerate(ids: Sequence[int], source: int, token_scores: Sequence[float]) -> dict[str, str]:
    """Flags of an output (ids without the end symbol) for a source of so many symbols; 0: any length is right."""
    flags = {}
    length = len(ids)
    if loop := longest_loop(ids):
        size, turns = loop
        flags["repetition"] = f"{size} symbol{'s' * (size > 1)} repeated {turns} times in a row"
    if source and length / source > LONG and length > SHORTEST:
        flags["length_ratio"] = f"{length} symbols for a source of {source}"
    elif source >= SHORTEST and length / source < SHORT:
        flags["length_ratio"] = f"only {length} symbols for a source of {source}"
    mean = sum(token_scores) / max(1, len(token_scores))
    if mean < LOW:
        flags["low_score"] = f"{mean:.2f} per symbol on average, below {LOW}"
    return flags


def longest_loop(ids: Sequence[int]) -> tuple[int, int] | None:
    """(size, turns) of the unit that is repeated in a row over the most symbols, if that is a loop."""
    row = np.asarray(ids)
    longest: tuple[int, int] | None = None
    for size in range(1, len(row) // TURNS + 1):
        same = np.concatenate(([False], row[size:] == row[:-size], [False])).astype(np.int8)
        edges = np.flatnonzero(np.diff(same))
        if not len(edges):
            continue
        run = int((edges[1::2] - edges[::2]).max()) + size  # symbols that this unit covers
        turns = run // size
        if turns >= TURNS and run >= COVERED and (longest is None or turns * size > longest[0] * longest[1]):
            longest = size, turns
    return longest


def collapsed(alignment: Alignment) -> dict[str, str]:
    """Flags of an output's attention: parked on one symbol, or looking nowhere in particular."""
    soft = alignment.soft
    if len(soft) < TOKENS or soft.shape[1] < TOKENS:
        return {}
    share = soft.mean(0)
    place = int(share.argmax())
    if share[place] > PARKED:
        symbol = alignment.source[place]
        return {"attention": f"{100 * share[place]:.0f}% of it on source symbol {place} ({symbol!r})"}
    entropy = -(soft * np.log(np.maximum(soft, 1e-12))).sum(1).mean() / np.log(soft.shape[1])
    if entropy > BLUR:
        return {"attention": "spread evenly over the source"}
    return {}
