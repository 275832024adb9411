"""Corpora: one file or many, by name or by pattern, read as one sequence of examples; and exact duplicates in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from glob import glob, has_magic
from hashlib import blake2b
from os.path import exists, getsize, isfile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.data.formats import named_columns, open_table
from regard.data.reader import MEMORY, Chunk, LineCounter, Located, Source
from regard.data.streams import STDIN
from regard.errors import UserError, plural
from regard.recipe import Column

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
