"""What a verb takes in: options made from the fields of config values, runs to open, and lines to read."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from queue import Empty, Queue
from stat import S_ISREG
from threading import Thread
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import torch
import typer
from pydantic import BaseModel

from regard.answers import is_small
from regard.batch import windows
from regard.cli import READER
from regard.cli.tables import message
from regard.config import parse
from regard.data.reader import (
    BAD_REQUEST,
    COLUMNS,
    LONG,
    NO_MEMORY,
    STDIN,
    UNMET,
    Line,
    LineCounter,
    Source,
    is_jsonl,
    read_lines,
    shown,
)
from regard.decode.hypothesis import DEGENERATE, MANY_DEGENERATE
from regard.decode.request import ANSWER_KEYS, Request, parse_request
from regard.device import choose_device, tune_allocator
from regard.errors import UserError, plural
from regard.files import json_object
from regard.recipe import Column, Data
from regard.run import Run
from regard.tasks import Reads
from regard.text.codec import Codec, UnknownTokens

# Options of several verbs

RunPath = Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads. (default: 1 for a small model, else one per core)")]
OneThread = Annotated[int, typer.Option("--threads", min=1, help="Threads.")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes. (default: one per core for a small model, when they pay off)"),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first bad line instead of skipping it.")]
Columns = Annotated[
    str | None, typer.Option(metavar="NAMES", help="What the columns are. (default: as the run was trained)")
]
Target = Annotated[str | None, typer.Option(help="Targets in a file of their own; the data then holds the sources.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. dropout=0.2 or train.lr=3e-4. Repeatable."),
]


def option_name(name: str) -> str:
    """A parameter's name as it is written on a command line."""
    return "--" + name.replace("_", "-")


def chosen_options(**values: Any) -> dict[str, Any]:
    """The options that the user gave a value; one that was left out is None, False or empty."""
    # not `in (None, False)`: 0 equals False, and an option of 0 is to be checked, not ignored
    return {name: value for name, value in values.items() if not (value is None or value is False or value == [])}


@dataclass(frozen=True)
class FieldOption:
    """An option that sets a field of a config value."""

    key: str  # the field's name, after that of its table if it is in one: train.lr
    parameter: Parameter
    split: bool  # the text is a list with commas


def field_options(
    value: type[BaseModel], *names: str, panel: str | None = None, table: str = "", flags: Mapping[str, str] = {}
) -> list[FieldOption]:
    """Options for fields of a config value: type, default and help come from the field.

    None stands for an option that was left out, so that the value itself has the only defaults and checks. A list of
    texts, which may hold commas, is a repeatable option; any other list is written with commas.
    """
    options = []
    for name in names:
        field = value.model_fields[name]
        kind = _plain_type(field.annotation)
        texts, split = kind == tuple[str, ...], get_origin(kind) is tuple and kind != tuple[str, ...]
        extra: Any = field.json_schema_extra or {}
        text, default = field.description or "", field.default
        if "(default:" not in text and not isinstance(default, bool) and default not in (None, "", ()):
            text = f"{text} (default: {','.join(default) if isinstance(default, tuple) else default})"
        flag = flags.get(name, option_name(name))
        option = typer.Option(flag, help=text, metavar=extra.get("metavar"), rich_help_panel=panel)
        annotation: Any = bool if kind is bool else (list[str] if texts else str if split else kind) | None
        unset = False if kind is bool else None
        parameter = Parameter(name, Parameter.KEYWORD_ONLY, default=unset, annotation=Annotated[annotation, option])
        options.append(FieldOption(f"{table}.{name}" if table else name, parameter, split))
    return options


def _plain_type(annotation: Any) -> Any:
    """A field's type without bounds, None and the choices of a literal, which the config value checks itself."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _plain_type(arguments[0])
    if origin in (Union, UnionType):
        (kind,) = (each for each in arguments if each is not type(None))
        return _plain_type(kind)
    if origin is Literal:
        return str
    texts = origin is tuple and get_origin(arguments[0]) is not Literal and _plain_type(arguments[0]) is str
    return tuple[str, ...] if texts else annotation


def with_options(parameter: str, *options: FieldOption) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a parameter of a command by these options; the command gets a dict of those that have a value."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(**values: Any) -> None:
            chosen = chosen_options(**{option.key: values.pop(option.parameter.name) for option in options})
            for option in options:
                if option.split and option.key in chosen:
                    chosen[option.key] = chosen[option.key].split(",")
            command(**values, **{parameter: chosen})

        plain = signature(command, eval_str=True)
        own = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in plain.parameters.values()]
        index = [each.name for each in own].index(parameter)
        own[index : index + 1] = [option.parameter for option in options]
        call.__signature__ = plain.replace(parameters=own)  # type: ignore[attr-defined]
        return call

    return decorate


# Runs and their data


def open_runs(paths: list[str], device: str = "cpu", threads: int | None = None) -> list[Run]:
    """Load runs onto a device and set the number of threads; small models are fastest with one."""
    tune_allocator()
    where = choose_device(device)
    every = torch.get_num_threads()
    torch.set_num_threads(1)  # starting threads takes longer than copying the weights
    runs = [Run.load(path, where) for path in paths]
    if not is_small(runs) or threads is not None:
        torch.set_num_threads(threads or every)
    return runs


def pairs_of(path: str, target: str | None, columns: str | None, of_run: tuple[Column, ...]) -> Source:
    """The pairs in a file, or in two; the columns are those named, or those the run was trained with."""
    if target is not None:
        return Source((path, target))
    return Source((path,), parse(Data, {"columns": columns.split(",")}, "--columns").columns if columns else of_run)


# Lines


IMAGES = "images (.npz)"
# What a line of a table holds, by column, and where the texts of a table have labels.
COLUMN_WORDS = {"source": "a source", "features": "features", "target": "a target"}
COLUMN_WORDS |= {"text": "a text", "prefix": "a prefix"}  # further ones of `generate`
LABELLED_WORDS = COLUMN_WORDS | {"source": "a text", "target": "a label"}


def announce_stdin(path: str, what: str) -> None:
    """Say at a terminal that standard input is read, and what it should hold; else a verb seems to hang."""
    if path == STDIN and sys.stdin is not None and sys.stdin.isatty():
        message(f"reading standard input: {what}; Ctrl-D ends it (or name a file after the run)")


def announce_data(source: Source, reads: Reads) -> None:
    """The same for the data of a task."""
    names = [*(source.columns if len(source.paths) == 1 else ("source",)), *["prefix"] * source.prefix_column]
    table = columns_in_words(names, LABELLED_WORDS if reads == "labelled" else COLUMN_WORDS)
    announce_stdin(source.paths[0], {"text": "plain text", "images": IMAGES}.get(reads, table))


def columns_in_words(names: Sequence[str], words: Mapping[str, str] = COLUMN_WORDS) -> str:
    """What every line of a table holds: a source and a target per line, separated by a tab."""
    *most, last = (words[name] for name in names)
    if not most:
        return f"{last} per line"
    return f"{', '.join(most)} and {last} per line, separated by {'a tab' if len(names) == 2 else 'tabs'}"


class InputLine(NamedTuple):
    """A line as a request; or, with an empty one, what is wrong with it."""

    location: str
    number: int
    request: Request
    extra: Mapping[str, Any] = MappingProxyType({})  # keys of a JSON line that are not part of a request
    error: str = ""


class InputLines:
    """The lines of a file as requests: columns, or JSON objects. A bad line is counted, and named at the end."""

    def __init__(
        self, path: str, codec: Codec, prefix_column: bool = False, prompts: bool = False, jsonl: bool = False
    ) -> None:
        self.path = path
        self.is_file = _is_file(path)
        self.jsonl = jsonl or is_jsonl(path)
        self.codec = codec
        self.counter = LineCounter()
        self.unknown = UnknownTokens()
        self.targets_ignored = 0
        self.degenerate = 0  # outputs
        self.fields = [name for name in Request.model_fields if name != "features" or "features" in codec.columns]
        self._names = [name for name in codec.columns if name != "target"]
        self._target_at = codec.columns.index("target") if "target" in codec.columns else None
        self._prompts = prompts
        self._prefix_column = prefix_column
        if self.jsonl and prefix_column:
            raise UserError("--prefix-column: lines of JSON have no columns; give each its prefix by the key prefix")

    def batches(self, most: int) -> Iterator[list[InputLine]]:
        """The lines, `most` at a time; from a pipe, as many as have come, so that no line waits for the next."""
        names = [*(["text"] if self._prompts else self._names), *["prefix"] * self._prefix_column]
        announce_stdin(self.path, "a JSON object per line" if self.jsonl else columns_in_words(names))
        lines = read_lines(self.path)
        for batch in windows(lines, most) if self.is_file else _available(lines, most):
            yield self.parse(batch)

    def parse(self, lines: Iterable[Line]) -> list[InputLine]:
        """Lines as requests, counted."""
        return [self._read(line) for line in lines]

    def note_flags(self, line: InputLine, flags: dict[str, str]) -> None:
        """Count a line whose output is empty for the reason that these flags give, or degenerates."""
        for name, reason in (("too_long", LONG), ("unsatisfied", UNMET), ("out_of_memory", NO_MEMORY)):
            if name in flags:
                self.counter.skip(reason, line.location, flags[name], tell=True)
        self.degenerate += any(name in flags for name in DEGENERATE)

    def remarks(self) -> list[str]:
        """Messages about lines that could not be used, ignored columns and unknown tokens."""
        remarks = []
        if self.counter.skipped:
            remarks.append(f"{self.counter.summary()}; their outputs are empty")
        if self.targets_ignored:
            lines = "line has" if self.targets_ignored == 1 else "lines have"
            remarks.append(f"{self.targets_ignored:,} {lines} a target column, which was ignored")
        if self.unknown:
            remarks.append(self.unknown.summary())
        if self.degenerate > MANY_DEGENERATE * self.counter.read:
            which = f"{self.degenerate:,} of {plural(self.counter.read, 'output')}"
            remarks.append(f"{which} repeat tokens or are far too long or short: too little training?")
        return remarks

    def _read(self, line: Line) -> InputLine:
        self.counter.read += 1
        location = f"{shown(self.path)}:{line.number}"
        if line.problem:
            return self._bad(line, location, line.problem)
        return self._from_json(line, location) if self.jsonl else self._from_columns(line, location)

    def _bad(
        self, line: Line, location: str, reason: str, detail: str = "", source: str = "", extra: Mapping[str, Any] = {}
    ) -> InputLine:
        self.counter.skip(reason, location, detail, tell=bool(detail))
        return InputLine(location, line.number, Request(source), extra, detail or reason)

    def _from_columns(self, line: Line, location: str) -> InputLine:
        cells = line.text.split("\t")
        prefix = cells.pop() if self._prefix_column and len(cells) > 1 else ""
        if self._prompts:  # of a language model: any text
            return InputLine(location, line.number, Request("\t".join(cells), None, prefix))
        if len(cells) == len(self._names) + 1 and self._target_at is not None:
            del cells[self._target_at]
            self.targets_ignored += 1
        if len(cells) != len(self._names):
            if line.text.strip():
                return self._bad(line, location, COLUMNS)
            return InputLine(location, line.number, Request(""))
        row = dict(zip(self._names, cells, strict=True))
        return InputLine(location, line.number, Request(row["source"], row.get("features"), prefix))

    def _from_json(self, line: Line, location: str) -> InputLine:
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
            return self._bad(line, location, BAD_REQUEST, str(error), source if isinstance(source, str) else "", extra)
        return InputLine(location, line.number, request, extra)


def _is_file(path: str) -> bool:
    try:
        return S_ISREG((os.fstat(sys.stdin.fileno()) if path == STDIN else os.stat(path)).st_mode)
    except FileNotFoundError:
        hint = f"a text itself goes to standard input: echo {shlex.quote(path)} | regard ..."
        raise UserError(f"{path}: no such file; {hint}") from None
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
