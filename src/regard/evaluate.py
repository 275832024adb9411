"""Scoring a run on pairs: decode, compare, and say how sure the numbers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.decode.generate import Decoder
from regard.decode.options import Options
from regard.decode.score import score
from regard.errors import UserError, one_of
from regard.metrics import METRICS, SAMPLES, Measure, compare, compare_sums, measure, measure_perplexity
from regard.run import Run
from regard.text.example import Example


@dataclass(frozen=True)
class Outputs:
    """What a run says to a test set."""

    texts: list[str]
    log_probabilities: list[float]  # of the references
    symbols: list[int]


@dataclass(frozen=True)
class Evaluation:
    """Scores by metric, and against another run the other's scores and the p-values of the differences."""

    examples: int
    metrics: dict[str, Measure]
    outputs: Outputs
    others: dict[str, Measure] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)

    def to_json(self, skipped: dict[str, int] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = {
            "examples": self.examples,
            "skipped": dict(skipped or {}),
            "metrics": {name: measured.to_json() for name, measured in self.metrics.items()},
        }
        if self.others:
            result["against"] = {
                name: {
                    **measured.to_json(),
                    "difference": self.metrics[name].score - measured.score,
                    "p": self.p_values[name],
                }
                for name, measured in self.others.items()
            }
        return result


def evaluate(
    run: Run,
    examples: Sequence[Example],
    options: Options | None = None,
    metrics: Sequence[str] = (),
    against: Run | None = None,
    samples: int = SAMPLES,
) -> Evaluation:
    """Evaluate a run; without `metrics`, those that fit its task. `samples` are those of the bootstrap, 0 for none."""
    if not examples:
        raise UserError("there is nothing to evaluate: not one usable pair was found")
    references = [example.target or "" for example in examples]
    names = list(metrics) or default_metrics(run, references)
    for name in names:
        if name not in METRICS:
            raise one_of("metric", name, METRICS)
    outputs = answer(run, examples, options, names)
    scores = {name: _measure(name, outputs, references, samples) for name in names}
    if against is None:
        return Evaluation(len(examples), scores, outputs)
    theirs = answer(against, examples, options, names)
    others = {name: _measure(name, theirs, references, samples) for name in names}
    p_values = {name: _compare(name, outputs, theirs, references, samples or SAMPLES) for name in names}
    return Evaluation(len(examples), scores, outputs, others, p_values)


def default_metrics(run: Run, references: Sequence[str]) -> list[str]:
    """Sequences of symbols, single strings and sentences are judged differently."""
    if run.codec.config.target_tokens == "space":
        return ["wer", "per", "accuracy", "perplexity"]
    words = sum(len(reference.split()) for reference in references) / len(references)
    if words < 2:
        return ["wer", "cer", "accuracy", "perplexity"]
    return ["bleu", "chrf", "ter", "perplexity"]


def answer(run: Run, examples: Sequence[Example], options: Options | None, metrics: Sequence[str]) -> Outputs:
    """Decode every source, and score every reference, if a metric asks for it."""
    texts, scored = [], []
    if set(metrics) - {"perplexity"}:
        texts = [hypotheses[0].text for hypotheses in Decoder(run, options)(examples)]
    if "perplexity" in metrics:
        scored = list(score(run, examples, options))
    return Outputs(texts, [item.score for item in scored], [len(item.tokens) for item in scored])


def _measure(name: str, outputs: Outputs, references: Sequence[str], samples: int) -> Measure:
    if name == "perplexity":
        return measure_perplexity(outputs.log_probabilities, outputs.symbols, samples)
    return measure(name, outputs.texts, references, samples)


def _compare(name: str, ours: Outputs, theirs: Outputs, references: Sequence[str], samples: int) -> float:
    if name == "perplexity":  # in the logarithm: the mean log-probability of a symbol
        sums = [(np.asarray(o.log_probabilities), np.asarray(o.symbols, float)) for o in (ours, theirs)]
        return compare_sums(sums[0], sums[1], samples)
    return compare(name, ours.texts, theirs.texts, references, samples)
