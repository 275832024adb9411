"""Lines of input as requests, and the lines of output that answer them."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from queue import Queue
from stat import S_ISREG
from threading import Thread
from types import MappingProxyType
from typing import Any, NamedTuple

from regard.answers import Answerer, generation_json, label_json, open_engine, usable_options
from regard.batch import windows
from regard.cli import READER
from regard.cli.output import json_line, message
from regard.data.pairs import read_table
from regard.data.reader import (
    BAD_REQUEST,
    COLUMNS,
    NO_MEMORY,
    STDIN,
    TOO_LONG,
    UNMET,
    Line,
    LineCounter,
    Source,
    read_lines,
    shown,
)
from regard.data.tables import format_of
from regard.decode.engine import Scores
from regard.decode.hypothesis import DEGENERATE, MANY_DEGENERATE, Hypothesis, empty_hypothesis
from regard.decode.request import ANSWER_KEYS, EngineChoice, Options, Request, parse_request
from regard.decode.sharded_output import Counts
from regard.errors import UserError
from regard.files import json_object
from regard.run import Run
from regard.tasks import Reads
from regard.text.codec import MAX_DISTINCT, Codec, Example, UnknownTokens

IMAGES = "images (.npz)"
ESCAPES = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})  # of a token in plain output
# Descriptions of the columns of a table.
COLUMN_WORDS = {
    "source": "a source", "features": "features", "target": "a target", "text": "a text", "prefix": "a prefix",
}  # fmt: skip
LABELLED_WORDS = COLUMN_WORDS | {"source": "a text", "target": "a label"}


def announce_stdin(path: str, content: str) -> None:
    """Inform a user at a terminal that standard input is read, with the expected content."""
    if path == STDIN and sys.stdin is not None and sys.stdin.isatty():
        message(f"reading standard input: {content}; Ctrl-D ends it (or name a file after the run)")


def announce_data(source: Source, reads: Reads) -> None:
    """Announce standard input with the content of data files."""
    names = [*(source.columns if len(source.paths) == 1 else ("source",)), *["prefix"] * source.prefix_column]
    table = columns_in_words(names, LABELLED_WORDS if reads == "labelled" else COLUMN_WORDS)
    announce_stdin(source.paths[0], {"text": "plain text", "images": IMAGES}.get(reads, table))


def columns_in_words(names: Sequence[str], words: Mapping[str, str] = COLUMN_WORDS) -> str:
    """The content of a line of a table: a source and a target per line, separated by a tab."""
    *first, last = (words[name] for name in names)
    if not first:
        return f"{last} per line"
    return f"{', '.join(first)} and {last} per line, separated by {'a tab' if len(names) == 2 else 'tabs'}"


class InputLine(NamedTuple):
    """A line as a request; a bad line has an empty request and an error."""

    number: int
    request: Request
    extra: Mapping[str, Any] = MappingProxyType({})  # keys of a JSON line that are not part of a request
    error: str = ""


class InputLines:
    """The lines of a file as requests: columns, or JSON objects. Bad lines are counted and reported at the end."""

    def __init__(
        self, path: str, codec: Codec, prefix_column: bool = False, prompts: bool = False, jsonl: bool = False
    ) -> None:
        if path != STDIN and not os.path.exists(path):
            hint = f"a text itself goes to standard input: echo {shlex.quote(path)} | regard ..."
            raise UserError(f"{path}: no such file; {hint}")
        self.path = path
        self.jsonl = jsonl or format_of(path) == "jsonl"
        self.table: Source | None = None  # a file in another format than text
        self.counter = LineCounter()
        self.unknown = UnknownTokens()
        self.targets_ignored = 0
        self.degenerate = 0  # outputs
        self.fields = [name for name in Request.model_fields if name != "features" or "features" in codec.columns]
        self._names = [name for name in codec.columns if name != "target"]
        self._target_at = codec.columns.index("target") if "target" in codec.columns else None
        self._prompts = prompts
        self._prefix_column = prefix_column
        if not self.jsonl and (os.path.isdir(path) or format_of(path) != "text"):
            names = ("text",) if prompts else None
            self.table = read_table(path, tuple(self._names), names, prefix_column, message)
        if self.jsonl and prefix_column:
            raise UserError("--prefix-column: lines of JSON have no columns; give each its prefix by the key prefix")

    def batches(self, count: int) -> Iterator[list[InputLine]]:
        """The lines, up to `count` at a time; from a pipe, the available lines, so that no line waits for the next."""
        names = [*(["text"] if self._prompts else self._names), *["prefix"] * self._prefix_column]
        announce_stdin(self.path, "a JSON object per line" if self.jsonl else columns_in_words(names))
        if self.table is not None:
            yield from windows(self._read_table(self.table), count)
            return
        lines = read_lines(self.path)
        for batch in windows(lines, count) if _is_file(self.path) else _available(lines, count):
            yield self.parse(batch)

    def parse(self, lines: Iterable[Line]) -> list[InputLine]:
        """Lines as requests, counted."""
        return [self._read(line) for line in lines]

    def note_flags(self, line: InputLine, flags: Mapping[str, str]) -> None:
        """Count a line whose output is empty or degenerate according to its flags."""
        for name, reason in (("too_long", TOO_LONG), ("unsatisfied", UNMET), ("out_of_memory", NO_MEMORY)):
            if name in flags:
                self.counter.skip(reason, self._location(line), flags[name], tell=True)
        self.degenerate += any(name in flags for name in DEGENERATE)

    def remarks(self) -> list[str]:
        """Messages about unusable lines, ignored columns and unknown tokens."""
        remarks = []
        if self.counter.skipped:
            remarks.append(f"{self.counter.summary()}; their outputs are empty")
        if self.targets_ignored:
            lines = "line has" if self.targets_ignored == 1 else "lines have"
            remarks.append(f"{self.targets_ignored:,} {lines} a target column, which was ignored")
        if self.unknown.total:
            remarks.append(self.unknown.summary())
        if self.degenerate > MANY_DEGENERATE * self.counter.read:
            share = f"{self.degenerate:,} of {self.counter.read:,} outputs"
            remarks.append(f"{share} repeat tokens or are far too long or short: too little training?")
        return remarks

    def _location(self, line: Line | InputLine) -> str:
        return self.table.location(line.number) if self.table else f"{shown(self.path)}:{line.number}"

    def _read(self, line: Line) -> InputLine:
        self.counter.read += 1
        if line.problem:
            return self._bad(line, line.problem)
        return self._from_json(line) if self.jsonl else self._from_cells(line, line.text.split("\t"))

    def _read_table(self, table: Source) -> Iterator[InputLine]:
        for number, cells, problem, detail in chain.from_iterable(map(table.rows, table.chunks())):
            self.counter.read += 1
            line = Line(number, "\t".join(cells))
            yield self._bad(line, problem, detail) if problem else self._from_cells(line, cells)

    def _bad(
        self, line: Line, reason: str, detail: str = "", source: str = "", extra: Mapping[str, Any] = {}
    ) -> InputLine:
        self.counter.skip(reason, self._location(line), detail, tell=bool(detail))
        return InputLine(line.number, Request(source), extra, detail or reason)

    def _from_cells(self, line: Line, cells: list[str]) -> InputLine:
        prefix = cells.pop() if self._prefix_column and len(cells) > 1 else ""
        if self._prompts:  # a prompt may contain tabs
            return InputLine(line.number, Request("\t".join(cells), None, prefix))
        if len(cells) == len(self._names) + 1 and self._target_at is not None:
            del cells[self._target_at]
            self.targets_ignored += 1
        if len(cells) != len(self._names):
            return self._bad(line, COLUMNS) if line.text.strip() else InputLine(line.number, Request(""))
        row = dict(zip(self._names, cells, strict=True))
        return InputLine(line.number, Request(row["source"], row.get("features"), prefix))

    def _from_json(self, line: Line) -> InputLine:
        data: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        try:
            data = json_object(line.text)
            extra = {key: value for key, value in data.items() if key not in (*Request.model_fields, *ANSWER_KEYS)}
            request = parse_request(data, self.fields)
            if "features" in self.fields and request.features is None:
                raise UserError("features: is required, since the run was trained with features")
        except UserError as error:
            source = data.get("source")
            return self._bad(line, BAD_REQUEST, str(error), source if isinstance(source, str) else "", extra)
        return InputLine(line.number, request, extra)


def _is_file(path: str) -> bool:
    try:
        return S_ISREG((os.fstat(sys.stdin.fileno()) if path == STDIN else os.stat(path)).st_mode)
    except (OSError, ValueError, AttributeError):
        # The reader reports the problem. A stdin without a file number is not a pipe; a closed stdin is None.
        return True


def _available(lines: Iterator[Line], count: int) -> Iterator[list[Line]]:
    """The lines that have arrived, up to `count` at a time; a thread reads ahead while the model works."""
    waiting: Queue[Line | BaseException | None] = Queue(maxsize=count)  # None is the end

    def read() -> None:
        try:
            for line in lines:
                waiting.put(line)
            waiting.put(None)
        except BaseException as error:  # raised by the consumer
            waiting.put(error)

    Thread(target=read, daemon=True, name=READER).start()
    item = waiting.get()
    while isinstance(item, Line):
        batch = [item]
        while len(batch) < count and not waiting.empty() and isinstance(item := waiting.get(), Line):
            batch.append(item)
        yield batch
        if isinstance(item, Line):
            item = waiting.get()
    if item is not None:
        raise item


@dataclass(frozen=True)
class GenerateJob:
    """The work of `regard generate` on a file of lines, as plain values that can be sent to another machine."""

    runs: tuple[str, ...]
    file: str
    options: dict[str, Any]  # of decoding, as on the command line
    engine: str | None = None
    workers: int | None = None
    threads: int | None = None
    device: str = "cpu"
    jsonl: bool = False
    json: bool = False
    prefix_column: bool = False


class LineAnswerer(Answerer):
    """Answers the lines of a job: requests in, lines of output out."""

    def __init__(self, job: GenerateJob, runs: Sequence[Run], options: Options, engine: EngineChoice) -> None:
        self.job = job
        self.run = runs[0]
        task = self.run.task
        self.json = job.json or self.lines().jsonl
        self.masks = "embed" in task.answers and options.top_tokens > 0  # plain output: the candidates of each mask
        self.several = options.nbest > 1 or options.alternatives > 0  # plain output: the number and score of each text
        opened = None
        if "generate" in task.answers:
            options = usable_here(options, self.run)
            if options.top_tokens and not self.json and not self.masks:
                raise UserError("--top-tokens: plain output does not show them; give --json too")
            scores: Scores = "tokens" if self.json else "totals" if self.several else "none"
            opened = open_engine(runs, options, engine, scores, job.workers, job.threads)
            if engine == "auto" and opened.name == "native" and sys.stderr is not None and sys.stderr.isatty():
                message("engine: native")
        super().__init__(runs, options, opened)

    def lines(self) -> InputLines:
        """A new reader of the file, with its own counts."""
        job = self.job
        task = self.run.task
        prompts = task.reads == "text" and not task.seq2seq
        lines = InputLines(job.file, self.run.codec, job.prefix_column, prompts, job.jsonl)
        if task.request_fields is not None:
            lines.fields = [name for name in lines.fields if name in task.request_fields]
        return lines

    def outputs(self, lines: InputLines) -> Iterator[str]:
        """The output of all lines, a window at a time."""
        for batch in lines.batches(self.options.window):
            yield self.answer(lines, batch)

    def answer(self, lines: InputLines, batch: Sequence[InputLine]) -> str:
        """The output for a batch of `lines`, which counts unusable lines."""
        answers = (self._decode if "generate" in self.run.task.answers else self._label)(lines, batch)
        return "".join(f"{line}\n" for line in answers)

    def _decode(self, lines: InputLines, batch: Sequence[InputLine]) -> Iterator[str]:
        answers = self.generate([line.request for line in batch if not line.error])
        for item, _ in answers:
            if item.unknown:
                lines.unknown.count(item.unknown)
        rows = iter(answers)
        for line in batch:
            hypotheses = [empty_hypothesis({"error": line.error})] if line.error else next(rows).hypotheses
            lines.note_flags(line, hypotheses[0].flags)
            yield from self.shown(line, hypotheses)

    def _label(self, lines: InputLines, batch: Sequence[InputLine]) -> Iterator[str]:
        texts = [
            Example(line.request.source, features=line.request.features)
            for line in batch
            if not line.error and line.request.source.strip()
        ]
        self.run.codec.note_unknown(texts, lines.unknown)
        from regard.decode.encoder_only import Classification

        labels = iter(self.classify(texts))
        for line in batch:
            if line.error:
                label = Classification("", {}, {"error": line.error})
            elif not line.request.source.strip():
                label = Classification("", {}, {"empty": "the text is empty"})
            else:
                label = next(labels)
            lines.note_flags(line, label.flags)
            yield self._json(line, label_json(line.request.source, label)) if self.json else one_line(label.label)

    def shown(self, line: InputLine, hypotheses: Sequence[Hypothesis]) -> Iterator[str]:
        """The lines of output for the hypotheses of a line."""
        if self.json:
            yield self._json(line, generation_json(line.request.source, hypotheses))
        elif self.masks:
            rows = [(n, top) for n, row in enumerate(hypotheses[0].top_tokens, 1) for top in row]
            for number, (token, score) in rows:
                yield f"{line.number}\t{number}\t{math.exp(score):.4f}\t{token.translate(ESCAPES)}"
            if not rows:
                yield f"{line.number}\t\t\t"
        elif self.several:
            for hypothesis in hypotheses:
                yield f"{line.number}\t{hypothesis.score:.4f}\t{one_line(hypothesis.text)}{links(hypothesis)}"
        else:
            yield one_line(hypotheses[0].text) + links(hypotheses[0])

    def _json(self, line: InputLine, answer: Mapping[str, Any]) -> str:
        error = {"error": f"{shown(self.job.file)}:{line.number}: {line.error}"} if line.error else {}
        return json_line({**line.extra, **answer, **error})

    def shard(self, lines: Iterable[Line]) -> tuple[Counts, str]:
        """The counts and the output of the lines of a shard."""
        reader = self.lines()
        output = self.answer(reader, reader.parse(lines))
        others = {"targets_ignored": reader.targets_ignored, "degenerate": reader.degenerate}
        return {**reader.counter.counts(), **others, "unknown": vars(reader.unknown)}, output


def usable_here(options: Options, run: Run) -> Options:
    """The options with a precision that works for the run; a message warns that outputs may differ with it."""
    if options.precision == "fp32":
        return options
    usable = usable_options(options, run, message)
    if usable.precision != "fp32":
        message(f"precision: {usable.precision}: faster, but outputs and scores may differ from those in fp32")
    return usable


def links(hypothesis: Hypothesis) -> str:
    """The alignment as a further column; empty without an alignment."""
    alignment = hypothesis.alignment
    return "" if alignment is None else f"\t{' '.join(f'{s}-{t}' for s, t in alignment.hard)}"


def one_line(text: str) -> str:
    """A text with spaces for line breaks: one line in, one line out."""
    return text.replace("\n", " ").replace("\r", " ")


def add_counts(lines: InputLines, counts: Counts) -> None:
    """Add the counts of a shard with later lines."""
    lines.counter.add(counts)
    lines.targets_ignored += counts["targets_ignored"]
    lines.degenerate += counts["degenerate"]
    unknown = lines.unknown
    more = counts["unknown"]
    unknown.total += more["total"]
    unknown.texts += more["texts"]
    for token, count in more["counts"].items():
        if token in unknown.counts or len(unknown.counts) < MAX_DISTINCT:
            unknown.counts[token] += count
