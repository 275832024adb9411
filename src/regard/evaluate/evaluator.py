"""Evaluation of runs and ready outputs: pairs are decoded, texts and images classified, tokens of plain text scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

import numpy as np

from regard.batch import windows
from regard.config import Count
from regard.data.images import read_images
from regard.data.plain_text import TokenizedText, read_pieces, tokenize_text
from regard.data.reader import TOO_LONG, LineCounter, Source
from regard.decode.engine import Engine
from regard.decode.hypothesis import Hypothesis
from regard.decode.request import (
    ENGINE_HELP,
    EngineChoice,
    Options,
    OptionSettings,
    PhraseList,
    Request,
    Whole,
    check_supported,
)
from regard.decode.scoring import Scored, overlong, score_pairs
from regard.errors import UserError, plural
from regard.evaluate.confusions import Confusion, Unit, count_confusions
from regard.evaluate.test_data import ParallelData, ParallelFiles, UnknownParts
from regard.metrics import (
    DEFAULTS,
    FITTING,
    METRICS,
    SAMPLES,
    BleuTokenizer,
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
from regard.recipe import Column, option
from regard.run import Run
from regard.suggest import one_of
from regard.tasks import TABLE, Reads
from regard.text.codec import Example, UnknownTokens

EMPTY_FLAGS = ("too_long", "unsatisfied", "out_of_memory", "error")  # reasons for an empty output
DEFAULT_CONFUSIONS = 10
OUTPUT_OPTIONS = (*TABLE, *MetricSettings.model_fields)  # for ready outputs without a run
OpenEngine = Callable[[Sequence[Run], Options], Engine]  # several runs are an ensemble
Skip = Callable[[int, str], object]  # takes the index of an unusable example and the reason
_UNITS: Mapping[str, Unit] = {"labels": "label", "tokens": "token", "phrases": "token", "words": "character"}


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
    metrics = {name: ours.measure(name, samples) for name in names}
    evaluation = Evaluation(examples, metrics, ours if isinstance(ours, Outputs) else None)
    for other in others:
        ready = isinstance(other, Outputs) and not other.log_probabilities  # then it has no perplexity
        common = [name for name in names if name != "perplexity" or not ready]
        theirs = {name: other.measure(name, samples) for name in common}
        p_values = {name: ours.p_value(name, other, samples or SAMPLES) for name in common}
        evaluation = replace(evaluation, others=theirs, p_values=p_values)
    return evaluation


def check_metrics(names: Sequence[str], allowed: Sequence[str]) -> None:
    for name in names:
        if name not in allowed:
            raise one_of("metric", name, allowed)


def usable(count: int, problems: Sequence[Sequence[str]], skip: Skip) -> list[int]:
    """The indices of the examples without a problem; `problems` has a text for each run and example."""
    reasons = {index: reason for each in reversed(problems) for index, reason in enumerate(each) if reason}
    for index in sorted(reasons):
        skip(index, reasons[index])
    return [index for index in range(count) if index not in reasons]


@dataclass(frozen=True)
class System:
    """A system to evaluate: a run, an ensemble of runs, or ready outputs."""

    runs: Sequence[Run] = ()
    options: Options = field(default_factory=Options)
    outputs: str | None = None  # file or name of the ready outputs
    texts: Sequence[str] = ()  # the ready outputs


class EvaluationOptions(MetricSettings):
    metrics: PhraseList = option(
        (),
        f"{', '.join(METRICS)}; for plain text also bits_per_char, loss, pseudo_perplexity. Repeatable."
        " (default: by task)",
        metavar="NAME",
    )
    bootstrap: Whole = option(SAMPLES, "Bootstrap samples for the 95% intervals; 0: none.")
    confusions: Whole | None = option(
        None, f"Most frequent confusions to print. (default: {DEFAULT_CONFUSIONS}; for sentences 0)"
    )
    context: Whole | None = option(None, "Tokens of plain text at a time. (default: as in training)")
    memory: Count | None = option(None, "Tokens of segment memory for plain text. (default: as in training)")
    engine: EngineChoice | None = option(None, ENGINE_HELP)
    strict: bool = option(False, "Stop at the first bad line instead of skipping it.")

    @property
    def chosen(self) -> set[str]:
        """The names of the options that are set, except the options that every task has."""
        return {*self.model_dump(exclude_defaults=True)} - {"metrics", "bootstrap"}


class EvaluationSettings(OptionSettings, total=False):
    """The fields of EvaluationOptions and Options as keyword arguments, for editors and type checkers."""

    metrics: PhraseList
    bleu_tokenize: BleuTokenizer
    lowercase: bool
    bootstrap: Whole
    confusions: Whole | None
    context: Whole | None
    memory: Count | None
    engine: EngineChoice | None
    strict: bool


def evaluate(
    run: Run,
    examples: Sequence[Example],
    options: Options | None = None,
    metrics: Sequence[str] = (),
    against: Run | None = None,
    samples: int = SAMPLES,
    skip: Skip = lambda index, reason: None,
) -> Evaluation:
    """Decode the sources and compare with the targets; `skip` is called for pairs that are too long for a run."""
    from regard.decode.torch_engine import TorchEngine

    systems = [System([each], options or Options()) for each in (run, against) if each is not None]
    inputs = [Request(example.source, example.features) for example in examples]
    data = ParallelData(inputs, [(example.target or "",) for example in examples])
    indices = usable(len(inputs), too_long(systems, data), skip)
    if not indices:
        raise UserError("there is nothing to evaluate: no pair is usable")
    settings = EvaluationOptions(metrics=tuple(metrics), bootstrap=samples)
    return evaluate_pairs(systems, data.part(indices), settings, TorchEngine)


def too_long(systems: Sequence[System], data: ParallelData) -> list[list[str]]:
    """For each run, the reason why a pair is too long, or an empty text, for each pair."""
    return [overlong(run, data.examples, system.options) for system in systems for run in system.runs]


def evaluate_pairs(
    systems: Sequence[System], data: ParallelData, options: EvaluationOptions, open_engine: OpenEngine
) -> Evaluation:
    """Decode the inputs and compare with the references; a second system is compared with the first."""
    run = next(iter(systems[0].runs), None)
    names = list(options.metrics) or default_metrics(run, [several[0] for several in data.references])
    check_metrics(names, METRICS)
    if options.bleu_tokenize != DEFAULTS.bleu_tokenize and "bleu" not in names:
        raise UserError(f"bleu_tokenize: bleu is not among the metrics ({', '.join(names)}); add this metric")
    if run is None and "perplexity" in names:
        raise UserError("metric: 'perplexity' needs a run; ready outputs have no probabilities")
    results = [_outputs(system, data, names, options, open_engine) for system in systems]
    return make_evaluation(len(data.inputs), names, results, options.bootstrap)


def content_for(run: Run | None, references: Sequence[str]) -> Content:
    """The kind of the references; without a run, guessed from their text."""
    if run is not None and run.task.labels:
        return "labels"
    return content_of(references, None if run is None else run.codec.config.target_tokens)


def default_metrics(run: Run | None, references: Sequence[str]) -> list[str]:
    """The metrics for labels, sequences of tokens, single words or sentences."""
    return [*FITTING[content_for(run, references)], *["perplexity"] * (run is not None)]


def _outputs(
    system: System, data: ParallelData, names: Sequence[str], settings: MetricSettings, open_engine: OpenEngine
) -> Outputs:
    """Decode every source and score every first reference, as far as the metrics need it, or take the ready outputs."""
    if not system.runs:
        return Outputs(list(system.texts), data.references, settings=settings)
    best: list[Hypothesis] = []
    scored: list[Scored] = []
    with open_engine(system.runs, system.options) as engine:
        if set(names) - {"perplexity"}:
            for window in windows(data.inputs, system.options.window):  # as in `regard generate`: the same outputs
                best += [hypotheses[0] for hypotheses in engine(window)]
        flags = {i: reason for i, h in enumerate(best) for name, reason in h.flags.items() if name in EMPTY_FLAGS}
        if "perplexity" in names:
            scored += score_pairs(system.runs, data.examples, system.options, engine.force)
    if unfit := next((item.flags["out_of_memory"] for item in scored if "out_of_memory" in item.flags), None):
        raise UserError(f"perplexity: {unfit}")
    texts = [hypothesis.text for hypothesis in best]
    log_probabilities = [item.score for item in scored]
    tokens = [len(item.tokens) for item in scored]
    return Outputs(texts, data.references, log_probabilities, tokens, settings, flags)


def judge_text(run: Run, text: TokenizedText, context: int | None = None, memory: int | None = None) -> TextScores:
    """Score the tokens of a text, or the masked tokens, depending on the task."""
    if memory is not None and not run.config.has_memory:
        raise UserError(f"memory: {run.path} has no memory of earlier segments (decoder.memory is 0)")
    from regard.decode.forced import score_text, scoring_context

    scores = score_text(run, text.ids, scoring_context(run, context), memory)
    lines = np.repeat(np.arange(len(text.tokens)), text.tokens)
    nll, correct, predicted = (np.bincount(lines, x, len(text.tokens)) for x in scores)
    unknown = run.codec.source.unknown(text.ids[1:].tolist())
    return TextScores(predicted, nll, correct, text.characters.astype(float), unknown)


def evaluate_text(
    run: Run, scores: Sequence[TextScores], metrics: Sequence[str] = (), samples: int = SAMPLES
) -> Evaluation:
    """Evaluate the text scores of a run, and of a second run on the same text."""
    # An unknown token does not determine its characters, so bits per character would be too low.
    known = not any(each.unknown for each in scores)
    names = list(metrics) or [name for name in run.task.evaluation if known or name != "bits_per_char"]
    check_metrics(names, run.task.evaluation)
    return make_evaluation(len(scores[0].nll), names, scores, samples)


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """A request for an evaluation; outputs and references are the names of files, or of `texts` in memory."""

    options: EvaluationOptions
    decoding: Options = field(default_factory=Options)
    chosen: AbstractSet[str] = frozenset()  # names of the options that the user has set, of any kind
    runs: Sequence[Run] = ()  # several are an ensemble
    outputs: str | None = None  # ready outputs, evaluated instead of the outputs of `runs`
    against: Run | str | None = None  # a run or ready outputs
    references: Sequence[str] = ()  # in addition to those of the table
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    open_engine: OpenEngine

    def check(self, option: Callable[[str], str] = str) -> Reads:
        """Check that the options apply to the task -> what the task reads; `option` is how an option is written."""
        other = [self.against] if isinstance(self.against, Run) else []
        reads = self._check([*self.runs[:1], *other], option)
        if self.outputs is not None:  # then only the other run decodes
            self._check(other, option)
        return reads

    def _check(self, runs: Sequence[Run], option: Callable[[str], str]) -> Reads:
        if not runs:
            if unused := ", ".join(map(option, sorted(self.chosen - set(OUTPUT_OPTIONS)))):
                raise UserError(f"{unused}: no meaning for outputs that are ready, without a run")
            return "pairs"
        run = runs[0]
        task = run.task
        for other in runs[1:]:
            if other.task != task:
                raise UserError(f"{option('against')}: {other.path} is {other.task.model}, {run.path} is {task.model}")
        decoding = Options.model_fields if task.reads == "pairs" else ()
        check_supported(sorted(self.chosen), (*task.evaluation_options, *decoding), task, run.path, option)
        if isinstance(self.against, str) and "outputs" not in task.evaluation_options:
            reason = f"{run.path}, which is {task.model}, is compared with another run"
            raise UserError(f"{option('against')}: no outputs that are ready; {reason}")
        unused = ", ".join(map(option, sorted({"ensemble", "weights"} & self.chosen)))
        if self.outputs is not None and unused:
            raise UserError(f"{unused}: of RUN, which is left out with {option('outputs')}")
        return task.reads


def evaluate_file(request: EvaluationRequest, source: Source | None) -> Evaluation:
    """Evaluate on a table, plain text or images; without a source, the outputs are compared with the references."""
    systems = [System(request.runs if request.outputs is None else (), request.decoding, request.outputs)]
    decoding = request.decoding.model_copy(update={"weights": ()})  # the weights are those of an ensemble
    if isinstance(request.against, Run):
        systems.append(System([request.against], decoding))
    elif request.against is not None:
        systems.append(System((), decoding, request.against))
    runs = [system.runs[0] for system in systems if system.runs]
    if runs and source is None:
        raise UserError("FILE is missing: a run needs sources in addition to the references")
    outputs = [system.outputs for system in systems if system.outputs is not None]
    files = ParallelFiles(source, request.references, list(dict.fromkeys(outputs)), request.texts)
    counter = LineCounter(request.options.strict)
    job = _Job(request.options, systems, runs, files, counter, request.open_engine)
    evaluation = _BY_CONTENT[runs[0].task.reads if runs else "pairs"](job)
    if not counter.skipped:
        return evaluation
    remarks = [f"{files.name}: {counter.summary()}", *evaluation.remarks]
    return replace(evaluation, skipped=dict(counter.skipped), remarks=remarks)


@dataclass(frozen=True)
class _Job:
    """An evaluation in progress."""

    options: EvaluationOptions
    systems: Sequence[System]
    runs: Sequence[Run]  # the first run of each system that has one
    files: ParallelFiles
    counter: LineCounter
    open_engine: OpenEngine

    @property
    def source(self) -> Source:
        assert self.files.table is not None, "evaluate_file checks it"
        return self.files.table

    def read(self) -> ParallelData:
        """Read the examples and check that they have the features that the runs need."""
        data = self.files.read(self.counter)
        for run in self.runs:
            for example, location in zip(data.examples, data.locations, strict=True):
                if problem := run.codec.features_problem(example):
                    raise UserError(f"{location}: {problem}")
        return data

    def usable(self, data: ParallelData, problems: Sequence[Sequence[str]]) -> list[int]:
        """The indices of the examples without a problem in any run; the others are counted as too long."""

        def skip(index: int, reason: str) -> None:
            self.counter.skip(TOO_LONG, data.locations[index], reason, tell=True)

        indices = usable(len(data.inputs), problems, skip)
        if not indices:
            raise UserError(f"{self.files.name}: there is nothing to evaluate: {self.counter.summary()}")
        return indices

    def with_remarks(
        self, evaluation: Evaluation, unknown: dict[str, int], remarks: Sequence[Sequence[str]]
    ) -> Evaluation:
        """Add the remarks on each run; if the remarks on two runs differ, they start with the name of the run."""
        notes = list(remarks[0])
        if list(remarks[-1]) != notes:
            notes = [f"{run.path}: {remark}" for run, each in zip(self.runs, remarks, strict=True) for remark in each]
        return replace(evaluation, unknown=unknown, remarks=[*evaluation.remarks, *notes])

    def with_unknown(
        self, evaluation: Evaluation, examples: Sequence[Example], labels: Sequence[str] = ()
    ) -> Evaluation:
        """Add the counts of tokens and labels that the runs do not know."""
        parts = [UnknownParts(run, examples, labels) for run in self.runs]
        if not parts:
            return evaluation
        return self.with_remarks(evaluation, parts[0].to_json(), [each.remarks() for each in parts])

    def with_confusions(
        self, evaluation: Evaluation, unit: Unit | None, sources: list[str], locations: list[str]
    ) -> Evaluation:
        """Add the most frequent confusions. By default there are none of sentences, whose `unit` is None."""
        outputs = evaluation.outputs
        limit = self.options.confusions
        if limit is None:
            limit = DEFAULT_CONFUSIONS if unit else 0
        if outputs is None or not outputs.texts or not limit:
            return evaluation
        confusions = count_confusions(
            outputs.texts, outputs.references, unit or "token", limit, sources, locations, outputs.settings.lowercase
        )
        return replace(evaluation, confusions=confusions)


def _evaluate_pairs(job: _Job) -> Evaluation:
    data = job.read()
    data = data.part(job.usable(data, too_long(job.systems, data)))
    systems = [replace(each, texts=data.outputs.get(each.outputs or "", ())) for each in job.systems]
    evaluation = evaluate_pairs(systems, data, job.options, job.open_engine)
    evaluation = replace(evaluation, remarks=_empty_outputs(evaluation.outputs, data))
    run = next(iter(systems[0].runs), None)
    unit = _UNITS.get(content_for(run, [references[0] for references in data.references]))
    if {"per", "word_edits"} & evaluation.metrics.keys():
        unit = "token"
    elif "cer" in evaluation.metrics:
        unit = "character"
    evaluation = job.with_confusions(evaluation, unit, [item.source for item in data.inputs], data.locations)
    return job.with_unknown(evaluation, data.examples)


def _empty_outputs(outputs: Outputs | None, data: ParallelData) -> list[str]:
    """One remark on the outputs that are empty because the options cannot be met for their lines."""
    flags = outputs.flags if outputs else {}
    if not flags:
        return []
    named = "; ".join(f"{data.locations[index]}: {reason}" for index, reason in list(flags.items())[:3])
    count = f"{len(flags):,} output{'s are' if len(flags) > 1 else ' is'} empty"
    return [f"{count} and counted as such ({named}{'; ...' * (len(flags) > 3)})"]


def _evaluate_labelled(job: _Job) -> Evaluation:
    from regard.decode.encoder_only import classify

    check_metrics(job.options.metrics, job.runs[0].task.evaluation)
    data = job.read()
    labels = []
    problems = []
    for system in job.systems:
        if not system.runs:
            labels.append(data.outputs[system.outputs or ""])
            continue
        options = system.options
        classified = classify(system.runs[0], data.examples, options.batch_tokens, options.max_source)
        labels.append([each.label for each in classified])
        problems.append([each.flags.get("too_long", "") for each in classified])
    indices = job.usable(data, problems)
    data = data.part(indices)
    results = [Outputs([texts[i] for i in indices], data.references) for texts in labels]
    evaluation = make_evaluation(len(indices), ["accuracy"], results, job.options.bootstrap)
    evaluation = job.with_confusions(evaluation, "label", [item.source for item in data.inputs], data.locations)
    return job.with_unknown(evaluation, data.examples)


def _evaluate_images(job: _Job) -> Evaluation:
    from regard.decode.encoder_only import classify_images

    check_metrics(job.options.metrics, job.runs[0].task.evaluation)
    images_NCHW, labels = read_images(job.source.paths[0])
    results = [Outputs([each.label for each in classify_images(run, images_NCHW)], labels) for run in job.runs]
    evaluation = make_evaluation(len(labels), ["accuracy"], results, job.options.bootstrap)
    locations = [f"{job.source.name}, image {number}" for number in range(len(labels))]
    evaluation = job.with_confusions(evaluation, "label", [], locations)
    return job.with_unknown(evaluation, (), labels)


def _evaluate_text(job: _Job) -> Evaluation:
    options = job.options
    pieces = list(read_pieces(job.source, job.counter))
    texts = [tokenize_text(pieces, run.codec.source, job.source.paths[0]) for run in job.runs]
    pairs = list(zip(job.runs, texts, strict=True))
    scores = [judge_text(run, text, options.context, options.memory) for run, text in pairs]
    evaluation = evaluate_text(job.runs[0], scores, options.metrics, options.bootstrap)
    remarks = [_unknown_in_text(run, pieces, text, evaluation) for run, text in pairs]
    return job.with_remarks(evaluation, {"source": scores[0].unknown} if scores[0].unknown else {}, remarks)


def _unknown_in_text(run: Run, pieces: list[str], text: TokenizedText, evaluation: Evaluation) -> list[str]:
    unknown = UnknownTokens()
    ends = text.tokens.cumsum()
    unknown.add(run.codec.source, pieces, [row.tolist() for row in np.split(text.ids[1:], ends[:-1])])
    if not unknown:
        return []
    remark = f"{100 * unknown.total / int(ends[-1]):.3g} % of the text: {unknown.summary()}"
    if "bits_per_char" in run.task.evaluation:
        effect = "are too few" if "bits_per_char" in evaluation.metrics else "are left out"
        remark += f"; bits per character {effect}, since the characters of an unknown token are not known"
    return [remark]


_BY_CONTENT: Mapping[Reads, Callable[[_Job], Evaluation]] = {
    "pairs": _evaluate_pairs,
    "labelled": _evaluate_labelled,
    "text": _evaluate_text,
    "images": _evaluate_images,
}


def parse_columns(columns: str | Iterable[str], references: bool, option: str = "columns") -> tuple[Column, ...]:
    """The columns of a table; there may be several target columns, or none if there are other `references`."""
    parts = columns.split(",") if isinstance(columns, str) else columns
    words: list[Any] = list(parts) if isinstance(parts, Iterable) else [parts]
    for word in words:
        if word not in get_args(Column):
            raise one_of(option, str(word), get_args(Column))
    if words.count("source") != 1 or words.count("features") > 1 or not ("target" in words or references):
        rule = "name source once, target once or several times, and features if the table has them"
        raise UserError(f"{option} {','.join(words)}: {rule}")
    return tuple(words)
