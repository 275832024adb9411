"""Evaluation on held-out data: each task's metrics with confidence intervals, compared with another run on request.

`evaluate`, `evaluate_labels` and `evaluate_text` take what is in memory, `evaluate_file` the files of any task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from regard.data.images import read_images
from regard.data.plain import TokenizedText, read_pieces, tokenize_text
from regard.data.reader import LONG, LineCounter, Source
from regard.decode.classify import Classification, classify, classify_images
from regard.decode.generate import Engine, TorchEngine
from regard.decode.options import Options
from regard.decode.scoring import overlong, score, score_text, scoring_context
from regard.errors import UserError, one_of
from regard.metrics import (
    METRICS,
    SAMPLES,
    Measurement,
    Sums,
    compare,
    compare_sums,
    measure,
    measure_perplexity,
    measure_ratio,
)
from regard.run import Run
from regard.tasks import Reads
from regard.text.codec import Example, UnknownTokens

# A decoder, or a pool of processes, for so many inputs.
OpenEngine = Callable[[TorchEngine, int], AbstractContextManager[Engine]]
Skip = Callable[[int, str], object]  # called with the index of an example that cannot be used, and the reason


@dataclass(frozen=True)
class Outputs:
    """The answers of a run to a test set, beside the references."""

    texts: list[str]
    references: list[str]
    log_probabilities: list[float] = field(default_factory=list)  # of the references
    tokens: list[int] = field(default_factory=list)  # of each reference, the end token included

    def measure(self, name: str, samples: int) -> Measurement:
        if name == "perplexity":
            return measure_perplexity(self.log_probabilities, self.tokens, samples)
        return measure(name, self.texts, self.references, samples)

    def p_value(self, name: str, other: Outputs, samples: int) -> float:
        if name == "perplexity":  # in the logarithm: the mean log-probability of a token
            ours, theirs = ((np.asarray(o.log_probabilities), np.asarray(o.tokens, float)) for o in (self, other))
            return compare_sums(ours, theirs, samples)
        return compare(name, self.texts, other.texts, self.references, samples)


class TextScores(NamedTuple):
    """Per line of a plain text: predicted tokens, their negative log-probability, correct ones, and characters."""

    predicted: np.ndarray
    nll: np.ndarray
    correct: np.ndarray
    characters: np.ndarray
    unknown: int = 0  # tokens of the text

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
    """Scores by metric, and against another run the other's scores and the p-values of the differences."""

    examples: int  # of plain text: lines
    metrics: dict[str, Measurement]
    outputs: Outputs | None = None
    others: dict[str, Measurement] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)  # tokens or labels that the run does not know, by side
    remarks: list[str] = field(default_factory=list)  # about them, for people

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
        return {**result, "unknown": self.unknown} if self.unknown else result


def _evaluation(examples: int, names: Sequence[str], results: Sequence[Any], samples: int) -> Evaluation:
    """Measure the results of one run, Outputs or TextScores; those of a second run are compared with them."""
    ours, *others = results
    outputs = ours if isinstance(ours, Outputs) else None
    evaluation = Evaluation(examples, {name: ours.measure(name, samples) for name in names}, outputs)
    for other in others:
        theirs = {name: other.measure(name, samples) for name in names}
        p_values = {name: ours.p_value(name, other, samples or SAMPLES) for name in names}
        evaluation = replace(evaluation, others=theirs, p_values=p_values)
    return evaluation


def _check_metrics(names: Sequence[str], allowed: Sequence[str]) -> None:
    for name in names:
        if name not in allowed:
            raise one_of("metric", name, allowed)


def _usable(problems: Sequence[Sequence[str]], skip: Skip) -> list[int]:
    """The indices of examples that no run has a problem with; `problems` are, for each run, one text per example."""
    reasons = {index: reason for each in reversed(problems) for index, reason in enumerate(each) if reason}
    for index in sorted(reasons):
        skip(index, reasons[index])
    return [index for index in range(len(problems[0])) if index not in reasons]


# Pairs


def one_process(engine: TorchEngine, inputs: int) -> AbstractContextManager[Engine]:
    """Decode in this process."""
    return nullcontext(engine)


def evaluate(
    run: Run,
    examples: Sequence[Example],
    options: Options | None = None,
    metrics: Sequence[str] = (),
    against: Run | None = None,
    samples: int = SAMPLES,
    open_engine: OpenEngine = one_process,
    skip: Skip = lambda index, reason: None,
) -> Evaluation:
    """Decode the sources and compare with the targets; without `metrics`, those that fit the references.

    `samples` are those of the bootstrap, 0 for none. Pairs that are too long for one of the runs are left out; `skip`
    is called for each.
    """
    runs = [run] if against is None else [run, against]
    problems = [overlong(each, examples, options or Options()) for each in runs]
    examples = [examples[index] for index in _usable(problems, skip)]
    if not examples:
        raise UserError("there is nothing to evaluate: not one usable pair was found")
    names = list(metrics) or default_metrics(run, [example.target or "" for example in examples])
    _check_metrics(names, METRICS)
    results = [_decode(each, examples, options, names, open_engine) for each in runs]
    return _evaluation(len(examples), names, results, samples)


def default_metrics(run: Run, references: Sequence[str]) -> list[str]:
    """The metrics for sequences of tokens, for single words, or for sentences."""
    if run.codec.config.target_tokens == "space":
        return ["wer", "per", "accuracy", "perplexity"]
    words = sum(len(reference.split()) for reference in references) / len(references)
    if words < 2:
        return ["wer", "cer", "accuracy", "perplexity"]
    return ["bleu", "chrf", "ter", "perplexity"]


def _decode(
    run: Run, examples: Sequence[Example], options: Options | None, metrics: Sequence[str], open_engine: OpenEngine
) -> Outputs:
    """Decode every source, and score every reference, if a metric needs it."""
    texts, scored = [], []
    if set(metrics) - {"perplexity"}:
        with open_engine(TorchEngine(run, options), len(examples)) as engine:
            texts = [hypotheses[0].text for hypotheses in engine(examples)]
    if "perplexity" in metrics:
        scored = list(score(run, examples, options))
    references = [example.target or "" for example in examples]
    return Outputs(texts, references, [item.score for item in scored], [len(item.tokens) for item in scored])


# Labels


def evaluate_labels(
    references: Sequence[str],
    classified: Sequence[Sequence[Classification]],
    samples: int = SAMPLES,
    skip: Skip = lambda index, reason: None,
) -> Evaluation:
    """Compare the labels that one run gives, or two, with the references.

    Examples that were too long to get a label are left out; `skip` is called for each.
    """
    kept = _usable([["".join(each.flags.values()) for each in labels] for labels in classified], skip)
    if not kept:
        raise UserError("there is nothing to evaluate: not one usable example was found")
    right = [references[index] for index in kept]
    results = [Outputs([labels[index].label for index in kept], right) for labels in classified]
    return _evaluation(len(kept), ["accuracy"], results, samples)


# Plain text


def judge_text(run: Run, units: TokenizedText, context: int | None = None, memory: int | None = None) -> TextScores:
    """Score the tokens of a text, or the masked ones, as the task has it."""
    if memory is not None and not run.config.has_memory:
        raise UserError(f"--memory: {run.path} does not remember earlier segments (decoder.memory is 0)")
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
    _check_metrics(names, run.task.evaluation)
    return _evaluation(len(scores[0].nll), names, scores, samples)


# Files


class UnknownParts:
    """Counts what a run does not know in examples: tokens of the source, and of the target, or labels."""

    def __init__(self, run: Run, examples: Sequence[Example] = (), labels: Sequence[str] = ()) -> None:
        self.codec = run.codec
        self.labels = set(run.label_names) if run.task.labels else None
        self.source, self.target = UnknownTokens(), UnknownTokens()
        if examples:
            self.note(examples)
        self._note_labels(labels)

    def note(self, examples: Sequence[Example]) -> None:
        """Count what is unknown in these."""
        self.codec.note_unknown(examples, self.source)
        targets = [example.target or "" for example in examples]
        if self.labels is None:
            self.target.add(self.codec.target, targets, self.codec.target.encode(targets))
        else:
            self._note_labels(targets)

    def _note_labels(self, labels: Sequence[str]) -> None:
        for label in labels:
            if label not in (self.labels or ()):
                self.target.count([label])

    def remarks(self) -> list[str]:
        """One remark for each side that has something unknown."""
        remarks = [f"source: {self.source.summary()}"] if self.source else []
        if self.target and self.labels is None:
            remarks.append(f"target: {self.target.summary()}")
        elif self.target:
            remarks.append(f"target: {self.target.summary(what='label')}; none of these can be right")
        return remarks

    def to_json(self) -> dict[str, int]:
        """How many tokens or labels are unknown, by side."""
        sides = {"source": self.source, "target": self.target}
        return {side: unknown.total for side, unknown in sides.items() if unknown}


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate: a run, or two to compare, on the files of their task."""

    runs: list[Run]
    source: Source
    counter: LineCounter
    options: Options
    metrics: Sequence[str] = ()
    samples: int = SAMPLES
    context: int | None = None  # of plain text: tokens read at a time
    memory: int | None = None  # of plain text: tokens remembered
    open_engine: OpenEngine = one_process

    def read(self) -> tuple[list[Example], Skip]:
        """The pairs, and a function that counts one that is too long and names its line."""
        located = list(self.source.read(self.counter))

        def skip(index: int, reason: str) -> None:
            self.counter.skip(LONG, self.source.location(located[index].number), reason, tell=True)

        return [item.example for item in located], skip

    def noted(self, evaluation: Evaluation, unknown: dict[str, int], remarks: list[list[str]]) -> Evaluation:
        """An evaluation with the remarks on each run; if those on two runs differ, with the runs' names."""
        notes = remarks[0]
        if remarks[-1] != notes:
            notes = [f"{run.path}: {remark}" for run, each in zip(self.runs, remarks, strict=True) for remark in each]
        return replace(evaluation, unknown=unknown, remarks=notes)

    def noted_parts(self, evaluation: Evaluation, parts: list[UnknownParts]) -> Evaluation:
        return self.noted(evaluation, parts[0].to_json(), [each.remarks() for each in parts])


def evaluate_file(request: EvaluationRequest) -> Evaluation:
    """Evaluate runs on the files of their task."""
    return _BY_CONTENT[request.runs[0].task.reads](request)


def _evaluate_pairs(request: EvaluationRequest) -> Evaluation:
    examples, skip = request.read()
    unknown = [UnknownParts(run, examples) for run in request.runs]
    run, against = request.runs[0], request.runs[1] if len(request.runs) > 1 else None
    settings = request.options, request.metrics, against, request.samples, request.open_engine
    return request.noted_parts(evaluate(run, examples, *settings, skip), unknown)


def _evaluate_labelled(request: EvaluationRequest) -> Evaluation:
    _check_metrics(request.metrics, request.runs[0].task.evaluation)
    examples, skip = request.read()
    unknown, options = [UnknownParts(run, examples) for run in request.runs], request.options
    classified = [classify(run, examples, options.batch_tokens, options.max_source) for run in request.runs]
    references = [example.target or "" for example in examples]
    return request.noted_parts(evaluate_labels(references, classified, request.samples, skip), unknown)


def _evaluate_images(request: EvaluationRequest) -> Evaluation:
    _check_metrics(request.metrics, request.runs[0].task.evaluation)
    images_NCHW, labels = read_images(request.source.paths[0])
    unknown = [UnknownParts(run, labels=labels) for run in request.runs]
    classified = [classify_images(run, images_NCHW) for run in request.runs]
    return request.noted_parts(evaluate_labels(labels, classified, request.samples), unknown)


def _evaluate_text(request: EvaluationRequest) -> Evaluation:
    pieces = list(read_pieces(request.source, request.counter))
    units = [tokenize_text(pieces, run.codec.source, request.source.paths[0]) for run in request.runs]
    pairs = list(zip(request.runs, units, strict=True))
    scores = [judge_text(run, each, request.context, request.memory) for run, each in pairs]
    evaluation = evaluate_text(request.runs[0], scores, request.metrics, request.samples)
    remarks = [_unknown_in_text(run, pieces, each, evaluation) for run, each in pairs]
    return request.noted(evaluation, {"source": scores[0].unknown} if scores[0].unknown else {}, remarks)


def _unknown_in_text(run: Run, pieces: list[str], units: TokenizedText, evaluation: Evaluation) -> list[str]:
    unknown, ends = UnknownTokens(), units.tokens.cumsum()
    unknown.add(run.codec.source, pieces, [row.tolist() for row in np.split(units.ids[1:], ends[:-1])])
    if not unknown:
        return []
    remark = f"{100 * unknown.total / int(ends[-1]):.3g} % of the text: {unknown.summary()}"
    if "bits_per_char" in run.task.evaluation:
        effect = "are too few" if "bits_per_char" in evaluation.metrics else "are left out"
        remark += f"; bits per character {effect}, since an unknown token does not say which character it was"
    return [remark]


_BY_CONTENT: Mapping[Reads, Callable[[EvaluationRequest], Evaluation]] = {
    "pairs": _evaluate_pairs,
    "labelled": _evaluate_labelled,
    "text": _evaluate_text,
    "images": _evaluate_images,
}
