"""Answers to lines of text: what a run gives for each line, as lines of output."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from regard.answers import open_engine
from regard.cli.decoding import parse_decoding, usable_here
from regard.cli.input import InputLine, InputLines, open_runs
from regard.cli.tables import json_line
from regard.data.reader import NAMED, Line
from regard.decode.ctranslate2 import Scores
from regard.decode.encoder_only import Classification, classify
from regard.decode.engine import Engine
from regard.decode.hypothesis import Hypothesis, empty_hypothesis
from regard.decode.request import EngineName, Options
from regard.decode.sharded_output import Counts
from regard.errors import UserError
from regard.run import Run
from regard.text.codec import DISTINCT, Example


@dataclass(frozen=True)
class GenerateJob:
    """What `regard generate` is to do with a file of lines, in plain values that can go to another machine."""

    runs: tuple[str, ...]
    file: str
    options: dict[str, Any]  # of decoding, those that were given
    engine: str | None = None
    workers: int | None = None
    threads: int | None = None
    device: str = "cpu"
    jsonl: bool = False
    json: bool = False
    prefix_column: bool = False
    path: str = ""  # of the file, where that is relative to another directory

    def decoding(self) -> tuple[Options, EngineName]:
        """The checked options and the engine."""
        return parse_decoding(self.options, self.engine)

    def load(self) -> list[Run]:
        """The runs."""
        return open_runs(list(self.runs), self.device, self.threads)

    def open(self) -> LineAnswerer:
        """What answers the lines, with its runs."""
        return self.answerer(self.load(), *self.decoding())

    def lines(self, run: Run) -> InputLines:
        """A reader of the file, with counts of its own."""
        prompts = not (run.task.seq2seq or run.task.labels)
        lines = InputLines(self.path or self.file, run.codec, self.prefix_column, prompts, self.jsonl)
        lines.path = self.file  # as messages name it
        if (known := run.task.request_fields) is not None:
            lines.fields = [name for name in lines.fields if name in known]
        return lines

    def show(self, lines: InputLines, options: Options) -> Show:
        """How the outputs of a search are written."""
        show = Show(self.json or lines.jsonl, several=options.nbest > 1 or options.alternatives > 0)
        if options.top_tokens and not show.json:
            raise UserError("--top-tokens: plain output does not show them; give --json too")
        return show

    def answerer(self, runs: Sequence[Run], options: Options, engine: EngineName) -> LineAnswerer:
        """What answers the lines, by the task of the run."""
        run = runs[0]
        lines = self.lines(run)
        if run.task.labels:
            return LabelAnswerer(self, run, options, self.json or lines.jsonl)
        if run.task.name == "masked":
            show = Show(self.json or lines.jsonl, candidates=options.top_tokens > 0)
        else:
            options = usable_here(options, run.model.device)
            show = self.show(lines, options)
        scores: Scores = "tokens" if show.json else "totals" if show.several else "none"
        return EngineAnswerer(self, run, open_engine(runs, options, engine, scores, self.workers, self.threads), show)


class LineAnswerer(ABC):
    """A run that answers the lines of a job; a context manager that ends its processes."""

    def __init__(self, job: GenerateJob, run: Run, options: Options) -> None:
        self.job, self.run, self.options = job, run, options

    def lines(self) -> InputLines:
        """A reader of the file, with counts of its own."""
        return self.job.lines(self.run)

    @abstractmethod
    def answer(self, lines: InputLines, batch: Sequence[InputLine]) -> Iterator[str]:
        """The lines of output for some lines that `lines` has read, which counts what is wrong with them."""

    def shard(self, lines: Iterable[Line]) -> tuple[Counts, str]:
        """The counts and the output of the lines of a shard."""
        reader = self.lines()
        output = "".join(f"{line}\n" for line in self.answer(reader, reader.parse(lines)))
        return counts_of(reader), output

    def close(self) -> None:  # noqa: B027  not every one has processes
        """End its processes."""

    def __enter__(self) -> LineAnswerer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineAnswerer(LineAnswerer):
    """Outputs of an engine."""

    def __init__(self, job: GenerateJob, run: Run, engine: Engine, show: Show) -> None:
        super().__init__(job, run, engine.options)
        self.engine, self.show = engine, show

    def answer(self, lines: InputLines, batch: Sequence[InputLine]) -> Iterator[str]:
        inputs = self.engine.prepare([line.request for line in batch if not line.error])
        for item in inputs:
            lines.unknown.count(item.unknown)
        answers = iter(self.engine.decode(inputs))
        for line in batch:
            hypotheses = [no_output(line)] if line.error else next(answers)
            lines.note_flags(line, hypotheses[0].flags)
            yield from self.show.answer(line, hypotheses)

    def close(self) -> None:
        self.engine.close()


class LabelAnswerer(LineAnswerer):
    """Labels of a classifier."""

    def __init__(self, job: GenerateJob, run: Run, options: Options, json: bool) -> None:
        super().__init__(job, run, options)
        self.json = json

    def answer(self, lines: InputLines, batch: Sequence[InputLine]) -> Iterator[str]:
        empty = Classification("", {}, {"empty": "the text is empty"})
        good = [line for line in batch if not line.error]
        texts = [Example(x.request.source, features=x.request.features) for x in good if x.request.source.strip()]
        self.run.codec.note_unknown(texts, lines.unknown)
        answers = iter(classify(self.run, texts, self.options.batch_tokens, self.options.max_source))
        for line in batch:
            answer = empty if line.error or not line.request.source.strip() else next(answers)
            if line.error:
                answer = replace(empty, flags={"error": line.error})
            lines.note_flags(line, answer.flags)
            shown = {**line.extra, "source": line.request.source, **answer.as_dict()}
            yield shown_label(answer.label, {**shown, **_error(line)}, self.json)


class Show(NamedTuple):
    """How outputs are written."""

    json: bool
    several: bool = False  # outputs per line
    candidates: bool = False  # of masks, instead of an output

    def answer(self, line: InputLine, hypotheses: list[Hypothesis]) -> Iterator[str]:
        """The outputs of a line, as lines."""
        if self.json:
            answer = {**line.extra, "source": line.request.source, "hypotheses": [h.as_dict() for h in hypotheses]}
            if candidates := hypotheses[0].candidates:
                answer["candidates"] = [{"text": h.text, "utility": h.utility, "score": h.score} for h in candidates]
            yield json_line({**answer, **_error(line)})
        elif self.candidates:
            rows = [(n, top) for n, row in enumerate(hypotheses[0].top_tokens, 1) for top in row]
            for number, (token, score) in rows:
                yield f"{line.number}\t{number}\t{math.exp(score):.4f}\t{_escaped(token)}"
            if not rows:
                yield f"{line.number}\t\t\t"
        elif self.several:
            for hypothesis in hypotheses:
                yield f"{line.number}\t{hypothesis.score:.4f}\t{one_line(hypothesis.text)}{links(hypothesis)}"
        else:
            yield one_line(hypotheses[0].text) + links(hypotheses[0])


def no_output(line: InputLine) -> Hypothesis:
    """The answer to a line with an error."""
    return empty_hypothesis({"error": line.error})


def _error(line: InputLine) -> dict[str, str]:
    return {"error": f"{line.location}: {line.error}"} if line.error else {}


def links(hypothesis: Hypothesis) -> str:
    """The column of an alignment, if there is one."""
    alignment = hypothesis.alignment
    return "" if alignment is None else f"\t{' '.join(f'{s}-{t}' for s, t in alignment.hard)}"


def shown_label(label: str, answer: dict[str, Any], json: bool) -> str:
    """The line of a label."""
    return json_line(answer) if json else one_line(label)


def _escaped(token: str) -> str:
    """A token without the characters that end cells and lines."""
    return token.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def one_line(text: str) -> str:
    """Text whose line breaks are shown as blanks: a line in is a line out."""
    return text.replace("\n", " ").replace("\r", " ")


# Counts of shards


def counts_of(lines: InputLines) -> Counts:
    """What was counted, as JSON."""
    unknown = {"counts": dict(lines.unknown.counts), "total": lines.unknown.total, "texts": lines.unknown.texts}
    others = {"targets_ignored": lines.targets_ignored, "degenerate": lines.degenerate, "unknown": unknown}
    return {**lines.counter.to_json(), **others}


def add_counts(lines: InputLines, counts: Counts) -> None:
    """Add what was counted of later lines."""
    counter, unknown = lines.counter, lines.unknown
    counter.read += counts["read"]
    counter.skipped.update(counts["skipped"])
    for reason, places in counts["places"].items():
        named = counter.locations.setdefault(reason, [])
        named += places[: NAMED - len(named)]
    lines.targets_ignored += counts["targets_ignored"]
    lines.degenerate += counts["degenerate"]
    unknown.total += counts["unknown"]["total"]
    unknown.texts += counts["unknown"]["texts"]
    for token, count in counts["unknown"]["counts"].items():
        if token in unknown.counts or len(unknown.counts) < DISTINCT:
            unknown.counts[token] += count
