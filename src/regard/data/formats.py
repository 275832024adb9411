"""Files whose columns have names: JSONL and Parquet, read as tables are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from regard.data.reader import (
    COLUMNS,
    NOT_JSON,
    NOT_TEXT,
    Cells,
    Chunk,
    Line,
    LineCounter,
    Source,
    decode_lines,
    is_jsonl,
)
from regard.data.streams import open_raw
from regard.errors import UserError, closest, missing_extra, shown_value
from regard.recipe import Column

PARQUET = (".parquet", ".pq")
ROWS = 8192  # of a Parquet file read at a time
BUFFER = 1 << 20  # bytes of a column of it; by default all of a row group are read at once


def is_parquet(path: str) -> bool:
    """Whether a file is a Parquet file, by its name."""
    return path.endswith(PARQUET)


def named_columns(path: str) -> bool:
    """Whether the columns of a file have names."""
    return is_jsonl(path) or is_parquet(path)


def open_table(path: str, columns: tuple[Column, ...], names: Sequence[str] | None) -> Source:
    """A table in a file of any format; `names` are those of the columns in files that name them."""
    if not named_columns(path):
        return Source((path,), columns)
    return (JsonlSource if is_jsonl(path) else ParquetSource)((path,), columns, keys=tuple(names or columns))


class JsonlSource(Source):
    """A JSON object in every line, of which some keys are columns."""

    __slots__ = ()

    def rows(self, chunk: Chunk) -> Iterator[Cells]:
        first, (block,) = chunk
        for number, text in enumerate(decode_lines(block, first), first):
            if isinstance(text, Line) or not text.strip():
                yield number, [], text.problem or "" if isinstance(text, Line) else "", ""
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                yield number, [], NOT_JSON, str(error)[:200]
                continue
            if not isinstance(row, dict):
                yield number, [], NOT_JSON, f"{shown_value(row)} instead of an object"
            else:
                yield self._named_cells(number, row)

    def _named_cells(self, number: int, row: dict[str, Any]) -> Cells:
        cells = [row.get(key, "") for key in self.keys]
        for index, cell in enumerate(cells):
            if cell is None:
                cells[index] = ""
            elif isinstance(cell, int) and not isinstance(cell, bool) and self.columns[index] == "target":
                cells[index] = str(cell)  # a label, perhaps
            elif not isinstance(cell, str):
                return number, [], NOT_TEXT, f"{self.keys[index]} is {shown_value(cell)}"
            elif not cell.isascii() and not _is_unicode(cell):
                return number, [], NOT_TEXT, f"{self.keys[index]} has half a surrogate pair"
        if not any(key in row for key in self.keys):
            keys = ", ".join(list(row)[:5]) or "none"
            return number, [], COLUMNS, f"no {' or '.join(self.keys)} among the keys: {keys}"
        return number, cells, "", ""

    def hint(self, counter: LineCounter) -> str:
        if counter.skipped[COLUMNS] * 2 < counter.read:
            return ""
        return f"most lines lack {' and '.join(self.keys)}; name the keys with --set column_names=[...]"


class ParquetSource(JsonlSource):
    """A Parquet file. Its chunks hold rows in Arrow's format for streams: it is read once, a few rows at a time."""

    __slots__ = ()

    def location(self, number: int, file: int = 0) -> str:
        return f"{self.file_names[file]}[{number - 1}]"

    def chunks(self, size: int = 0) -> Iterator[Chunk]:
        """Yield some rows at a time, of at least `size` bytes; row groups may be of any size."""
        first, batches, bytes_ = 1, [], 0
        with self._open() as file:
            for batch in file.iter_batches(ROWS, columns=list(self.keys), use_threads=False):
                batches.append(batch)
                bytes_ += batch.nbytes
                if bytes_ >= size:
                    yield first, (_pack(batches),)
                    first, batches, bytes_ = first + sum(map(len, batches)), [], 0
        if batches:
            yield first, (_pack(batches),)

    def chunk_lines(self, chunk: Chunk) -> int:
        return sum(map(len, _unpack(chunk[1][0])))

    def rows(self, chunk: Chunk) -> Iterator[Cells]:
        first, (packed,) = chunk
        rows = (row for batch in _unpack(packed) for row in batch.to_pylist())
        for number, row in enumerate(rows, first):
            yield self._named_cells(number, row)

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """Open the file with pyarrow, and see that it has the columns."""
        try:
            arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        except ImportError:
            raise missing_extra(f"{self.name}: a Parquet file", "pyarrow", "corpora") from None
        with open_raw(self.paths[0]) as raw:
            try:
                with parquet.ParquetFile(raw, buffer_size=BUFFER, pre_buffer=False) as file:
                    self._require_columns(file.schema_arrow.names)
                    yield file
            except (arrow.ArrowException, OSError) as error:
                raise UserError(f"{self.name}: not a readable Parquet file: {error}") from None

    def _require_columns(self, known: Sequence[str]) -> None:
        for key in self.keys:
            if key not in known:
                raise UserError(
                    f"{self.name}: has no column {key!r}{closest(key, known)}\n  columns: {', '.join(known)}; name "
                    f"those to read with --set column_names=[...], in the order {','.join(self.columns)}"
                )

    @property
    def in_blocks(self) -> bool:
        return False

    def hint(self, counter: LineCounter) -> str:
        return ""


def _pack(batches: list[Any]) -> bytes:
    arrow = import_module("pyarrow")
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def _unpack(packed: bytes) -> Iterator[Any]:
    """The batches of `_pack`."""
    with import_module("pyarrow").ipc.open_stream(packed) as stream:
        yield from stream


def _is_unicode(text: str) -> bool:
    """Whether a text can be written: JSON can name half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


SOURCES: dict[str, type[Source]] = {kind.__name__: kind for kind in (Source, JsonlSource, ParquetSource)}
