"""Evaluation of files, by the task of the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np

from regard.config import Count
from regard.data.images import read_images
from regard.data.plain_text import TokenizedText, read_pieces, tokenize_text
from regard.data.reader import LONG, LineCounter, Source
from regard.decode.encoder_only import classify, classify_images
from regard.decode.request import EngineName, Options, PhraseList, Whole, check_supported
from regard.errors import UserError
from regard.evaluate.confusions import Unit, count_confusions
from regard.evaluate.evaluator import (
    Evaluation,
    Judging,
    OpenEngine,
    Outputs,
    System,
    check_metrics,
    content_for,
    evaluate_pairs,
    evaluate_text,
    judge_text,
    make_evaluation,
    too_long,
    usable,
)
from regard.evaluate.test_data import ParallelData, ParallelFiles, UnknownParts
from regard.metrics import SAMPLES, MetricSettings
from regard.recipe import Column
from regard.run import Run
from regard.suggest import one_of
from regard.tasks import TABLE, Reads
from regard.text.codec import Example, UnknownTokens

CONFUSIONS = 10  # reported by default


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate, and on which files; a second system is compared with the first."""

    systems: Sequence[System]
    files: ParallelFiles  # of other tasks: plain text or images in place of the table
    counter: LineCounter = field(default_factory=LineCounter)
    judging: Judging = field(default_factory=Judging)
    confusions: int | None = None  # the most frequent; None: some, unless sentences are judged
    context: int | None = None  # of plain text: tokens read at a time
    memory: int | None = None  # of plain text: tokens remembered

    @property
    def runs(self) -> list[Run]:
        """The first run of each system that has one."""
        return [system.runs[0] for system in self.systems if system.runs]

    @property
    def source(self) -> Source:
        """The table, text or images."""
        assert self.files.table is not None, "evaluate_file checks it"
        return self.files.table

    def read(self) -> ParallelData:
        """The examples of the files, checked to have the features that the runs need."""
        data = self.files.read(self.counter)
        for run in self.runs:
            for item, location in zip(data.inputs, data.locations, strict=True):
                if problem := run.codec.features_problem(Example(item.source, None, item.features)):
                    raise UserError(f"{location}: {problem}")
        return data

    def keep(self, data: ParallelData, problems: Sequence[Sequence[str]]) -> list[int]:
        """The examples with which no run has a problem; the others are counted, and their lines named."""

        def skip(index: int, reason: str) -> None:
            self.counter.skip(LONG, data.locations[index], reason, tell=True)

        kept = usable(len(data.inputs), problems, skip)
        if not kept:
            raise UserError(f"{self.files.name}: there is nothing to evaluate: {self.counter.summary()}")
        return kept

    def noted(self, evaluation: Evaluation, unknown: dict[str, int], remarks: list[list[str]]) -> Evaluation:
        """An evaluation with the remarks on each run; if those on two runs differ, with the runs' names."""
        notes = remarks[0]
        if remarks[-1] != notes:
            notes = [f"{run.path}: {remark}" for run, each in zip(self.runs, remarks, strict=True) for remark in each]
        return replace(evaluation, unknown=unknown, remarks=[*evaluation.remarks, *notes])

    def noted_parts(self, evaluation: Evaluation, parts: list[UnknownParts]) -> Evaluation:
        """An evaluation with what the runs do not know."""
        return self.noted(evaluation, parts[0].to_json(), [each.remarks() for each in parts]) if parts else evaluation

    def confused(self, evaluation: Evaluation, unit: Unit | None, sources: list[str], places: list[str]) -> Evaluation:
        """An evaluation with its most frequent confusions."""
        outputs, most = evaluation.outputs, CONFUSIONS if self.confusions is None else self.confusions
        if outputs is None or not outputs.texts or not most or (unit is None and self.confusions is None):
            return evaluation
        settings = most, sources, places, outputs.settings.lowercase
        return replace(
            evaluation, confusions=count_confusions(outputs.texts, outputs.references, unit or "token", *settings)
        )


def evaluate_file(request: EvaluationRequest) -> Evaluation:
    """Evaluate systems on the files of their task; outputs without a run are judged like those of pairs."""
    if request.runs and request.files.table is None:
        raise UserError("FILE is missing: a run needs sources, beside the references")
    return _BY_CONTENT[request.runs[0].task.reads if request.runs else "pairs"](request)


def _evaluate_pairs(request: EvaluationRequest) -> Evaluation:
    data = request.read()
    data = data.part(request.keep(data, too_long(request.systems, data.inputs, data.references)))
    systems = [replace(each, texts=data.outputs.get(each.outputs or "", ())) for each in request.systems]
    evaluation = evaluate_pairs(systems, data.inputs, data.references, request.judging)
    evaluation = replace(evaluation, remarks=_empty_outputs(evaluation.outputs, data))
    run = systems[0].runs[0] if systems[0].runs else None
    content = content_for(run, [several[0] for several in data.references])
    unit: Unit | None = _UNITS.get(content)
    unit = "token" if "per" in evaluation.metrics else "character" if "cer" in evaluation.metrics else unit
    evaluation = request.confused(evaluation, unit, [item.source for item in data.inputs], data.locations)
    return request.noted_parts(evaluation, [UnknownParts(run, _examples(data)) for run in request.runs])


_UNITS: Mapping[str, Unit] = {"labels": "label", "tokens": "token", "words": "character"}


def _examples(data: ParallelData) -> list[Example]:
    pairs = zip(data.inputs, data.references, strict=True)
    return [Example(item.source, references[0], item.features) for item, references in pairs]


def _empty_outputs(outputs: Outputs | None, data: ParallelData) -> list[str]:
    """One remark on outputs that are empty because the options cannot be met for their lines."""
    flags = outputs.flags if outputs else {}
    if not flags:
        return []
    named = "; ".join(f"{data.locations[index]}: {reason}" for index, reason in list(flags.items())[:3])
    count = f"{len(flags):,} output{'s are' if len(flags) > 1 else ' is'} empty"
    return [f"{count} and counted as such ({named}{'; ...' * (len(flags) > 3)})"]


def _evaluate_labelled(request: EvaluationRequest) -> Evaluation:
    check_metrics(request.judging.metrics, request.runs[0].task.evaluation)
    data = request.read()
    labels, problems = [], []
    for system in request.systems:
        if not system.runs:
            labels.append(data.outputs[system.outputs or ""])
            continue
        options = system.options
        classified = classify(system.runs[0], _examples(data), options.batch_tokens, options.max_source)
        labels.append([each.label for each in classified])
        problems.append([each.flags.get("too_long", "") for each in classified])
    kept = request.keep(data, problems)
    data = data.part(kept)
    results = [Outputs([texts[i] for i in kept], data.references) for texts in labels]
    evaluation = make_evaluation(len(kept), ["accuracy"], results, request.judging.samples)
    evaluation = request.confused(evaluation, "label", [item.source for item in data.inputs], data.locations)
    return request.noted_parts(evaluation, [UnknownParts(run, _examples(data)) for run in request.runs])


def _evaluate_images(request: EvaluationRequest) -> Evaluation:
    check_metrics(request.judging.metrics, request.runs[0].task.evaluation)
    images_NCHW, labels = read_images(request.source.paths[0])
    results = [Outputs([each.label for each in classify_images(run, images_NCHW)], labels) for run in request.runs]
    evaluation = make_evaluation(len(labels), ["accuracy"], results, request.judging.samples)
    places = [f"{request.source.name}, image {number}" for number in range(len(labels))]
    evaluation = request.confused(evaluation, "label", [], places)
    return request.noted_parts(evaluation, [UnknownParts(run, labels=labels) for run in request.runs])


def _evaluate_text(request: EvaluationRequest) -> Evaluation:
    source, judging = request.source, request.judging
    pieces = list(read_pieces(source, request.counter))
    units = [tokenize_text(pieces, run.codec.source, source.paths[0]) for run in request.runs]
    pairs = list(zip(request.runs, units, strict=True))
    scores = [judge_text(run, each, request.context, request.memory) for run, each in pairs]
    evaluation = evaluate_text(request.runs[0], scores, judging.metrics, judging.samples)
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


READY = (*TABLE, *MetricSettings.model_fields)  # options to judge outputs without a run


class EvaluationOptions(MetricSettings):
    """How outputs are judged, and what is reported of them."""

    metrics: PhraseList = ()  # without any, those that fit
    bootstrap: Whole = SAMPLES  # samples; 0: no intervals
    confusions: Whole | None = None
    context: Whole | None = None
    memory: Count | None = None
    engine: EngineName | None = None
    strict: bool = False

    @property
    def given(self) -> set[str]:
        """The names of what was asked for, without what every task has."""
        return {*self.model_dump(exclude_defaults=True)} - {"metrics", "bootstrap"}

    def request(
        self, systems: Sequence[System], files: ParallelFiles, counter: LineCounter, open_engine: OpenEngine
    ) -> EvaluationRequest:
        """The evaluation of these systems on these files."""
        settings = MetricSettings(bleu_tokenize=self.bleu_tokenize, lowercase=self.lowercase)
        judging = Judging(self.metrics, self.bootstrap, settings, open_engine)
        return EvaluationRequest(systems, files, counter, judging, self.confusions, self.context, self.memory)


def check_given(given: AbstractSet[str], runs: Sequence[Run], ready: bool, name: Callable[[str], str] = str) -> Reads:
    """Refuse runs of different tasks, and options without a meaning for them -> what the runs read.

    `runs` are the one that is judged and the one to compare with, unless there are outputs in its place; `ready` says
    whether there are any to compare with. `name` gives the name of an option as it is written.
    """
    if not runs:
        if foreign := sorted(given - set(READY)):
            raise UserError(f"{', '.join(map(name, foreign))}: no meaning for outputs that are ready, without a run")
        return "pairs"
    run, task = runs[0], runs[0].task
    for other in runs[1:]:
        if other.task != task:
            raise UserError(f"{name('against')}: {other.path} is {other.task.model}, {run.path} is {task.model}")
    decoding = Options.model_fields if task.reads == "pairs" else ()
    check_supported(sorted(given), (*task.evaluation_options, *decoding), task, run.path, name)
    if ready and "outputs" not in task.evaluation_options:
        reason = f"{run.path}, which is {task.model}, is compared with another run"
        raise UserError(f"{name('against')}: no outputs that are ready; {reason}")
    if "outputs" in given and (foreign := sorted({"ensemble", "weights"} & given)):
        raise UserError(f"{', '.join(map(name, foreign))}: of RUN, which is left out with {name('outputs')}")
    return task.reads


def parse_columns(columns: str | Iterable[str], references: bool, option: str = "columns") -> tuple[Column, ...]:
    """The columns of a table: target may be there several times, or not at all if there are other `references`."""
    parts = columns.split(",") if isinstance(columns, str) else columns
    words: list[Any] = list(parts) if isinstance(parts, Iterable) else [parts]
    for word in words:
        if word not in get_args(Column):
            raise one_of(option, str(word), get_args(Column))
    if words.count("source") != 1 or words.count("features") > 1 or not ("target" in words or references):
        wanted = "name source once, target once or several times, and features if there are"
        raise UserError(f"{option} {','.join(words)}: {wanted}")
    return tuple(words)
