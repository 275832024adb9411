"""Data in memory: lists, data frames and datasets, which are written to a file and read like other files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, islice
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.reader import Source
from regard.errors import UserError, plural, shown_value
from regard.recipe import Column
from regard.tasks import Reads
from regard.text.codec import Example
from regard.text.tokenizer import SURROGATE

LABELLED = {"text": "source", "label": "target"}  # other names of the columns of labelled texts
TEXT = ("text", "source")  # names of the column of plain text
Write = Callable[[Path], object]


@dataclass(frozen=True)
class InMemory:
    """Data in memory that can be written to a file."""

    name: str  # in messages
    columns: tuple[Column, ...]
    packed: bool  # as in Source
    _write: Write

    def write(self, path: Path) -> Source:
        """Write the data to a file; an iterator can be written only once."""
        self._write(path)
        return Source((str(path),), self.columns, (self.name,), self.packed)


def in_memory(data: Any, reads: Reads, name: str = "data", columns: Sequence[Column] | None = None) -> InMemory:
    """Recognise the format of data; `columns` names the columns of rows without names, or selects named columns.

    Pairs and labelled texts are rows (tuples, lists, mappings, `Example`) or columns (data frames, a mapping of lists),
    plain text is a list of texts, images are a mapping with the arrays `images` and `labels`.
    """
    if not isinstance(data, Iterable) and hasattr(data, "collect"):  # a lazy frame
        raise UserError(f"{name}: {type(data).__name__} is not computed yet; give what its collect() returns")
    if isinstance(data, str | bytes) or (not isinstance(data, Iterable) and not hasattr(data, "__arrow_c_stream__")):
        raise UserError(f"{name}: takes a file, or examples in memory, not {shown_value(data)}")
    if reads == "images":
        return InMemory(name, ("source", "target"), False, _image_writer(data, name))
    names, rows = _open(data, name)
    if reads == "text":
        return InMemory(name, ("source", "target"), False, _text_writer(names, rows, name))
    labelled = reads == "labelled"
    columns, positions = _find_columns(names, LABELLED if labelled else {}, name, columns)

    def line(row: Any, where: str) -> str:
        values = zip(columns, _values(row, names, positions, columns, where), strict=True)
        cells = [_text(value, labelled and column == "target", column, where) for column, value in values]
        return json.dumps(cells, ensure_ascii=False)

    return InMemory(name, columns, True, _line_writer(rows, line, name))


def _line_writer(rows: Iterable[Any], line: Callable[[Any, str], str], name: str) -> Write:
    """Write a line for every row; `line` takes the row and its location."""

    def write(path: Path) -> None:
        index = -1
        with path.open("w", encoding="utf-8", newline="\n") as file:
            for index, row in enumerate(rows):
                file.write(line(row, f"{name}[{index}]") + "\n")
        if index < 0:
            raise UserError(f"{name}: is empty")

    return write


def _open(data: Any, name: str) -> tuple[list[str] | None, Iterable[Any]]:
    """The names of the columns, if any, and the rows. Data frames are recognised without importing their libraries."""
    if isinstance(data, Mapping):
        return _open_columns(data, name)
    if hasattr(data, "itertuples") and hasattr(data, "columns"):  # pandas
        return [str(column) for column in data.columns], data.itertuples(index=False, name=None)
    if hasattr(data, "iter_rows") and hasattr(data, "columns"):  # polars
        return [str(column) for column in data.columns], data.iter_rows()
    if hasattr(data, "to_batches") and hasattr(data, "column_names"):  # an Arrow table
        return list(data.column_names), (row for batch in data.to_batches() for row in batch.to_pylist())
    if not isinstance(data, Iterable):  # only __arrow_c_stream__
        try:
            return _open(import_module("pyarrow").table(data), name)
        except ImportError:
            needed = f"to read {type(data).__name__}, pyarrow is needed; or give a list of rows"
            raise UserError(f"{name}: {needed}") from None
    rows = iter(data)
    start = list(islice(rows, 1))
    first = start[0] if start else None
    names = [str(key) for key in first] if isinstance(first, Mapping) else None
    if isinstance(first, Example):
        names = [*(Example._fields if first.features is not None else Example._fields[:2])]
    return names, chain(start, rows)


def _open_columns(data: Mapping[Any, Any], name: str) -> tuple[list[str], Iterable[Any]]:
    for key, column in data.items():
        if hasattr(column, "column_names"):
            datasets = ", ".join(f"{name}[{key!r}]" for key in data)
            raise UserError(f"{name}: holds several datasets; give one of them: {datasets}")
        if isinstance(column, str | bytes) or not isinstance(column, Iterable):
            raise UserError(f"{name}: a mapping has a list for each column; {key!r} is {shown_value(column)}")
    columns = {str(key): list(column) for key, column in data.items()}
    if len({len(column) for column in columns.values()}) != 1:
        lengths = ", ".join(f"{key} {len(column):,}" for key, column in columns.items()) or "none"
        raise UserError(f"{name}: columns of equal length are needed, not {lengths}")
    return list(columns), zip(*columns.values(), strict=True)


def _find_columns(
    names: list[str] | None, synonyms: Mapping[str, str], name: str, columns: Sequence[Column] | None
) -> tuple[tuple[Column, ...], list[int]]:
    """The columns to read and their positions: by name, or all of them in order."""
    if names is None:
        needed = tuple(columns or ("source", "target"))
        return needed, list(range(len(needed)))
    known = [synonyms.get(each, each) if synonyms.get(each) not in names else each for each in names]
    needed = tuple(columns or (("source", "features", "target") if "features" in known else ("source", "target")))
    if set(needed) <= set(known):
        return needed, [known.index(column) for column in needed]
    misplaced = any(column in known and known.index(column) != index for index, column in enumerate(needed))
    if len(names) != len(needed) or misplaced or {"source", "features", "target"} & set(known) - set(needed):
        raise UserError(
            f"{name}: has the columns {', '.join(names)}; needed are {' and '.join(needed)}, by these names, or "
            f"{len(needed)} columns in this order"
        )
    return needed, list(range(len(needed)))


def _values(
    row: Any, names: list[str] | None, positions: list[int], columns: tuple[Column, ...], where: str
) -> list[Any]:
    if isinstance(row, Mapping):
        if names is None:
            raise UserError(f"{where}: is a mapping, but the rows before have no names")
        return [row.get(names[position]) for position in positions]
    if isinstance(row, Example):
        return [getattr(row, column) for column in columns]
    if hasattr(row, "tolist"):
        row = row.tolist()
    if isinstance(row, str):
        raise UserError(
            f"{where}: is one text, {shown_value(row)}, but a row has {' and '.join(columns)}; a list of texts is "
            "data for a language model (task='lm')"
        )
    if not isinstance(row, Sequence):
        raise UserError(f"{where}: a row is a tuple, a list or a mapping, not {shown_value(row)}")
    width = len(columns) if names is None else len(names)
    if len(row) != width:
        advice = "; name them: columns=('source', 'features', 'target')" if len(row) == 3 and names is None else ""
        raise UserError(f"{where}: {plural(len(row), 'value')} instead of {width} ({', '.join(columns)}){advice}")
    return [row[position] for position in positions]


def _text(value: Any, label: bool, what: str, where: str) -> str:
    """A value as text; a missing value is an empty text."""
    if isinstance(value, str):
        if SURROGATE.search(value):
            raise UserError(f"{where}: {what} is not text: half a surrogate pair in {shown_value(value)}")
        return str(value)
    if value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType"):
        return ""
    if label and isinstance(value, Integral):
        return str(value)
    raise UserError(f"{where}: {what} is {shown_value(value)}, not text; turn it into text first")


def _text_writer(names: list[str] | None, rows: Iterable[Any], name: str) -> Write:
    """Write texts, which may have several lines."""
    columns = [TEXT[0]] if names is None else names
    candidates = [each for each in TEXT if each in columns] or (columns if len(columns) == 1 else [])
    if not candidates:
        raise UserError(f"{name}: has the columns {', '.join(columns)}; needed is one column, or one called text")

    def text(row: Any, where: str) -> str:
        if isinstance(row, Mapping) and names is not None:
            row = row.get(candidates[0])
        elif isinstance(row, Example):
            row = row.source
        elif isinstance(row, list | tuple):
            if len(row) != len(columns):
                raise UserError(f"{where}: plain text is a list of texts, not of {shown_value(row)}")
            row = row[columns.index(candidates[0])]
        return _text(row, False, "text", where).removesuffix("\n")

    return _line_writer(rows, text, name)


def _image_writer(data: Any, name: str) -> Write:
    """Write images and labels as an .npz file."""
    if not isinstance(data, Mapping):
        raise UserError(f"{name}: images come as {{'images': array, 'labels': array}}, not {shown_value(data)}")
    arrays = {}
    for key, value in data.items():
        try:
            array = np.asarray(value)
        except ValueError:  # rows of different lengths
            array = np.asarray(None)
        if array.dtype.kind == "O":
            raise UserError(f"{name}: {key} is not an array of numbers or texts")
        arrays[str(key)] = array

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # names come as keywords

    return write
