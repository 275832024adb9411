"""Which source symbol an output symbol comes from, read off the attention in a second, forced pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from regard.batch import Ids, collate
from regard.config import Value, parse
from regard.decode.attention import cross_attentions, heads_of, mean_heads, watching
from regard.decode.batches import by_length
from regard.decode.hypothesis import Alignment
from regard.decode.options import Head
from regard.errors import UserError
from regard.files import read_json, write_json
from regard.model import Model
from regard.run import HEADS, Run
from regard.text.example import Example


def to_words(run: Run, alignment: Alignment) -> Alignment:
    """The alignment of words, where symbols are pieces of them: summed over the source's, the mean of the output's."""
    source = _words(alignment.source[:-1], run.codec.source.scheme)
    output = _words(alignment.output, run.codec.target.scheme)
    member_SW = np.zeros((len(alignment.source), len(source) + 1))
    member_SW[-1, -1] = 1  # the end stays by itself
    for word, places in enumerate(source):
        member_SW[places, word] = 1
    soft = np.zeros((len(output), len(source) + 1))
    for word, places in enumerate(output):
        soft[word] = (alignment.soft[places] @ member_SW).mean(0)
    soft /= np.maximum(soft.sum(1, keepdims=True), 1e-9)
    shown = tuple("".join(alignment.source[i] for i in places).strip() for places in source)
    made = tuple("".join(alignment.output[i] for i in places).strip() for places in output)
    return Alignment(soft, (*shown, alignment.source[-1]), made)


def _words(symbols: Sequence[str], scheme: str) -> list[list[int]]:
    """The places of each word's symbols; white space separates words and belongs to none."""
    if scheme == "space":
        return [[place] for place in range(len(symbols))]
    words: list[list[int]] = []
    inside = False
    for place, symbol in enumerate(symbols):
        if symbol.strip():
            if not inside or symbol[0].isspace():
                words.append([])
            words[-1].append(place)
        inside = bool(symbol.strip()) and not symbol[-1].isspace()
    return words


class Heads(Value):
    """What alignment.json holds: layers and heads counted from 0, as in `Options`; people are shown them from 1."""

    heads: tuple[Head, ...]


def align(
    run: Run, sources: Sequence[Ids], outputs: Sequence[Ids], heads: Sequence[Head] = (), batch_tokens: int = 8192
) -> list[Alignment]:
    """The alignment of every output with its source, both as ids that end in the end symbol: the mean of the heads.

    The source's end symbol has its column (attention parks there), but no hard link.
    """
    heads = heads_of(run.model, heads)
    results: list[Alignment] = [Alignment(np.zeros((0, 0)), (), ())] * len(outputs)
    lengths = [max(len(source), len(output)) for source, output in zip(sources, outputs, strict=True)]
    for batch in by_length(lengths, batch_tokens):
        seen = _forced(
            run.model, [sources[i] for i in batch], [outputs[i] for i in batch], [layer for layer, _ in heads]
        )
        weights_BTS = mean_heads(seen, heads).numpy(force=True)
        for i, weights_TS in zip(batch, weights_BTS, strict=True):
            soft = weights_TS[: len(outputs[i]) - 1, : len(sources[i])]
            soft = soft / np.maximum(soft.sum(1, keepdims=True), 1e-9)  # local attention fades within its window
            shown = run.codec.source_pieces(sources[i]), run.codec.target_pieces(outputs[i][:-1])
            results[i] = Alignment(soft, tuple(shown[0]), tuple(shown[1]))
    return results


def choose_heads(
    run: Run, pairs: Iterable[tuple[str, str] | Example], most: int = 4, lines: int = 200
) -> tuple[Head, ...]:
    """The decoder heads that align best on given pairs: sharp, and over the pairs looking at all of the source.

    A head's merit is its mean weight on the symbol it looks at most, times the share of source symbols that it ever
    looks at. The best head is taken, and up to `most` with nearly its merit.
    """
    examples = [pair if isinstance(pair, Example) else Example(*pair) for pair in islice(pairs, lines)]
    examples = [example for example in examples if example.source.strip() and example.target]
    if not examples:
        raise UserError("choosing alignment heads needs pairs with a source and a target")
    sources = run.codec.encode_source(examples)
    targets = run.codec.encode_target([example.target or "" for example in examples])
    layers = sorted(cross_attentions(run.model))
    merits: dict[Head, float] = {}
    for batch in by_length([max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)], 8192):
        seen = _forced(run.model, [sources[i] for i in batch], [targets[i] for i in batch], layers)
        for layer, passes in seen.items():
            for row, weights_HTS in zip(batch, torch.cat(passes, 2), strict=True):
                weights_HTS = weights_HTS[:, : len(targets[row]) - 1, : len(sources[row]) - 1]
                sharp_H = weights_HTS.amax(2).mean(1)
                covered_H = weights_HTS.sum(1).clamp(max=1.0).mean(1)
                for head, merit in enumerate((sharp_H * covered_H).tolist()):
                    merits[layer, head] = merits.get((layer, head), 0.0) + merit
    ranked = sorted(merits, key=lambda head: (-merits[head], head))
    return tuple(sorted(head for head in ranked[:most] if merits[head] >= 0.9 * merits[ranked[0]]))


def save_heads(path: Path, heads: Sequence[Head]) -> None:
    """Keep the heads to align with in a run directory."""
    write_json(path / HEADS, {"heads": [list(head) for head in heads]})


def load_heads(path: Path) -> tuple[Head, ...]:
    """The heads kept in a run directory, if any."""
    if not (path / HEADS).is_file():
        return ()
    return parse(Heads, read_json(path / HEADS), str(path / HEADS)).heads


@torch.inference_mode()
def _forced(
    model: Model, sources: Sequence[Ids], outputs: Sequence[Ids], layers: Sequence[int]
) -> dict[int, list[Tensor]]:
    made = collate(sources, outputs, model.config).to(next(model.parameters()).device)
    with watching(model, sorted(set(layers))) as seen:
        model.hidden(made.source_BS, made.source_keep_BS, made.input_BT)
    return seen
