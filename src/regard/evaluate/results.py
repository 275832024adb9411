"""What a system gives for test data, and what is measured of it: the results that metrics are computed from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from regard.errors import plural
from regard.evaluate.confusions import Confusion
from regard.metrics import (
    DEFAULTS,
    SAMPLES,
    Measurement,
    MetricSettings,
    References,
    Sums,
    alternatives,
    compare,
    compare_sums,
    measure,
    measure_perplexity,
    measure_ratio,
)
from regard.notebook import table_of


@dataclass(frozen=True)
class Outputs:
    """The answers of a system to test data, beside the references."""

    texts: list[str]
    references: References
    log_probabilities: list[float] = field(default_factory=list)  # of the first reference of each example
    tokens: list[int] = field(default_factory=list)  # of these references, the end token included
    settings: MetricSettings = DEFAULTS
    flags: dict[int, str] = field(default_factory=dict)  # why an output is empty, by the number of the example

    def __repr__(self) -> str:
        return f"Outputs({plural(len(self.texts), 'text')} for {plural(len(self.references), 'example')})"

    def _repr_html_(self) -> str:
        pairs = zip(self.texts, alternatives(self.references), strict=False)
        return table_of([{"output": text, "reference": "\n".join(several)} for text, several in pairs], repr(self))

    def has(self, name: str) -> bool:
        """Whether a metric can be computed."""
        return bool(self.log_probabilities if name == "perplexity" else self.texts)

    def measure(self, name: str, samples: int) -> Measurement:
        if name == "perplexity":
            return measure_perplexity(self.log_probabilities, self.tokens, samples)
        return measure(name, self.texts, self.references, samples, self.settings)

    def p_value(self, name: str, other: Outputs, samples: int) -> float:
        if name == "perplexity":  # in the logarithm: the mean log-probability of a token
            ours, theirs = ((np.asarray(o.log_probabilities), np.asarray(o.tokens, float)) for o in (self, other))
            return compare_sums(ours, theirs, samples)
        return compare(name, self.texts, other.texts, self.references, samples, self.settings)


class TextScores(NamedTuple):
    """Per line of a plain text: predicted tokens, their negative log-probability, correct ones, and characters."""

    predicted: np.ndarray
    nll: np.ndarray
    correct: np.ndarray
    characters: np.ndarray
    unknown: int = 0  # tokens of the text

    def has(self, name: str) -> bool:
        """Whether a metric can be computed: those of plain text always can."""
        return True

    def sums(self, name: str) -> Sums:
        """Amount and total of a metric, by line; in the logarithm where it is a perplexity."""
        if name == "bits_per_char":
            return self.nll / math.log(2), self.characters
        return (100 * self.correct if name == "accuracy" else self.nll), self.predicted

    def measure(self, name: str, samples: int) -> Measurement:
        amounts, totals = self.sums(name)
        return measure_ratio(amounts, totals, samples, exponential=name.endswith("perplexity"))

    def p_value(self, name: str, other: TextScores, samples: int) -> float:
        return compare_sums(self.sums(name), other.sums(name), samples)


@dataclass(frozen=True)
class Evaluation:
    """Scores by metric, and against another system the other's scores and the p-values of the differences."""

    examples: int  # of plain text: lines
    metrics: dict[str, Measurement]
    outputs: Outputs | None = None
    others: dict[str, Measurement] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)  # tokens or labels that the run does not know, by side
    remarks: list[str] = field(default_factory=list)  # about them and about empty outputs, for people
    confusions: list[Confusion] | None = None  # None: not asked for

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {measured.score:.2f}" for name, measured in self.metrics.items())
        return f"Evaluation({plural(self.examples, 'example')}: {scores})"

    def _repr_html_(self) -> str:
        rows = []
        for name, measured in self.metrics.items():
            compared = {"against": self.others[name].score, "p": self.p_values[name]} if name in self.others else {}
            rows.append({"metric": name, **measured.to_json(), **compared})
        scores = table_of(rows, "\n".join([repr(self), *self.remarks]))
        confusions = [each.cells() for each in self.confusions or ()]
        return scores + (table_of(confusions, "most frequent confusions") if confusions else "")

    def to_json(self, skipped: dict[str, int] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = {
            "examples": self.examples,
            "skipped": dict(skipped or {}),
            "metrics": {name: measured.to_json() for name, measured in self.metrics.items()},
        }
        if self.others:
            result["against"] = {}
            for name, measured in self.others.items():
                difference = self.metrics[name].score - measured.score
                result["against"][name] = {**measured.to_json(), "difference": difference, "p": self.p_values[name]}
        if self.unknown:
            result["unknown"] = self.unknown
        if self.confusions is not None:
            result["confusions"] = [confusion.to_json() for confusion in self.confusions]
        return result


def make_evaluation(examples: int, names: Sequence[str], results: Sequence[Any], samples: int) -> Evaluation:
    """Measure the results of one system, Outputs or TextScores; those of a second one are compared with them."""
    ours, *others = results
    outputs = ours if isinstance(ours, Outputs) else None
    evaluation = Evaluation(examples, {name: ours.measure(name, samples) for name in names}, outputs)
    for other in others:
        common = [name for name in names if other.has(name)]
        theirs = {name: other.measure(name, samples) for name in common}
        p_values = {name: ours.p_value(name, other, samples or SAMPLES) for name in common}
        evaluation = replace(evaluation, others=theirs, p_values=p_values)
    return evaluation
