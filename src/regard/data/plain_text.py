"""Plain text: files become a tokenizer and two streams of ids, for training and for validation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.data.encode import BLOCK_BYTES, TextEncoder, codec_settings, dtype_for, make_shards
from regard.data.reader import BYTE_ORDER_MARK, ENCODING, READ_BYTES, LineCounter, Source, open_bytes
from regard.data.store import Flat, Row, append
from regard.data.tables import Corpora, format_of, open_table
from regard.errors import UserError, plural
from regard.files import read_json
from regard.parallel.messages import Message
from regard.recipe import Recipe
from regard.tasks import TASKS
from regard.text.codec import Codec
from regard.text.learn import BaseText, Sample, draw_sample, learn_tokenizer, one_request
from regard.text.tokenizer import Tokenizer, threads

MAX_PIECE_BYTES = 1 << 16  # longer lines are cut into pieces
TEXT = ("text",)  # the default name of the column in JSONL and Parquet files
VALID_SHARE = 0.1  # of the characters
MAX_VALID = 1_000_000  # characters


def make_text(
    recipe: Recipe, train: Corpora, valid: Corpora | None, path: Path, base: BaseText | None, processes: int = 1
) -> dict[str, Any]:
    """Write a tokenizer and two streams into `path`, in at most `processes` processes -> the record of the data."""
    counter = LineCounter(recipe.data.strict)
    valid_counter = LineCounter(recipe.data.strict)
    sample = Sample()
    characters = 0
    for piece in read_pieces(train, counter):
        characters += len(piece)
        sample.add(piece)
    if not characters:
        raise counter.unusable(train.name, train.hint(counter), "text", len(train.parts))
    split = characters if valid else split_at(characters)
    if not split or characters < 2:
        raise UserError(f"{train.name}: {characters} characters are too little text to learn from")
    codec, notes = _make_codec(recipe, train, sample, split, base)
    codec.save(path)
    train_writer = StreamWriter(path / "train", codec.source)
    valid_writer = StreamWriter(path / "valid", codec.source)
    blocks = _blocks(_divided(train, valid, split, valid_counter))
    size = train.text_size + (valid.text_size if valid else 0)
    for header, shard in make_shards(PieceEncoder(codec), blocks, path, processes, size):
        if header["held_out"]:
            valid_writer.write(shard.parts[0], header["characters"])
        else:
            train_writer.write(shard.parts[0], header["characters"], header["corpus"])
    train_writer.finish(len(train.sizes))
    valid_writer.finish()
    notes.append(f"training: {train_writer.summary()} from {train.name}, {counter.summary()}")
    if valid:
        if not valid_writer.characters:
            raise UserError(f"{valid.name}: contains no text")
        notes.append(f"validation: {valid_writer.summary()} from {valid.name}, {valid_counter.summary()}")
    else:
        share = 100 * valid_writer.characters / characters
        notes.append(f"validation: {valid_writer.summary()}, the last {share:.3g} % of the text")
    for split_name, writer in (("training", train_writer), ("validation", valid_writer)):
        if writer.unknown:
            share = 100 * writer.unknown / writer.tokens
            notes.append(f"{split_name}: {plural(writer.unknown, 'unknown token')} ({share:.2g} %)")
    counts = {"train": counter.to_json(), "valid": valid_counter.to_json() if valid else None}
    return {"text": codec.config.model_dump(), "labels": (), "notes": notes, "accounts": counts}


def _make_codec(
    recipe: Recipe, train: Corpora, sample: Sample, split: int, base: BaseText | None
) -> tuple[Codec, list[str]]:
    """Learn a vocabulary from the first `split` characters, or use that of the base run."""
    task = TASKS[recipe.task]
    start_from = recipe.train.start_from
    if base is not None:
        if task.seq2seq and not base.codec.shared:
            raise UserError(f"{start_from}: task {task.name} needs one vocabulary for both sides; this run has two")
        if base.codec.source.scheme == "space":
            raise UserError(f"{start_from}: its tokens are separated by spaces, which would lose line ends")
        return base.codec, [base.note(start_from)]
    scheme = one_request(recipe.text, "one text")
    if scheme == "space":
        raise UserError(
            "text.source_tokens: space drops line ends and doubled spaces, which plain text needs; "
            "word cuts at spaces and keeps them"
        )

    def texts(count: int) -> Iterator[str]:
        pieces = divide(read_pieces(train, LineCounter()), split)
        return draw_sample((piece for piece, _ in takewhile(lambda part: not part[1], pieces)), count, sample.count)

    min_count = recipe.text.min_count
    mask = task.name == "masked"
    tokenizer, note = learn_tokenizer(
        scheme, sample.column(), sample.count, texts, min_count=min_count, mask=mask, line_ends=True
    )
    return Codec(tokenizer, frame=task.frame), [note]


def read_pieces(source: Source | Corpora, counter: LineCounter) -> Iterator[str]:
    """Yield the lines of a text with their line ends; very long lines are cut into pieces, which bounds the memory.

    Lines that are not UTF-8 are skipped. `\\r\\n` becomes `\\n`. A row of JSONL or Parquet may have several lines.
    """
    for part in source.parts:
        if type(part) is not Source or format_of(part.paths[0]) != "text":
            table = open_table(part.paths[0], ("source",), part.keys or TEXT) if type(part) is Source else part
            for _, (text,) in table.cells(counter):
                yield from (f"{line}\n" for line in text.replace("\r\n", "\n").removesuffix("\n").split("\n"))
            continue
        with open_bytes(part.paths[0]) as stream:
            for raw, number, begins, ends in _split(stream):
                counter.read += begins
                if number == 1 and begins:
                    raw = raw.removeprefix(BYTE_ORDER_MARK)
                if ends:
                    raw = raw.removesuffix(b"\r")
                try:
                    yield raw.decode("utf-8") + "\n" * ends
                except UnicodeDecodeError:
                    counter.read += not begins  # a skipped piece counts as a line: at most all lines can be skipped
                    counter.skip(ENCODING, part.location(number))


def _split(stream: BinaryIO) -> Iterator[tuple[bytes, int, bool, bool]]:
    """Yield lines, or pieces of long lines, with the line number and whether the line begins and ends in the piece."""
    rest = b""
    number = 1
    begins = True
    while chunk := stream.read(READ_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line, number, begins, True
            number += 1
            begins = True
        if len(rest) > MAX_PIECE_BYTES:
            cut = _cut(rest)
            yield rest[:cut], number, begins, False
            rest = rest[cut:]
            begins = False
    if rest:
        yield rest, number, begins, True


def _cut(line: bytes) -> int:
    """The position at which a long line is cut: before the last space, or else between two characters."""
    cut = line.rfind(b" ")
    if cut > 0:
        return cut
    cut = len(line) - 1
    while cut > len(line) - 4 and line[cut] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        cut -= 1
    return cut


def split_at(characters: int) -> int:
    """The number of characters for training; the rest, at most a tenth, is held out."""
    return max(characters - MAX_VALID, int(characters * (1 - VALID_SHARE)))


def divide(pieces: Iterator[str], at: int) -> Iterator[tuple[str, bool]]:
    """Yield pieces and whether they follow the first `at` characters; a piece across the border is cut."""
    position = 0
    for piece in pieces:
        before = min(max(0, at - position), len(piece))
        position += len(piece)
        if before:
            yield piece[:before], False
        if before < len(piece):
            yield piece[before:], True


Part = tuple[str, bool, int]  # a piece of the text, whether it is held out, and the number of its corpus


def _divided(train: Corpora, valid: Corpora | None, split: int, counter: LineCounter) -> Iterator[Part]:
    """Yield all pieces: the first `split` characters are for training, the rest is held out."""
    characters_left = split
    for number, files in enumerate(train.corpora()):
        corpus = replace(train, parts=train.parts[files.start : files.stop])
        for piece, held_out in divide(read_pieces(corpus, LineCounter()), characters_left):
            characters_left -= 0 if held_out else len(piece)
            yield piece, held_out, number
    for piece in read_pieces(valid, counter) if valid else ():
        yield piece, True, len(train.sizes)


def _blocks(parts: Iterator[Part]) -> Iterator[Message]:
    """Yield blocks of consecutive pieces of the same split and corpus."""
    for (held_out, corpus), group in groupby(parts, key=lambda part: part[1:]):
        while first := next(group, None):
            pieces: list[bytes] = []
            size = 0
            characters = 0
            for piece, *_ in chain([first], group):
                pieces.append(piece.encode())
                size += len(pieces[-1])
                characters += len(piece)
                if size >= BLOCK_BYTES:
                    break
            lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
            header = {"held_out": held_out, "corpus": corpus, "characters": characters}
            yield Message(header, (b"".join(pieces), lengths.tobytes()))


class PieceEncoder:
    """Tokenises blocks of pieces. A shard holds their concatenated ids."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._encoder = TextEncoder(codec.source, dtype_for(codec.source.size))

    def make(self, block: Message) -> Message:
        text = block.parts[0]
        lengths = np.frombuffer(block.parts[1], np.int64)
        ends = np.cumsum(lengths)
        spans = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
        pieces = [text[begin:end].decode() for begin, end in spans]
        return Message({}, (b"".join(self._encoder.encode(pieces)),))

    def settings(self) -> dict[str, Any]:
        return codec_settings(self.codec)

    @classmethod
    def restore(cls, settings: dict[str, Any], codec: Codec) -> PieceEncoder:
        return cls(codec)


class StreamWriter:
    """Writes a stream of ids between two end tokens; `finish` completes it."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self.path = directory
        self.path.mkdir(parents=True)
        self.tokens = 0  # written so far
        self.characters = 0
        self.unknown = 0
        self._corpus_ends: list[int] = []  # number of tokens up to the end of each corpus
        self._ids = tokenizer.ids
        self._dtype = dtype_for(tokenizer.size)
        self._write(np.asarray([self._ids.eos], self._dtype))

    def summary(self) -> str:
        return f"{self.tokens:,} tokens ({self.characters:,} characters)"

    def write(self, ids: bytes, characters: int, corpus: int = 0) -> None:
        """Write ids of the corpus with this number; corpora are written in order."""
        self._corpus_ends += [self.tokens] * (corpus - len(self._corpus_ends))
        self._write(np.frombuffer(ids, self._dtype))
        self.characters += characters

    def _write(self, ids: NDArray[Any]) -> None:
        append(self.path / "text.bin", ids)
        self.tokens += len(ids)
        self.unknown += int(np.count_nonzero(ids == self._ids.unk))

    def finish(self, corpora: int = 1) -> None:
        """Complete a stream of this number of corpora."""
        self._corpus_ends += [self.tokens] * (corpora - len(self._corpus_ends))
        self._write(np.asarray([self._ids.eos], self._dtype))
        meta: dict[str, Any] = {"symbols": self.tokens, "characters": self.characters, "dtype": self._dtype}
        if len(self._corpus_ends) > 1:
            meta["corpora"] = self._corpus_ends
        (self.path / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


class Stream:
    """A text as ids, on disk or in memory."""

    def __init__(self, ids: Flat | Row, characters: int, corpora: Sequence[int] = ()) -> None:
        self._ids = ids
        self.corpora = tuple(corpora) or (len(ids),)  # number of tokens up to the end of each corpus
        self.size = self.characters = characters  # reported as the amount of data

    @classmethod
    def open(cls, directory: str | Path) -> Stream:
        path = Path(directory)
        try:
            meta: dict[str, Any] = read_json(path / "meta.json")
            flat = Flat(path / "text.bin", meta["dtype"])
            if len(flat) != meta["symbols"]:
                raise ValueError("text.bin and meta.json do not fit together")
            return cls(flat, int(meta["characters"]), meta.get("corpora", ()))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: not a readable text: {error}") from None

    def __len__(self) -> int:
        return len(self._ids)

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Rows of `length` ids, one from each start."""
        rows = [self._ids[int(start) : int(start) + length] for start in starts]
        return np.stack(rows).astype(np.int64) if rows else np.empty((0, length), np.int64)


class TokenizedText(NamedTuple):
    """A text in memory: an end token and the ids of the text, and the numbers of tokens and characters of each line."""

    ids: NDArray[np.uint32]
    tokens: NDArray[np.int64]
    characters: NDArray[np.int64]


def tokenize_text(pieces: Sequence[str], tokenizer: Tokenizer, name: str) -> TokenizedText:
    """Tokenise a text in memory; `name` is the name of its file."""
    if not pieces:
        raise UserError(f"{name}: contains no text")
    with threads():
        rows = [np.asarray(row, np.uint32) for row in tokenizer.encode(pieces)]
    first = np.asarray([tokenizer.ids.eos], np.uint32)
    tokens = np.fromiter(map(len, rows), np.int64, len(rows))
    characters = np.fromiter(map(len, pieces), np.int64, len(pieces))
    return TokenizedText(np.concatenate([first, *rows]), tokens, characters)
