"""Confusions: which tokens, characters or labels are taken for which, most frequent first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from rapidfuzz.distance import Levenshtein

from regard.metrics import References, alternatives, closest

LONGEST = 40  # characters of an example that are shown
NOTHING = "∅"  # in place of a token that was inserted or deleted
# What a text is compared by: as a whole, token by token (separated by spaces), or character by character.
Unit = Literal["label", "token", "character"]
_CUT: dict[Unit, Callable[[str], Sequence[Hashable]]] = {
    "label": lambda text: (text,),
    "token": str.split,
    "character": str,
}


class ConfusedExample(NamedTuple):
    """An example with a confusion, and where it was read."""

    location: str
    source: str
    reference: str
    output: str


@dataclass(frozen=True)
class Confusion:
    """What the reference has, what the output has in its place, how often, and the first example."""

    reference: str | None  # None: inserted
    output: str | None  # None: deleted
    count: int
    example: ConfusedExample

    def cells(self) -> dict[str, str]:
        """The row of a table; spaces are quoted, and a long example is cut."""
        source = self.example.source
        source = source if len(source) <= LONGEST else source[: LONGEST - 1] + "…"
        place = f"{self.example.location} {source}".rstrip()
        sides = {"reference": _visible(self.reference), "output": _visible(self.output)}
        return {**sides, "count": f"{self.count:,}", "example": place}

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"example": self.example._asdict()}


def _visible(token: str | None) -> str:
    return NOTHING if token is None else repr(token) if token.isspace() else token or "''"


def count_confusions(
    outputs: Sequence[str],
    references: References,
    unit: Unit,
    most: int,
    sources: Sequence[str] = (),
    locations: Sequence[str] = (),
    lowercase: bool = False,
) -> list[Confusion]:
    """The `most` frequent differences between outputs and their closest references, by a smallest number of edits."""
    counts: Counter[tuple[str | None, str | None]] = Counter()
    first: dict[tuple[str | None, str | None], ConfusedExample] = {}
    fold, cut = str.lower if lowercase else str, _CUT[unit]
    for index, (output, several) in enumerate(zip(outputs, alternatives(references), strict=True)):
        ours, theirs = cut(fold(output)), [cut(fold(reference)) for reference in several]
        edits, reference = closest(ours, theirs)
        if not edits:
            continue
        place = sources[index] if sources else "", several[theirs.index(reference)], output
        for edit in Levenshtein.editops(reference, ours):
            pair = (
                None if edit.tag == "insert" else str(reference[edit.src_pos]),
                None if edit.tag == "delete" else str(ours[edit.dest_pos]),
            )
            counts[pair] += 1
            first.setdefault(pair, ConfusedExample(locations[index] if locations else "", *place))
    ranked = sorted(counts, key=lambda pair: (-counts[pair], pair[0] or "", pair[1] or ""))
    return [Confusion(*pair, counts[pair], first[pair]) for pair in ranked[:most]]
