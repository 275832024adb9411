"""Files whose columns have names: JSONL and Parquet, read as tables are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import glob, has_magic
from hashlib import blake2b
from importlib import import_module
from os.path import exists, getsize, isfile
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from regard.data.reader import (
    COLUMNS,
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
    is_jsonl,
    open_raw,
)
from regard.errors import UserError, missing_extra, plural, shown_value
from regard.recipe import Column
from regard.suggest import closest

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


PART = 1 << 40  # the position of an example is the number of its line, plus so much for every file before
DUPLICATE = "pair that came before"
PARTITIONS = 64  # of hashes sorted at a time
NAMED = 3  # entries in messages
PACKED = 3  # bytes of text in a byte of a compressed file, or so

Mask = NDArray[np.bool_]


def expand(entry: str) -> list[str]:
    """The files that an entry names, in the order of their names; one that matches none stays as it is."""
    if entry in (STDIN, MEMORY) or exists(entry) or not has_magic(entry):
        return [entry]
    return sorted(path for path in glob(entry, recursive=True) if isfile(path)) or [entry]


class LineBlock(NamedTuple):
    """A part of the corpora to be read by itself: the number of the file, some of its lines, the duplicates there."""

    part: int
    chunk: Chunk
    duplicates: Mask | None = None  # which of its lines are


@dataclass(frozen=True)
class Corpora:
    """Files (tables, or parallel ones side by side), each of which belongs to a corpus, an entry of the recipe."""

    parts: tuple[Source, ...]
    sizes: tuple[int, ...]  # files of each corpus
    entries: tuple[str, ...]  # what to call them
    duplicates: Duplicates | None = None

    @classmethod
    def of_tables(cls, entries: Sequence[str], columns: tuple[Column, ...], names: Sequence[str] | None) -> Corpora:
        files = [expand(entry) for entry in entries]
        parts = [open_table(path, columns, names) for paths in files for path in paths]
        if entries == (MEMORY,):
            parts = [Source((MEMORY,), columns, packed=True)]
        return cls(tuple(parts), tuple(map(len, files)), tuple(entries))

    @classmethod
    def of_parallel(cls, sources: Sequence[str], targets: Sequence[str], what: Sequence[str]) -> Corpora:
        """Files of sources and files of targets, in the same order; `what` they are called in the recipe."""
        if len(sources) != len(targets):
            raise UserError(f"{what[0]} has {plural(len(sources), 'entry')} but {what[1]} has {len(targets)}")
        parts, sizes = [], []
        for source, target in zip(sources, targets, strict=True):
            left, right = expand(source), expand(target)
            if len(left) != len(right):
                raise UserError(f"{source} matches {plural(len(left), 'file')} but {target} matches {len(right)}")
            if named := [path for path in (*left, *right) if named_columns(path)]:
                raise UserError(
                    f"{named[0]}: JSONL and Parquet have both sides in one file, in columns with names; give it with "
                    "--data, and the names with --set column_names=[...]"
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
        more = len(self.entries) - NAMED
        return ", ".join(self.entries[:NAMED]) + (f" and {more:,} more" if more > 0 else "")

    @property
    def text_size(self) -> int:
        """About how many bytes of text there are; a missing file is reported when it is read."""
        packed = (".gz", ".zst", ".parquet")
        return sum(getsize(path) * (PACKED if path.endswith(packed) else 1) for path in self.paths if exists(path))

    def corpora(self) -> list[range]:
        """The numbers of the files of each corpus."""
        ends = [sum(self.sizes[: index + 1]) for index in range(len(self.sizes))]
        return [range(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]

    def location(self, position: int) -> str:
        """Name the line, or row, of an example."""
        part, number = divmod(position, PART)
        return self.parts[part].location(number)

    def read(self, counter: LineCounter) -> Iterator[Located]:
        """Yield the good examples in order, without duplicates if they were looked for; every line is counted."""
        for block in self.blocks():
            yield from self.read_block(block, counter)

    def blocks(self, size: int = 0) -> Iterator[LineBlock]:
        """Cut the files into blocks of about `size` bytes."""
        for index, part in enumerate(self.parts):
            for chunk in part.chunks(size):
                if self.duplicates is None:
                    yield LineBlock(index, chunk)
                else:
                    mask = self.duplicates.among(index, chunk[0], part.chunk_lines(chunk))
                    yield LineBlock(index, chunk, mask)

    def read_block(self, block: LineBlock, counter: LineCounter) -> Iterator[Located]:
        """Yield the good examples of a block."""
        part, first = self.parts[block.part], PART * block.part
        examples = part.read_chunk(block.chunk, counter)
        if block.duplicates is not None:
            return self._unique(examples, block, counter)
        return (Located(first + number, example) for number, example in examples) if first else examples

    def _unique(self, examples: Iterator[Located], block: LineBlock, counter: LineCounter) -> Iterator[Located]:
        assert block.duplicates is not None
        begin = block.chunk[0]
        for number, example in examples:
            position = PART * block.part + number
            if block.duplicates[number - begin]:
                counter.skip(DUPLICATE, self.location(position))
            else:
                yield Located(position, example)

    def without_duplicates(self) -> Corpora:
        return replace(self, duplicates=Duplicates(self))

    def require(self, counter: LineCounter) -> None:
        """Raise if not a single example came out of the files, with the likely cause."""
        if len(self.parts) == 1:
            self.parts[0].require(counter)
        elif not counter.read:
            raise UserError(f"{self.name}: the files are empty")
        elif not counter.kept:
            hint = self.hint(counter)
            raise UserError(f"{self.name}: no usable example: {counter.summary()}{hint and chr(10) + '  ' + hint}")

    def hint(self, counter: LineCounter) -> str:
        return self.parts[0].hint(counter)


class Duplicates:
    """Which examples have the pair, and the features, of an earlier one.

    Pairs are compared by hashes of 8 bytes each, the memory that it takes; of 20 million different pairs two have the
    same hash with a probability of 1 in 90,000.
    """

    def __init__(self, corpora: Corpora) -> None:
        hashes, self._begins = _hashes(corpora)
        self._mask = np.zeros(len(hashes), np.bool_)
        for partition in range(PARTITIONS):
            lines = np.flatnonzero(hashes % PARTITIONS == partition)
            order = np.argsort(hashes[lines], kind="stable")
            equal = np.diff(hashes[lines[order]]) == 0
            self._mask[lines[order[1:][equal]]] = True

    def among(self, part: int, first: int, lines: int) -> Mask:
        """Which of these lines of a file are duplicates; that a bad one is marked means nothing."""
        begin = self._begins[part] + first - 1
        return self._mask[begin : begin + lines]


def _hashes(corpora: Corpora) -> tuple[NDArray[np.uint64], list[int]]:
    """The hash of every line, 0 for bad ones, and how many lines there are before each file."""
    hashes, begins = bytearray(), []
    for part in corpora.parts:
        begins.append(len(hashes) // 8)
        counter = LineCounter()
        for number, (source, target, features) in part.read(counter):
            text = "\n".join((source, target or "", features or ""))
            hashes += bytes(8 * (begins[-1] + number - 1) - len(hashes))
            hashes += blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        hashes += bytes(8 * (begins[-1] + counter.read) - len(hashes))
    return np.frombuffer(hashes, np.uint64), begins


VALID_SHARE = 0.05  # of the examples are held out for validation
MIN_VALID, MAX_VALID = 50, 2_000
CANDIDATES = 2 * MAX_VALID  # sources with the smallest hashes, from which those to hold out are chosen
KEY = b"1"  # of the hash; with it, the split is the one of earlier versions and their default seed
LARGEST_SHARE = 0.2  # of a small file no larger part is taken, even if that makes fewer than MIN_VALID


def valid_count(examples: int) -> int:
    """How many of `examples` to hold out."""
    return max(1, round(min(max(VALID_SHARE * examples, min(MIN_VALID, LARGEST_SHARE * examples)), MAX_VALID)))


class Splitter:
    """Finds the sources to hold out while they stream by; memory holds only the candidates.

    The smallest hashes are held out: the choice follows from the contents alone, not from their order or a seed.
    """

    def __init__(self, chosen: Iterable[tuple[int, bytes]] = ()) -> None:
        self._counts: dict[bytes, int] = {}  # hash of a source -> its examples
        self._sums: dict[bytes, int] = {}  # hash of a source -> its checksum
        self._bound = b"\xff" * 8  # hashes above are no candidates
        self._examples = 0
        self.chosen = frozenset(chosen)  # checksums and hashes of what is held out
        self._chosen_sums = frozenset(checksum for checksum, _ in self.chosen)
        self._keyed = blake2b(digest_size=8, key=KEY)

    def _hash(self, content: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(content)
        return keyed.digest()

    def see(self, source: str | bytes) -> None:
        """Count an example's source, a text or the bytes of an image."""
        self._examples += 1
        content = _bytes(source)
        digest = self._hash(content)
        if digest > self._bound:
            return
        self._counts[digest] = self._counts.get(digest, 0) + 1
        self._sums[digest] = crc32(content)
        if len(self._counts) >= 2 * CANDIDATES:  # keep the smallest; what goes now could not come back
            smallest = sorted(self._counts)[:CANDIDATES]
            self._bound = smallest[-1]
            self._counts = {digest: self._counts[digest] for digest in smallest}
            self._sums = {digest: self._sums[digest] for digest in smallest}

    def choose(self) -> int:
        """Decide, after the last example; return how many are held out (0: all have one source, nothing to split)."""
        if len(self._counts) < 2:
            return 0
        want = valid_count(self._examples)
        chosen: list[bytes] = []
        total = 0
        candidates = sorted(self._counts)[:CANDIDATES]  # which others are still there depends on the order
        for digest in candidates:
            count = self._counts[digest]
            if total + count <= want:
                chosen.append(digest)
                total += count
        if not chosen:  # every source has more examples than wanted: take the rarest
            chosen = [min(candidates, key=lambda digest: (self._counts[digest], digest))]
            total = self._counts[chosen[0]]
        self.chosen = frozenset((self._sums[digest], digest) for digest in chosen)
        self._chosen_sums = frozenset(checksum for checksum, _ in self.chosen)
        return total

    def held_out(self, source: str | bytes) -> bool:
        """Whether examples with this source belong to validation."""
        content = _bytes(source)
        checksum = crc32(content)  # many times faster than the hash, and nearly always enough
        return checksum in self._chosen_sums and (checksum, self._hash(content)) in self.chosen


def _bytes(source: str | bytes) -> bytes:
    return source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
