"""Readers of lines and of tables of examples, which count skipped lines and record their locations.

Only a line feed ends a line. A carriage return before it is dropped, and so is a byte order mark at the start.
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
MEMORY = "<memory>"  # in place of the path of data in memory
COMPRESSIONS = {".gz": "gzip", ".zst": "zstandard"}  # by suffix
ZSTANDARD_BYTES = 1 << 11  # compressed bytes per call, which can become 64 MB of text

_OTHER_FORMATS = {
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8 first",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8 first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"BZh": "bzip2 data; only .gz and .zst are read directly",
    b"\xfd7zXZ": "xz data; only .gz and .zst are read directly",
    b"PAR1": "a Parquet file, which is read as a table if its name ends in .parquet",
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
    """Open a file, or stdin (`-`). Compression is recognised by the first bytes. Every failure is a UserError."""
    with open_raw(path) as raw:
        try:
            head = raw.peek(8)[:8]  # type: ignore[attr-defined]
            for magic, description in _OTHER_FORMATS.items():
                if head.startswith(magic):
                    raise UserError(f"{shown(path)}: this is {description}")
            if head.startswith(b"\x1f\x8b"):
                with gzip.GzipFile(fileobj=raw, mode="rb") as decompressed:
                    yield cast(BinaryIO, decompressed)
            elif head.startswith(b"\x28\xb5\x2f\xfd"):
                yield cast(BinaryIO, io.BufferedReader(_ZstandardReader(raw, path)))
            elif compression := COMPRESSIONS.get(os.path.splitext(path)[1]):
                raise UserError(f"{path}: not a {compression} file, although its name says so")
            else:
                yield raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{shown(path)}: broken gzip data, perhaps cut short: {error}") from None


class _ZstandardReader(io.RawIOBase):
    """Decompresses a zstandard file. Unlike the reader of the package it detects truncated files."""

    def __init__(self, compressed: BinaryIO, path: str) -> None:
        try:
            self._library: Any = import_module("zstandard")
        except ImportError:
            raise missing_extra(f"{shown(path)}: zstandard data", "zstandard", "corpora") from None
        self._compressed = compressed
        self._name = shown(path)
        self._frame: Any = None  # the current frame of a file that may have several
        self._rest = b""  # compressed bytes after the last frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._rest or self._compressed.read1(ZSTANDARD_BYTES)  # type: ignore[attr-defined]
            if not compressed:
                if self._frame is not None:
                    raise UserError(f"{self._name}: broken zstandard data, perhaps cut short")
                return 0
            try:
                if self._frame is None:
                    self._frame = self._library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                self._ready = memoryview(self._frame.decompress(compressed))
            except self._library.ZstdError as error:
                raise UserError(f"{self._name}: broken zstandard data, perhaps cut short: {error}") from None
            self._rest = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


@contextmanager
def open_raw(path: str) -> Iterator[BinaryIO]:
    """Open a file, or stdin (`-`), without decompression."""
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


MAX_LINE_BYTES = 1_000_000
READ_BYTES = 1 << 18
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_COLUMNS = 10  # lines with more columns are counted together

# Reasons to skip a line
BLANK = "blank line"
COLUMNS = "wrong column count"
EMPTY = "empty side"
ENCODING = "invalid UTF-8"
TOO_LONG = "too long"
NO_MEMORY = "too large for the memory"
UNMET = "with a constraint that cannot be met"
BAD_REQUEST = "not a valid request"
BAD_QUOTES = "wrong quotes"
NOT_JSON = "not a JSON object"
NOT_TEXT = "not text"
MAX_LOCATIONS = 5  # recorded per reason


class Line(NamedTuple):
    """A line, its number from 1, and the reason to skip a bad line, whose text is shortened or repaired."""

    number: int
    text: str
    problem: str | None = None


def read_lines(path: str) -> Iterator[Line]:
    """Yield every line of a file, good or bad."""
    with open_bytes(path) as stream:
        yield from lines_of(stream)


def lines_of(stream: BinaryIO, first: int = 1, length: int | None = None) -> Iterator[Line]:
    """Yield the lines of the next `length` bytes of a stream (default: all bytes), numbered from `first`."""
    for begin, block in _split(stream, first, length=length):
        for number, line in enumerate(decode_lines(block, begin), begin):
            yield line if isinstance(line, Line) else Line(number, line)


def read_chunks(path: str, size: int = 0) -> Iterator[Chunk]:
    """Yield a file in chunks of whole lines with at least `size` bytes; by default, lines are not collected."""
    with open_bytes(path) as stream:
        for first, block in _split(stream, size=size):
            yield first, (block,)


def decode_lines(block: bytes, first: int) -> Sequence[str | Line]:
    """The lines of a block whose first line has the number `first`: texts, or Lines if they are bad."""
    if first > 1 and b"\r" not in block and len(block) <= MAX_LINE_BYTES:
        with suppress(UnicodeDecodeError):
            return block.decode("utf-8").split("\n")
    return [_decode_line(raw, number) for number, raw in enumerate(block.split(b"\n"), first)]


def _decode_line(raw: bytes, number: int) -> str | Line:
    raw = raw.removesuffix(b"\r")
    if number == 1:
        raw = raw.removeprefix(BYTE_ORDER_MARK)
    if len(raw) > MAX_LINE_BYTES:
        return Line(number, raw[:80].decode("utf-8", "replace"), TOO_LONG)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return Line(number, raw.decode("utf-8", "replace"), ENCODING)


def _split(stream: BinaryIO, first: int = 1, size: int = 0, length: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Split the next `length` bytes of a stream at newlines -> the first line number of each block, and the block.

    Blocks have at least `size` bytes. The end of a line that is too long is dropped, so that memory is bounded.
    """
    ready: list[bytes] = []
    ready_bytes = 0
    rest = b""  # of an incomplete line
    bytes_left = sys.maxsize if length is None else length
    # read1 returns the available bytes of a pipe; read would wait for a full chunk
    while chunk := stream.read1(min(READ_BYTES, bytes_left)):  # type: ignore[attr-defined]
        bytes_left -= len(chunk)
        lines, newline, rest = (rest + chunk).rpartition(b"\n")
        if newline:
            ready.append(lines)
            ready_bytes += len(lines)
            if ready_bytes >= size:
                block = b"\n".join(ready)
                yield first, block
                first += block.count(b"\n") + 1
                ready = []
                ready_bytes = 0
        if len(rest) > MAX_LINE_BYTES + 4:  # a byte order mark and a \r do not count
            rest = rest[: MAX_LINE_BYTES + 5]
    if rest:
        ready.append(rest)
    if ready:
        yield first, b"\n".join(ready)


class LineCounter:
    """Counts lines and skipped lines, and records locations. `read == kept + sum(skipped.values())` always holds."""

    def __init__(self, strict: bool = False, reasons: Iterable[str] = ()) -> None:
        """These `reasons` come first among equally frequent reasons in summaries."""
        self.strict = strict
        self.read = 0
        self.skipped: Counter[str] = Counter(dict.fromkeys(reasons, 0))
        self.locations: dict[str, list[str]] = {reason: [] for reason in self.skipped}  # the first few, file:line
        self.wrong_columns: Counter[int] = Counter()  # skipped lines by their number of columns

    @property
    def kept(self) -> int:
        return self.read - self.skipped.total()

    def skip(self, reason: str, location: str, detail: str = "", *, tell: bool = False) -> None:
        """Count a line as skipped, or raise an error in strict mode; with `tell`, summaries also show the detail."""
        if self.strict:
            advice = "without data.strict such lines are skipped and counted"
            raise UserError(f"{location}: {reason}{detail and ': ' + detail}\n  {advice}")
        self.skipped[reason] += 1
        locations = self.locations.setdefault(reason, [])
        if len(locations) < MAX_LOCATIONS:
            locations.append(f"{location}: {detail}" if tell else location)

    def add(self, counts: dict[str, Any]) -> None:
        """Add the `counts` of a counter of later lines."""
        self.read += counts["read"]
        for reason, count in counts["skipped"].items():
            self.skipped[reason] += count
            locations = self.locations.setdefault(reason, [])
            locations.extend(counts["places"][reason][: MAX_LOCATIONS - len(locations)])
        for columns, count in counts["wrong_columns"].items():
            self.wrong_columns[int(columns)] += count

    def summary(self) -> str:
        """The numbers of kept and skipped lines in one sentence."""
        reasons = []
        for reason, count in self.skipped.most_common():
            named = self.locations[reason][:3]
            reasons.append(f"{count:,} {reason} ({', '.join(named)}{', ...' * (count > len(named))})")
        lines = f"{self.kept:,} of {plural(self.read, 'line')}"
        return lines + (f"; skipped {', '.join(reasons)}" if reasons else "")

    def unusable(self, name: str, hint: str = "", noun: str = "example", files: int = 1) -> UserError:
        """The error for files without a usable line; `hint` is the likely cause."""
        if not self.read:
            return UserError(f"{name}: the file{' is' if files == 1 else 's are'} empty")
        return UserError(f"{name}: no usable {noun}: {self.summary()}{hint and chr(10) + '  ' + hint}")

    def counts(self) -> dict[str, Any]:
        """The argument of `add`."""
        return {**self.to_json(), "wrong_columns": dict(self.wrong_columns)}

    def to_json(self) -> dict[str, Any]:
        return {"read": self.read, "kept": self.kept, "skipped": dict(self.skipped), "places": self.locations}


class Located(NamedTuple):
    """An example and the number of its line."""

    number: int
    example: Example


Cells = tuple[int, list[str], str, str]  # a row: its number, its cells, the reason to skip it, a detail of the reason
Chunk = tuple[int, tuple[bytes, ...]]  # the number of the first line, and the lines of each file


class Source(NamedTuple):
    """A file of examples: a TSV file and its columns, or two parallel files, sources and targets."""

    paths: tuple[str, ...]
    columns: tuple[Column, ...] = ("source", "target")
    names: tuple[str, ...] = ()  # of the files in messages; by default the paths
    packed: bool = False  # whether the file is a copy of rows in memory: each line is a JSON list of cells
    prefix_column: bool = False  # whether a last column, after `columns`, holds prefixes of outputs
    keys: tuple[str, ...] = ()  # the names of the columns in a file that names its columns
    header: tuple[str, ...] = ()  # all names in the first line of the file, if it names its columns
    dialect: str = ""  # of CSV: the separator of cells, and the character that escapes quotes, if any

    def location(self, number: int, file: int = 0) -> str:
        """The name of a line, or of a row in memory."""
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
        """Yield the lines in chunks of about `size` bytes, which can be read independently."""
        return read_chunks(self.paths[0], size) if len(self.paths) == 1 else self._parallel_chunks(size)

    def chunk_lines(self, chunk: Chunk) -> int:
        return chunk[1][0].count(b"\n") + 1

    def read_chunk(self, chunk: Chunk, counter: LineCounter) -> Iterator[Located]:
        """Yield the good examples of a chunk."""
        return self._table(chunk, counter) if len(self.paths) == 1 else self._parallel(chunk, counter)

    def _table(self, chunk: Chunk, counter: LineCounter) -> Iterator[Located]:
        index = {name: self.columns.index(name) for name in self.columns}
        source_index = index["source"]
        target_index = index.get("target")
        features_index = index.get("features")
        for number, cells in self._good_cells(chunk, counter):
            target = cells[target_index] if target_index is not None else None
            features = cells[features_index] if features_index is not None else None
            yield Located(number, Example(cells[source_index], target, features))

    def cells(self, counter: LineCounter) -> Iterator[tuple[int, list[str]]]:
        """Yield the number and the cells of the good lines of a table; every line is counted."""
        for chunk in self.chunks():
            yield from self._good_cells(chunk, counter)

    def _good_cells(self, chunk: Chunk, counter: LineCounter) -> Iterator[tuple[int, list[str]]]:
        names = [*self.columns, *["prefix"] * self.prefix_column]
        width = len(names)
        source_index = names.index("source")
        target_indices = [i for i, name in enumerate(names) if name == "target"]
        first_target = target_indices[0] if target_indices else source_index
        for number, cells, problem, detail in self.rows(chunk):
            counter.read += 1
            if len(cells) == width and cells[first_target].strip() and cells[source_index].strip():  # the usual case
                yield number, cells
            elif problem:
                counter.skip(problem, self.location(number), detail)
            elif not any(map(str.strip, cells)):
                counter.skip(BLANK, self.location(number))
            elif len(cells) != width:
                counter.wrong_columns[min(len(cells), MAX_COLUMNS)] += 1
                counter.skip(COLUMNS, self.location(number), f"{len(cells)} instead of {width} ({','.join(names)})")
            elif not cells[source_index].strip():
                counter.skip(EMPTY, self.location(number), "source")
            elif target_indices and not any(cells[i].strip() for i in target_indices):
                counter.skip(EMPTY, self.location(number), "target")
            else:
                yield number, cells

    def rows(self, chunk: Chunk) -> Iterator[Cells]:
        """Yield every row of a table; a row with a problem has no cells."""
        return self._named_rows(self.parse(chunk)) if self.header else self.parse(chunk)

    def _named_rows(self, rows: Iterator[Cells]) -> Iterator[Cells]:
        """The rows after the header, with the cells of the columns `keys`, or with all cells."""
        places = [self.header.index(key) for key in self.keys]
        for number, cells, problem, detail in rows:
            if places and len(cells) == len(self.header):
                cells = [cells[place] for place in places]
            elif places and any(map(str.strip, cells)):
                problem = COLUMNS
                detail = f"{len(cells)} instead of {len(self.header)} ({','.join(self.header)})"
            if number > 1:
                yield number, cells if not problem else [], problem, detail

    def parse(self, chunk: Chunk) -> Iterator[Cells]:
        """Yield all cells of every row."""
        first, (block,) = chunk
        width = max(len(self.columns) + self.prefix_column, len(self.header))
        single_column = width == 1  # then a tab is part of the text
        for number, line in enumerate(decode_lines(block, first), first):
            if isinstance(line, Line):
                yield number, [], line.problem or "", ""
            elif self.packed:
                yield number, json.loads(line), "", ""
            else:
                yield number, [line] if single_column else line.split("\t"), "", ""

    def _parallel_chunks(self, size: int) -> Iterator[Chunk]:
        """Yield chunks with an equal number of lines of each file."""
        left, right = (read_chunks(path, size) for path in self.paths)
        targets: list[bytes] = []  # read, but not yet in a chunk
        source_count = 0  # lines read
        target_count = 0  # lines in chunks
        for first, (block,) in left:
            lines = block.count(b"\n") + 1
            source_count += lines
            while len(targets) < lines and (more := next(right, None)):
                targets.extend(more[1][0].split(b"\n"))
            if len(targets) < lines:
                break
            yield first, (block, b"\n".join(targets[:lines]))
            del targets[:lines]
            target_count += lines
        source_count += sum(map(self.chunk_lines, left))
        target_count += len(targets) + sum(map(self.chunk_lines, right))
        if source_count != target_count:
            raise UserError(
                f"{self.file_names[0]} has {plural(source_count, 'line')} but {self.file_names[1]} has "
                f"{target_count:,}; parallel files must have the same number of lines"
            )

    def _parallel(self, chunk: Chunk, counter: LineCounter) -> Iterator[Located]:
        first, blocks = chunk
        for number, pair in enumerate(zip(*(decode_lines(block, first) for block in blocks), strict=True), first):
            counter.read += 1
            source, target = (line if isinstance(line, Line) else Line(number, line) for line in pair)
            blank = [not line.text.strip() for line in (source, target)]
            if problem := source.problem or target.problem:
                counter.skip(problem, self.location(number, int(not source.problem)))
            elif any(blank):
                counter.skip(BLANK if all(blank) else EMPTY, self.location(number, int(not blank[0])))
            else:
                yield Located(number, Example(source.text, target.text))

    def require(self, counter: LineCounter) -> None:
        """Raise an error with the likely cause if the file has no usable example."""
        if not counter.kept:
            raise counter.unusable(self.name, self.hint(counter))

    def hint(self, counter: LineCounter) -> str:
        """The likely mistake if most lines have the wrong number of columns."""
        (columns, count), *_ = counter.wrong_columns.most_common(1) or [(0, 0)]
        if count * 2 < counter.read or not columns:
            return ""
        if columns == 1:
            return "most lines have one column: is the separator a tab?"
        names = {2: "source,target", 3: "source,features,target"}.get(columns)
        advice = f"; name them, for example data.columns={names}" if names else ""
        if self.prefix_column:
            advice = f" ({','.join(self.columns)} and the prefix)"
        expected = len(self.columns) + self.prefix_column
        return f"most lines have {'at least ' * (columns == MAX_COLUMNS)}{columns} columns, not {expected}{advice}"
