"""Evaluation of what is in memory: pairs, whose sources are decoded, and plain text, whose tokens are scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from regard.batch import windows
from regard.data.plain_text import TokenizedText
from regard.decode.engine import Engine, TorchEngine
from regard.decode.forced import overlong, score, score_text, scoring_context
from regard.decode.hypothesis import Hypothesis
from regard.decode.request import Options, Request
from regard.errors import UserError, plural
from regard.evaluate.confusions import Confusion
from regard.metrics import (
    DEFAULTS,
    FITTING,
    METRICS,
    SAMPLES,
    Content,
    Measurement,
    MetricSettings,
    References,
    Sums,
    alternatives,
    compare,
    compare_sums,
    content_of,
    measure,
    measure_perplexity,
    measure_ratio,
)
from regard.notebook import table_of
from regard.run import Run
from regard.suggest import one_of
from regard.text.codec import Example


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


OpenEngine = Callable[[Sequence[Run], Options], Engine]  # for runs, of which several are an ensemble
Skip = Callable[[int, str], object]  # called with the index of an example that cannot be used, and the reason


def check_metrics(names: Sequence[str], allowed: Sequence[str]) -> None:
    """Refuse metrics that are not allowed."""
    for name in names:
        if name not in allowed:
            raise one_of("metric", name, allowed)


def usable(count: int, problems: Sequence[Sequence[str]], skip: Skip) -> list[int]:
    """The indices of examples without a problem; `problems` are, for each run, one text per example."""
    reasons = {index: reason for each in reversed(problems) for index, reason in enumerate(each) if reason}
    for index in sorted(reasons):
        skip(index, reasons[index])
    return [index for index in range(count) if index not in reasons]


# Pairs


@dataclass(frozen=True)
class System:
    """What is judged: a run, an ensemble of runs, or outputs that are ready."""

    runs: Sequence[Run] = ()
    options: Options = field(default_factory=Options)
    outputs: str | None = None  # the file of ready outputs, or their name
    texts: Sequence[str] = ()  # what it holds


@dataclass(frozen=True)
class Judging:
    """How outputs are judged: by which metrics, with which settings and how many bootstrap samples (0: none)."""

    metrics: Sequence[str] = ()  # without any, those that fit the references
    samples: int = SAMPLES
    settings: MetricSettings = DEFAULTS
    open_engine: OpenEngine = TorchEngine


def evaluate(
    run: Run,
    examples: Sequence[Example],
    options: Options | None = None,
    metrics: Sequence[str] = (),
    against: Run | None = None,
    samples: int = SAMPLES,
    skip: Skip = lambda index, reason: None,
) -> Evaluation:
    """Decode the sources and compare with the targets; without `metrics`, those that fit the references.

    `samples` are those of the bootstrap, 0 for none. Pairs that are too long for one of the runs are left out; `skip`
    is called for each.
    """
    systems = [System([each], options or Options()) for each in (run, against) if each is not None]
    inputs = [Request(example.source, example.features) for example in examples]
    references = [(example.target or "",) for example in examples]
    kept = usable(len(inputs), too_long(systems, inputs, references), skip)
    if not kept:
        raise UserError("there is nothing to evaluate: not one usable pair was found")
    judging = Judging(metrics, samples)
    return evaluate_pairs(systems, [inputs[i] for i in kept], [references[i] for i in kept], judging)


def too_long(
    systems: Sequence[System], inputs: Sequence[Request], references: Sequence[tuple[str, ...]]
) -> list[list[str]]:
    """For each run, why each pair is too long to be used with it."""
    pairs = _pairs(inputs, references)
    return [overlong(run, pairs, system.options) for system in systems for run in system.runs]


def evaluate_pairs(
    systems: Sequence[System], inputs: Sequence[Request], references: Sequence[tuple[str, ...]], judging: Judging
) -> Evaluation:
    """Decode the inputs and compare with the references; a second system is compared with the first."""
    run = systems[0].runs[0] if systems[0].runs else None
    names = list(judging.metrics) or default_metrics(run, [several[0] for several in references])
    check_metrics(names, METRICS)
    if judging.settings.bleu_tokenize != DEFAULTS.bleu_tokenize and "bleu" not in names:
        raise UserError(f"bleu_tokenize: bleu is not among the metrics ({', '.join(names)}); ask for this metric too")
    if run is None and "perplexity" in names:
        raise UserError("metric: 'perplexity' is of a run; ready outputs have no probabilities")
    results = [_judged(system, inputs, references, names, judging) for system in systems]
    return make_evaluation(len(inputs), names, results, judging.samples)


def content_for(run: Run | None, references: Sequence[str]) -> Content:
    """What the references of a run are; without one, by their look."""
    if run is not None and run.task.labels:
        return "labels"
    return content_of(references, None if run is None else run.codec.config.target_tokens)


def default_metrics(run: Run | None, references: Sequence[str]) -> list[str]:
    """The metrics for sequences of tokens, for single words, or for sentences."""
    return [*FITTING[content_for(run, references)], *["perplexity"] * (run is not None)]


def _judged(
    system: System,
    inputs: Sequence[Request],
    references: Sequence[tuple[str, ...]],
    names: Sequence[str],
    judging: Judging,
) -> Outputs:
    """Decode every source, and score every first reference, if a metric needs it."""
    if not system.runs:
        return Outputs(list(system.texts), references, settings=judging.settings)
    best = list(_decode(system, inputs, judging.open_engine)) if set(names) - {"perplexity"} else []
    flags = {i: reason for i, h in enumerate(best) for name, reason in h.flags.items() if name in EMPTY_FLAGS}
    scored = list(score(system.runs, _pairs(inputs, references), system.options)) if "perplexity" in names else []
    if unfit := next((item.flags["out_of_memory"] for item in scored if "out_of_memory" in item.flags), None):
        raise UserError(f"perplexity: {unfit}")
    log_probabilities, tokens = [item.score for item in scored], [len(item.tokens) for item in scored]
    texts = [hypothesis.text for hypothesis in best]
    return Outputs(texts, references, log_probabilities, tokens, judging.settings, flags)


EMPTY_FLAGS = ("too_long", "unsatisfied", "out_of_memory", "error")  # reasons of an empty output


def _decode(system: System, inputs: Sequence[Request], open_engine: OpenEngine) -> Iterator[Hypothesis]:
    """The best output of every input; windows are those of `regard generate`, and so are the outputs."""
    with open_engine(system.runs, system.options) as engine:
        for window in windows(inputs, system.options.window):
            yield from (hypotheses[0] for hypotheses in engine(window))


def _pairs(inputs: Sequence[Request], references: Sequence[tuple[str, ...]]) -> list[Example]:
    """The sources with their first references."""
    return [Example(item.source, several[0], item.features) for item, several in zip(inputs, references, strict=True)]


# Plain text


def judge_text(run: Run, units: TokenizedText, context: int | None = None, memory: int | None = None) -> TextScores:
    """Score the tokens of a text, or the masked ones, as the task has it."""
    if memory is not None and not run.config.has_memory:
        raise UserError(f"memory: {run.path} does not remember earlier segments (decoder.memory is 0)")
    scores = score_text(run, units.ids, scoring_context(run, context), memory)
    lines = np.repeat(np.arange(len(units.tokens)), units.tokens)
    nll, correct, predicted = (np.bincount(lines, x, len(units.tokens)) for x in scores)
    unknown = run.codec.source.unknown(units.ids[1:].tolist())
    return TextScores(predicted, nll, correct, units.characters.astype(float), unknown)


def evaluate_text(
    run: Run, scores: Sequence[TextScores], metrics: Sequence[str] = (), samples: int = SAMPLES
) -> Evaluation:
    """Evaluate what `judge_text` gives for a run, and for a second one on the same text.

    Bits per character are left out by default where a token is unknown: it does not determine its characters, so they
    would be too few.
    """
    known = not any(each.unknown for each in scores)
    names = list(metrics) or [name for name in run.task.evaluation if known or name != "bits_per_char"]
    check_metrics(names, run.task.evaluation)
    return make_evaluation(len(scores[0].nll), names, scores, samples)
