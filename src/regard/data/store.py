"""A corpus on disk, read on demand: `source.bin` and `target.bin` hold the concatenated ids of all examples,
`*.offsets` their boundaries, `lines.bin` the positions of the examples in their files, and `meta.json` the counts.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.batch import Batch, collate
from regard.config import Config
from regard.data.encode import ExampleEncoder, Rows
from regard.data.reader import LineCounter, Located
from regard.data.tables import PART
from regard.errors import UserError
from regard.files import open_file, read_json
from regard.text.codec import Example
from regard.text.tokenizer import threads

FORMAT = 1
SIDES = ("source", "target")
LINES = "lines.bin"
MAX_CHUNK = 8192  # examples tokenised together
MAX_CHUNK_TEXT = 1_000_000  # characters tokenised together
MAX_MAPPED_BYTES = 64 << 20  # larger files are not mapped into memory
MAX_OFFSETS = 1 << 20  # offsets per read
MAX_GAP = 256  # largest number of unneeded offsets that are read to save another read

Row = NDArray[np.unsignedinteger[Any]]


class Corpus:
    """Examples as ids. Source and target rows end with the end token."""

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory)
        try:
            meta = read_json(path / "meta.json")
            if meta["format"] != FORMAT:
                raise UserError(f"{path}: a corpus of format {meta['format']}; this version reads format {FORMAT}")
            source, target = (_Side(path, side, meta) for side in SIDES)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: not a readable corpus: {error}") from None
        self.source, self.target = source.row, target.row  # functions from the number of an example to its ids
        self.source_lengths, self.target_lengths = source.lengths, target.lengths
        self.tokens = len(source.flat) + len(target.flat)  # of both sides
        self.corpora = tuple(meta.get("corpora", (len(self),)))  # numbers of examples
        self.size = len(self)  # reported as the amount of data
        self._lines = path / LINES

    def __len__(self) -> int:
        return len(self.source_lengths)

    @cached_property
    def mean_length(self) -> float:
        """The mean number of tokens of the longer side."""
        sides = zip(self.source_lengths.chunks(), self.target_lengths.chunks(), strict=True)
        return sum(int(np.maximum(*chunk).sum()) for chunk in sides) / max(1, len(self))

    def line(self, index: int) -> int | None:
        """The position of an example in the data files; None in a corpus of an early version."""
        if not self._lines.is_file():
            return None
        with open_file(self._lines) as file:
            return int(np.fromfile(file, np.int64, count=1, offset=8 * index)[0])

    def batch(self, indices: NDArray[np.integer[Any]], config: Config, total: int | None = None) -> Batch:
        rows = [int(index) for index in indices]
        return collate([self.source(row) for row in rows], [self.target(row) for row in rows], config, total)


class Flat:
    """A flat file of numbers, read on demand."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        self._file = open_file(path)
        weakref.finalize(self, self._file.close)
        size = os.fstat(self._file.fileno()).st_size
        self._length = size // self._dtype.itemsize
        # The pages of a large memory map count as memory of this process until another process needs memory. Reading
        # costs little more and leaves caching to the system.
        self.mapped: NDArray[Any] | None = None  # the whole file, unless it is large
        if size <= MAX_MAPPED_BYTES or not hasattr(os, "pread"):
            self.mapped = np.asarray(np.memmap(self._file, self._dtype, mode="r")) if size else np.empty(0, self._dtype)
            self._file.close()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice) -> Row:
        if self.mapped is not None:
            return self.mapped[span]
        width = self._dtype.itemsize
        stop = self._length if span.stop is None else span.stop
        return np.frombuffer(
            os.pread(self._file.fileno(), (stop - span.start) * width, span.start * width), self._dtype
        )


def append(path: Path, values: NDArray[Any]) -> None:
    with path.open("ab") as file:
        file.write(values.tobytes())


class RowLengths:
    """The number of ids in each row of a side, computed from the offsets on demand."""

    def __init__(self, offsets: Flat) -> None:
        if not len(offsets):
            raise ValueError("the file of offsets is empty")
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, rows: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """The lengths of these rows; nearby offsets are read together."""
        if (offsets := self._offsets.mapped) is not None:
            lengths: NDArray[np.int64] = offsets[rows + 1] - offsets[rows]
            return lengths
        order = np.argsort(rows)
        ordered = rows[order]
        lengths = np.empty(len(rows), np.int64)
        apart = (np.diff(ordered) > MAX_GAP) | (np.diff(ordered // MAX_OFFSETS) > 0)
        for begin, end in pairwise((0, *(np.flatnonzero(apart) + 1).tolist(), len(rows))):
            if begin < end:
                first = int(ordered[begin])
                last = int(ordered[end - 1])
                span = np.diff(self._offsets[first : last + 2])
                lengths[order[begin:end]] = span[ordered[begin:end] - first]
        return lengths

    def chunks(self) -> Iterator[NDArray[np.int64]]:
        """Yield all lengths in order, in arrays of limited size."""
        for start in range(0, len(self), MAX_OFFSETS):
            yield np.diff(self._offsets[start : min(start + MAX_OFFSETS, len(self)) + 1])

    @cached_property
    def longest(self) -> int:
        return max((int(chunk.max()) for chunk in self.chunks()), default=0)


class _Side:
    """The rows of one side."""

    def __init__(self, path: Path, side: str, meta: dict[str, Any]) -> None:
        self._offsets = Flat(path / f"{side}.offsets", "int64")
        self.lengths = RowLengths(self._offsets)
        self.flat = Flat(path / f"{side}.bin", meta["dtype"][side])
        if len(self.lengths) != meta["examples"] or len(self.flat) != self._offsets[len(self.lengths) :][0]:
            raise ValueError(f"{side}.bin and {side}.offsets do not fit together")

    def row(self, index: int) -> Row:
        begin, end = self._offsets[index : index + 2].tolist()
        return self.flat[begin:end]


class CorpusWriter:
    """Writes a corpus in chunks; `finish` completes it."""

    def __init__(self, directory: str | Path, encoder: ExampleEncoder) -> None:
        self.path = Path(directory)
        self.path.mkdir(parents=True)
        self.examples: list[Example] = []  # written by `add`
        self.parts: Counter[int] = Counter()  # number of examples from each file
        self.unknown = dict.fromkeys(SIDES, 0)
        self.tokens = dict.fromkeys(SIDES, 0)
        self._encoder = encoder
        for side in SIDES:
            np.zeros(1, np.int64).tofile(self.path / f"{side}.offsets")

    @property
    def count(self) -> int:
        return self.parts.total()

    def add(self, examples: Iterable[Located], counter: LineCounter, location: Callable[[int], str]) -> None:
        """Tokenise and write examples; `counter` counts examples outside the limits."""
        for chunk in _chunks(examples):
            with threads():
                rows, indices = self._encoder.encode(
                    chunk, lambda position, reason, detail: counter.skip(reason, location(position), detail)
                )
            self.write(rows)
            self.examples.extend(chunk[index].example for index in indices)

    def write(self, rows: Rows) -> None:
        self._write("source", rows.source, rows.source_lengths)
        self._write("target", rows.target, rows.target_lengths)
        append(self.path / LINES, rows.positions)
        parts, counts = np.unique(rows.positions // PART, return_counts=True)
        self.parts.update(dict(zip(parts.tolist(), counts.tolist(), strict=True)))

    def _write(self, side: str, flat: bytes, lengths: NDArray[np.int64]) -> None:
        ids = np.frombuffer(flat, self._encoder.dtype[side])
        append(self.path / f"{side}.bin", ids)
        append(self.path / f"{side}.offsets", np.cumsum(lengths) + self.tokens[side])
        self.tokens[side] += len(ids)
        if side == "source" or not self._encoder.labels:
            self.unknown[side] += int(np.count_nonzero(ids == self._encoder.codec.ids.unk))

    def finish(self, corpora: Sequence[int] = ()) -> None:
        """Complete the corpus; `corpora` are the numbers of examples of its parts."""
        counts = {"examples": self.count, "symbols": self.tokens, "unknown": self.unknown}
        meta = {"format": FORMAT, **counts, "dtype": self._encoder.dtype}
        if len(corpora) > 1:
            meta["corpora"] = list(corpora)
        (self.path / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _chunks(examples: Iterable[Located]) -> Iterator[list[Located]]:
    chunk: list[Located] = []
    characters = 0
    for located in examples:
        chunk.append(located)
        characters += len(located.example.source) + len(located.example.target or "")
        if len(chunk) >= MAX_CHUNK or characters >= MAX_CHUNK_TEXT:
            yield chunk
            chunk = []
            characters = 0
    if chunk:
        yield chunk
