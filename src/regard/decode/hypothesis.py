"""What comes out of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from regard.decode.options import Utility


class DecodedIds(NamedTuple):
    """A finished output as ids."""

    ids: tuple[int, ...]  # ends in the end token, unless it stopped at the limit of an open-ended task
    token_scores: tuple[float, ...]  # natural-log probabilities, one per id
    value: float  # what the search ranked it by
    limited: bool = False  # it ended because it had to

    @property
    def score(self) -> float:
        return sum(self.token_scores)


@dataclass(frozen=True)
class Alignment:
    """Which source tokens an output was made from: a row of weights per output token, the end not counted."""

    soft: np.ndarray  # (output tokens, source tokens), rows sum to 1; the last source token is its end
    source: tuple[str, ...]  # the tokens as shown
    output: tuple[str, ...]

    @property
    def hard(self) -> list[tuple[int, int]]:
        """(source place, output place) of the heaviest link of each output token; the source's end is no place."""
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
    tokens: tuple[str, ...]  # as shown, the end token included if there is one
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


TURNS, COVERED = 4, 8  # a unit so often in a row, over so many tokens, is a loop
LONG, SHORT, SHORTEST = 4.0, 0.2, 10  # output tokens per source token; short only matters for longer sources
LOW = -2.5  # mean log-probability per token: the model was guessing
PARKED, TOKENS = 0.9, 6  # share of all attention on one source token, over so many output tokens
BLUR = 0.95  # of the entropy of looking everywhere alike


def degenerate(ids: Sequence[int], source: int, token_scores: Sequence[float]) -> dict[str, str]:
    """Flags of an output (ids without the end token) for a source of so many tokens; 0: any length is right."""
    flags = {}
    length = len(ids)
    if loop := longest_loop(ids):
        size, turns = loop
        flags["repetition"] = f"{size} token{'s' * (size > 1)} repeated {turns} times in a row"
    if source and length / source > LONG and length > SHORTEST:
        flags["length_ratio"] = f"{length} tokens for a source of {source}"
    elif source >= SHORTEST and length / source < SHORT:
        flags["length_ratio"] = f"only {length} tokens for a source of {source}"
    mean = sum(token_scores) / max(1, len(token_scores))
    if mean < LOW:
        flags["low_score"] = f"{mean:.2f} per token on average, below {LOW}"
    return flags


def longest_loop(ids: Sequence[int]) -> tuple[int, int] | None:
    """(size, turns) of the unit that is repeated in a row over the most tokens, if that is a loop."""
    row = np.asarray(ids)
    longest: tuple[int, int] | None = None
    for size in range(1, len(row) // TURNS + 1):
        same = np.concatenate(([False], row[size:] == row[:-size], [False])).astype(np.int8)
        edges = np.flatnonzero(np.diff(same))
        if not len(edges):
            continue
        run = int((edges[1::2] - edges[::2]).max()) + size  # tokens that this unit covers
        turns = run // size
        if turns >= TURNS and run >= COVERED and (longest is None or turns * size > longest[0] * longest[1]):
            longest = size, turns
    return longest


def collapsed(alignment: Alignment) -> dict[str, str]:
    """Flags of an output's attention: parked on one token, or looking nowhere in particular."""
    soft = alignment.soft
    if len(soft) < TOKENS or soft.shape[1] < TOKENS:
        return {}
    share = soft.mean(0)
    place = int(share.argmax())
    if share[place] > PARKED:
        symbol = alignment.source[place]
        return {"attention": f"{100 * share[place]:.0f}% of it on source token {place} ({symbol!r})"}
    entropy = -(soft * np.log(np.maximum(soft, 1e-12))).sum(1).mean() / np.log(soft.shape[1])
    if entropy > BLUR:
        return {"attention": "spread evenly over the source"}
    return {}


def shares(scores: Sequence[float]) -> list[float]:
    """Log-probabilities of different outputs, as shares that sum to one."""
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def expected(texts: Sequence[str], weights: Sequence[float], utility: Utility, spaced: bool = False) -> list[float]:
    """The expected utility, 0 to 1, of every text when each is right as often as its weight says (they sum to one).

    Edit distance counts characters, or whole tokens where the texts are tokens `spaced` apart.
    """
    useful = _utility(utility, spaced)
    mass: dict[str, float] = {}
    for text, weight in zip(texts, weights, strict=True):
        mass[text] = mass.get(text, 0.0) + weight
    totals = {
        text: math.fsum(weight * (1.0 if text == other else useful(text, other)) for other, weight in mass.items())
        for text in mass
    }
    return [totals[text] for text in texts]


def _utility(name: Utility, spaced: bool) -> Callable[[str, str], float]:
    if name == "exact":
        return lambda text, other: 0.0  # the same text is worth 1 by every measure
    if name == "edit":
        cut: Callable[[str], Sequence[str]] = (lambda text: text.split(" ")) if spaced else (lambda text: text)
        return lambda text, other: float(Levenshtein.normalized_similarity(cut(text), cut(other)))
    metric = CHRF() if name == "chrf" else BLEU(effective_order=True)
    return lambda text, other: float(metric.sentence_score(text, [other]).score) / 100
