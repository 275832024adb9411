"""Metrics: pure functions of hypotheses and references, with bootstrap intervals and p-values; shares are in percent.

accuracy    sequences that are right in full
wer         sequences that are wrong, 100 - accuracy: the word error rate of pronunciation and inflection tasks
per, cer    edits per token (separated by spaces) or character of the references
bleu, chrf, chrf++, ter    by sacrebleu, with its signature
perplexity  exp of the mean negative log-probability of a token

An example may have several references: sacrebleu takes them all, our own metrics the closest.

For plain text also: loss, that mean itself; bits_per_char, the same sum in bits per character; pseudo_perplexity, the
perplexity of masked tokens given all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field
from rapidfuzz.distance import Levenshtein

from regard.config import Value
from regard.errors import UserError

Texts = Sequence[str]
BleuTokenizer = Literal["13a", "intl", "zh", "char", "none", "ja-mecab", "ko-mecab", "flores101", "flores200"]
References = Sequence[str] | Sequence[tuple[str, ...]]  # one of each example, or several
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


class MetricSettings(Value):
    """Settings of the metrics that compare texts."""

    bleu_tokenize: BleuTokenizer = Field(
        "13a",
        description="Of bleu, as sacrebleu has it: 13a, intl, zh, char or none; with further packages ja-mecab, "
        "ko-mecab, flores101 or flores200.",
    )
    lowercase: bool = Field(False, description="Compare without regard to case.")


DEFAULTS = MetricSettings()
# The tokens of a text; text that is compared as a whole has none.
UNITS: dict[str, Callable[[str], Sequence[Hashable]]] = {"per": str.split, "cer": str}
RATIOS = ("accuracy", "wer", *UNITS)
METRICS = (*RATIOS, "bleu", "chrf", "chrf++", "ter", "perplexity")


def closest(output: Sequence[Hashable], references: Sequence[Sequence[Hashable]]) -> tuple[int, Sequence[Hashable]]:
    """Insertions, deletions and substitutions to the closest reference, and this; of equally close ones the longest."""
    distances = [(Levenshtein.distance(output, reference), reference) for reference in references]
    return min(distances, key=lambda item: (item[0], -len(item[1])))


def ratio(name: str, hypotheses: Texts, references: References, settings: MetricSettings = DEFAULTS) -> Sums:
    """Of each example the numerator and the denominator of one of RATIOS."""
    counts = []
    for output, several in zip(hypotheses, alternatives(references), strict=True):
        if settings.lowercase:
            output, several = output.lower(), tuple(each.lower() for each in several)
        if name in UNITS:
            edits, reference = closest(UNITS[name](output), [UNITS[name](each) for each in several])
            counts.append((edits, len(reference)))
        else:
            counts.append(((output in several) == (name == "accuracy"), 1))
    amounts, totals = np.asarray(counts, float).T
    return amounts, totals


def alternatives(references: References) -> list[tuple[str, ...]]:
    """All references of each example."""
    return [(each,) if isinstance(each, str) else each for each in references]


def measure(
    name: str,
    hypotheses: Texts,
    references: References,
    samples: int = SAMPLES,
    settings: MetricSettings = DEFAULTS,
) -> Measurement:
    """Compute a metric by name, with a bootstrap interval of that many samples (0: none)."""
    if not references:
        raise ValueError("a metric needs at least one example")
    if name in RATIOS:
        measured = _interval(ratio(name, hypotheses, references, settings), _shares, samples)
        return measured._replace(signature=_signature(references, settings))
    metric, samples = _sacrebleu(name, settings), _affordable(samples, len(references))
    result = metric.corpus_score(list(hypotheses), _streams(references), n_bootstrap=max(1, samples))
    signature, value = str(metric.get_signature()), float(result.score)  # which may be one of numpy
    if samples < 2:
        return Measurement(value, signature=signature)
    low, high = float(result._mean - result._ci), float(result._mean + result._ci)
    return Measurement(value, low, high, signature)


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


def compare(
    name: str,
    hypotheses: Texts,
    others: Texts,
    references: References,
    samples: int = SAMPLES,
    settings: MetricSettings = DEFAULTS,
) -> float:
    """p-value of the difference between two systems on the same examples, by paired bootstrap resampling."""
    if name in RATIOS:
        ours, theirs = (ratio(name, texts, references, settings) for texts in (hypotheses, others))
        return compare_sums(ours, theirs, samples)
    if list(hypotheses) == list(others):
        return 1.0  # sacrebleu counts no larger difference here and would call that significant
    from sacrebleu.significance import PairedTest

    systems: list[tuple[str, Texts]] = [("base", list(others)), ("system", list(hypotheses))]
    samples, metric = _affordable(samples, len(references)), {name: _sacrebleu(name, settings)}
    test = PairedTest(systems, metric, _streams(references), test_type="bs", n_samples=samples)
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


def _streams(references: References) -> list[list[str]]:
    """The references as sacrebleu takes them: all first ones, all second ones; None where there are fewer."""
    return [list(stream) for stream in zip_longest(*alternatives(references))]


def _signature(references: References, settings: MetricSettings) -> str | None:
    """How one of RATIOS was computed, in sacrebleu's words, if not in the plainest way."""
    counts = {len(each) for each in alternatives(references)}
    several = f"nrefs:{counts.pop() if len(counts) == 1 else 'var'}" if counts != {1} else ""
    return "|".join(filter(None, [several, "case:lc" * settings.lowercase])) or None


def _sacrebleu(name: str, settings: MetricSettings) -> Any:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if name == "chrf" or name == "chrf++":
        return CHRF(lowercase=settings.lowercase, word_order=2 if name == "chrf++" else 0)
    if name == "ter":
        return TER()  # which never regards case
    if name != "bleu":
        raise ValueError(f"no such metric: {name}")
    tokenize = settings.bleu_tokenize
    try:
        # force: no warning about text that looks tokenised, since tokens are compared as they are
        return BLEU(force=True, lowercase=settings.lowercase, tokenize=tokenize)
    except (ImportError, RuntimeError):
        extra = {"ja-mecab": "'sacrebleu[ja]'", "ko-mecab": "'sacrebleu[ko]'"}.get(tokenize, "sentencepiece")
        raise UserError(f"--bleu-tokenize {tokenize}: it needs a further package: pip install {extra}") from None
    except OSError as error:  # a sentencepiece model that sacrebleu downloads once
        raise UserError(f"--bleu-tokenize {tokenize}: sacrebleu cannot get its model: {error}") from None


# What fits which references

Content = Literal["labels", "tokens", "words", "sentences"]
FITTING: Mapping[Content, tuple[str, ...]] = {
    "labels": ("accuracy",),
    "tokens": ("wer", "per", "accuracy"),
    "words": ("wer", "cer", "accuracy"),
    "sentences": ("bleu", "chrf", "ter"),
}
SHORT = 2.5  # characters: tokens that are shorter on average are no words
FEW = 5  # examples of each label on average; with fewer, the references are no labels


def content_of(references: Sequence[str], scheme: str | None) -> Content:
    """What references are, which a run tokenises by `scheme`; without a run (None), by their look."""
    if scheme == "space":
        return "tokens"
    words = [word for reference in references for word in reference.split()]
    if scheme is None and len(references) >= FEW * len(set(references)):
        return "labels"
    if len(words) < 2 * len(references):
        return "words"
    return "tokens" if scheme is None and sum(map(len, words)) < SHORT * len(words) else "sentences"
