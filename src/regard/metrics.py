"""Metrics: pure functions of hypotheses and references, with bootstrap intervals and p-values; shares are in percent.

accuracy    sequences that are right in full
wer         sequences that are wrong, 100 - accuracy: the word error rate of pronunciation and inflection tasks
per, cer    edits per token (separated by spaces) or character of the references
bleu, chrf, ter    by sacrebleu, with its signature
perplexity  exp of the mean negative log-probability of a token

For plain text also: loss, that mean itself; bits_per_char, the same sum in bits per character; pseudo_perplexity, the
perplexity of masked tokens given all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein

Texts = Sequence[str]
Sums = tuple[np.ndarray, np.ndarray]  # per example: numerator and denominator of a ratio of sums

SAMPLES = 1000
SEED = 12345  # also sacrebleu's own
LOWER_IS_BETTER = frozenset({"wer", "per", "cer", "ter", "perplexity", "pseudo_perplexity", "loss", "bits_per_char"})


class Measurement(NamedTuple):
    """A score, the bounds of its 95% bootstrap interval, and how it was computed."""

    score: float
    low: float | None = None
    high: float | None = None
    signature: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in self._asdict().items() if value is not None}


def edits(hypotheses: Sequence[Sequence[Hashable]], references: Sequence[Sequence[Hashable]]) -> Sums:
    """Insertions, deletions and substitutions of each pair, and the length of each reference."""
    pairs = list(zip(hypotheses, references, strict=True))
    counts = [Levenshtein.distance(hypothesis, reference) for hypothesis, reference in pairs]
    return np.asarray(counts, float), np.asarray([len(reference) for _, reference in pairs], float)


def _matches(hypotheses: Texts, references: Texts, right: bool = True) -> Sums:
    counts = np.asarray([(h == r) is right for h, r in zip(hypotheses, references, strict=True)], float)
    return counts, np.ones_like(counts)


RATIOS: dict[str, Callable[[Texts, Texts], Sums]] = {
    "accuracy": _matches,
    "wer": partial(_matches, right=False),
    "per": lambda hypotheses, references: edits([h.split() for h in hypotheses], [r.split() for r in references]),
    "cer": edits,
}
METRICS = (*RATIOS, "bleu", "chrf", "ter", "perplexity")


def measure(name: str, hypotheses: Texts, references: Texts, samples: int = SAMPLES) -> Measurement:
    """Compute a metric by name, with a bootstrap interval of that many samples (0: none)."""
    if not references:
        raise ValueError("a metric needs at least one example")
    if name in RATIOS:
        return _interval(RATIOS[name](hypotheses, references), _shares, samples)
    metric, samples = _sacrebleu(name), _affordable(samples, len(references))
    result = metric.corpus_score(list(hypotheses), [list(references)], n_bootstrap=max(1, samples))
    signature = str(metric.get_signature())
    if samples < 2:
        return Measurement(result.score, signature=signature)
    return Measurement(result.score, result._mean - result._ci, result._mean + result._ci, signature)


def measure_perplexity(
    log_probabilities: Sequence[float], tokens: Sequence[int], samples: int = SAMPLES
) -> Measurement:
    """Perplexity per token, from the log-probability and the number of tokens (end included) of each sequence."""
    return measure_ratio(-np.asarray(log_probabilities, float), np.asarray(tokens, float), samples, exponential=True)


def measure_ratio(
    amounts: np.ndarray, totals: np.ndarray, samples: int = SAMPLES, exponential: bool = False
) -> Measurement:
    """A ratio of sums, or exp of it, with its interval; the elements of the arrays are resampled."""

    def score(amounts: Any, totals: Any) -> np.ndarray:
        ratios = np.asarray(amounts / np.maximum(totals, 1))
        return np.asarray(np.exp(np.minimum(ratios, 700))) if exponential else ratios  # e^710 is no float

    return _interval((amounts, totals), score, samples)


def compare(name: str, hypotheses: Texts, others: Texts, references: Texts, samples: int = SAMPLES) -> float:
    """p-value of the difference between two systems on the same examples, by paired bootstrap resampling."""
    if name in RATIOS:
        return compare_sums(RATIOS[name](hypotheses, references), RATIOS[name](others, references), samples)
    if list(hypotheses) == list(others):
        return 1.0  # sacrebleu counts no larger difference here and would call that significant
    from sacrebleu.significance import PairedTest

    systems: list[tuple[str, Texts]] = [("base", list(others)), ("system", list(hypotheses))]
    samples = _affordable(samples, len(references))
    test = PairedTest(systems, {name: _sacrebleu(name)}, [list(references)], test_type="bs", n_samples=samples)
    scores: dict[str, Any] = test()[1]
    return float(next(results[1].p_value for key, results in scores.items() if key != "System"))


def compare_sums(ours: Sums, theirs: Sums, samples: int = SAMPLES) -> float:
    """The same for a ratio of sums: how often a difference this large arises when there is none."""
    picks = _picks(len(ours[0]), samples)
    differences = _shares(*_resample(ours, picks)) - _shares(*_resample(theirs, picks))
    actual = float(_shares(ours[0].sum(), ours[1].sum()) - _shares(theirs[0].sum(), theirs[1].sum()))
    return float((np.sum(np.abs(differences - actual) >= abs(actual)) + 1) / (samples + 1))


def _shares(amounts: Any, totals: Any) -> np.ndarray:
    # Without a single reference token every edit counts in full.
    return np.asarray(100 * np.asarray(amounts) / np.maximum(totals, 1))


def _interval(sums: Sums, score: Callable[[Any, Any], np.ndarray], samples: int) -> Measurement:
    value = float(score(sums[0].sum(), sums[1].sum()))
    if samples < 2:
        return Measurement(value)
    low, high = np.percentile(score(*_resample(sums, _picks(len(sums[0]), samples))), (2.5, 97.5))
    return Measurement(value, float(low), float(high))


def _picks(count: int, samples: int) -> list[np.ndarray]:
    """How often each example is drawn in each sample: small integers, whatever the number of examples."""
    rng = np.random.default_rng(SEED)
    return [np.bincount(rng.integers(count, size=count), minlength=count).astype(np.uint16) for _ in range(samples)]


def _resample(sums: Sums, picks: list[np.ndarray]) -> Sums:
    return np.asarray([pick @ sums[0] for pick in picks]), np.asarray([pick @ sums[1] for pick in picks])


def _affordable(samples: int, count: int) -> int:
    """sacrebleu draws all samples at once; this keeps it within about half a gigabyte."""
    return min(samples, max(100, 5_000_000 // count))


def _sacrebleu(name: str) -> Any:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    kinds: dict[str, type] = {"bleu": BLEU, "chrf": CHRF, "ter": TER}
    if name not in kinds:
        raise ValueError(f"no such metric: {name}")
    # force: no warning about text that looks tokenised, since tokens are compared as they are
    return BLEU(force=True) if name == "bleu" else kinds[name]()
