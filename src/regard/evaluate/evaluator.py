"""Evaluation of data in memory: pairs, whose sources are decoded, and plain text, whose tokens are scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from regard.batch import windows
from regard.config import Count
from regard.data.plain_text import TokenizedText
from regard.decode.engine import Engine, TorchEngine
from regard.decode.forced import overlong, score, score_text, scoring_context
from regard.decode.hypothesis import Hypothesis
from regard.decode.request import EngineName, Options, PhraseList, Request, Whole
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
    """The outputs of a system for test data, and the references."""

    texts: list[str]
    references: References
    log_probabilities: list[float] = field(default_factory=list)  # of the first reference of each example
    tokens: list[int] = field(default_factory=list)  # in these references, the end token included
    settings: MetricSettings = DEFAULTS
    flags: dict[int, str] = field(default_factory=dict)  # index of an empty output -> the reason

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
        if name == "perplexity":  # compared by its logarithm
            ours, theirs = ((np.asarray(o.log_probabilities), np.asarray(o.tokens, float)) for o in (self, other))
            return compare_sums(ours, theirs, samples)
        return compare(name, self.texts, other.texts, self.references, samples, self.settings)


class TextScores(NamedTuple):
    """Scores of each line of a plain text."""

    predicted: np.ndarray  # number of predicted tokens
    nll: np.ndarray  # their negative log-probability
    correct: np.ndarray  # number of tokens predicted correctly
    characters: np.ndarray
    unknown: int = 0  # unknown tokens in the text

    def has(self, name: str) -> bool:
        """Whether a metric can be computed, which is true of all metrics of plain text."""
        return True

    def sums(self, name: str) -> Sums:
        """Amount and total of a metric for each line; for a perplexity, of its logarithm."""
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
    """Scores by metric; in a comparison also the scores of the other system and the p-values of the differences."""

    examples: int  # lines, for plain text
    metrics: dict[str, Measurement]
    outputs: Outputs | None = None
    others: dict[str, Measurement] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)  # number of unknown tokens or labels, by side
    remarks: list[str] = field(default_factory=list)  # about skipped lines, empty outputs and unknown tokens
    confusions: list[Confusion] | None = None  # None: not requested
    skipped: dict[str, int] = field(default_factory=dict)  # number of skipped lines, by reason

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

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "examples": self.examples,
            "skipped": self.skipped,
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
    """Compute the metrics of a system from its results, Outputs or TextScores, and compare with a second system."""
    ours, *others = results
    outputs = ours if isinstance(ours, Outputs) else None
    evaluation = Evaluation(examples, {name: ours.measure(name, samples) for name in names}, outputs)
    for other in others:
        common = [name for name in names if other.has(name)]
        theirs = {name: other.measure(name, samples) for name in common}
        p_values = {name: ours.p_value(name, other, samples or SAMPLES) for name in common}
        evaluation = replace(evaluation, others=theirs, p_values=p_values)
    return evaluation


OpenEngine = Callable[[Sequence[Run], Options], Engine]  # several runs are an ensemble
Skip = Callable[[int, str], object]  # takes the index of an unusable example and the reason


def check_metrics(names: Sequence[str], allowed: Sequence[str]) -> None:
    """Refuse metrics that are not allowed."""
    for name in names:
        if name not in allowed:
            raise one_of("metric", name, allowed)


def usable(count: int, problems: Sequence[Sequence[str]], skip: Skip) -> list[int]:
    """The indices of the examples without a problem; `problems` has a text for each run and example."""
    reasons = {index: reason for each in reversed(problems) for index, reason in enumerate(each) if reason}
    for index in sorted(reasons):
        skip(index, reasons[index])
    return [index for index in range(count) if index not in reasons]


# Pairs


@dataclass(frozen=True)
class System:
    """A system to evaluate: a run, an ensemble of runs, or ready outputs."""

    runs: Sequence[Run] = ()
    options: Options = field(default_factory=Options)
    outputs: str | None = None  # file or name of the ready outputs
    texts: Sequence[str] = ()  # the ready outputs


class EvaluationOptions(MetricSettings):
    """Options of an evaluation."""

    metrics: PhraseList = ()  # default: the metrics that fit the task and the references
    bootstrap: Whole = SAMPLES  # samples; 0: no intervals
    confusions: Whole | None = None  # number; None: DEFAULT_CONFUSIONS, or none if the references are sentences
    context: Whole | None = None  # of plain text: tokens read at a time
    memory: Count | None = None  # of plain text: tokens of segment memory
    engine: EngineName | None = None
    strict: bool = False

    @property
    def chosen(self) -> set[str]:
        """The names of the options that are set, except those of every task."""
        return {*self.model_dump(exclude_defaults=True)} - {"metrics", "bootstrap"}


def evaluate(
    run: Run,
    examples: Sequence[Example],
    options: Options | None = None,
    metrics: Sequence[str] = (),
    against: Run | None = None,
    samples: int = SAMPLES,
    skip: Skip = lambda index, reason: None,
) -> Evaluation:
    """Decode the sources and compare with the targets; `metrics` default to the ones that fit the references.

    `samples` is the number of bootstrap samples, 0 for none. `skip` is called for pairs that are too long for a run.
    """
    systems = [System([each], options or Options()) for each in (run, against) if each is not None]
    inputs = [Request(example.source, example.features) for example in examples]
    references = [(example.target or "",) for example in examples]
    indices = usable(len(inputs), too_long(systems, inputs, references), skip)
    if not indices:
        raise UserError("there is nothing to evaluate: no pair is usable")
    evaluation_options = EvaluationOptions(metrics=tuple(metrics), bootstrap=samples)
    return evaluate_pairs(systems, [inputs[i] for i in indices], [references[i] for i in indices], evaluation_options)


def too_long(
    systems: Sequence[System], inputs: Sequence[Request], references: Sequence[tuple[str, ...]]
) -> list[list[str]]:
    """For each run, the reason why a pair is too long, or an empty text, for each pair."""
    pairs = pair_examples(inputs, references)
    return [overlong(run, pairs, system.options) for system in systems for run in system.runs]


def evaluate_pairs(
    systems: Sequence[System],
    inputs: Sequence[Request],
    references: Sequence[tuple[str, ...]],
    options: EvaluationOptions,
    open_engine: OpenEngine = TorchEngine,
) -> Evaluation:
    """Decode the inputs and compare with the references; a second system is compared with the first."""
    run = systems[0].runs[0] if systems[0].runs else None
    names = list(options.metrics) or default_metrics(run, [several[0] for several in references])
    check_metrics(names, METRICS)
    if options.bleu_tokenize != DEFAULTS.bleu_tokenize and "bleu" not in names:
        raise UserError(f"bleu_tokenize: bleu is not among the metrics ({', '.join(names)}); add this metric")
    if run is None and "perplexity" in names:
        raise UserError("metric: 'perplexity' needs a run; ready outputs have no probabilities")
    results = []
    for system in systems:
        if system.runs:
            results.append(_outputs(system, inputs, references, names, options, open_engine))
        else:
            results.append(Outputs(list(system.texts), references, settings=options))
    return make_evaluation(len(inputs), names, results, options.bootstrap)


def content_for(run: Run | None, references: Sequence[str]) -> Content:
    """The kind of the references; without a run, guessed from their text."""
    if run is not None and run.task.labels:
        return "labels"
    return content_of(references, None if run is None else run.codec.config.target_tokens)


def default_metrics(run: Run | None, references: Sequence[str]) -> list[str]:
    """The metrics for labels, sequences of tokens, single words or sentences."""
    return [*FITTING[content_for(run, references)], *["perplexity"] * (run is not None)]


def _outputs(
    system: System,
    inputs: Sequence[Request],
    references: Sequence[tuple[str, ...]],
    names: Sequence[str],
    settings: MetricSettings,
    open_engine: OpenEngine,
) -> Outputs:
    """Decode every source and score every first reference, as far as the metrics need it."""
    best = list(_decode(system, inputs, open_engine)) if set(names) - {"perplexity"} else []
    flags = {i: reason for i, h in enumerate(best) for name, reason in h.flags.items() if name in EMPTY_FLAGS}
    scored = (
        list(score(system.runs, pair_examples(inputs, references), system.options)) if "perplexity" in names else []
    )
    if unfit := next((item.flags["out_of_memory"] for item in scored if "out_of_memory" in item.flags), None):
        raise UserError(f"perplexity: {unfit}")
    texts = [hypothesis.text for hypothesis in best]
    log_probabilities = [item.score for item in scored]
    tokens = [len(item.tokens) for item in scored]
    return Outputs(texts, references, log_probabilities, tokens, settings, flags)


EMPTY_FLAGS = ("too_long", "unsatisfied", "out_of_memory", "error")  # reasons for an empty output


def _decode(system: System, inputs: Sequence[Request], open_engine: OpenEngine) -> Iterator[Hypothesis]:
    """Yield the best output for every input, in the same windows, hence the same outputs, as `regard generate`."""
    with open_engine(system.runs, system.options) as engine:
        for window in windows(inputs, system.options.window):
            yield from (hypotheses[0] for hypotheses in engine(window))


def pair_examples(inputs: Sequence[Request], references: Sequence[tuple[str, ...]]) -> list[Example]:
    """The sources with their first references."""
    return [Example(item.source, several[0], item.features) for item, several in zip(inputs, references, strict=True)]


# Plain text


def judge_text(run: Run, text: TokenizedText, context: int | None = None, memory: int | None = None) -> TextScores:
    """Score the tokens of a text, or the masked tokens, depending on the task."""
    if memory is not None and not run.config.has_memory:
        raise UserError(f"memory: {run.path} has no memory of earlier segments (decoder.memory is 0)")
    scores = score_text(run, text.ids, scoring_context(run, context), memory)
    lines = np.repeat(np.arange(len(text.tokens)), text.tokens)
    nll, correct, predicted = (np.bincount(lines, x, len(text.tokens)) for x in scores)
    unknown = run.codec.source.unknown(text.ids[1:].tolist())
    return TextScores(predicted, nll, correct, text.characters.astype(float), unknown)


def evaluate_text(
    run: Run, scores: Sequence[TextScores], metrics: Sequence[str] = (), samples: int = SAMPLES
) -> Evaluation:
    """Evaluate the text scores of a run, and of a second run on the same text.

    By default, bits per character are left out if tokens are unknown: an unknown token does not determine its
    characters, so the number would be too low.
    """
    known = not any(each.unknown for each in scores)
    names = list(metrics) or [name for name in run.task.evaluation if known or name != "bits_per_char"]
    check_metrics(names, run.task.evaluation)
    return make_evaluation(len(scores[0].nll), names, scores, samples)
