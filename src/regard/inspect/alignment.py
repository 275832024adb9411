"""The alignment heads of a run: a small file beside its weights, written by `regard heads`, read by whoever aligns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regard.errors import UserError
from regard.files import read_json, write_json

FILE = "alignment.json"
Heads = tuple[tuple[int, int], ...]  # (decoder layer, place among the heads that the layer has), both from 0


def alignment_heads(run: Path) -> Heads:
    """The heads that a run's alignments are read from; none if nobody has looked for them."""
    path = run / FILE
    if not path.is_file():
        return ()
    found = read_json(path)
    heads = found.get("heads") if isinstance(found, dict) else None
    if not isinstance(heads, list) or not all(_is_pair(pair) for pair in heads):
        raise UserError(f'{path}: not a list of heads; it should look like {{"heads": [[2, 5], [2, 7]]}}')
    return tuple((pair[0], pair[1]) for pair in heads)


def save_alignment_heads(run: Path, heads: Sequence[tuple[int, int]], reason: str) -> None:
    """Keep the heads in a run, with a word on how they were found."""
    write_json(run / FILE, {"heads": [list(pair) for pair in heads], "chosen_by": reason})


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(number) is int and number >= 0 for number in pair)
