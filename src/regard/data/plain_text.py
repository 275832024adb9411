"""Plain text: files become a tokenizer and two streams of ids, for training and for validation.

The rows of a JSONL or Parquet file are texts that follow each other, each of one line or several. Parts of a long text
become shards, by other processes if there are many; this module is the one that these run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.data.encode import BLOCK_BYTES, TextEncoder, codec_settings, dtype_for, make_shards
from regard.data.reader import BOM, CHUNK, ENCODING, LineCounter, Source, open_bytes
from regard.data.store import Flat, Row, append
from regard.data.tables import Corpora, named_columns, open_table
from regard.errors import UserError, plural
from regard.parallel.children import Message
from regard.recipe import Recipe
from regard.tasks import TASKS
from regard.text.codec import Codec
from regard.text.learn import BaseText, Sample, draw_sample, learn_tokenizer, one_request
from regard.text.tokenizer import Tokenizer, threads

LONG_LINE = 1 << 16  # bytes; of a longer line every part is a piece of its own
TEXT = ("text",)  # what JSONL and Parquet files call their text, if nothing else is said
VALID_SHARE = 0.1  # of the characters
MAX_VALID = 1_000_000  # characters


def make_text(
    recipe: Recipe, train: Corpora, valid: Corpora | None, path: Path, base: BaseText | None, processes: int = 1
) -> dict[str, Any]:
    """Write a tokenizer and two streams into `path`, with up to so many processes; return the record of it."""
    strict = recipe.data.strict
    counter, valid_counter = LineCounter(strict), LineCounter(strict)
    sample, characters = scan_text(train, counter)
    split = characters if valid else split_at(characters)
    if not split or characters < 2:
        raise UserError(f"{train.name}: {characters} characters are too little text to learn from")
    codec, notes = _make_codec(recipe, train, sample, split, base)
    codec.save(path)
    train_writer = StreamWriter(path / "train", codec.source)
    valid_writer = StreamWriter(path / "valid", codec.source)
    requests = _requests(_divided(train, valid, split, valid_counter))
    total = train.text_size + (valid.text_size if valid else 0)
    for place, shard in make_shards(PieceEncoder(codec), requests, path, processes, total):
        if place["held_out"]:
            valid_writer.write(shard.parts[0], place["characters"])
        else:
            train_writer.write(shard.parts[0], place["characters"], place["corpus"])
    train_writer.finish(len(train.sizes))
    valid_writer.finish()
    notes.append(f"training: {train_writer.summary()} from {train.name}, {counter.summary()}")
    if valid:
        if not valid_writer.characters:
            raise UserError(f"{valid.name}: there is no text in it")
        notes.append(f"validation: {valid_writer.summary()} from {valid.name}, {valid_counter.summary()}")
    else:
        share = 100 * valid_writer.characters / characters
        notes.append(f"validation: {valid_writer.summary()}, the last {share:.3g} % of the text")
    for what, writer in (("training", train_writer), ("validation", valid_writer)):
        if writer.unknown:
            share = 100 * writer.unknown / writer.tokens
            notes.append(f"{what}: {plural(writer.unknown, 'unknown token')} ({share:.2g} %)")
    counts = {"train": counter.to_json(), "valid": valid_counter.to_json() if valid else None}
    return {"text": codec.config.model_dump(), "labels": (), "notes": notes, "accounts": counts}


def _make_codec(
    recipe: Recipe, train: Corpora, sample: Sample, split: int, base: BaseText | None
) -> tuple[Codec, list[str]]:
    """Learn a vocabulary from the text before `split`, or take that of the run to start from."""
    task, start_from = TASKS[recipe.task], recipe.train.start_from
    if base is not None:
        if task.seq2seq and not base.codec.shared:
            raise UserError(f"{start_from}: task {task.name} needs one vocabulary for both sides; this run has two")
        if base.codec.source.scheme == "space":
            raise UserError(f"{start_from}: its tokens are separated by spaces, so line ends would be lost")
        return base.codec, [base.note(start_from)]
    scheme = one_request(recipe.text, "one text")
    if scheme == "space":
        raise UserError(
            "text.source_tokens: space drops line ends and doubled spaces, which plain text needs; "
            "word cuts at spaces and keeps them"
        )

    def texts(wanted: int) -> Iterator[str]:
        pieces = divide(read_pieces(train, LineCounter()), split)
        return draw_sample((piece for piece, _ in takewhile(lambda part: not part[1], pieces)), wanted, sample.count)

    rare, mask = recipe.text.min_count, task.name == "masked"
    tokenizer, note = learn_tokenizer(
        scheme, sample.column(), sample.count, texts, min_count=rare, mask=mask, line_ends=True
    )
    return Codec(tokenizer, frame=task.frame), [note]


def scan_text(source: Source | Corpora, counter: LineCounter) -> tuple[Sample, int]:
    """Read a text once -> a sample of its pieces, and how many characters it has."""
    sample, characters = Sample(), 0
    for piece in read_pieces(source, counter):
        characters += len(piece)
        sample.add(piece)
    if not counter.read:
        raise UserError(f"{source.name}: the file is empty")
    if not characters:
        hint = source.hint(counter)
        raise UserError(f"{source.name}: no usable text: {counter.summary()}{hint and chr(10) + '  ' + hint}")
    return sample, characters


def read_pieces(source: Source | Corpora, counter: LineCounter) -> Iterator[str]:
    """Yield a text line by line, line ends included. Memory is bounded: a very long line comes in several pieces.

    Lines that are not UTF-8 are skipped and counted. `\\r\\n` becomes `\\n`, and the last line ends like the others.
    """
    for part in source.parts:
        if named_columns(part.paths[0]):
            for _, (text,) in open_table(part.paths[0], ("source",), part.keys or TEXT).cells(counter):
                yield from (f"{line}\n" for line in text.replace("\r\n", "\n").removesuffix("\n").split("\n"))
            continue
        with open_bytes(part.paths[0]) as stream:
            for raw, number, begins, ends in _split(stream):
                counter.read += begins
                if number == 1 and begins:
                    raw = raw.removeprefix(BOM)
                if ends:
                    raw = raw.removesuffix(b"\r")
                try:
                    yield raw.decode("utf-8") + "\n" * ends
                except UnicodeDecodeError:
                    counter.read += not begins  # a part of a line counts like one, or more would be skipped than read
                    counter.skip(ENCODING, part.location(number))


def _split(stream: BinaryIO) -> Iterator[tuple[bytes, int, bool, bool]]:
    """Lines or parts of long lines, with the number of the line, and whether it begins and ends here."""
    rest, number, begins = b"", 1, True
    while chunk := stream.read(CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line, number, begins, True
            number, begins = number + 1, True
        if len(rest) > LONG_LINE:
            cut = _cut(rest)
            yield rest[:cut], number, begins, False
            rest, begins = rest[cut:], False
    if rest:
        yield rest, number, begins, True


def _cut(line: bytes) -> int:
    """Where to cut a long line: in front of its last space, where no scheme joins anything, or between characters."""
    cut = line.rfind(b" ")
    if cut > 0:
        return cut
    cut = len(line) - 1
    while cut > len(line) - 4 and line[cut] & 0xC0 == 0x80:  # inside a character
        cut -= 1
    return cut


def split_at(characters: int) -> int:
    """How many characters come before those that are held out: the last tenth, or less of a very long text."""
    return max(characters - MAX_VALID, int(characters * (1 - VALID_SHARE)))


def divide(pieces: Iterator[str], at: int) -> Iterator[tuple[str, bool]]:
    """Pieces, and whether each comes after the first `at` characters; the one across is cut in two."""
    seen = 0
    for piece in pieces:
        before = min(max(0, at - seen), len(piece))
        seen += len(piece)
        if before:
            yield piece[:before], False
        if before < len(piece):
            yield piece[before:], True


Part = tuple[str, bool, int]  # a piece of the text, whether it is held out, and the number of its corpus


def _divided(train: Corpora, valid: Corpora | None, split: int, counter: LineCounter) -> Iterator[Part]:
    """The pieces of all texts: of the first `split` characters for training, then of what is held out."""
    left = split
    for number, files in enumerate(train.corpora()):
        corpus = replace(train, parts=train.parts[files.start : files.stop])
        for piece, held_out in divide(read_pieces(corpus, LineCounter()), left):
            left -= 0 if held_out else len(piece)
            yield piece, held_out, number
    for piece in read_pieces(valid, counter) if valid else ():
        yield piece, True, len(train.sizes)


def _requests(parts: Iterator[Part]) -> Iterator[Message]:
    """Pieces that follow each other and have the same place, about as many as a shard holds."""
    for (held_out, corpus), same in groupby(parts, key=lambda part: part[1:]):
        pieces: list[bytes] = []
        size = characters = 0
        for piece, *_ in same:
            pieces.append(piece.encode())
            size, characters = size + len(pieces[-1]), characters + len(piece)
            if size >= BLOCK_BYTES:
                yield _request(pieces, characters, held_out, corpus)
                pieces, size, characters = [], 0, 0
        if pieces:
            yield _request(pieces, characters, held_out, corpus)


def _request(pieces: Sequence[bytes], characters: int, held_out: bool, corpus: int) -> Message:
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    header = {"held_out": held_out, "corpus": corpus, "characters": characters}
    return Message(header, (b"".join(pieces), lengths.tobytes()))


class PieceEncoder:
    """Makes shards of pieces: their ids, one after the other."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._encoder = TextEncoder(codec.source, dtype_for(codec.source.size))

    def make(self, request: Message) -> Message:
        text, lengths = request.parts[0], np.frombuffer(request.parts[1], np.int64)
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
    """Writes ids between two end tokens; after `finish` they are complete."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self.path = directory
        self.path.mkdir(parents=True)
        self.tokens = self.characters = self.unknown = 0  # counts of what was written
        self._corpora: list[int] = []  # how many tokens there are up to the end of each
        self._ids = tokenizer.ids
        self._dtype = dtype_for(tokenizer.size)
        self._write(np.asarray([self._ids.eos], self._dtype))

    def summary(self) -> str:
        return f"{self.tokens:,} tokens ({self.characters:,} characters)"

    def write(self, ids: bytes, characters: int, corpus: int = 0) -> None:
        """Write ids of the corpus with this number, none of which is below that of the last ones."""
        self._end_corpora(corpus)
        self._write(np.frombuffer(ids, self._dtype))
        self.characters += characters

    def _end_corpora(self, count: int) -> None:
        """Note that so many corpora have ended."""
        self._corpora += [self.tokens] * (count - len(self._corpora))

    def _write(self, ids: NDArray[Any]) -> None:
        append(self.path / "text.bin", ids)
        self.tokens += len(ids)
        self.unknown += int(np.count_nonzero(ids == self._ids.unk))

    def finish(self, corpora: int = 1) -> None:
        """Write the end of the text, which is that of so many corpora."""
        self._end_corpora(corpora)
        self._write(np.asarray([self._ids.eos], self._dtype))
        meta: dict[str, Any] = {"symbols": self.tokens, "characters": self.characters, "dtype": self._dtype}
        if len(self._corpora) > 1:
            meta["corpora"] = self._corpora
        (self.path / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


class Stream:
    """A text as ids, on disk or in memory."""

    def __init__(self, ids: Flat | Row, characters: int, corpora: Sequence[int] = ()) -> None:
        self._ids = ids
        self.corpora = tuple(corpora) or (len(ids),)  # how many tokens there are up to the end of each
        self.size = self.characters = characters  # reported as the amount of data

    @classmethod
    def open(cls, directory: str | Path) -> Stream:
        path = Path(directory)
        try:
            meta: dict[str, Any] = json.loads((path / "meta.json").read_text(encoding="utf-8"))
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
    """A text in memory: its ids with an end token in front, and the numbers of tokens and characters of each line."""

    ids: NDArray[np.uint32]
    tokens: NDArray[np.int64]
    characters: NDArray[np.int64]


def tokenize_text(pieces: Sequence[str], tokenizer: Tokenizer, name: str) -> TokenizedText:
    """Tokenize a text that is not to be written; `name` is that of its file."""
    if not pieces:
        raise UserError(f"{name}: there is no text in it")
    with threads():
        rows = [np.asarray(row, np.uint32) for row in tokenizer.encode(pieces)]
    first = np.asarray([tokenizer.ids.eos], np.uint32)
    tokens, characters = (np.asarray(list(map(len, x)), np.int64) for x in (rows, pieces))
    return TokenizedText(np.concatenate([first, *rows]), tokens, characters)
