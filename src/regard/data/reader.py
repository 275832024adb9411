"""Reading files without surprises: lines, a count of what was skipped and where, and the examples of tables.

Lines are split on `\n` alone, in bounded memory, gzip or not. One trailing `\r` is dropped, and a byte order mark at
the start of the file. Everything else is text: U+2028, U+0085, form feeds and NUL never end a line.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, BinaryIO, NamedTuple, cast

from regard.errors import UserError, plural
from regard.recipe import Column
from regard.text.codec import Example

LONGEST = 1_000_000  # bytes of a line
CHUNK = 1 << 18
BOM = b"\xef\xbb\xbf"
STDIN = "-"
MEMORY = "<memory>"  # instead of a path: data that a program held in memory
MANY = 10  # columns; more are counted together

# Reasons to skip a line
BLANK = "blank line"
COLUMNS = "wrong column count"
EMPTY = "empty side"
ENCODING = "invalid UTF-8"
LONG = "too long"
NO_MEMORY = "too large for the memory"
UNMET = "with a constraint that cannot be met"
BAD_REQUEST = "not a valid request"
NAMED = 5  # lines that are named per reason

_OTHER_FORMATS = {
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8 first",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8 first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"BZh": "bzip2 data; only .gz is read directly",
    b"\xfd7zXZ": "xz data; only .gz is read directly",
    b"\x28\xb5\x2f\xfd": "zstandard data; only .gz is read directly",
    b"PAR1": "a Parquet file; write it as tab-separated text first",
}
_REASONS: dict[type[Exception], str] = {
    FileNotFoundError: "no such file",
    IsADirectoryError: "is a directory, not a file",
    PermissionError: "not readable: permission denied",
}


class Line(NamedTuple):
    """A line, its number from 1, and what is wrong with it; the text of a bad line is shortened or repaired."""

    number: int
    text: str
    problem: str | None = None


def shown(path: str) -> str:
    """The name of a file in messages."""
    return "stdin" if path == STDIN else path


def is_jsonl(path: str) -> bool:
    """Whether the lines of a file are JSON objects, by its name."""
    return path.removesuffix(".gz").endswith((".jsonl", ".ndjson"))


@contextmanager
def open_bytes(path: str) -> Iterator[BinaryIO]:
    """Open a file, gzip or not (by its first bytes), or `-` for stdin; every failure is a UserError."""
    with open_raw(path) as raw:
        try:
            head = raw.peek(8)[:8]  # type: ignore[attr-defined]
            for magic, what in _OTHER_FORMATS.items():
                if head.startswith(magic):
                    raise UserError(f"{shown(path)}: this is {what}")
            if head.startswith(b"\x1f\x8b"):
                with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked:
                    yield cast(BinaryIO, unpacked)
            elif path.endswith(".gz"):
                raise UserError(f"{path}: not a gzip file, although its name says so")
            else:
                yield raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{shown(path)}: broken gzip data, perhaps cut short: {error}") from None


@contextmanager
def open_raw(path: str) -> Iterator[BinaryIO]:
    """Open a file as it is, or `-` for stdin."""
    try:
        if path == STDIN:
            if sys.stdin is None:
                raise UserError("stdin: is closed; name a file to read")
            stdin = sys.stdin.buffer
            yield stdin if hasattr(stdin, "peek") else cast(BinaryIO, io.BufferedReader(stdin))
        else:
            with open(path, "rb") as file:
                yield file
    except (OSError, ValueError) as error:
        raise UserError(f"{shown(path)}: {_REASONS.get(type(error), f'not readable: {error}')}") from None


def read_lines(path: str) -> Iterator[Line]:
    """Yield every line of a file, good or bad."""
    with open_bytes(path) as stream:
        yield from lines_of(stream)


def lines_of(stream: BinaryIO, first: int = 1, size: int | None = None) -> Iterator[Line]:
    """Yield the lines of a stream from where it is, numbered from `first`; of `size` bytes, or to its end."""
    for number, raw in enumerate(_split(stream, size), start=first):
        if raw.endswith(b"\r"):
            raw = raw[:-1]
        if number == 1 and raw.startswith(BOM):
            raw = raw[len(BOM) :]
        if len(raw) > LONGEST:
            yield Line(number, raw[:80].decode("utf-8", "replace"), LONG)
            continue
        try:
            yield Line(number, raw.decode("utf-8"))
        except UnicodeDecodeError:
            yield Line(number, raw.decode("utf-8", "replace"), ENCODING)


def _split(stream: BinaryIO, size: int | None) -> Iterator[bytes]:
    """Split on newlines; of a line that is too long only a little more than LONGEST is kept."""
    rest, left = b"", sys.maxsize if size is None else size
    # read1 gives what a pipe has by now; read would wait for a full chunk while someone waits for an answer
    while chunk := stream.read1(min(CHUNK, left)):  # type: ignore[attr-defined]
        left -= len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
        if len(rest) > LONGEST + 4:  # a BOM and a \r may go
            rest = rest[: LONGEST + 5]
    if rest:
        yield rest


class LineCounter:
    """How many lines were read, kept and skipped, and where. `read == kept + sum(skipped.values())`, always."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.read = 0
        self.skipped: Counter[str] = Counter()
        self.locations: dict[str, list[str]] = {}  # reason -> the first few file:line
        self.wrong_columns: Counter[int] = Counter()  # how many lines have so many columns

    @property
    def kept(self) -> int:
        return self.read - self.skipped.total()

    def skip(self, reason: str, location: str, detail: str = "", *, tell: bool = False) -> None:
        """Count a line (already counted as read) as skipped; in strict mode raise.

        The error names the detail, and with `tell` the summary does too, where it is not the same for all such lines.
        """
        if self.strict:
            raise UserError(
                f"{location}: {reason}{detail and ': ' + detail}\n  without --strict such lines are skipped and counted"
            )
        self.skipped[reason] += 1
        locations = self.locations.setdefault(reason, [])
        if len(locations) < NAMED:
            locations.append(f"{location}: {detail}" if tell else location)

    def summary(self) -> str:
        """How many lines were kept and skipped, in one sentence."""
        reasons = []
        for reason, count in self.skipped.most_common():
            named = self.locations[reason][:3]
            reasons.append(f"{count:,} {reason} ({', '.join(named)}{', ...' * (count > len(named))})")
        lines = f"{self.kept:,} of {plural(self.read, 'line')}"
        return lines + (f"; skipped {', '.join(reasons)}" if reasons else "")

    def to_json(self) -> dict[str, Any]:
        """The counter as plain values."""
        return {"read": self.read, "kept": self.kept, "skipped": dict(self.skipped), "places": self.locations}


class Located(NamedTuple):
    """An example and its line."""

    number: int
    example: Example


class Source(NamedTuple):
    """Where examples come from: one TSV and its columns, or a file of sources and a file of targets."""

    paths: tuple[str, ...]
    columns: tuple[Column, ...] = ("source", "target")
    names: tuple[str, ...] = ()  # what to call the files, where not by their paths
    packed: bool = False  # rows that were in memory: the line of each is a JSON list of its cells
    prefix_column: bool = False  # one more column, the last: how an output is to start

    def location(self, number: int, file: int = 0) -> str:
        """Name a line, or a row of what was in memory."""
        return f"{self.file_names[file]}[{number - 1}]" if self.packed else f"{self.file_names[file]}:{number}"

    @property
    def name(self) -> str:
        return " + ".join(self.file_names)

    @property
    def file_names(self) -> tuple[str, ...]:
        return self.names or tuple(map(shown, self.paths))

    def read(self, counter: LineCounter) -> Iterator[Located]:
        """Yield the good examples in order; every line is counted."""
        return self._table(counter) if len(self.paths) == 1 else self._parallel(counter)

    def _table(self, counter: LineCounter) -> Iterator[Located]:
        at = {name: self.columns.index(name) for name in self.columns}
        source_at, target_at, features_at = at["source"], at.get("target"), at.get("features")
        for number, cells in self.cells(counter):
            target = cells[target_at] if target_at is not None else None
            features = cells[features_at] if features_at is not None else None
            yield Located(number, Example(cells[source_at], target, features))

    def cells(self, counter: LineCounter) -> Iterator[tuple[int, list[str]]]:
        """Yield the number and the cells of the good lines of a table; every line is counted.

        A column of targets may be there several times; a line needs one of them.
        """
        names = [*self.columns, *["prefix"] * self.prefix_column]
        source_at, targets_at = names.index("source"), [i for i, name in enumerate(names) if name == "target"]
        for number, text, problem in read_lines(self.paths[0]):
            counter.read += 1
            if problem:
                counter.skip(problem, self.location(number))
                continue
            # where there is one column alone, a tab is text
            cells: list[str] = json.loads(text) if self.packed else text.split("\t") if len(names) > 1 else [text]
            if not any(map(str.strip, cells)):
                counter.skip(BLANK, self.location(number))
            elif len(cells) != len(names):
                counter.wrong_columns[min(len(cells), MANY)] += 1
                counter.skip(
                    COLUMNS, self.location(number), f"{len(cells)} instead of {len(names)} ({','.join(names)})"
                )
            elif not cells[source_at].strip():
                counter.skip(EMPTY, self.location(number), "source")
            elif targets_at and not any(cells[i].strip() for i in targets_at):
                counter.skip(EMPTY, self.location(number), "target")
            else:
                yield number, cells

    def _parallel(self, counter: LineCounter) -> Iterator[Located]:
        left, right = (read_lines(path) for path in self.paths)
        for source, target in zip_longest(left, right):
            if source is None or target is None:
                longer = counter.read + 1 + sum(1 for _ in (right if source is None else left))
                counts = (counter.read, longer) if source is None else (longer, counter.read)
                first, second = self.file_names
                raise UserError(
                    f"{first} has {counts[0]:,} lines but {second} has {counts[1]:,}; "
                    "parallel files need one line for one line"
                )
            counter.read += 1
            blank = [not line.text.strip() for line in (source, target)]
            if problem := source.problem or target.problem:
                counter.skip(problem, self.location(source.number, int(not source.problem)))
            elif any(blank):
                counter.skip(BLANK if all(blank) else EMPTY, self.location(source.number, int(not blank[0])))
            else:
                yield Located(source.number, Example(source.text, target.text))

    def require(self, counter: LineCounter) -> None:
        """Raise if not a single example came out of the file, with the likely cause."""
        if counter.kept:
            return
        if not counter.read:
            raise UserError(f"{self.name}: the file is empty")
        hint = self.hint(counter)
        raise UserError(f"{self.name}: no usable example: {counter.summary()}{hint and chr(10) + '  ' + hint}")

    def hint(self, counter: LineCounter) -> str:
        """What is probably wrong when most lines have an unexpected number of columns; else nothing."""
        (columns, count), *_ = counter.wrong_columns.most_common(1) or [(0, 0)]
        if count * 2 < counter.read or not columns:
            return ""
        if columns == 1:
            return "most lines have one column: is the separator a tab?"
        names = {2: "source,target", 3: "source,features,target"}.get(columns)
        advice = f"; name them, for example --columns {names}" if names else ""
        if self.prefix_column:
            advice = f" ({','.join(self.columns)} and the prefix)"
        expected = len(self.columns) + self.prefix_column
        return f"most lines have {'at least ' * (columns == MANY)}{columns} columns, not {expected}{advice}"
