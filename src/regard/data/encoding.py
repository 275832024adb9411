"""Examples as ids, many at a time: rows of bytes that are written as they are, and a count of what does not fit.

Blocks of the corpora become shards, by other processes if there are many; this module is the one that these run.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.data.corpora import Corpora, LineBlock
from regard.data.formats import SOURCES
from regard.data.holdout import Splitter
from regard.data.reader import LONG, LineCounter, Located
from regard.data.shards import BLOCK, Message, codec_settings, make_shards, serve
from regard.errors import plural
from regard.recipe import Data
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer

SHORT = "too short"
RATIO = "lengths too different"
WORDS = 200_000  # in a cache
LONGEST_WORD = 40  # characters of a word that is likely to come again

Numbers = NDArray[np.int64]


def dtype_for(vocab: int) -> str:
    """The smallest type that holds the ids of a vocabulary."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


class TextEncoder:
    """A tokenizer whose ids come as bytes. Words that came before are looked up, many times faster than the library.

    In the schemes with words no token crosses the space in front of a word, so a text whose words are separated by
    single spaces has the tokens of its words.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: str) -> None:
        self._tokenizer = tokenizer
        self._code = "H" if dtype == "uint16" else "I"
        self._has_words = type(tokenizer) is Tokenizer and tokenizer.scheme.split(":")[0] in ("bpe", "unigram", "word")
        self._first: dict[str, bytes] = {}  # of words at the start of a text
        self._later: dict[str, bytes] = {}  # of words after a space

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        if not self._has_words:
            return self._encode(texts)
        rows = [self._look_up(text) for text in texts]
        missing = [index for index, row in enumerate(rows) if row is None]
        if missing:
            self._learn([texts[index] for index in missing])
            for index in missing:
                rows[index] = self._look_up(texts[index])
            missing = [index for index in missing if rows[index] is None]
            for index, row in zip(missing, self._encode([texts[index] for index in missing]), strict=True):
                rows[index] = row
        return rows  # type: ignore[return-value]  # none is missing now

    def _encode(self, texts: Sequence[str]) -> list[bytes]:
        return [self.pack(row) for row in self._tokenizer.encode(texts)] if texts else []

    def pack(self, ids: Sequence[int]) -> bytes:
        return array(self._code, ids).tobytes()

    def _look_up(self, text: str) -> bytes | None:
        first, *later = text.split(" ")
        try:
            return b"".join([self._first[first], *map(self._later.__getitem__, later)])
        except KeyError:
            return None

    def _learn(self, texts: Sequence[str]) -> None:
        """Remember the words of texts that have the same tokens everywhere."""
        first, later = set(), set()
        for text in texts:
            word, *words = text.split(" ")
            first.add(word)
            later.update(words)
        new = [
            [word for word in words - known.keys() if len(word) <= LONGEST_WORD and _has_own_tokens(word)]
            for words, known in ((first, self._first), (later, self._later))
        ]
        if len(self._first) + len(self._later) + len(new[0]) + len(new[1]) > WORDS:
            self._first.clear()
            self._later.clear()
        rows = self._encode([*new[0], *(f" {word}" for word in new[1])])
        self._first.update(zip(new[0], rows, strict=False))
        self._later.update(zip(new[1], rows[len(new[0]) :], strict=True))


def _has_own_tokens(word: str) -> bool:
    """Whether no token of a word can reach into the next one, as white space at its end could; a line end does not."""
    text = word.removesuffix("\n")
    return word == "\n" or text.split() == [text]


class Limits(NamedTuple):
    """Which examples are kept, by their tokens."""

    max_length: int
    min_length: int = 1
    max_ratio: float | None = None

    @classmethod
    def of(cls, data: Data) -> Limits:
        return cls(data.max_length, data.min_length, data.max_ratio)


class Rows(NamedTuple):
    """Examples as ids: the rows of each side one after the other, their lengths, and where the examples came from."""

    source: bytes
    target: bytes
    source_lengths: Numbers
    target_lengths: Numbers
    positions: Numbers


class ExampleEncoder:
    """Turns examples into rows. With `labels`, the target of an example is one of them, and its row their number."""

    def __init__(self, codec: Codec, limits: Limits, labels: Sequence[str] = ()) -> None:
        self.codec, self.limits, self.labels = codec, limits, tuple(labels)
        self.dtype = {
            "source": dtype_for(codec.source_vocab),
            "target": dtype_for(len(labels) or codec.target_vocab),
        }
        self._source = TextEncoder(codec.source, self.dtype["source"])
        self._target = TextEncoder(codec.target, self.dtype["target"])
        self._label_rows = {label: self._target.pack([number]) for number, label in enumerate(labels)}
        self._around = tuple(self._source.pack(ids) for ids in codec.ids.around(codec.frame))
        self._end = self._target.pack([codec.ids.eos])
        self._own = type(codec.source) is Tokenizer  # of a foreign one, an empty text may have tokens
        self._features: dict[str, bytes] = {}  # what is before the text, by the column of features

    def encode(self, waiting: Sequence[Located], skip: Callable[[int, str, str], None]) -> tuple[Rows, Sequence[int]]:
        """The rows of the examples that are kept, and their indices; the others are given to `skip`.

        It gets the position, the reason and a detail.
        """
        examples = [located.example for located in waiting]
        sources = self._sources(examples)
        texts = [example.target or "" for example in examples]
        targets = (
            [self._label_rows[text] for text in texts]
            if self.labels
            else [row + self._end for row in self._target.encode(texts)]
        )
        source_lengths, target_lengths = self._lengths("source", sources), self._lengths("target", targets)
        positions = np.fromiter((located.number for located in waiting), np.int64, len(waiting))
        kept = self._filter(source_lengths, target_lengths, positions, skip)
        if len(kept) < len(waiting):
            sources, targets = [sources[index] for index in kept], [targets[index] for index in kept]
            source_lengths, target_lengths = source_lengths[kept], target_lengths[kept]
            positions = positions[kept]
        return Rows(b"".join(sources), b"".join(targets), source_lengths, target_lengths, positions), kept

    def _lengths(self, side: str, rows: Sequence[bytes]) -> Numbers:
        return np.fromiter(map(len, rows), np.int64, len(rows)) // np.dtype(self.dtype[side]).itemsize

    def _sources(self, examples: Sequence[Example]) -> list[bytes]:
        if not self._own:
            return [self._source.pack(row) for row in self.codec.encode_source(examples)]
        before, after = self._around
        rows = self._source.encode([example.source for example in examples])
        return [
            (self._before(example.features) if example.features else before) + row + after
            for example, row in zip(examples, rows, strict=True)
        ]

    def _before(self, features: str) -> bytes:
        row = self._features.get(features)
        if row is None:
            if len(self._features) > WORDS:
                self._features.clear()
            (ids,) = self.codec.encode_source([Example("", None, features)])
            row = self._features[features] = self._source.pack(ids).removesuffix(self._around[1])
        return row

    def _filter(
        self, sources: Numbers, targets: Numbers, positions: Numbers, skip: Callable[[int, str, str], None]
    ) -> Sequence[int]:
        """The indices of those that are within the limits."""
        most, least, ratio = self.limits
        longest = np.maximum(sources, targets) - 1  # the end token is not the user's
        bad = longest > most
        # without special tokens
        own = sources - int(self._lengths("source", self._around).sum())
        pair = (own, own) if self.labels else (own, targets - 1)
        shorter, longer = np.minimum(*pair), np.maximum(*pair)
        bad |= shorter < (least if least > 1 else 0)
        if ratio is not None:
            bad |= longer > ratio * shorter
        if not bad.any():
            return range(len(sources))
        for index in np.flatnonzero(bad).tolist():
            position = int(positions[index])
            if longest[index] > most:
                skip(position, LONG, f"{plural(longest[index], 'token')}; data.max_length is {most:,}")
            elif shorter[index] < least:
                skip(position, SHORT, f"{plural(shorter[index], 'token')}; data.min_length is {least:,}")
            else:
                lengths = f"{plural(longer[index], 'token')} and {shorter[index]:,}"
                skip(position, RATIO, f"{lengths}; data.max_ratio is {ratio}")
        return np.flatnonzero(~bad).tolist()


# Blocks


class EncodedBlock(NamedTuple):
    """A block as ids: what is for training, what was held out, as examples too, and the count of its lines."""

    train: Rows
    valid: Rows
    examples: list[Example]
    counts: dict[str, Any]

    def message(self) -> Message:
        parts = [
            part
            for rows in (self.train, self.valid)
            for part in (rows.source, rows.target, *(each.tobytes() for each in rows[2:]))
        ]
        return Message({"examples": self.examples, "counts": self.counts}, parts)

    @classmethod
    def of(cls, message: Message) -> EncodedBlock:
        parts = message.parts
        train, valid = (
            Rows(source, target, *(np.frombuffer(each, np.int64) for each in numbers))
            for source, target, *numbers in (parts[:5], parts[5:])
        )
        return cls(train, valid, [Example(*row) for row in message.header["examples"]], message.header["counts"])


class BlockEncoder:
    """Reads a block, holds out what is for validation, and makes a shard of it."""

    module = "regard.data.encoding"

    def __init__(self, corpora: Corpora, encoder: ExampleEncoder, splitter: Splitter | None, strict: bool) -> None:
        self.corpora, self.encoder, self.splitter, self.strict = corpora, encoder, splitter, strict

    def encode_all(self, path: Path, processes: int) -> Iterator[EncodedBlock]:
        """All blocks as ids, in order, by up to so many processes; the codec was saved in `path`."""
        requests = map(_request, self.corpora.blocks(BLOCK))
        for _, shard in make_shards(self, requests, path, processes, self.corpora.text_size):
            yield EncodedBlock.of(shard)

    def make(self, request: Message) -> Message:
        """Make the shard that holds a block as ids."""
        *texts, mask = request.parts
        duplicates = np.frombuffer(mask, np.bool_) if request.header["marked"] else None
        return self.encode(
            LineBlock(request.header["part"], (request.header["first"], tuple(texts)), duplicates)
        ).message()

    def encode(self, block: LineBlock) -> EncodedBlock:
        counter = LineCounter(self.strict)
        train: list[Located] = []
        valid: list[Located] = []
        held_out = self.splitter.held_out if self.splitter else lambda source: False
        for located in self.corpora.read_block(block, counter):
            (valid if held_out(located.example.source) else train).append(located)
        skipped: list[tuple[int, str, str]] = []
        train_rows, _ = self.encoder.encode(train, lambda *skip: skipped.append(skip))
        valid_rows, kept = self.encoder.encode(valid, lambda *skip: skipped.append(skip))
        for position, reason, detail in sorted(skipped):
            counter.skip(reason, self.corpora.location(position), detail)
        return EncodedBlock(train_rows, valid_rows, [valid[index].example for index in kept], counter.counts())

    def settings(self) -> dict[str, Any]:
        chosen = sorted(self.splitter.chosen) if self.splitter else None
        return {
            **codec_settings(self.encoder.codec),
            "labels": self.encoder.labels,
            "limits": self.encoder.limits,
            "held_out": chosen and [[checksum, digest.hex()] for checksum, digest in chosen],
            "strict": self.strict,
            "parts": [[type(part).__name__, *part] for part in self.corpora.parts],
            # Of these a block has the numbers alone, not the text.
            "row_groups": [_stamp(part.paths[0]) for part in self.corpora.parts if not part.in_blocks],
        }

    @classmethod
    def restore(cls, settings: dict[str, Any], codec: Codec) -> BlockEncoder:
        """The encoder that settings describe."""
        parts = []
        for kind, *fields in settings["parts"]:
            fields = [tuple(field) if isinstance(field, list) else field for field in fields]
            parts.append(SOURCES[kind](*fields))
        corpora = Corpora(tuple(parts), (len(parts),), ())
        held_out = settings["held_out"]
        splitter = None
        if held_out is not None:
            splitter = Splitter((checksum, bytes.fromhex(digest)) for checksum, digest in held_out)
        encoder = ExampleEncoder(codec, Limits(*settings["limits"]), settings["labels"])
        return cls(corpora, encoder, splitter, settings["strict"])


def _request(block: LineBlock) -> Message:
    first, texts = block.chunk
    mask = b"" if block.duplicates is None else block.duplicates.tobytes()
    header = {"part": block.part, "first": first, "marked": block.duplicates is not None}
    return Message(header, (*texts, mask))


def _stamp(path: str) -> tuple[int, int]:
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns


if __name__ == "__main__":
    serve(BlockEncoder.restore)
