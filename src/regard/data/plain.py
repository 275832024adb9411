"""Preparing plain text: one vocabulary, and two long rows of ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.data.corpus import CHUNK_TEXT, Flat, Row, dtype_for
from regard.data.reader import BOM, CHUNK, ENCODING, LineCounter, Source, open_bytes
from regard.errors import UserError
from regard.recipe import Recipe
from regard.tasks import TASKS
from regard.text.codec import Base, Codec
from regard.text.learn import TokenizerChoice, choose, one_request, share, threads
from regard.text.tokenizer import Tokenizer


def make_text(recipe: Recipe, train: Source, valid: Source | None, path: Path, base: Base | None) -> dict[str, Any]:
    """Write a tokenizer and two streams into `path`; return the record of it."""
    strict = recipe.data.strict
    account, valid_account = LineCounter(strict), LineCounter(strict)
    scan = scan_text(train, account)
    at = scan.characters if valid else split_at(scan.characters)
    if not at or scan.characters < 2:
        raise UserError(f"{train.name}: {scan.characters} characters are too little text to learn from")
    codec, notes = _codec(recipe, train, scan, at, base)
    codec.save(path)
    train_writer = StreamWriter(path / "train", codec.source)
    valid_writer = StreamWriter(path / "valid", codec.source)
    with train_writer, valid_writer:
        for piece, held_out in divide(read_pieces(train, LineCounter()), at):
            (valid_writer if held_out else train_writer).add(piece)
        for piece in read_pieces(valid, valid_account) if valid else ():
            valid_writer.add(piece)
    notes.append(f"training: {_size(train_writer)} from {train.name}, {account.summary()}")
    if valid:
        if not valid_writer.characters:
            raise UserError(f"{valid.name}: there is no text in it")
        notes.append(f"validation: {_size(valid_writer)} from {valid.name}, {valid_account.summary()}")
    else:
        part = 100 * valid_writer.characters / scan.characters
        notes.append(f"validation: {_size(valid_writer)}, the last {part:.3g} % of the text")
    for what, writer in (("training", train_writer), ("validation", valid_writer)):
        if writer.unknown:
            notes.append(
                f"{what}: {writer.unknown:,} tokens ({100 * writer.unknown / writer.symbols:.2g} %) are unknown"
            )
    accounts = {"train": account.to_json(), "valid": valid_account.to_json() if valid else None}
    return {"text": codec.config.model_dump(), "labels": (), "notes": notes, "accounts": accounts}


def _size(writer: StreamWriter) -> str:
    return f"{writer.symbols:,} tokens ({writer.characters:,} characters)"


def _codec(recipe: Recipe, train: Source, scan: TextScan, at: int, base: Base | None) -> tuple[Codec, list[str]]:
    text = recipe.text
    if base is not None:
        if recipe.task == "span" and not base.codec.shared:
            raise UserError(
                f"{recipe.train.start_from}: task span needs one vocabulary for both sides; this run has two"
            )
        if base.codec.source.scheme == "space":
            raise UserError(
                f"{recipe.train.start_from}: its tokens are separated by spaces, so line ends would be lost"
            )
        return base.codec, [f"tokens: those of {recipe.train.start_from}, {base.codec.source_vocab:,} tokens"]
    request = one_request(text, "one text")
    if request == "space":
        raise UserError(
            "text.source_tokens: space drops line ends and doubled spaces, which plain text needs; "
            "word cuts at spaces and keeps them"
        )
    choice = TokenizerChoice(request, "as asked for")
    if request == "auto":
        choice = choose(scan.sample, scan.pieces)
        if choice.scheme == "space":
            choice = TokenizerChoice("word", choice.reason)
    texts = _texts(train, at, share(choice.scheme, scan.sample, scan.pieces), scan.pieces)
    tokenizer = Tokenizer.train(choice.scheme, texts, text.min_count, mask=recipe.task == "masked")
    return Codec(tokenizer, frame=TASKS[recipe.task].frame), [f"tokens: {choice}; {tokenizer.size:,} tokens"]


def _texts(train: Source, at: int, share: int, pieces: int) -> Iterator[str]:
    """The text to learn tokens from: what is not held out, about `share` of so many pieces, drawn from all over."""
    random = Random(0)
    for piece, held_out in divide(read_pieces(train, LineCounter()), at):
        if held_out:
            return
        if share >= pieces or random.random() * pieces < share:
            yield piece


LONG_LINE = 1 << 16  # bytes; of a longer line every part is a piece of its own
SAMPLE = 10_000  # pieces looked at
CUT = 1_000  # characters looked at of each
VALID_SHARE = 0.1
MOST_VALID = 1_000_000  # characters


def read_pieces(source: Source, account: LineCounter) -> Iterator[str]:
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


def _piece(raw: bytes, number: int, begun: bool, ends: bool, source: Source, account: LineCounter) -> Iterator[str]:
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


def scan_text(source: Source, account: LineCounter) -> TextScan:
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

    @property
    def size(self) -> int:
        """What is reported as the amount of data: characters."""
        return self.characters

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Rows of `length` ids that begin at these places."""
        rows = [self._cut(int(start), int(start) + length) for start in starts]
        return np.stack(rows).astype(np.int64) if rows else np.empty((0, length), np.int64)


class Units(NamedTuple):
    """A text in memory: its ids with an end token in front, and of each line how many ids and characters it has."""

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
