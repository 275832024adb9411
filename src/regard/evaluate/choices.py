"""What may be asked of an evaluation, on the command line or in a program, and which of it has a meaning for a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal, get_args

from regard.config import Count
from regard.data.reader import LineCounter
from regard.decode.generate import TorchEngine
from regard.decode.options import Options, PhraseList
from regard.decode.request import Whole
from regard.errors import UserError, one_of
from regard.evaluate.by_task import EvaluationRequest
from regard.evaluate.evaluator import Judging, OpenEngine, System
from regard.evaluate.parallel import ParallelFiles
from regard.metrics import SAMPLES, MetricSettings
from regard.recipe import Column
from regard.run import Run
from regard.tasks import Reads

EngineChoice = Literal["torch", "ctranslate2"]
LINES = ("target", "columns", "reference", "strict", "confusions")
READY = (*LINES, "outputs", *MetricSettings.model_fields)
# The options of each kind of data, beside metrics, what to compare with, and the samples of the bootstrap.
SUPPORTED: Mapping[Reads, Sequence[str]] = {
    "pairs": (*READY, *Options.model_fields, "ensemble", "prefix_column", "engine", "workers"),
    "labelled": (*LINES, "outputs", "max_source", "batch_tokens"),
    "text": ("context", "memory", "strict"),
    "images": ("confusions",),
}


class EvaluationOptions(MetricSettings):
    """How outputs are judged, and what is reported of them."""

    metrics: PhraseList = ()  # without any, those that fit
    bootstrap: Whole = SAMPLES  # samples; 0: no intervals
    confusions: Whole | None = None
    context: Whole | None = None
    memory: Count | None = None
    engine: EngineChoice | None = None
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
    if foreign := sorted(given - set(SUPPORTED[task.reads])):
        raise UserError(f"{', '.join(map(name, foreign))}: no meaning for {run.path}, which is {task.model}")
    if ready and "outputs" not in SUPPORTED[task.reads]:
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


def engine_opener(engine: EngineChoice | None, precision: str) -> OpenEngine:
    """What opens an engine in this process; the precision is that of CTranslate2, whose options have none."""
    if engine != "ctranslate2":
        return TorchEngine
    from regard.engines.ctranslate2 import CTranslate2Engine  # an optional dependency

    return lambda runs, options: CTranslate2Engine.open(runs, options, precision, "none")
