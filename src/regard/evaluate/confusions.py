"""The most frequent confusions of tokens, characters or labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from rapidfuzz.distance import Levenshtein

from regard.metrics import References, alternatives, closest

MAX_SHOWN = 40  # characters of an example
NO_TOKEN = "∅"  # in place of a token that was inserted or deleted
# The parts to compare: whole texts, tokens separated by spaces, or characters.
Unit = Literal["label", "token", "character"]
_SPLIT: dict[Unit, Callable[[str], Sequence[Hashable]]] = {
    "label": lambda text: (text,),
    "token": str.split,
    "character": str,
}


class ConfusedExample(NamedTuple):
    """An example with a confusion."""

    location: str
    source: str
    reference: str
    output: str


@dataclass(frozen=True)
class Confusion:
    """A token of the reference, the token of the output at its place, their count, and the first example."""

    reference: str | None  # None: inserted
    output: str | None  # None: deleted
    count: int
    example: ConfusedExample

    def cells(self) -> dict[str, str]:
        """The row of a table; spaces are quoted, and a long example is shortened."""
        source = self.example.source
        source = source if len(source) <= MAX_SHOWN else source[: MAX_SHOWN - 1] + "…"
        place = f"{self.example.location} {source}".rstrip()
        sides = {"reference": _visible(self.reference), "output": _visible(self.output)}
        return {**sides, "count": f"{self.count:,}", "example": place}

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"example": self.example._asdict()}


def _visible(token: str | None) -> str:
    return NO_TOKEN if token is None else repr(token) if token.isspace() else token or "''"


def count_confusions(
    outputs: Sequence[str],
    references: References,
    unit: Unit,
    limit: int,
    sources: Sequence[str] = (),
    locations: Sequence[str] = (),
    lowercase: bool = False,
) -> list[Confusion]:
    """The `limit` most frequent edits of a minimal edit distance between each output and its closest reference."""
    counts: Counter[tuple[str | None, str | None]] = Counter()
    first: dict[tuple[str | None, str | None], ConfusedExample] = {}
    fold = str.lower if lowercase else str
    split = _SPLIT[unit]
    for index, (output, several) in enumerate(zip(outputs, alternatives(references), strict=True)):
        ours = split(fold(output))
        theirs = [split(fold(reference)) for reference in several]
        edits, reference = closest(ours, theirs)
        if not edits:
            continue
        texts = sources[index] if sources else "", several[theirs.index(reference)], output
        for edit in Levenshtein.editops(reference, ours):
            pair = (
                None if edit.tag == "insert" else str(reference[edit.src_pos]),
                None if edit.tag == "delete" else str(ours[edit.dest_pos]),
            )
            counts[pair] += 1
            first.setdefault(pair, ConfusedExample(locations[index] if locations else "", *texts))
    ranked = sorted(counts, key=lambda pair: (-counts[pair], pair[0] or "", pair[1] or ""))
    return [Confusion(*pair, counts[pair], first[pair]) for pair in ranked[:limit]]
