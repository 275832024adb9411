"""The input of `generate`: every line becomes a request, whatever is wrong with it, so that a line in is a line out."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from queue import Empty, Queue
from stat import S_ISREG
from threading import Thread
from typing import NamedTuple

import torch

from regard.cli import READER
from regard.cli.parameters import SMALL, option_name
from regard.cli.tables import flush, message, out, out_json
from regard.data.images import read_images
from regard.data.reader import COLUMNS, LONG, STDIN, UNMET, Line, LineCounter, read_lines, shown
from regard.decode.classify import Classification, classify, classify_images
from regard.decode.generate import Decoder, Request
from regard.decode.options import Options
from regard.decode.workers import WorkerPool
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
        """The requests, `most` at a time. From a pipe: as many as are there, so that nobody waits for lines to come."""
        lines = read_lines(self.path)
        for batch in _windows(lines, most) if self.is_file else _available(lines, most):
            requests = [self._request(line) for line in batch]
            examples = [Example(request.source, None, request.features) for request in requests]
            self.codec.note_unknown(examples, self.unknown)
            yield requests

    def note(self, number: int, flags: dict[str, str]) -> None:
        """Count a line whose output is empty for what these flags say."""
        for name, reason in (("too_long", LONG), ("unsatisfied", UNMET)):
            if name in flags:
                self.account.skip(reason, f"{shown(self.path)}:{number}", flags[name], tell=True)

    def remarks(self) -> list[str]:
        """What a person should know about the lines read."""
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
        place = f"{shown(self.path)}:{line.number}"
        if line.problem:
            self.account.skip(line.problem, place)
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
                self.account.skip(COLUMNS, place)
            return Request("")
        row = dict(zip(self._names, cells, strict=True))
        return Request(row["source"], row.get("features"), prefix)


@contextmanager
def staffed(decoder: Decoder, inputs: int, workers: int | None, threads: int | None) -> Iterator[Decoder | WorkerPool]:
    """A decoder with as many processes as were asked for, or as pay off for so many inputs at a time."""
    on_cpu = decoder.scorer.device.type == "cpu"
    if workers is None:
        small = sum(p.numel() for model in decoder.scorer.models for p in model.parameters()) < SMALL
        pays = inputs * decoder.options.rows >= MANY and small and on_cpu and threads is None
        workers = cores() if pays else 1
    if workers == 1:
        yield decoder
        return
    if not on_cpu:
        raise UserError(f"workers: {workers} processes share the cores of a CPU; on {decoder.scorer.device} use 1")
    if threads is None:
        torch.set_num_threads(max(1, cores() // workers))
    with WorkerPool(decoder, workers, tune_allocator) as crew:
        yield crew


def _is_file(path: str) -> bool:
    try:
        return S_ISREG((os.fstat(sys.stdin.fileno()) if path == STDIN else os.stat(path)).st_mode)
    except (OSError, ValueError, AttributeError):
        # Let the reader say what is wrong with it; a stdin without a number is no pipe, and a closed one is None.
        return True


def _windows(lines: Iterator[Line], most: int) -> Iterator[list[Line]]:
    while window := list(islice(lines, most)):
        yield window


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


OPTIONS = {"text": ("max_source", "batch_tokens", "window"), "image": ()}  # beside those of how to print and where


def tell_labels(run: Run, file: str, options: Options, told: Collection[str], json: bool) -> None:
    """Print the label of every line, or of every image; `told` are the names of the options that were given."""
    kind = "image" if run.task.reads == "images" else "text"
    if strange := [option_name(name) for name in told if name not in OPTIONS[kind]]:
        allowed = [option_name(name) for name in (*OPTIONS[kind], "json", "threads", "device")]
        raise UserError(f"{', '.join(strange)}: {run.path} tells labels, for which there are {', '.join(allowed)} only")
    if kind == "image":
        _images(run, file, json)
    else:
        _lines(run, file, options, json)


def _images(run: Run, file: str, json: bool) -> None:
    for labelled in classify_images(run, read_images(file, labelled=False).images_NCHW):
        if json:
            out_json(labelled.as_dict())
        else:
            out(_line(labelled.label))


def _lines(run: Run, file: str, options: Options, json: bool) -> None:
    lines, number = InputLines(file, run.codec), 0
    for batch in lines.batches(options.window):
        told = [request for request in batch if request.source.strip()]
        examples = [Example(request.source, features=request.features) for request in told]
        found = iter(classify(run, examples, options.batch_tokens, options.max_source))
        for request in batch:
            number += 1
            blank = Classification("", {}, {"empty": "the text is empty"})
            labelled = next(found) if request.source.strip() else blank
            lines.note(number, labelled.flags)
            if json:
                out_json({"source": request.source, **labelled.as_dict()})
            else:
                out(_line(labelled.label))
        flush()
    for remark in lines.remarks():
        message(remark)


def _line(label: str) -> str:
    return label.replace("\n", " ").replace("\r", " ")
