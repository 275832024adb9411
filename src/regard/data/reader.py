"""Reading files without surprises: lines, a count of what was skipped and where, and the examples of tables.

Lines are split on `\n` alone, in bounded memory, compressed or not. One trailing `\r` is dropped, and a byte order mark
at the start of the file. Everything else is text: U+2028, U+0085, form feeds and NUL never end a line.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import has_magic
from importlib import import_module
from typing import Any, BinaryIO, NamedTuple, cast

from regard.errors import UserError, missing_extra, plural
from regard.recipe import Column
from regard.text.codec import Example

STDIN = "-"
PACKED = 1 << 11  # bytes of zstandard data unpacked at a time, which can become 64 MB of text

_OTHER_FORMATS = {
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8 first",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8 first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"BZh": "bzip2 data; only .gz and .zst are read directly",
    b"\xfd7zXZ": "xz data; only .gz and .zst are read directly",
    b"PAR1": "a Parquet file; training reads one whose name ends in .parquet, elsewhere write tab-separated text",
}
_REASONS: dict[type[Exception], str] = {
    FileNotFoundError: "no such file",
    IsADirectoryError: "is a directory, not a file",
    PermissionError: "not readable: permission denied",
}


def shown(path: str) -> str:
    """The name of a file in messages."""
    return "stdin" if path == STDIN else path


@contextmanager
def open_bytes(path: str) -> Iterator[BinaryIO]:
    """Open a file, compressed or not (by its first bytes), or `-` for stdin; every failure is a UserError."""
    with open_raw(path) as raw:
        try:
            head = raw.peek(8)[:8]  # type: ignore[attr-defined]
            for magic, what in _OTHER_FORMATS.items():
                if head.startswith(magic):
                    raise UserError(f"{shown(path)}: this is {what}")
            if head.startswith(b"\x1f\x8b"):
                with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked:
                    yield cast(BinaryIO, unpacked)
            elif head.startswith(b"\x28\xb5\x2f\xfd"):
                yield cast(BinaryIO, io.BufferedReader(_Unpacked(raw, path)))
            elif kind := {".gz": "gzip", ".zst": "zstandard"}.get(os.path.splitext(path)[1]):
                raise UserError(f"{path}: not a {kind} file, although its name says so")
            else:
                yield raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{shown(path)}: broken gzip data, perhaps cut short: {error}") from None


class _Unpacked(io.RawIOBase):
    """What a zstandard file holds; unlike the package's own reader it notices a file that was cut short."""

    def __init__(self, packed: BinaryIO, path: str) -> None:
        try:
            self._library: Any = import_module("zstandard")
        except ImportError:
            raise missing_extra(f"{shown(path)}: zstandard data", "zstandard", "corpora") from None
        self._packed, self._name = packed, shown(path)
        self._frame: Any = None  # the one being read; a file may be several, one after the other
        self._rest = b""  # packed
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            while not self._ready and self._more():
                pass
        except self._library.ZstdError as error:
            raise UserError(f"{self._name}: broken zstandard data, perhaps cut short: {error}") from None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _more(self) -> bool:
        """Unpack a little more, if there is more."""
        packed = self._rest or self._packed.read1(PACKED)  # type: ignore[attr-defined]
        self._rest = b""
        if not packed:
            if self._frame is not None:
                raise UserError(f"{self._name}: broken zstandard data, perhaps cut short")
            return False
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self._ready = memoryview(self._frame.decompress(packed))
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        return True


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
        reason = _REASONS.get(type(error), f"not readable: {error}")
        if isinstance(error, FileNotFoundError) and has_magic(path):
            reason = "no file matches this pattern"
        raise UserError(f"{shown(path)}: {reason}") from None


LONGEST = 1_000_000  # bytes of a line
CHUNK = 1 << 18
BOM = b"\xef\xbb\xbf"
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
NOT_JSON = "not a JSON object"
NOT_TEXT = "not text"
NAMED = 5  # lines that are named per reason


class Line(NamedTuple):
    """A line, its number from 1, and what is wrong with it; the text of a bad line is shortened or repaired."""

    number: int
    text: str
    problem: str | None = None


def is_jsonl(path: str) -> bool:
    """Whether the lines of a file are JSON objects, by its name."""
    return path.removesuffix(".gz").removesuffix(".zst").endswith((".jsonl", ".ndjson"))


def read_lines(path: str) -> Iterator[Line]:
    """Yield every line of a file, good or bad."""
    with open_bytes(path) as stream:
        yield from lines_of(stream)


def lines_of(stream: BinaryIO, first: int = 1, length: int | None = None) -> Iterator[Line]:
    """Yield the lines of a stream from where it is, numbered from `first`; of `length` bytes, or to its end."""
    for block in _split(stream, length=length):
        for number, line in enumerate(decode_lines(block, first), first):
            yield line if isinstance(line, Line) else Line(number, line)
        first += block.count(b"\n") + 1


def read_chunks(path: str, size: int = 0) -> Iterator[Chunk]:
    """Yield a file in chunks of at least `size` bytes, whole lines each, or as soon as there is a line."""
    first = 1
    with open_bytes(path) as stream:
        for block in _split(stream, size):
            yield first, (block,)
            first += block.count(b"\n") + 1


def _count_lines(chunks: Iterator[Chunk]) -> int:
    return sum(block.count(b"\n") + 1 for _, (block,) in chunks)


def decode_lines(block: bytes, first: int) -> Sequence[str | Line]:
    """The lines of a block, of which the first has this number: text, or a Line if it is bad."""
    if first > 1 and b"\r" not in block and len(block) <= LONGEST:
        with suppress(UnicodeDecodeError):
            return block.decode("utf-8").split("\n")
    return [_decode_line(raw, number) for number, raw in enumerate(block.split(b"\n"), first)]


def _decode_line(raw: bytes, number: int) -> str | Line:
    raw = raw.removesuffix(b"\r")
    if number == 1:
        raw = raw.removeprefix(BOM)
    if len(raw) > LONGEST:
        return Line(number, raw[:80].decode("utf-8", "replace"), LONG)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return Line(number, raw.decode("utf-8", "replace"), ENCODING)


def _split(stream: BinaryIO, size: int = 0, length: int | None = None) -> Iterator[bytes]:
    """Split before newlines, into blocks of at least `size` bytes; of `length` bytes, or all that there are.

    Of a line that is too long only a little more than LONGEST is kept.
    """
    ready: list[bytes] = []
    rest, waiting, left = b"", 0, sys.maxsize if length is None else length
    # read1 gives what a pipe has by now; read would wait for a full chunk while someone waits for an answer
    while chunk := stream.read1(min(CHUNK, left)):  # type: ignore[attr-defined]
        left -= len(chunk)
        lines, newline, rest = (rest + chunk).rpartition(b"\n")
        if newline:
            ready.append(lines)
            waiting += len(lines)
            if waiting >= size:
                yield b"\n".join(ready)
                ready, waiting = [], 0
        if len(rest) > LONGEST + 4:  # a BOM and a \r may go
            rest = rest[: LONGEST + 5]
    if rest:
        ready.append(rest)
    if ready:
        yield b"\n".join(ready)


class LineCounter:
    """How many lines were read, kept and skipped, and where. `read == kept + sum(skipped.values())`, always."""

    def __init__(self, strict: bool = False, reasons: Iterable[str] = ()) -> None:
        """`reasons` that are known to come, in the order in which they are named."""
        self.strict = strict
        self.read = 0
        self.skipped: Counter[str] = Counter(dict.fromkeys(reasons, 0))
        self.locations: dict[str, list[str]] = {reason: [] for reason in self.skipped}  # the first few file:line
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

    def add(self, counts: dict[str, Any]) -> None:
        """Add the `counts` of further lines."""
        self.read += counts["read"]
        for reason, count in counts["skipped"].items():
            self.skipped[reason] += count
            locations = self.locations.setdefault(reason, [])
            locations.extend(counts["places"][reason][: NAMED - len(locations)])
        for columns, count in counts["wrong_columns"].items():
            self.wrong_columns[int(columns)] += count

    def summary(self) -> str:
        """How many lines were kept and skipped, in one sentence."""
        reasons = []
        for reason, count in self.skipped.most_common():
            named = self.locations[reason][:3]
            reasons.append(f"{count:,} {reason} ({', '.join(named)}{', ...' * (count > len(named))})")
        lines = f"{self.kept:,} of {plural(self.read, 'line')}"
        return lines + (f"; skipped {', '.join(reasons)}" if reasons else "")

    def counts(self) -> dict[str, Any]:
        """All that `add` takes."""
        return {**self.to_json(), "wrong_columns": dict(self.wrong_columns)}

    def to_json(self) -> dict[str, Any]:
        """The counter as plain values."""
        return {"read": self.read, "kept": self.kept, "skipped": dict(self.skipped), "places": self.locations}


class Located(NamedTuple):
    """An example and its line."""

    number: int
    example: Example


Cells = tuple[int, list[str], str, str]  # number and cells of a row; the problem, and a detail of it, if it has one
Chunk = tuple[int, tuple[bytes, ...]]  # the number of the first line, and the lines in each file


class Source(NamedTuple):
    """Where examples come from: one TSV and its columns, or a file of sources and a file of targets."""

    paths: tuple[str, ...]
    columns: tuple[Column, ...] = ("source", "target")
    names: tuple[str, ...] = ()  # what to call the files, where not by their paths
    packed: bool = False  # rows that were in memory: the line of each is a JSON list of its cells
    prefix_column: bool = False  # one more column, the last: how an output is to start
    keys: tuple[str, ...] = ()  # what the columns are called in a file that names them

    def location(self, number: int, file: int = 0) -> str:
        """Name a line, or a row of what was in memory."""
        return f"{self.file_names[file]}[{number - 1}]" if self.packed else f"{self.file_names[file]}:{number}"

    @property
    def name(self) -> str:
        return " + ".join(self.file_names)

    @property
    def file_names(self) -> tuple[str, ...]:
        return self.names or tuple(map(shown, self.paths))

    @property
    def parts(self) -> tuple[Source, ...]:
        return (self,)

    def read(self, counter: LineCounter) -> Iterator[Located]:
        """Yield the good examples in order; every line is counted."""
        for chunk in self.chunks():
            yield from self.read_chunk(chunk, counter)

    def chunks(self, size: int = 0) -> Iterator[Chunk]:
        """Yield the lines in chunks that can be read one by one, each of about `size` bytes."""
        return read_chunks(self.paths[0], size) if len(self.paths) == 1 else self._parallel_chunks(size)

    def chunk_lines(self, chunk: Chunk) -> int:
        """How many lines a chunk has."""
        return chunk[1][0].count(b"\n") + 1

    def read_chunk(self, chunk: Chunk, counter: LineCounter) -> Iterator[Located]:
        """Yield the good examples of a chunk."""
        return self._table(chunk, counter) if len(self.paths) == 1 else self._parallel(chunk, counter)

    def _table(self, chunk: Chunk, counter: LineCounter) -> Iterator[Located]:
        at = {name: self.columns.index(name) for name in self.columns}
        source_at, target_at, features_at = at["source"], at.get("target"), at.get("features")
        for number, cells in self._good_cells(chunk, counter):
            target = cells[target_at] if target_at is not None else None
            features = cells[features_at] if features_at is not None else None
            yield Located(number, Example(cells[source_at], target, features))

    def cells(self, counter: LineCounter) -> Iterator[tuple[int, list[str]]]:
        """Yield the number and the cells of the good lines of a table; every line is counted.

        A column of targets may be there several times; a line needs one of them.
        """
        for chunk in self.chunks():
            yield from self._good_cells(chunk, counter)

    def _good_cells(self, chunk: Chunk, counter: LineCounter) -> Iterator[tuple[int, list[str]]]:
        names = [*self.columns, *["prefix"] * self.prefix_column]
        source_at, targets_at = names.index("source"), [i for i, name in enumerate(names) if name == "target"]
        target_at, width = targets_at[0] if targets_at else source_at, len(names)
        for number, cells, problem, detail in self.rows(chunk):
            counter.read += 1
            if len(cells) == width and cells[target_at].strip() and cells[source_at].strip():  # nearly every line
                yield number, cells
            elif problem:
                counter.skip(problem, self.location(number), detail)
            elif not any(map(str.strip, cells)):
                counter.skip(BLANK, self.location(number))
            elif len(cells) != width:
                counter.wrong_columns[min(len(cells), MANY)] += 1
                counter.skip(COLUMNS, self.location(number), f"{len(cells)} instead of {width} ({','.join(names)})")
            elif not cells[source_at].strip():
                counter.skip(EMPTY, self.location(number), "source")
            elif targets_at and not any(cells[i].strip() for i in targets_at):
                counter.skip(EMPTY, self.location(number), "target")
            else:
                yield number, cells

    def rows(self, chunk: Chunk) -> Iterator[Cells]:
        """Yield every row of a table; one that has a problem has no cells."""
        first, (block,) = chunk
        alone = len(self.columns) + self.prefix_column == 1  # where there is one column alone, a tab is text
        for number, line in enumerate(decode_lines(block, first), first):
            if isinstance(line, Line):
                yield number, [], line.problem or "", ""
            else:
                yield number, json.loads(line) if self.packed else [line] if alone else line.split("\t"), "", ""

    def _parallel_chunks(self, size: int) -> Iterator[Chunk]:
        """Chunks with as many lines of each file."""
        left, right = (read_chunks(path, size) for path in self.paths)
        waiting: list[bytes] = []
        end = 0  # lines so far
        for first, (block,) in left:
            lines = block.count(b"\n") + 1
            while len(waiting) < lines and (more := next(right, None)):
                waiting.extend(more[1][0].split(b"\n"))
            if len(waiting) < lines:
                self._refuse(end + lines + _count_lines(left), end + len(waiting))
            yield first, (block, b"\n".join(waiting[:lines]))
            del waiting[:lines]
            end += lines
        if more_targets := len(waiting) + _count_lines(right):
            self._refuse(end, end + more_targets)

    def _refuse(self, sources: int, targets: int) -> None:
        first, second = self.file_names
        raise UserError(
            f"{first} has {plural(sources, 'line')} but {second} has {targets:,};"
            " parallel files need one line for one line"
        )

    def _parallel(self, chunk: Chunk, counter: LineCounter) -> Iterator[Located]:
        first, blocks = chunk
        sources, targets = (decode_lines(block, first) for block in blocks)
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), first):
            counter.read += 1
            texts = [line.text if isinstance(line, Line) else line for line in (source, target)]
            problems = [line.problem if isinstance(line, Line) else None for line in (source, target)]
            blank = [not text.strip() for text in texts]
            if problem := problems[0] or problems[1]:
                counter.skip(problem, self.location(number, int(not problems[0])))
            elif any(blank):
                counter.skip(BLANK if all(blank) else EMPTY, self.location(number, int(not blank[0])))
            else:
                yield Located(number, Example(texts[0], texts[1]))

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
