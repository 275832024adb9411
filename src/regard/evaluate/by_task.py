"""Evaluation of runs and ready outputs on the files of their task, as the command line and the library request it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np

from regard.data.images import read_images
from regard.data.plain_text import TokenizedText, read_pieces, tokenize_text
from regard.data.reader import TOO_LONG, LineCounter, Source
from regard.decode.encoder_only import classify, classify_images
from regard.decode.engine import TorchEngine
from regard.decode.request import Options, check_supported
from regard.errors import UserError
from regard.evaluate.confusions import Unit, count_confusions
from regard.evaluate.evaluator import (
    Evaluation,
    EvaluationOptions,
    OpenEngine,
    Outputs,
    System,
    check_metrics,
    content_for,
    evaluate_pairs,
    evaluate_text,
    judge_text,
    make_evaluation,
    pair_examples,
    too_long,
    usable,
)
from regard.evaluate.test_data import ParallelData, ParallelFiles, UnknownParts
from regard.metrics import MetricSettings
from regard.recipe import Column
from regard.run import Run
from regard.suggest import one_of
from regard.tasks import TABLE, Reads
from regard.text.codec import Example, UnknownTokens

DEFAULT_CONFUSIONS = 10
OUTPUT_OPTIONS = (*TABLE, *MetricSettings.model_fields)  # for ready outputs without a run
_UNITS: Mapping[str, Unit] = {"labels": "label", "tokens": "token", "words": "character"}


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """A run, an ensemble or ready outputs to evaluate, another run or other outputs to compare with, and the options.

    Outputs and references are the names of files, or of `texts` in memory.
    """

    options: EvaluationOptions
    decoding: Options = field(default_factory=Options)
    chosen: AbstractSet[str] = frozenset()  # names of the options that the user has set, of any kind
    runs: Sequence[Run] = ()  # several are an ensemble
    outputs: str | None = None  # ready outputs, evaluated instead of the outputs of `runs`
    against: Run | str | None = None  # a run or ready outputs
    references: Sequence[str] = ()  # in addition to those of the table
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    open_engine: OpenEngine = TorchEngine

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
        run, task = runs[0], runs[0].task
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

    @property
    def systems(self) -> list[System]:
        systems = [System(self.runs if self.outputs is None else (), self.decoding, self.outputs)]
        decoding = self.decoding.model_copy(update={"weights": ()})  # the weights are those of an ensemble
        if isinstance(self.against, Run):
            systems.append(System([self.against], decoding))
        elif self.against is not None:
            systems.append(System((), decoding, self.against))
        return systems


def evaluate_file(request: EvaluationRequest, source: Source | None) -> Evaluation:
    """Evaluate on a table, plain text or images; without a source, the outputs are compared with the references.

    Ready outputs without a run are evaluated like outputs for pairs.
    """
    systems = request.systems
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
            for item, location in zip(data.inputs, data.locations, strict=True):
                if problem := run.codec.features_problem(Example(item.source, None, item.features)):
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
        limit = DEFAULT_CONFUSIONS if self.options.confusions is None else self.options.confusions
        if unit is None and self.options.confusions is None:
            limit = 0
        if outputs is None or not outputs.texts or not limit:
            return evaluation
        confusions = count_confusions(
            outputs.texts, outputs.references, unit or "token", limit, sources, locations, outputs.settings.lowercase
        )
        return replace(evaluation, confusions=confusions)


def _evaluate_pairs(job: _Job) -> Evaluation:
    data = job.read()
    data = data.part(job.usable(data, too_long(job.systems, data.inputs, data.references)))
    systems = [replace(each, texts=data.outputs.get(each.outputs or "", ())) for each in job.systems]
    evaluation = evaluate_pairs(systems, data.inputs, data.references, job.options, job.open_engine)
    evaluation = replace(evaluation, remarks=_empty_outputs(evaluation.outputs, data))
    run = systems[0].runs[0] if systems[0].runs else None
    unit = _UNITS.get(content_for(run, [references[0] for references in data.references]))
    if "per" in evaluation.metrics:
        unit = "token"
    elif "cer" in evaluation.metrics:
        unit = "character"
    evaluation = job.with_confusions(evaluation, unit, [item.source for item in data.inputs], data.locations)
    return job.with_unknown(evaluation, pair_examples(data.inputs, data.references))


def _empty_outputs(outputs: Outputs | None, data: ParallelData) -> list[str]:
    """One remark on the outputs that are empty because the options cannot be met for their lines."""
    flags = outputs.flags if outputs else {}
    if not flags:
        return []
    named = "; ".join(f"{data.locations[index]}: {reason}" for index, reason in list(flags.items())[:3])
    count = f"{len(flags):,} output{'s are' if len(flags) > 1 else ' is'} empty"
    return [f"{count} and counted as such ({named}{'; ...' * (len(flags) > 3)})"]


def _evaluate_labelled(job: _Job) -> Evaluation:
    check_metrics(job.options.metrics, job.runs[0].task.evaluation)
    data = job.read()
    labels, problems = [], []
    for system in job.systems:
        if not system.runs:
            labels.append(data.outputs[system.outputs or ""])
            continue
        options = system.options
        classified = classify(
            system.runs[0], pair_examples(data.inputs, data.references), options.batch_tokens, options.max_source
        )
        labels.append([each.label for each in classified])
        problems.append([each.flags.get("too_long", "") for each in classified])
    indices = job.usable(data, problems)
    data = data.part(indices)
    results = [Outputs([texts[i] for i in indices], data.references) for texts in labels]
    evaluation = make_evaluation(len(indices), ["accuracy"], results, job.options.bootstrap)
    evaluation = job.with_confusions(evaluation, "label", [item.source for item in data.inputs], data.locations)
    return job.with_unknown(evaluation, pair_examples(data.inputs, data.references))


def _evaluate_images(job: _Job) -> Evaluation:
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
    unknown, ends = UnknownTokens(), text.tokens.cumsum()
    unknown.add(run.codec.source, pieces, [row.tolist() for row in np.split(text.ids[1:], ends[:-1])])
    if not unknown:
        return []
    remark = f"{100 * unknown.total / int(ends[-1]):.3g} % of the text: {unknown.summary()}"
    if "bits_per_char" in run.task.evaluation:
        effect = "are too few" if "bits_per_char" in evaluation.metrics else "are left out"
        remark += f"; bits per character {effect}, since an unknown token does not say which character it was"
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
