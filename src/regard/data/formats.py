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
    """A Parquet file. A chunk of it is some of the rows of some row groups, and holds their numbers."""

    __slots__ = ()

    def location(self, number: int, file: int = 0) -> str:
        return f"{self.file_names[file]}[{number - 1}]"

    def chunks(self, size: int = 0) -> Iterator[Chunk]:
        """Yield row groups, several small ones together; with a `size` in bytes, large ones in parts."""
        with self._open() as file:
            begin, first, rows, bytes_ = 0, 1, 0, 0
            for group in range(file.num_row_groups):
                rows += file.metadata.row_group(group).num_rows
                bytes_ += file.metadata.row_group(group).total_byte_size
                if bytes_ >= max(size, 1) or group == file.num_row_groups - 1:
                    part = max(ROWS, rows * size // max(bytes_, 1)) if size else rows
                    for skipped in range(0, rows, max(part, 1)):
                        count = min(part, rows - skipped)
                        yield first + skipped, (f"{begin} {group + 1} {skipped} {count}".encode(),)
                    begin, first, rows, bytes_ = group + 1, first + rows, 0, 0

    def chunk_lines(self, chunk: Chunk) -> int:
        return int(chunk[1][0].split()[-1])

    def rows(self, chunk: Chunk) -> Iterator[Cells]:
        number, (numbers,) = chunk
        begin, end, skipped, count = map(int, numbers.split())
        with self._open() as file:
            for batch in file.iter_batches(ROWS, list(range(begin, end)), columns=list(self.keys), use_threads=False):
                for row in batch.slice(min(skipped, len(batch)), count).to_pylist():
                    yield self._named_cells(number, row)
                    number += 1
                count -= max(0, min(count, len(batch) - skipped))
                skipped = max(0, skipped - len(batch))
                if not count:
                    return

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """Open the file with pyarrow, and see that it has the columns."""
        try:
            arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        except ImportError:
            raise missing_extra(f"{self.name}: a Parquet file", "pyarrow", "corpora") from None
        with open_raw(self.paths[0]) as raw:
            try:
                with parquet.ParquetFile(raw) as file:
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


def _is_unicode(text: str) -> bool:
    """Whether a text can be written: JSON can name half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


SOURCES: dict[str, type[Source]] = {kind.__name__: kind for kind in (Source, JsonlSource, ParquetSource)}
