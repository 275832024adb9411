"""Alignment of outputs with sources by cross-attention heads, which are chosen once per run on held-out pairs."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from regard.config import Config, Value, parse
from regard.data.reader import read_lines
from regard.decode.hypothesis import Alignment
from regard.decode.request import HeadIndex
from regard.errors import UserError, plural
from regard.files import read_json, rewriting, write_json
from regard.run import HEADS
from regard.text.codec import Codec

MAX_HEADS = 4  # alignment heads
MIN_MERIT = 0.9  # of an alignment head, as a share of the merit of the best head

Links = list[tuple[int, int]]  # (source position, output position) from 0
H = TypeVar("H", bound=Hashable)


class AlignmentHeads(Value):
    """The content of alignment.json; layers and heads are counted from 0, as in `Options`."""

    heads: tuple[HeadIndex, ...]


def save_heads(path: Path, heads: Sequence[HeadIndex]) -> None:
    with rewriting(path, HEADS):
        write_json(path / HEADS, {"heads": [list(head) for head in heads]})


def load_heads(path: Path) -> tuple[HeadIndex, ...]:
    """The alignment heads of a run directory; none if it has no alignment.json."""
    if not (path / HEADS).is_file():
        return ()
    return parse(AlignmentHeads, read_json(path / HEADS), str(path / HEADS)).heads


def check_heads(config: Config, heads: Sequence[HeadIndex]) -> tuple[HeadIndex, ...]:
    """Check that a model has these heads -> the heads; by default all heads of the second to last layer."""
    counts = config.cross_heads
    if not heads:
        layer = sorted(counts)[-2:][0]
        return tuple((layer, head) for head in range(counts[layer]))
    for layer, head in heads:
        if head >= counts.get(layer, 0):
            layers = ", ".join(f"{i + 1}: {plural(count, 'head')}" for i, count in sorted(counts.items()))
            advice = f"(layers with cross-attention, counted from 1: {layers})"
            raise UserError(f"alignment_heads: there is no layer {layer + 1} with a head {head + 1} {advice}")
    return tuple(heads)


def make_alignment(
    codec: Codec, source: Sequence[int], output: Sequence[int], weights_TS: NDArray[np.floating]
) -> Alignment:
    """The alignment of an output by attention weights; ids have end tokens."""
    soft = weights_TS[: len(output) - 1]
    soft = soft / np.maximum(soft.sum(1, keepdims=True), 1e-9)  # with local attention they sum to less than 1
    return Alignment(soft, tuple(codec.source_pieces(source)), tuple(codec.target_pieces(output[:-1])))


def best_heads(merits: Mapping[H, float]) -> list[H]:
    """Select the head with the highest merit and heads that are nearly as good, in the order of `merits`."""
    ranked = sorted(merits, key=lambda head: -merits[head])[:MAX_HEADS]
    chosen = {head for head in ranked if merits[head] >= MIN_MERIT * merits[ranked[0]]}
    return [head for head in merits if head in chosen]


def alignment_quality(weights_TS: NDArray[np.floating]) -> NDArray[np.floating]:
    """Sharpness times coverage of attention weights (..., T, S); the last column is the end token of the source."""
    if weights_TS.size == 0:
        return np.zeros(weights_TS.shape[:-2])
    sharpness = weights_TS.max(-1).mean(-1)  # of the output tokens
    coverage = np.minimum(1.0, weights_TS[..., : max(1, weights_TS.shape[-1] - 1)].sum(-2)).mean(-1)
    return np.asarray(sharpness * coverage)


def read_links(path: str | Path) -> list[Links]:
    """Read an alignment file with lines of source-output pairs like `0-0 1-2`, counted from 0."""
    rows = []
    for number, line, problem in read_lines(str(path)):
        if problem:
            raise UserError(f"{path}:{number}: {problem}")
        links = []
        for word in line.split():
            if not (link := re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})", word)):
                advice = "write source-output, counted from 0, like 0-0 1-2"
                raise UserError(f"{path}:{number}: {word!r} is not a link; {advice}")
            links.append((int(link[1]), int(link[2])))
        rows.append(links)
    return rows
