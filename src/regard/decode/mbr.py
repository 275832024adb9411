"""Minimum Bayes risk: of some candidates, the one that is most useful on average if any of them were right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rapidfuzz.distance import Levenshtein
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from regard.decode.options import Utility


def shares(scores: Sequence[float]) -> list[float]:
    """Log-probabilities of different outputs, as shares that sum to one."""
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def expected(texts: Sequence[str], weights: Sequence[float], utility: Utility, spaced: bool = False) -> list[float]:
    """The expected utility, 0 to 1, of every text when each is right as often as its weight says (they sum to one).

    Edit distance counts characters, or whole symbols where the texts are symbols `spaced` apart.
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
