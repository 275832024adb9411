"""A corpus on disk: the ids of both sides in flat files, read as needed, so that its size costs little memory.

`source.bin` and `target.bin` hold the ids one example after the other, `*.offsets` where each begins, `lines.bin` the
line that each came from, and `meta.json` the counts.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.batch import Batch, collate
from regard.config import Config
from regard.data.reader import LONG, LineCounter, Located, Source
from regard.errors import UserError
from regard.text.codec import Codec, Example
from regard.text.scheme import threads

FORMAT = 1
SIDES = ("source", "target")
LINES = "lines.bin"
CHUNK = 8192  # examples tokenised at a time
CHUNK_TEXT = 1_000_000  # characters tokenised at a time
SMALL = 64 << 20  # bytes of a file that is mapped into memory

Row = NDArray[np.unsignedinteger[Any]]
Lengths = NDArray[np.int32]


class Corpus:
    """Examples as ids. Source and target rows end in the end token."""

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory)
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            if meta["format"] != FORMAT:
                raise UserError(f"{path}: a corpus of format {meta['format']}; this version reads format {FORMAT}")
            source, target = (_Side(path, side, meta) for side in SIDES)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: not a readable corpus: {error}") from None
        self.source, self.target = source.row, target.row  # the ids of an example, by its number
        self.source_lengths, self.target_lengths = source.lengths, target.lengths
        self.size = len(self)  # reported as the amount of data
        self._lines = path / LINES

    def __len__(self) -> int:
        return len(self.source_lengths)

    def line(self, index: int) -> int | None:
        """The number of the line that an example was read from; None if it was not kept, as by earlier versions."""
        if not self._lines.is_file():
            return None
        return int(np.fromfile(self._lines, np.int64, count=1, offset=8 * index)[0])

    def batch(self, indices: NDArray[np.integer[Any]], config: Config, total: int | None = None) -> Batch:
        """The examples with these numbers."""
        rows = [int(index) for index in indices]
        return collate([self.source(row) for row in rows], [self.target(row) for row in rows], config, total)


class Flat:
    """Ids in one long file, read as needed."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        size = path.stat().st_size
        self._length = size // self._dtype.itemsize
        # Pages of a large map would count as our memory for as long as nobody else needs it; reading leaves them to
        # the system, and costs little more.
        self._mapped: NDArray[Any] | None = None
        if size > SMALL and hasattr(os, "pread"):
            self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            weakref.finalize(self, os.close, self._file)
        else:
            self._mapped = np.asarray(np.memmap(path, self._dtype, mode="r")) if size else np.empty(0, self._dtype)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice) -> Row:
        if self._mapped is not None:
            return self._mapped[span]
        width = self._dtype.itemsize
        return np.frombuffer(os.pread(self._file, (span.stop - span.start) * width, span.start * width), self._dtype)


def dtype_for(vocab: int) -> str:
    """The smallest type that holds the ids of a vocabulary."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def append(path: Path, values: NDArray[Any]) -> None:
    """Write numbers to the end of a file."""
    with path.open("ab") as file:
        file.write(values.tobytes())


class _Side:
    """The rows of one side. In memory are only the offsets."""

    def __init__(self, path: Path, side: str, meta: dict[str, Any]) -> None:
        self._offsets = np.fromfile(path / f"{side}.offsets", np.int64)
        self.lengths: Lengths = np.diff(self._offsets).astype(np.int32)
        self._flat = Flat(path / f"{side}.bin", meta["dtype"][side])
        if len(self.lengths) != meta["examples"] or len(self._flat) != self._offsets[-1]:
            raise ValueError(f"{side}.bin and {side}.offsets do not fit together")

    def row(self, index: int) -> Row:
        return self._flat[int(self._offsets[index]) : int(self._offsets[index + 1])]


class CorpusWriter:
    """Tokenise examples and write them as a corpus, chunk by chunk; after `finish` it is complete.

    With `labels`, the target of an example is one of them, and its row their number.
    """

    def __init__(
        self,
        directory: str | Path,
        codec: Codec,
        source: Source,
        counter: LineCounter,
        max_length: int,
        labels: Sequence[str] = (),
        keep: bool = False,
    ) -> None:
        self.path = Path(directory)
        self.path.mkdir(parents=True)
        self.examples: list[Example] | None = [] if keep else None  # those written, if wanted
        self.count = 0
        self.unknown = dict.fromkeys(SIDES, 0)
        self.tokens = dict.fromkeys(SIDES, 0)
        self._codec, self._source, self._counter, self._max_length = codec, source, counter, max_length
        self._label_ids = {label: number for number, label in enumerate(labels)}
        self._dtype = {"source": dtype_for(codec.source_vocab), "target": dtype_for(len(labels) or codec.target_vocab)}
        for side in SIDES:
            np.zeros(1, np.int64).tofile(self.path / f"{side}.offsets")
        self._waiting: list[Located] = []
        self._text = 0  # characters waiting

    def add(self, located: Located) -> None:
        self._waiting.append(located)
        self._text += len(located.example.source) + len(located.example.target or "")
        if len(self._waiting) >= CHUNK or self._text >= CHUNK_TEXT:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting, self._text = self._waiting, [], 0
        examples = [located.example for located in waiting]
        texts = [example.target or "" for example in examples]
        with threads():
            sources = self._codec.encode_source(examples)
            targets = (
                [[self._label_ids[text]] for text in texts] if self._label_ids else self._codec.encode_target(texts)
            )
        kept = []
        for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
            longest = max(len(source), len(target)) - 1  # the end token is not the user's
            if longest > self._max_length:
                location = self._source.location(waiting[index].number)
                self._counter.skip(LONG, location, f"{longest:,} tokens; data.max_length is {self._max_length:,}")
            else:
                kept.append(index)
        self._write("source", [sources[index] for index in kept])
        self._write("target", [targets[index] for index in kept])
        append(self.path / LINES, np.array([waiting[index].number for index in kept], np.int64))
        self.count += len(kept)
        if self.examples is not None:
            self.examples.extend(examples[index] for index in kept)

    def _write(self, side: str, rows: Sequence[Sequence[int]]) -> None:
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        total = int(ends[-1]) if len(rows) else 0
        flat = np.fromiter(chain.from_iterable(rows), dtype=self._dtype[side], count=total)
        append(self.path / f"{side}.bin", flat)
        append(self.path / f"{side}.offsets", ends + self.tokens[side])
        self.tokens[side] += total
        if side == "source" or not self._label_ids:
            self.unknown[side] += int(np.count_nonzero(flat == self._codec.ids.unk))

    def finish(self) -> None:
        self._flush()
        counts = {"examples": self.count, "symbols": self.tokens, "unknown": self.unknown}
        meta = {"format": FORMAT, **counts, "dtype": self._dtype}
        (self.path / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
