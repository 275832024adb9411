"""Plain text as one long row of ids on disk: an end symbol, the text with its line ends, and another end symbol.

The end symbol in front is what a model reads before the first symbol of a text, and what an empty prompt consists of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.data.account import ENCODING, Account
from regard.data.corpus import CHUNK_TEXT, Flat, Row, dtype_for
from regard.data.lines import BOM, CHUNK, open_bytes
from regard.data.source import Source
from regard.errors import UserError
from regard.text.library import threads
from regard.text.tokenizer import Tokenizer

LONG_LINE = 1 << 16  # bytes; of a longer line every part is a piece of its own
SAMPLE = 10_000  # pieces looked at
CUT = 1_000  # characters looked at of each
VALID_SHARE = 0.1
MOST_VALID = 1_000_000  # characters


def read_pieces(source: Source, account: Account) -> Iterator[str]:
    """Yield a text line by line, line ends included. Memory is bounded: a very long line comes in several pieces.

    Lines that are not UTF-8 are skipped and counted. `\\r\\n` becomes `\\n`, and the last line ends like the others.
    """
    with open_bytes(source.paths[0]) as stream:
        rest, number, begun = b"", 0, False
        while chunk := stream.read(CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                number += not begun
                yield from _piece(line, number, begun, True, source, account)
                begun = False
            if len(rest) > LONG_LINE:
                cut = _cut(rest)
                number += not begun
                yield from _piece(rest[:cut], number, begun, False, source, account)
                rest, begun = rest[cut:], True
        if rest:
            yield from _piece(rest, number + (not begun), begun, True, source, account)


def _cut(line: bytes) -> int:
    """Where to cut a long line: in front of its last space, where no scheme joins anything, or between characters."""
    cut = line.rfind(b" ")
    if cut > 0:
        return cut
    cut = len(line) - 1
    while cut > len(line) - 4 and line[cut] & 0xC0 == 0x80:  # inside a character
        cut -= 1
    return cut


def _piece(raw: bytes, number: int, begun: bool, ends: bool, source: Source, account: Account) -> Iterator[str]:
    account.read += not begun
    if number == 1 and not begun:
        raw = raw.removeprefix(BOM)
    if ends:
        raw = raw.removesuffix(b"\r")
    try:
        yield raw.decode("utf-8") + "\n" * ends
    except UnicodeDecodeError:
        account.read += begun  # a part of a line counts like one, or more would be skipped than read
        account.skip(ENCODING, source.place(number))


class TextScan(NamedTuple):
    """The first look at a text."""

    characters: int
    pieces: int
    sample: list[str]


def scan_text(source: Source, account: Account) -> TextScan:
    """Read a text once: how much there is, and what it looks like."""
    characters, pieces = 0, 0
    sample: list[str] = []
    random = Random(0)
    for pieces, piece in enumerate(read_pieces(source, account), start=1):
        characters += len(piece)
        if pieces <= SAMPLE:
            sample.append(piece[:CUT])
        elif (chance := int(random.random() * pieces)) < SAMPLE:
            sample[chance] = piece[:CUT]
    if not account.read:
        raise UserError(f"{source.name}: the file is empty")
    if not characters:
        raise UserError(f"{source.name}: no usable text: {account.summary()}")
    return TextScan(characters, pieces, sample)


def split_at(characters: int) -> int:
    """How many characters come before those that are held out: the last tenth, or less of a very long text."""
    return max(characters - MOST_VALID, int(characters * (1 - VALID_SHARE)))


def divide(pieces: Iterator[str], at: int) -> Iterator[tuple[str, bool]]:
    """Pieces, and whether each comes after the first `at` characters; the one across that place is cut in two."""
    seen = 0
    for piece in pieces:
        before = min(max(0, at - seen), len(piece))
        seen += len(piece)
        if before:
            yield piece[:before], False
        if before < len(piece):
            yield piece[before:], True


class StreamWriter:
    """Tokenises a text and writes it, chunk by chunk; at the end of the `with` block it is complete."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self.path = directory
        self.path.mkdir(parents=True)
        self.symbols = self.characters = self.unknown = 0
        self._tokenizer = tokenizer
        self._dtype = dtype_for(tokenizer.size)
        self._file = (directory / "text.bin").open("wb")
        self._waiting: list[str] = []
        self._text = 0

    def add(self, piece: str) -> None:
        self._waiting.append(piece)
        self._text += len(piece)
        if self._text >= CHUNK_TEXT:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting, self._text = self._waiting, [], 0
        with threads():
            for row in self._tokenizer.encode(waiting):
                self._write(row)
        self.characters += sum(map(len, waiting))

    def _write(self, ids: list[int]) -> None:
        flat = np.asarray(ids, dtype=self._dtype)
        self._file.write(flat.tobytes())
        self.symbols += len(flat)
        self.unknown += int(np.count_nonzero(flat == self._tokenizer.ids.unk))

    def __enter__(self) -> StreamWriter:
        self._write([self._tokenizer.ids.eos])
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None:
                self._flush()
                self._write([self._tokenizer.ids.eos])
        finally:
            self._file.close()
        if error is None:
            meta = {"symbols": self.symbols, "characters": self.characters, "dtype": self._dtype}
            (self.path / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


class Stream:
    """A text as ids, on disk or in memory."""

    def __init__(self, cut: Callable[[int, int], Row], length: int, characters: int) -> None:
        self._cut = cut
        self._length = length
        self.characters = characters

    @classmethod
    def of(cls, ids: Row, characters: int) -> Stream:
        return cls(lambda start, end: ids[start:end], len(ids), characters)

    @classmethod
    def open(cls, directory: str | Path) -> Stream:
        path = Path(directory)
        try:
            meta: dict[str, Any] = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            flat = Flat(path / "text.bin", meta["dtype"])
            if len(flat) != meta["symbols"]:
                raise ValueError("text.bin and meta.json do not fit together")
            return cls(flat.cut, len(flat), int(meta["characters"]))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: not a readable text: {error}") from None

    def __len__(self) -> int:
        return self._length

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Rows of `length` ids that begin at these places."""
        rows = [self._cut(int(start), int(start) + length) for start in starts]
        return np.stack(rows).astype(np.int64) if rows else np.empty((0, length), np.int64)


class Units(NamedTuple):
    """A text in memory: its ids with an end symbol in front, and of each line how many ids and characters it has."""

    ids: NDArray[np.uint32]
    symbols: NDArray[np.int64]
    characters: NDArray[np.int64]


def tokenised(pieces: Sequence[str], tokenizer: Tokenizer, name: str) -> Units:
    """A text that is not to be written down; `name` is that of its file."""
    if not pieces:
        raise UserError(f"{name}: there is no text in it")
    with threads():
        rows = [np.asarray(row, np.uint32) for row in tokenizer.encode(pieces)]
    first = np.asarray([tokenizer.ids.eos], np.uint32)
    lengths, characters = (np.asarray(list(map(len, x)), np.int64) for x in (rows, pieces))
    return Units(np.concatenate([first, *rows]), lengths, characters)
