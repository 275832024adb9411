"""Tables in all formats (TSV, CSV, JSONL, Parquet, Arrow), data sets of several files, duplicates, validation split."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from glob import glob, has_magic
from hashlib import blake2b
from importlib import import_module
from os.path import exists, getsize, isdir, isfile
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from regard.data.reader import (
    BAD_QUOTES,
    COLUMNS,
    COMPRESSIONS,
    MEMORY,
    NOT_JSON,
    NOT_TEXT,
    STDIN,
    Cells,
    Chunk,
    Line,
    LineCounter,
    Located,
    Source,
    decode_lines,
    open_raw,
    read_chunks,
    read_lines,
)
from regard.errors import UserError, missing_extra, plural, shown_value
from regard.recipe import Column
from regard.suggest import closest
from regard.text.tokenizer import SURROGATE

Format = Literal["text", "csv", "jsonl", "parquet"]
SUFFIXES: dict[str, Format] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
SUFFIXES.update(dict.fromkeys((".parquet", ".pq", ".arrow"), "parquet"))
PARQUET_ROWS = 8192  # per batch
PARQUET_BUFFER_BYTES = 1 << 20  # per column; by default, pyarrow reads a whole row group into memory
QUOTE = '"'
TRANSLATION = "translation"  # in Hugging Face data, a column with a text for each language


def format_of(path: str) -> Format:
    """The format of a file, decided by its name; "text" (for example stdin) includes TSV."""
    for suffix in COMPRESSIONS:
        path = path.removesuffix(suffix)
    return SUFFIXES.get(os.path.splitext(path)[1], "text")


def open_table(path: str, columns: tuple[Column, ...], names: Sequence[str] | None) -> Source:
    """The table in a file. `names` are the column names in files with named columns, by default `columns`."""
    return SOURCES[format_of(path)]((path,), columns, keys=tuple(names or columns))


class JsonlSource(Source):
    """A file with a JSON object in every line; the columns are keys of the objects."""

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
            if isinstance(row, dict):
                yield self._named_cells(number, row)
            else:
                yield number, [], NOT_JSON, f"{shown_value(row)} instead of an object"

    def column_names(self) -> list[str]:
        """The names of the columns, or the languages of translations: the keys of the first object."""
        with suppress(ValueError, RecursionError, AttributeError):  # reported when the line is read
            row = json.loads(next(read_lines(self.paths[0]), Line(1, "{}")).text)
            return list(dict(row[TRANSLATION] if isinstance(row.get(TRANSLATION), dict) else row))
        return []

    def _named_cells(self, number: int, row: dict[str, Any]) -> Cells:
        row = _flat(row)
        cells = [row.get(key, "") for key in self.keys]
        for index, cell in enumerate(cells):
            if cell is None:
                cells[index] = ""
            elif isinstance(cell, int) and not isinstance(cell, bool) and self.columns[index] == "target":
                cells[index] = str(cell)  # labels may be numbers
            elif not isinstance(cell, str):
                return number, [], NOT_TEXT, f"{self.keys[index]} is {shown_value(cell)}"
            elif not cell.isascii() and SURROGATE.search(cell):
                return number, [], NOT_TEXT, f"{self.keys[index]} has half a surrogate pair"
        if not any(key in row for key in self.keys):
            keys = ", ".join(list(row)[:5]) or "none"
            return number, [], COLUMNS, f"no {' or '.join(self.keys)} among the keys: {keys}"
        return number, cells, "", ""

    def hint(self, counter: LineCounter) -> str:
        if counter.skipped[COLUMNS] * 2 < counter.read:
            return ""
        return f"most lines lack {' and '.join(self.keys)}; name the keys in data.columns"


class ParquetSource(JsonlSource):
    """A Parquet file. A chunk holds rows in the stream format of Arrow, so that the file is read only once."""

    __slots__ = ()

    def location(self, number: int, file: int = 0) -> str:
        return f"{self.file_names[file]}[{number - 1}]"

    def chunks(self, size: int = 0) -> Iterator[Chunk]:
        """Yield chunks of at least `size` bytes, for row groups of any size."""
        first = 1
        batches: list[Any] = []
        with self._open() as (names, file):
            if missing := [key for key in self.keys if key not in names]:
                raise no_column(self, missing[0], list(names))
            columns = list(dict.fromkeys(names[key] for key in self.keys))
            stream = self.paths[0].endswith(".arrow")
            for batch in file if stream else file.iter_batches(PARQUET_ROWS, columns=columns, use_threads=False):
                batches.append(batch.select(columns))
                if sum(each.nbytes for each in batches) >= size:
                    yield first, (_pack(batches),)
                    first += sum(map(len, batches))
                    batches = []
        if batches:
            yield first, (_pack(batches),)

    def chunk_lines(self, chunk: Chunk) -> int:
        return sum(map(len, _unpack(chunk[1][0])))

    def rows(self, chunk: Chunk) -> Iterator[Cells]:
        first, (packed,) = chunk
        rows = (row for batch in _unpack(packed) for row in batch.to_pylist())
        for number, row in enumerate(rows, first):
            yield self._named_cells(number, row)

    def column_names(self) -> list[str]:
        with self._open() as (names, _):
            return [name for name, column in names.items() if column != name] or list(names)

    @contextmanager
    def _open(self) -> Iterator[tuple[dict[str, str], Any]]:
        """Open the file -> the column of the file for each name, and the Parquet file or stream of Arrow."""
        try:
            arrow = import_module("pyarrow")
            parquet = import_module("pyarrow.parquet")
        except ImportError:
            raise missing_extra(f"{self.name}: a Parquet or Arrow file", "pyarrow", "corpora") from None
        with open_raw(self.paths[0]) as raw:
            try:
                if stream := self.paths[0].endswith(".arrow"):
                    file = arrow.ipc.open_stream(raw)
                else:
                    file = parquet.ParquetFile(raw, buffer_size=PARQUET_BUFFER_BYTES, pre_buffer=False)
                schema = file.schema if stream else file.schema_arrow
                nested = schema.field(TRANSLATION).type if TRANSLATION in schema.names else ()
                languages = [each.name for each in nested] if nested and arrow.types.is_struct(nested) else []
                yield dict.fromkeys(languages, TRANSLATION) | {name: name for name in schema.names}, file
            except (arrow.ArrowException, OSError) as error:
                raise UserError(f"{self.name}: not a readable Parquet file: {error}") from None

    def hint(self, counter: LineCounter) -> str:
        return ""


class CsvSource(Source):
    """A CSV file. A record is counted as one line, even if a cell in quotes has several."""

    __slots__ = ()

    def chunks(self, size: int = 0) -> Iterator[Chunk]:
        """Yield chunks of whole records."""
        rest: list[bytes] = []  # lines that do not complete a record
        first = 1
        for _, (block,) in read_chunks(self.paths[0], size):
            lines = [*rest, *block.split(b"\n")]
            records = self.records(decode_lines(b"\n".join(lines), first), complete=False)
            end = max((end for *_, end in records), default=0)
            if end:
                yield first, (b"\n".join(lines[:end]),)
            rest = lines[end:]
            first += end
        if rest:
            yield first, (b"\n".join(rest),)

    def parse(self, chunk: Chunk) -> Iterator[Cells]:
        first, (block,) = chunk
        for begin, cells, problem, detail, _ in self.records(decode_lines(block, first)):
            yield first + begin, cells, problem, detail

    def records(
        self, lines: Sequence[str | Line], complete: bool = True
    ) -> Iterator[tuple[int, list[str], str, str, int]]:
        """Yield the index of the first line of each record, its cells, problem and detail, and the end of its lines.

        Unless the lines are `complete`, a record that they do not complete is left out.
        """
        separator, escape = self.dialect[:1] or ",", self.dialect[1:] or None
        end = 0
        while end < len(lines):
            begin = end
            end += 1
            line = lines[begin]
            if isinstance(line, str) and QUOTE not in line and not escape:
                yield begin, line.split(separator), "", "", end
                continue
            texts = (f"{getattr(each, 'text', each)}\n" for each in map(lines.__getitem__, range(begin, len(lines))))
            reader = csv.reader(texts, delimiter=separator, escapechar=escape, strict=True)
            try:
                cells, problem, detail = next(reader), "", ""
                end = begin + reader.line_num
            except csv.Error as error:
                if not complete and begin + reader.line_num == len(lines):
                    return
                cells, problem, detail = [], BAD_QUOTES, str(error)
            problem = next((each.problem for each in lines[begin:end] if isinstance(each, Line)), None) or problem
            yield begin, [] if problem else cells, problem, detail, end


SOURCES: dict[Format, type[Source]] = {"text": Source, "jsonl": JsonlSource, "csv": CsvSource, "parquet": ParquetSource}
VALIDATION = ("validation", "valid", "val", "dev")
SPLIT = re.compile(rf"(?:^|[/_.-])(train|test|{'|'.join(VALIDATION)})(?=[/_.-])")


def splits_of(directory: str) -> dict[str, list[str]]:
    """The files of each split in a directory that `datasets` has saved, or in a directory of Parquet files."""
    path = Path(directory)
    files = []
    try:
        for state in sorted(path.rglob("state.json")):
            entries = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
            files += [state.parent / Path(entry["filename"]).name for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory}: not a data set that save_to_disk has written: {error}") from None
    splits: dict[str, list[str]] = {}
    for file in files or sorted(path.rglob("*.parquet")):
        name = file.relative_to(path).as_posix()
        split = SPLIT.search(name)
        splits.setdefault(split[1] if split else os.path.dirname(name), []).append(str(file))
    return splits


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row of Hugging Face data, with the texts of its `translation` by language."""
    texts = row.get(TRANSLATION)
    return {**texts, **row} if isinstance(texts, dict) else row


def no_column(source: Source, key: str, known: Sequence[str]) -> UserError:
    return UserError(
        f"{source.name}: has no column {key!r:.100}{closest(key, known)}\n  columns: {', '.join(known)}; name those to "
        f"read in data.columns, in the order {','.join(source.columns)}"
    )


def _pack(batches: list[Any]) -> bytes:
    arrow = import_module("pyarrow")
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def _unpack(packed: bytes) -> Iterator[Any]:
    with import_module("pyarrow").ipc.open_stream(packed) as stream:
        yield from stream


PART = 1 << 40  # the position of an example is the number of its line plus PART times the number of its file
DUPLICATE = "pair that came before"
PARTITIONS = 64  # of hashes, sorted separately to save memory
MAX_NAMED_ENTRIES = 3  # in a message
COMPRESSION_RATIO = 3  # approximate

Mask = NDArray[np.bool_]


def expand(entry: str, *splits: str) -> list[str]:
    """The files that match an entry of a recipe, sorted by name; the entry itself if no file matches.

    Of a directory with several splits, the first of `splits` that it has.
    """
    if isdir(entry):
        parts = splits_of(entry)
        names = list(parts) if len(parts) == 1 else [name for name in splits if name in parts]
        if not names:
            content = f"with splits; name one: {', '.join(parts)}" if parts else "without a data set or Parquet files"
            raise UserError(f"{entry}: is a directory {content}")
        return parts[names[0]]
    if entry in (STDIN, MEMORY) or exists(entry) or not has_magic(entry):
        return [entry]
    return sorted(path for path in glob(entry, recursive=True) if isfile(path)) or [entry]


class LineBlock(NamedTuple):
    """An independently readable part of the input: lines of the file with the number `part`."""

    part: int
    chunk: Chunk
    duplicates: Mask | None = None  # marks the duplicates among its lines


@dataclass(frozen=True)
class Corpora:
    """Files (tables or pairs of parallel files), grouped into corpora, the entries of the recipe."""

    parts: tuple[Source, ...]
    sizes: tuple[int, ...]  # number of files of each corpus
    entries: tuple[str, ...]  # names of the corpora
    duplicates: Duplicates | None = None

    @classmethod
    def of_tables(
        cls, entries: Sequence[str], columns: tuple[Column, ...], names: Sequence[str] | None, *splits: str
    ) -> Corpora:
        """The tables in files; of data sets with several `splits`, the first of these."""
        files = [expand(entry, *splits) for entry in entries]
        parts = [open_table(path, columns, names) for paths in files for path in paths]
        if entries == (MEMORY,):
            parts = [Source((MEMORY,), columns, packed=True)]
        return cls(tuple(parts), tuple(map(len, files)), tuple(entries))

    @classmethod
    def of_parallel(cls, sources: Sequence[str], targets: Sequence[str], settings: tuple[str, str]) -> Corpora:
        """Parallel files of sources and targets; `settings` are the names of both lists in the recipe."""
        if len(sources) != len(targets):
            raise UserError(f"{settings[0]} has {plural(len(sources), 'entry')} but {settings[1]} has {len(targets)}")
        parts: list[Source] = []
        sizes = []
        for source, target in zip(sources, targets, strict=True):
            left = expand(source)
            right = expand(target)
            if len(left) != len(right):
                raise UserError(f"{source} matches {plural(len(left), 'file')} but {target} matches {len(right)}")
            if named := [path for path in (*left, *right) if format_of(path) != "text"]:
                raise UserError(
                    f"{named[0]}: {format_of(named[0])} has both sides in one file, in columns with names; name it "
                    "in data.train, and the columns in data.columns"
                )
            parts += [Source(pair) for pair in zip(left, right, strict=True)]
            sizes.append(len(left))
        return cls(tuple(parts), tuple(sizes), tuple(" + ".join(pair) for pair in zip(sources, targets, strict=True)))

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.parts[0].columns

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for part in self.parts for path in part.paths)

    @property
    def file_names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.file_names)

    @property
    def name(self) -> str:
        if len(self.parts) == 1:
            return self.parts[0].name
        more = len(self.entries) - MAX_NAMED_ENTRIES
        return ", ".join(self.entries[:MAX_NAMED_ENTRIES]) + (f" and {more:,} more" if more > 0 else "")

    @property
    def text_size(self) -> int:
        """The approximate size of the text in bytes; missing files are ignored here and reported when they are read."""
        compressed = (*COMPRESSIONS, ".parquet", ".pq")
        return sum(
            getsize(path) * (COMPRESSION_RATIO if path.endswith(compressed) else 1)
            for path in self.paths
            if exists(path)
        )

    def corpora(self) -> list[range]:
        """The numbers of the files of each corpus."""
        ends = [sum(self.sizes[: index + 1]) for index in range(len(self.sizes))]
        return [range(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]

    def location(self, position: int) -> str:
        """The name of the line or row of an example."""
        part, number = divmod(position, PART)
        return self.parts[part].location(number)

    def read(self, counter: LineCounter) -> Iterator[Located]:
        """Yield the good examples in order, without the marked duplicates; every line is counted."""
        for block in self.blocks():
            yield from self.read_block(block, counter)

    def blocks(self, size: int = 0) -> Iterator[LineBlock]:
        """Split the files into blocks of about `size` bytes."""
        for index, part in enumerate(self.parts):
            for chunk in part.chunks(size):
                marks = None
                if self.duplicates is not None:
                    marks = self.duplicates.among(index, chunk[0], part.chunk_lines(chunk))
                yield LineBlock(index, chunk, marks)

    def read_block(self, block: LineBlock, counter: LineCounter) -> Iterator[Located]:
        """Yield the good examples of a block, without the marked duplicates."""
        examples = self.parts[block.part].read_chunk(block.chunk, counter)
        if block.part == 0 and block.duplicates is None:
            yield from examples  # positions are line numbers
            return
        for number, example in examples:
            position = PART * block.part + number
            if block.duplicates is not None and block.duplicates[number - block.chunk[0]]:
                counter.skip(DUPLICATE, self.location(position))
            else:
                yield Located(position, example)

    def without_duplicates(self) -> Corpora:
        return replace(self, duplicates=Duplicates(self))

    def require(self, counter: LineCounter) -> None:
        """Raise an error with the likely cause if the files have no usable example."""
        if not counter.kept:
            raise counter.unusable(self.name, self.hint(counter), files=len(self.parts))

    def hint(self, counter: LineCounter) -> str:
        return self.parts[0].hint(counter)


class Duplicates:
    """Marks examples that repeat the source, target and features of an earlier one, compared by hashes of 8 bytes."""

    def __init__(self, corpora: Corpora) -> None:
        packed = bytearray()  # the hash of every line, 0 for bad lines
        self._begins: list[int] = []  # number of lines before each file
        for part in corpora.parts:
            begin = len(packed) // 8
            self._begins.append(begin)
            counter = LineCounter()
            for chunk in part.chunks():
                for number, (source, target, features) in part.read_chunk(chunk, counter):
                    text = "\n".join((source, target or "", features or ""))
                    packed += bytes(8 * (begin + number - 1) - len(packed))
                    packed += blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
                packed += bytes(8 * (begin + chunk[0] - 1 + part.chunk_lines(chunk)) - len(packed))
        hashes = np.frombuffer(packed, np.uint64)
        self._mask = np.zeros(len(hashes), np.bool_)
        for partition in range(PARTITIONS):
            lines = np.flatnonzero(hashes % PARTITIONS == partition)
            order = np.argsort(hashes[lines], kind="stable")
            equal = np.diff(hashes[lines[order]]) == 0
            self._mask[lines[order[1:][equal]]] = True

    def among(self, part: int, first: int, lines: int) -> Mask:
        """The marks of a range of lines of a file; the marks of bad lines have no meaning."""
        begin = self._begins[part] + first - 1
        return self._mask[begin : begin + lines]


VALID_SHARE = 0.05  # of the examples
MIN_VALID = 50  # examples
MAX_VALID = 2_000
MAX_VALID_SHARE = 0.2  # of a small file, even if this is below MIN_VALID
CANDIDATES = 2 * MAX_VALID  # sources with the smallest hashes, from which held-out sources are chosen
HASH_KEY = b"1"  # gives the split of earlier versions with their default seed


def valid_count(examples: int) -> int:
    """The number of examples to hold out."""
    return max(1, round(min(max(VALID_SHARE * examples, min(MIN_VALID, MAX_VALID_SHARE * examples)), MAX_VALID)))


class Splitter:
    """Holds out the sources with the smallest hashes: the choice depends on the content of the data, not its order."""

    def __init__(self, chosen: Iterable[tuple[int, bytes]] = ()) -> None:
        self._candidates: dict[bytes, tuple[int, int]] = {}  # hash of a source -> (number of examples, checksum)
        self._bound = b"\xff" * 8  # sources with larger hashes are not candidates
        self._examples = 0
        self._keyed = blake2b(digest_size=8, key=HASH_KEY)
        self._choose(chosen)

    def _choose(self, chosen: Iterable[tuple[int, bytes]]) -> None:
        self.chosen = frozenset(chosen)  # checksums and hashes of the held-out sources
        self._chosen_checksums = frozenset(checksum for checksum, _ in self.chosen)

    def _hash(self, content: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(content)
        return keyed.digest()

    def see(self, source: str | bytes) -> None:
        """Count an example by its source: a text, or the bytes of an image."""
        self._examples += 1
        content = _bytes(source)
        digest = self._hash(content)
        if digest > self._bound:
            return
        count, checksum = self._candidates.get(digest) or (0, crc32(content))
        self._candidates[digest] = (count + 1, checksum)
        if len(self._candidates) >= 2 * CANDIDATES:  # keep the smallest; larger hashes can never be chosen
            self._candidates = dict(sorted(self._candidates.items())[:CANDIDATES])
            self._bound = max(self._candidates)

    def choose(self) -> int:
        """Choose sources, after all examples -> the number of held-out examples; 0 if all have the same source."""
        if len(self._candidates) < 2:
            return 0
        limit = valid_count(self._examples)
        chosen: list[tuple[int, bytes]] = []
        total = 0
        candidates = sorted(self._candidates.items())[:CANDIDATES]  # examples with larger hashes may not all be counted
        for digest, (count, checksum) in candidates:
            if total + count <= limit:
                chosen.append((checksum, digest))
                total += count
        if not chosen:  # every source has more examples than the limit: choose the rarest
            total, digest, checksum = min((count, digest, checksum) for digest, (count, checksum) in candidates)
            chosen = [(checksum, digest)]
        self._choose(chosen)
        return total

    def held_out(self, source: str | bytes) -> bool:
        """Whether examples with this source are held out."""
        content = _bytes(source)
        checksum = crc32(content)  # much faster than the hash, and nearly always sufficient
        return checksum in self._chosen_checksums and (checksum, self._hash(content)) in self.chosen


def _bytes(source: str | bytes) -> bytes:
    return source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
