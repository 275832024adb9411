"""Metrics as pure functions of outputs and references, with bootstrap intervals and p-values; shares are in percent.

accuracy    share of sequences that equal a reference
wer         100 - accuracy: the sequence error rate, called word error rate in pronunciation and inflection
per, word_edits, cer    edits per token, word (both separated by spaces) or character of the references
bleu, chrf, chrf++, ter    by sacrebleu, with its signature
perplexity  exp of the mean negative log-probability of a token

An example may have several references: sacrebleu uses all of them, the other metrics use the closest.

Plain text also has: loss, the mean negative log-probability of a token; bits_per_char, their sum in bits per character;
pseudo_perplexity, the perplexity of masked tokens given all other tokens.
"""

from __future__ import annotations

import json
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
References = Sequence[str] | Sequence[tuple[str, ...]]  # one or several for each example
Sums = tuple[np.ndarray, np.ndarray]  # numerators and denominators of all examples, for a ratio of their sums

SAMPLES = 1000
SEED = 12345  # the default of sacrebleu
EXACT_DIGITS = 20  # decimals that represent every score exactly
LOWER_IS_BETTER = frozenset(
    {"wer", "per", "word_edits", "cer", "ter", "perplexity", "pseudo_perplexity", "loss", "bits_per_char"}
)


class Measurement(NamedTuple):
    """A score, the bounds of its 95% bootstrap interval, and the signature of its computation."""

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
        description="Tokenizer of sacrebleu for bleu: 13a, intl, zh, char or none; with additional packages ja-mecab, "
        "ko-mecab, flores101 or flores200.",
    )
    lowercase: bool = Field(False, description="Ignore case.")


DEFAULTS = MetricSettings()
# Functions that split a text into the units of its edit distance; accuracy and wer compare the whole text.
UNITS: dict[str, Callable[[str], Sequence[Hashable]]] = {"per": str.split, "word_edits": str.split, "cer": str}
RATIOS = ("accuracy", "wer", *UNITS)
METRICS = (*RATIOS, "bleu", "chrf", "chrf++", "ter", "perplexity")
MEANING = {  # explanations of ambiguous names
    "wer": "sequence error rate: sequences with an error, in percent",
    "per": "edits per token of the reference, in percent",
    "word_edits": "edits per word of the reference, in percent (the word error rate of speech recognition)",
}


def closest(output: Sequence[Hashable], references: Sequence[Sequence[Hashable]]) -> tuple[int, Sequence[Hashable]]:
    """The edit distance to the closest reference, and this reference; among equally close ones, the longest."""
    distances = [(Levenshtein.distance(output, reference), reference) for reference in references]
    return min(distances, key=lambda item: (item[0], -len(item[1])))


def ratio(name: str, hypotheses: Texts, references: References, settings: MetricSettings = DEFAULTS) -> Sums:
    """The numerators and denominators of a metric in RATIOS."""
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
    """The references of each example as a tuple."""
    return [(each,) if isinstance(each, str) else each for each in references]


def measure(
    name: str, hypotheses: Texts, references: References, samples: int = SAMPLES, settings: MetricSettings = DEFAULTS
) -> Measurement:
    """Compute a metric, with an interval from this number of bootstrap samples (0: no interval)."""
    if not references:
        raise ValueError("a metric needs at least one example")
    if name in RATIOS:
        measured = _interval(ratio(name, hypotheses, references, settings), _shares, samples)
        return measured._replace(signature=_signature(references, settings))
    metric = _sacrebleu(name, settings)
    samples = _limit_samples(samples, len(references))
    result = metric.corpus_score(list(hypotheses), _streams(references), n_bootstrap=max(1, samples))
    signature = str(metric.get_signature())
    value = float(result.score)  # it may be a number of numpy
    if samples < 2:
        return Measurement(value, signature=signature)
    interval = json.loads(result.format(EXACT_DIGITS, signature=signature, is_json=True))  # without keys if all are 0
    mean = interval.get("confidence_mean", 0.0)
    half = interval.get("confidence_var", 0.0)
    return Measurement(value, mean - half, mean + half, signature)


def measure_perplexity(
    log_probabilities: Sequence[float], tokens: Sequence[int], samples: int = SAMPLES
) -> Measurement:
    """Perplexity per token, from the log-probability and the number of tokens (with end token) of each sequence."""
    return measure_ratio(-np.asarray(log_probabilities, float), np.asarray(tokens, float), samples, exponential=True)


def measure_ratio(
    amounts: np.ndarray, totals: np.ndarray, samples: int = SAMPLES, exponential: bool = False
) -> Measurement:
    """A ratio of sums, or its exponential, with the interval from resampling the elements of the arrays."""

    def score(amounts: Any, totals: Any) -> np.ndarray:
        ratios = np.asarray(amounts / np.maximum(totals, 1))
        return np.asarray(np.exp(np.minimum(ratios, 700))) if exponential else ratios  # e^710 overflows

    return _interval((amounts, totals), score, samples)


def compare(
    name: str,
    hypotheses: Texts,
    others: Texts,
    references: References,
    samples: int = SAMPLES,
    settings: MetricSettings = DEFAULTS,
) -> float:
    """The p-value of the difference between two systems on the same examples, by paired bootstrap resampling."""
    if name in RATIOS:
        ours, theirs = (ratio(name, texts, references, settings) for texts in (hypotheses, others))
        return compare_sums(ours, theirs, samples)
    if list(hypotheses) == list(others):
        return 1.0  # sacrebleu would call equal outputs significantly different
    from sacrebleu.significance import PairedTest

    systems: list[tuple[str, Texts]] = [("base", list(others)), ("system", list(hypotheses))]
    metrics = {name: _sacrebleu(name, settings)}
    samples = _limit_samples(samples, len(references))
    test = PairedTest(systems, metrics, _streams(references), test_type="bs", n_samples=samples)
    scores: dict[str, Any] = test()[1]
    return float(next(results[1].p_value for key, results in scores.items() if key != "System"))


def compare_sums(ours: Sums, theirs: Sums, samples: int = SAMPLES) -> float:
    """The p-value for a ratio of sums: the probability of such a difference between equal systems."""
    picks = _picks(len(ours[0]), samples)
    differences = _shares(*_resample(ours, picks)) - _shares(*_resample(theirs, picks))
    actual = float(_shares(ours[0].sum(), ours[1].sum()) - _shares(theirs[0].sum(), theirs[1].sum()))
    return float((np.sum(np.abs(differences - actual) >= abs(actual)) + 1) / (samples + 1))


def _shares(amounts: Any, totals: Any) -> np.ndarray:
    # Without reference tokens, every edit counts as one token.
    return np.asarray(100 * np.asarray(amounts) / np.maximum(totals, 1))


def _interval(sums: Sums, score: Callable[[Any, Any], np.ndarray], samples: int) -> Measurement:
    value = float(score(sums[0].sum(), sums[1].sum()))
    if samples < 2:
        return Measurement(value)
    low, high = np.percentile(score(*_resample(sums, _picks(len(sums[0]), samples))), (2.5, 97.5))
    return Measurement(value, float(low), float(high))


def _picks(count: int, samples: int) -> list[np.ndarray]:
    """The number of times that each example is drawn, for each sample; uint16 saves memory."""
    rng = np.random.default_rng(SEED)
    return [np.bincount(rng.integers(count, size=count), minlength=count).astype(np.uint16) for _ in range(samples)]


def _resample(sums: Sums, picks: list[np.ndarray]) -> Sums:
    return np.asarray([pick @ sums[0] for pick in picks]), np.asarray([pick @ sums[1] for pick in picks])


def _limit_samples(samples: int, count: int) -> int:
    """Limit sacrebleu, which draws all samples at the same time, to about half a gigabyte of memory."""
    return min(samples, max(100, 5_000_000 // count))


def _streams(references: References) -> list[list[str]]:
    """The references in the layout of sacrebleu: the first of every example, the second ..., padded with None."""
    return [list(stream) for stream in zip_longest(*alternatives(references))]


def _signature(references: References, settings: MetricSettings) -> str | None:
    """The signature of a metric in RATIOS, in the notation of sacrebleu; None with default settings."""
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
        return TER()  # always ignores case
    if name != "bleu":
        raise ValueError(f"no such metric: {name}")
    tokenize = settings.bleu_tokenize
    try:
        # force suppresses the warning about text that looks tokenised
        return BLEU(force=True, lowercase=settings.lowercase, tokenize=tokenize)
    except (ImportError, RuntimeError):
        extra = {"ja-mecab": "'sacrebleu[ja]'", "ko-mecab": "'sacrebleu[ko]'"}.get(tokenize, "sentencepiece")
        raise UserError(f"bleu_tokenize {tokenize}: needs another package: pip install {extra}") from None
    except OSError as error:  # sacrebleu downloads a sentencepiece model
        raise UserError(f"bleu_tokenize {tokenize}: sacrebleu cannot get its model: {error}") from None


Content = Literal["labels", "tokens", "words", "phrases", "sentences"]
FITTING: Mapping[Content, tuple[str, ...]] = {
    "labels": ("accuracy",),
    "tokens": ("wer", "per", "accuracy"),
    "words": ("wer", "cer", "accuracy"),
    "phrases": ("wer", "word_edits", "accuracy"),
    "sentences": ("bleu", "chrf", "ter"),
}
MIN_WORD_LENGTH = 2.5  # characters on average; shorter units are tokens
MIN_LABEL_EXAMPLES = 5  # of each label on average; otherwise the references are not labels


def content_of(references: Sequence[str], scheme: str | None) -> Content:
    """The kind of references with this token scheme of a run; None: guess from the text."""
    words = [word for reference in references for word in reference.split()]
    if scheme is None and len(references) >= MIN_LABEL_EXAMPLES * len(set(references)):
        return "labels"
    several = len(words) >= 2 * len(references)
    if scheme in ("space", None) and sum(map(len, words)) < MIN_WORD_LENGTH * len(words) and several:
        return "tokens"
    if scheme == "space":
        return "phrases" if several else "tokens"
    return "sentences" if several else "words"
