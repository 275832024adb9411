"""The input of `generate`: every line becomes a request, a bad one an empty one, so that a line in is a line out."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, Queue
from stat import S_ISREG
from threading import Thread
from typing import NamedTuple

import torch

from regard.batch import windows
from regard.cli import READER
from regard.cli.parameters import SMALL, option_name
from regard.cli.tables import flush, message, out, out_json
from regard.data.reader import COLUMNS, LONG, STDIN, UNMET, Line, LineCounter, read_lines, shown
from regard.decode.generate import Engine, TorchEngine
from regard.decode.options import Options
from regard.decode.request import Request
from regard.device import cores, tune_allocator
from regard.errors import UserError
from regard.run import Run
from regard.text.codec import Codec, Example, UnknownTokens

MANY = 2000  # hypotheses: fewer are done before another process has started


class InputLines:
    """The lines of a file as requests. A bad line is an empty request, counted and named at the end."""

    def __init__(self, path: str, codec: Codec, prefix_column: bool = False, prompts: bool = False) -> None:
        self.path = path
        self.is_file = _is_file(path)
        self.codec = codec
        self.account = LineCounter()
        self.unknown = UnknownTokens()
        self.targets_ignored = 0
        self._names = [name for name in codec.columns if name != "target"]
        self._target_at = codec.columns.index("target") if "target" in codec.columns else None
        self._prompts = prompts
        self._prefix_column = prefix_column

    def batches(self, most: int) -> Iterator[list[Request]]:
        """The requests, `most` at a time; from a pipe, as many as have come, so that no line waits for the next."""
        lines = read_lines(self.path)
        for batch in windows(lines, most) if self.is_file else _available(lines, most):
            yield [self._request(line) for line in batch]

    def note_unknown(self, requests: Sequence[Request], rows: Sequence[Sequence[int]]) -> None:
        """Count the unknown tokens of requests; `rows` are the ids of their sources."""
        examples = [Example(request.source, None, request.features) for request in requests]
        self.codec.note_unknown(examples, self.unknown, rows)

    def note_flags(self, number: int, flags: dict[str, str]) -> None:
        """Count a line whose output is empty for the reason that these flags give."""
        for name, reason in (("too_long", LONG), ("unsatisfied", UNMET)):
            if name in flags:
                self.account.skip(reason, f"{shown(self.path)}:{number}", flags[name], tell=True)

    def remarks(self) -> list[str]:
        """Messages about lines that could not be used, ignored columns and unknown tokens."""
        remarks = []
        if self.account.skipped:
            remarks.append(f"{self.account.summary()}; their outputs are empty")
        if self.targets_ignored:
            lines = "line has" if self.targets_ignored == 1 else "lines have"
            remarks.append(f"{self.targets_ignored:,} {lines} a target column, which was ignored")
        if self.unknown:
            remarks.append(self.unknown.summary())
        return remarks

    def _request(self, line: Line) -> Request:
        self.account.read += 1
        location = f"{shown(self.path)}:{line.number}"
        if line.problem:
            self.account.skip(line.problem, location)
            return Request("", skip=True)
        cells = line.text.split("\t")
        prefix = cells.pop() if self._prefix_column and len(cells) > 1 else ""
        if self._prompts:  # of a language model: any text
            return Request("\t".join(cells), None, prefix)
        if len(cells) == len(self._names) + 1 and self._target_at is not None:
            del cells[self._target_at]
            self.targets_ignored += 1
        if len(cells) != len(self._names):
            if line.text.strip():
                self.account.skip(COLUMNS, location)
            return Request("")
        row = dict(zip(self._names, cells, strict=True))
        return Request(row["source"], row.get("features"), prefix)


@contextmanager
def with_workers(engine: TorchEngine, inputs: int, workers: int | None, threads: int | None) -> Iterator[Engine]:
    """An engine with as many processes as were asked for, or as pay off for so many inputs at a time."""
    on_cpu = engine.scorer.device.type == "cpu"
    if workers is None:
        small = sum(model.size for model in engine.scorer.models) < SMALL
        pays = inputs * engine.options.rows >= MANY and small and on_cpu and threads is None
        workers = cores() if pays else 1
    if workers == 1:
        yield engine
        return
    if not on_cpu:
        raise UserError(f"workers: {workers} processes share the cores of a CPU; on {engine.scorer.device} use 1")
    if threads is None:
        torch.set_num_threads(max(1, cores() // workers))
    from regard.decode.workers import WorkerPool  # only now: multiprocessing delays the start of every command

    with WorkerPool(engine, workers, tune_allocator) as pool:
        yield pool


def _is_file(path: str) -> bool:
    try:
        return S_ISREG((os.fstat(sys.stdin.fileno()) if path == STDIN else os.stat(path)).st_mode)
    except (OSError, ValueError, AttributeError):
        # Let the reader say what is wrong with it; a stdin without a number is no pipe, and a closed one is None.
        return True


class _End(NamedTuple):
    error: BaseException | None


def _available(lines: Iterator[Line], most: int) -> Iterator[list[Line]]:
    """Lines as they come: a thread reads ahead while the model works."""
    waiting: Queue[Line | _End] = Queue(maxsize=most)

    def read() -> None:
        try:
            for line in lines:
                waiting.put(line)
            waiting.put(_End(None))
        except BaseException as error:  # to be raised where it is waited for
            waiting.put(_End(error))

    Thread(target=read, daemon=True, name=READER).start()
    end = None
    while end is None:
        batch: list[Line] = []
        item = waiting.get()
        while isinstance(item, Line):
            batch.append(item)
            if len(batch) == most:
                break
            try:
                item = waiting.get_nowait()
            except Empty:
                break
        end = item if isinstance(item, _End) else None
        if batch:
            yield batch
    if end.error is not None:
        raise end.error


LABEL_OPTIONS = {"labelled": ("max_source", "batch_tokens", "window"), "images": ()}  # by what a task reads


def print_labels(run: Run, file: str, options: Options, given: Collection[str], json: bool) -> None:
    """Print the label of every line, or of every image; `given` are the names of the options that were given."""
    supported = LABEL_OPTIONS[run.task.reads]
    if unsupported := [option_name(name) for name in given if name not in supported]:
        names = [option_name(name) for name in (*supported, "json", "threads", "device")]
        raise UserError(
            f"{', '.join(unsupported)}: {run.path} tells labels, for which there are {', '.join(names)} only"
        )
    if run.task.reads == "images":
        _print_image_labels(run, file, json)
    else:
        _print_text_labels(run, file, options, json)


def _print_image_labels(run: Run, file: str, json: bool) -> None:
    from regard.data.images import read_images
    from regard.decode.classify import classify_images

    for answer in classify_images(run, read_images(file, labelled=False).images_NCHW):
        if json:
            out_json(answer.as_dict())
        else:
            out(one_line(answer.label))


def _print_text_labels(run: Run, file: str, options: Options, json: bool) -> None:
    from regard.decode.classify import Classification, classify_ids

    empty = Classification("", {}, {"empty": "the text is empty"})
    lines, number = InputLines(file, run.codec), 0
    for batch in lines.batches(options.window):
        rows = run.codec.encode_source([Example(request.source, features=request.features) for request in batch])
        lines.note_unknown(batch, rows)
        texts = [row for row, request in zip(rows, batch, strict=True) if request.source.strip()]
        answers = iter(classify_ids(run, texts, options.batch_tokens, options.max_source))
        for request in batch:
            number += 1
            answer = next(answers) if request.source.strip() else empty
            lines.note_flags(number, answer.flags)
            if json:
                out_json({"source": request.source, **answer.as_dict()})
            else:
                out(one_line(answer.label))
        flush()
    for remark in lines.remarks():
        message(remark)


def one_line(text: str) -> str:
    """Text whose line breaks are shown as blanks: a line in is a line out."""
    return text.replace("\n", " ").replace("\r", " ")
