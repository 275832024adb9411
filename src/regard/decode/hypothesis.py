"""What comes out of a search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Found(NamedTuple):
    """A finished output as ids."""

    ids: tuple[int, ...]  # ends in the end symbol, unless it stopped at the limit of an open-ended task
    token_scores: tuple[float, ...]  # natural-log probabilities, one per id
    value: float  # what the search ranked it by
    limited: bool = False  # it ended because it had to

    @property
    def score(self) -> float:
        return sum(self.token_scores)


@dataclass(frozen=True)
class Alignment:
    """Which source symbols an output was made from: a row of weights per output symbol, the end not counted."""

    soft: np.ndarray  # (output symbols, source symbols), rows sum to 1; the last source symbol is its end
    source: tuple[str, ...]  # the symbols as shown
    output: tuple[str, ...]

    @property
    def hard(self) -> list[tuple[int, int]]:
        """(source place, output place) of the heaviest link of each output symbol; the source's end is no place."""
        return [(int(place), t) for t, place in enumerate(self.soft[:, :-1].argmax(1))] if self.soft.size else []


class Candidate(NamedTuple):
    """An output that minimum Bayes risk chose from."""

    text: str
    utility: float  # expected
    score: float


@dataclass(frozen=True)
class Hypothesis:
    """One output of the model for one source."""

    text: str
    score: float  # the sum of token_scores
    tokens: tuple[str, ...]  # as shown, the end symbol included if there is one
    token_scores: tuple[float, ...]
    normalized: float  # score / length ** length_penalty
    ids: tuple[int, ...] = ()
    alignment: Alignment | None = None
    utility: float | None = None  # expected, of minimum Bayes risk
    flags: dict[str, str] = field(default_factory=dict)  # what looks wrong: name -> reason
    candidates: tuple[Candidate, ...] = ()  # of minimum Bayes risk, on its best output: all, best first

    def as_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on; alignment, utility and flags only where there are any.

        The candidates are told once per source, not here.
        """
        out: dict[str, Any] = {
            "text": self.text,
            "score": self.score,
            "tokens": list(self.tokens),
            "token_scores": list(self.token_scores),
            "normalized": self.normalized,
        }
        if self.utility is not None:
            out["utility"] = self.utility
        if self.alignment is not None:
            soft = [[round(float(weight), 4) for weight in row] for row in self.alignment.soft]
            out["alignment"] = {"source": list(self.alignment.source), "hard": self.alignment.hard, "soft": soft}
        if self.flags:
            out["flags"] = dict(self.flags)
        return out


def normalize(score: float, length: int, penalty: float) -> float:
    """A score made comparable between lengths."""
    return score / length**penalty if length else score
