"""Tokenisation of whole files, in child processes if they are large: blocks of text become shards of ids as bytes.

Shards are stored in files until the prepared data is complete, so that an interrupted preparation can continue.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from hashlib import blake2b
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from regard.config import parse
from regard.data.reader import TOO_LONG, LineCounter, Located
from regard.data.tables import SOURCES, Corpora, LineBlock, Splitter
from regard.errors import UserError, plural
from regard.files import open_file
from regard.parallel.children import Child, Template, Work, answer_requests, ordered_map
from regard.parallel.messages import Message, Unpacker, pack
from regard.text.codec import Codec, Example, TextConfig
from regard.text.tokenizer import PARALLELISM_VARIABLE, Tokenizer, threads

BLOCK_BYTES = 4 << 20  # approximate size of the text in a block
MIN_PARALLEL_BYTES = 48 << 20  # child processes take a second to start, which does not pay off for less text
FORMAT = 3  # of shards


class ShardMaker(Protocol):
    """Tokenises blocks. The header of a block describes its origin; its parts hold the text."""

    def settings(self) -> dict[str, Any]: ...  # everything that a shard depends on except the block, as JSON values
    def make(self, block: Message) -> Message: ...  # the shard of a block
    @classmethod
    def restore(cls, settings: dict[str, Any], codec: Codec) -> ShardMaker: ...  # an equal maker in another process


def shards_of(path: Path) -> Path:
    """The directory of the shards of data that is prepared in `path`; the same in every attempt."""
    return path.with_name(path.name.removesuffix(".tmp") + ".shards")


def codec_settings(codec: Codec) -> dict[str, Any]:
    """The part of a maker's settings that identifies its codec."""
    tokenizers = "".join(tokenizer.to_json() for tokenizer in (codec.source, codec.target))
    digest = blake2b(tokenizers.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return {"text": codec.config.model_dump(mode="json"), "tokenizers": digest}


def make_shards(
    maker: ShardMaker, blocks: Iterable[Message], path: Path, processes: int, size: int
) -> Iterator[tuple[dict[str, Any], Message]]:
    """Yield the header of each block with its shard, in order; for a large `size` in bytes, use child processes.

    The processes load the codec that is saved in `path`. Shards are stored next to it, unless there is only one.
    """
    blocks = iter(blocks)
    first = list(islice(blocks, 2))
    make = threads()(maker.make)
    if len(first) < 2:
        yield from ((block.header, make(block)) for block in first)
        return
    name = f"{type(maker).__module__}:{type(maker).__qualname__}"
    settings = {"format": FORMAT, "maker": name, **maker.settings()}
    store = ShardStore(shards_of(path), settings)
    blocks = chain(first, blocks)
    if processes < 2 or size < MIN_PARALLEL_BYTES:
        yield from map(partial(store.shard, make), blocks)
    else:
        processes = min(processes, 1 + size // BLOCK_BYTES)
        yield from _make_in_children(store, {**settings, "codec_at": str(path)}, blocks, processes)


def _make_in_children(
    store: ShardStore, settings: dict[str, Any], blocks: Iterable[Message], processes: int
) -> Iterator[tuple[dict[str, Any], Message]]:
    name = "a process that turns text into tokens"
    environment = {PARALLELISM_VARIABLE: "false"}  # one thread in each child
    children: list[Child] = []

    def ask(child: Child, block: Message) -> Message:
        return child.ask(*block)

    def kill() -> None:
        for child in children:
            child.kill()

    with ExitStack() as stack:
        template = stack.enter_context(closing(Template(f"{__name__}:load_maker", settings, environment, name)))
        for _ in range(processes):
            children.append(stack.enter_context(closing(template.start({}, name))))
        yield from ordered_map([partial(store.shard, partial(ask, child)) for child in children], blocks, stop=kill)


def load_maker(settings: dict[str, Any]) -> tuple[Work, dict[str, Any]]:
    """Prepare a template whose children make shards."""
    module, _, name = settings["maker"].partition(":")
    codec = Codec.load(settings["codec_at"], parse(TextConfig, settings["text"], "text"))
    maker: ShardMaker = getattr(import_module(module), name).restore(settings, codec)
    return lambda channel, _: answer_requests(channel, maker.make), {}


class ShardStore:
    """A directory of shards. The name of a file is a hash of the maker's settings and the block."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self._directory = directory
        self._key = blake2b(json.dumps(settings).encode(), digest_size=16).digest()
        directory.mkdir(parents=True, exist_ok=True)

    def shard(self, make: Callable[[Message], Message], block: Message) -> tuple[dict[str, Any], Message]:
        """The header of a block, and its shard, which is made and stored unless it is stored already."""
        path = self._directory / f"{_hash(self._key, block)}.shard"
        shard = _load(path)
        if shard is None:
            shard = make(block)
            try:
                with open_file(path, "wb") as file:
                    file.write(pack(Message({"digest": _hash(b"", shard), "header": shard.header}, shard.parts)))
            except OSError as error:
                raise UserError(f"{path}: cannot write: {error.strerror or error}") from None
        return block.header, shard


def _hash(key: bytes, message: Message) -> str:
    digest = blake2b(key, digest_size=16)
    digest.update(json.dumps([message.header, [len(part) for part in message.parts]]).encode())
    for part in message.parts:
        digest.update(part)
    return digest.hexdigest()


def _load(path: Path) -> Message | None:
    """Read a shard; None if it is missing, incomplete or damaged."""
    try:
        with open_file(path) as file:
            [saved] = Unpacker().feed(file.read())
        shard = Message(saved.header["header"], saved.parts)
        return shard if _hash(b"", shard) == saved.header["digest"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


TOO_SHORT = "too short"
RATIO = "lengths too different"
MAX_CACHED_WORDS = 200_000
MAX_CACHED_LENGTH = 40  # characters; longer words are unlikely to be repeated

Numbers = NDArray[np.int64]
Skip = Callable[[int, str, str], None]  # takes the position of an example, the reason and a detail


def dtype_for(vocab: int) -> str:
    """The smallest type that holds the ids of a vocabulary."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


class TextEncoder:
    """A tokenizer that returns ids as bytes and caches the ids of words, which is much faster than the library.

    In bpe, unigram and word, no token crosses the start of a word, so words can be tokenised separately.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: str) -> None:
        self._tokenizer = tokenizer
        self._code = "H" if dtype == "uint16" else "I"
        self._has_words = type(tokenizer) is Tokenizer and tokenizer.scheme.split(":")[0] in ("bpe", "unigram", "word")
        self._first: dict[str, bytes] = {}  # ids of words at the start of a text
        self._later: dict[str, bytes] = {}  # ids of words after a space

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        if not self._has_words:
            return self._encode(texts)
        rows = [self._look_up(text) for text in texts]
        missing = [index for index, row in enumerate(rows) if row is None]
        if missing:
            self._cache_words([texts[index] for index in missing])
            for index in missing:
                rows[index] = self._look_up(texts[index])
            missing = [index for index in missing if rows[index] is None]
            for index, row in zip(missing, self._encode([texts[index] for index in missing]), strict=True):
                rows[index] = row
        return rows  # type: ignore[return-value]  # no row is None any more

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

    def _cache_words(self, texts: Sequence[str]) -> None:
        """Tokenise the new words of texts, except words whose tokens depend on the following word."""
        first = set()
        later = set()
        for text in texts:
            word, *words = text.split(" ")
            first.add(word)
            later.update(words)
        new = [
            [word for word in words - known.keys() if len(word) <= MAX_CACHED_LENGTH and _has_own_tokens(word)]
            for words, known in ((first, self._first), (later, self._later))
        ]
        if len(self._first) + len(self._later) + len(new[0]) + len(new[1]) > MAX_CACHED_WORDS:
            self._first.clear()
            self._later.clear()
        rows = self._encode([*new[0], *(f" {word}" for word in new[1])])
        self._first.update(zip(new[0], rows, strict=False))
        self._later.update(zip(new[1], rows[len(new[0]) :], strict=True))


def _has_own_tokens(word: str) -> bool:
    """Whether no token crosses the end of a word: it may, after white space other than a line end."""
    text = word.removesuffix("\n")
    return word == "\n" or text.split() == [text]


class Limits(NamedTuple):
    """Limits on the number of tokens of an example."""

    max_length: int
    min_length: int = 1
    max_ratio: float | None = None


class Rows(NamedTuple):
    """Examples as ids: the concatenated rows of each side, the lengths of the rows, the positions of the examples."""

    source: bytes
    target: bytes
    source_lengths: Numbers
    target_lengths: Numbers
    positions: Numbers


class ExampleEncoder:
    """Turns examples into rows. With `labels`, the target row of an example is the number of its label."""

    def __init__(self, codec: Codec, limits: Limits, labels: Sequence[str] = ()) -> None:
        self.codec = codec
        self.limits = limits
        self.labels = tuple(labels)
        self.dtype = {"source": dtype_for(codec.source_vocab), "target": dtype_for(len(labels) or codec.target_vocab)}
        self._source = TextEncoder(codec.source, self.dtype["source"])
        self._target = TextEncoder(codec.target, self.dtype["target"])
        self._label_rows = {label: self._target.pack([number]) for number, label in enumerate(labels)}
        self._around = tuple(self._source.pack(ids) for ids in codec.ids.around(codec.frame))
        self._end = self._target.pack([codec.ids.eos])
        self._is_ours = type(codec.source) is Tokenizer  # foreign tokenizers may give an empty text tokens

    def encode(self, examples: Sequence[Located], skip: Skip) -> tuple[Rows, Sequence[int]]:
        """The rows of the examples within the limits, and their indices; `skip` is called for the other examples."""
        sources = self._sources([located.example for located in examples])
        texts = [located.example.target or "" for located in examples]
        if self.labels:
            targets = [self._label_rows[text] for text in texts]
        else:
            targets = [row + self._end for row in self._target.encode(texts)]
        source_lengths = self._lengths("source", sources)
        target_lengths = self._lengths("target", targets)
        positions = np.fromiter((located.number for located in examples), np.int64, len(examples))
        indices = self._filter(source_lengths, target_lengths, positions, skip)
        if len(indices) < len(examples):
            sources = [sources[index] for index in indices]
            targets = [targets[index] for index in indices]
            source_lengths = source_lengths[indices]
            target_lengths = target_lengths[indices]
            positions = positions[indices]
        return Rows(b"".join(sources), b"".join(targets), source_lengths, target_lengths, positions), indices

    def _lengths(self, side: str, rows: Sequence[bytes]) -> Numbers:
        return np.fromiter(map(len, rows), np.int64, len(rows)) // np.dtype(self.dtype[side]).itemsize

    def _sources(self, examples: Sequence[Example]) -> list[bytes]:
        if not self._is_ours:
            return [self._source.pack(row) for row in self.codec.encode_source(examples)]
        before, after = self._around
        distinct = {example.features or "" for example in examples}
        starts = {features: before + self._source.pack(self.codec.feature_ids(features)) for features in distinct}
        rows = self._source.encode([example.source for example in examples])
        return [starts[example.features or ""] + row + after for example, row in zip(examples, rows, strict=True)]

    def _filter(self, sources: Numbers, targets: Numbers, positions: Numbers, skip: Skip) -> Sequence[int]:
        """The indices of the examples within the limits."""
        max_length, min_length, max_ratio = self.limits
        longest = np.maximum(sources, targets) - 1  # the end token does not count
        source_text = sources - int(self._lengths("source", self._around).sum())
        target_text = source_text if self.labels else targets - 1
        shorter = np.minimum(source_text, target_text)
        longer = np.maximum(source_text, target_text)
        bad = (longest > max_length) | (shorter < (min_length if min_length > 1 else 0))
        if max_ratio is not None:
            bad |= longer > max_ratio * shorter
        for index in np.flatnonzero(bad).tolist():
            position = int(positions[index])
            if longest[index] > max_length:
                skip(position, TOO_LONG, f"{plural(longest[index], 'token')}; data.max_length is {max_length:,}")
            elif shorter[index] < min_length:
                skip(position, TOO_SHORT, f"{plural(shorter[index], 'token')}; data.min_length is {min_length:,}")
            else:
                lengths = f"{plural(longer[index], 'token')} and {shorter[index]:,}"
                skip(position, RATIO, f"{lengths}; data.max_ratio is {max_ratio}")
        return np.flatnonzero(~bad).tolist() if bad.any() else range(len(bad))


class EncodedBlock(NamedTuple):
    """A tokenised block: rows for training and validation, the validation examples, and the line counts."""

    train: Rows
    valid: Rows
    examples: list[Example]
    counts: dict[str, Any]


class BlockEncoder:
    """Parses the lines of a block, separates held-out examples, and tokenises both parts."""

    def __init__(self, corpora: Corpora, encoder: ExampleEncoder, splitter: Splitter | None, strict: bool) -> None:
        self.corpora = corpora
        self.encoder = encoder
        self.splitter = splitter
        self.strict = strict

    def encode_all(self, path: Path, processes: int) -> Iterator[EncodedBlock]:
        """Yield all blocks in order, encoded; see `make_shards` for `path` and `processes`."""
        blocks = map(_block_message, self.corpora.blocks(BLOCK_BYTES))
        for _, shard in make_shards(self, blocks, path, processes, self.corpora.text_size):
            train, valid = (
                Rows(source, target, *(np.frombuffer(each, np.int64) for each in numbers))
                for source, target, *numbers in (shard.parts[:5], shard.parts[5:])
            )
            examples = [Example(*row) for row in shard.header["examples"]]
            yield EncodedBlock(train, valid, examples, shard.header["counts"])

    def make(self, block: Message) -> Message:
        *texts, mask = block.parts
        duplicates = np.frombuffer(mask, np.bool_) if block.header["marked"] else None
        lines = LineBlock(block.header["part"], (block.header["first"], tuple(texts)), duplicates)
        counter = LineCounter(self.strict)
        train: list[Located] = []
        valid: list[Located] = []
        for located in self.corpora.read_block(lines, counter):
            held_out = self.splitter is not None and self.splitter.held_out(located.example.source)
            (valid if held_out else train).append(located)
        skipped: list[tuple[int, str, str]] = []
        train_rows, _ = self.encoder.encode(train, lambda *skip: skipped.append(skip))
        valid_rows, indices = self.encoder.encode(valid, lambda *skip: skipped.append(skip))
        for position, reason, detail in sorted(skipped):
            counter.skip(reason, self.corpora.location(position), detail)
        parts: list[bytes] = []
        for rows in (train_rows, valid_rows):
            parts += [rows.source, rows.target, *(numbers.tobytes() for numbers in rows[2:])]
        return Message({"examples": [valid[index].example for index in indices], "counts": counter.counts()}, parts)

    def settings(self) -> dict[str, Any]:
        held_out = sorted(self.splitter.chosen) if self.splitter else None
        return {
            **codec_settings(self.encoder.codec),
            "labels": self.encoder.labels,
            "limits": self.encoder.limits,
            "held_out": held_out and [[checksum, digest.hex()] for checksum, digest in held_out],
            "strict": self.strict,
            "parts": [[type(part).__name__, *part] for part in self.corpora.parts],
        }

    @classmethod
    def restore(cls, settings: dict[str, Any], codec: Codec) -> BlockEncoder:
        kinds = {kind.__name__: kind for kind in SOURCES.values()}
        parts = []
        for name, *fields in settings["parts"]:
            fields = [tuple(field) if isinstance(field, list) else field for field in fields]
            parts.append(kinds[name](*fields))
        corpora = Corpora(tuple(parts), (len(parts),), ())
        splitter = None
        if settings["held_out"] is not None:
            splitter = Splitter((checksum, bytes.fromhex(digest)) for checksum, digest in settings["held_out"])
        encoder = ExampleEncoder(codec, Limits(*settings["limits"]), settings["labels"])
        return cls(corpora, encoder, splitter, settings["strict"])


def _block_message(block: LineBlock) -> Message:
    first, texts = block.chunk
    mask = b"" if block.duplicates is None else block.duplicates.tobytes()
    return Message({"part": block.part, "first": first, "marked": block.duplicates is not None}, (*texts, mask))
