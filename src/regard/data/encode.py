"""Examples as ids, many at a time: rows of bytes that are written as they are, and a count of what does not fit.

Blocks of the corpora become shards, by other processes if there are many; this module is the one that these run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from regard.config import parse
from regard.data.reader import LONG, LineCounter, Located
from regard.data.tables import SOURCES, Corpora, LineBlock, Splitter
from regard.errors import UserError, plural
from regard.recipe import Data
from regard.text.codec import Codec, Example, TextConfig
from regard.text.tokenizer import Tokenizer, threads

BLOCK = 4 << 20  # bytes of text in a shard, about
PAYS = 48 << 20  # bytes of text from which on other processes pay: they start in a second
FORMAT = 2

Header = dict[str, Any]  # what can be JSON


class Message(NamedTuple):
    """A part of the text that is to become a shard, or the shard."""

    header: Header
    parts: Sequence[bytes]


class ShardMaker(Protocol):
    """Turns parts of a text into shards. Its module can be run by other processes: it calls `serve`."""

    module: str

    def settings(self) -> dict[str, Any]:
        """All that a shard depends on beside the text, from which another process can make a maker that is equal."""

    def make(self, request: Message) -> Message:
        """Make a shard of a part of the text."""


def shards_of(path: Path) -> Path:
    """Where the shards are kept while data is prepared in `path`, so that the next one finds them if it is killed."""
    return path.with_name(path.name.removesuffix(".tmp") + ".shards")


def codec_settings(codec: Codec) -> dict[str, Any]:
    """The settings of a maker that say which codec it has."""
    tokenizers = "".join(tokenizer.to_json() for tokenizer in (codec.source, codec.target))
    digest = blake2b(tokenizers.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return {"text": codec.config.model_dump(mode="json"), "tokenizers": digest}


def make_shards(
    maker: ShardMaker, requests: Iterable[Message], path: Path, processes: int, size: int
) -> Iterator[tuple[Header, Message]]:
    """The headers of all requests with their shards, in order; by up to `processes` processes, if `size` bytes pay.

    The codec was saved in `path`. Shards are kept beside it; of a single part of the text there is none.
    """
    rest = iter(requests)
    few = list(islice(rest, 2))
    if len(few) < 2:
        with threads():
            yield from ((request.header, maker.make(request)) for request in few)
        return
    shards = shards_of(path)
    shards.mkdir(parents=True, exist_ok=True)
    settings = {"format": FORMAT, "module": maker.module, **maker.settings()}
    parallel = size >= PAYS and processes > 1
    pool = _Pool(maker.module, {**settings, "codec_at": str(path)}, processes) if parallel else None
    try:
        yield from _in_order(maker, chain(few, rest), shards, settings, pool)
    finally:
        if pool is not None:
            pool.close()


def _in_order(
    maker: ShardMaker, requests: Iterator[Message], shards: Path, settings: dict[str, Any], pool: _Pool | None
) -> Iterator[tuple[Header, Message]]:
    key = blake2b(json.dumps(settings).encode(), digest_size=16).digest()

    def make(request: Message) -> tuple[Header, Message]:
        path = shards / f"{_hash(key, request)}.shard"
        if (shard := _load(path)) is None:
            if pool is None:
                with threads():
                    _save(maker.make(request), path)
            else:
                pool.make(request, path)
            shard = _load(path)
            if shard is None:
                raise UserError(f"{path}: was removed or changed while it was needed")
        return request.header, shard  # the text is needed no more

    if pool is None:
        yield from map(make, requests)
        return
    waiting: deque[Future[tuple[Header, Message]]] = deque()
    with ThreadPoolExecutor(pool.processes) as executor:
        try:
            for request in requests:
                waiting.append(executor.submit(make, request))
                if len(waiting) > 2 * pool.processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            pool.close()  # ends those that are waited for


def _hash(key: bytes, message: Message) -> str:
    digest = blake2b(key, digest_size=16)
    digest.update(json.dumps([message.header, [len(part) for part in message.parts]]).encode())
    for part in message.parts:
        digest.update(part)
    return digest.hexdigest()


# Files


def _save(shard: Message, path: Path) -> None:
    """Write a shard under another name first, so that a file of this name is complete."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            _send(file, Message({"digest": _hash(b"", shard), "header": shard.header}, shard.parts))
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _load(path: Path) -> Message | None:
    """Read a shard; None if there is none, or not all of it (a machine may have stopped before it was on disk)."""
    try:
        with path.open("rb") as file:
            saved = _receive(file)
        if saved is None:
            return None
        shard = Message(saved.header["header"], saved.parts)
        return shard if _hash(b"", shard) == saved.header["digest"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _send(stream: Any, message: Message) -> None:
    """Write a message: a line of JSON, and the bytes after it."""
    sizes = [len(part) for part in message.parts]
    stream.write(json.dumps({"sizes": sizes, "header": message.header}).encode() + b"\n")
    stream.writelines(message.parts)
    stream.flush()


def _receive(stream: Any) -> Message | None:
    """Read a message; None at the end, or if the process that wrote it was killed meanwhile."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    header = json.loads(line)
    parts = [stream.read(size) for size in header["sizes"]]
    return Message(header["header"], parts) if [len(part) for part in parts] == header["sizes"] else None


# Processes


class _Pool:
    """Processes that make shards, started when they are needed. They end with their input, so with this process."""

    def __init__(self, module: str, settings: dict[str, Any], processes: int) -> None:
        self.processes = processes
        self._module = module
        self._settings = Message(settings, ())
        self._idle: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
        for _ in range(processes):
            self._idle.put(None)
        self._started: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def make(self, request: Message, path: Path) -> None:
        """Have a shard made; called by one thread for each process."""
        process = self._idle.get()
        try:
            process = process or self._start()
            assert process.stdin is not None and process.stdout is not None
            _send(process.stdin, Message({"path": str(path), "request": request.header}, request.parts))
            answer = _receive(process.stdout)
        except (BrokenPipeError, ValueError):
            answer = None
        finally:
            self._idle.put(process)
        if answer is None:
            raise UserError("a process that turns text into tokens has ended; perhaps memory ran out")
        if error := answer.header["error"]:
            raise UserError(error)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise BrokenPipeError
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, *sys.path]))
        process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._started.append(process)
        _send(process.stdin, self._settings)
        return process

    def close(self) -> None:
        self._closed = True
        for process in self._started:
            process.kill()  # a shard is there or not; nothing is lost
        for process in self._started:
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):
                    if stream is not None:
                        stream.close()
        self._started.clear()


def serve(
    restore: Callable[[dict[str, Any], Codec], ShardMaker], requests: BinaryIO | None = None, answers: Any = None
) -> None:
    """Make shards as asked for, until there are no more requests. `restore` makes the maker of settings and a codec."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks decides
    requests, answers = requests or sys.stdin.buffer, answers or sys.stdout.buffer
    settings = _receive(requests)
    if settings is None:
        return
    text = parse(TextConfig, settings.header["text"], "text")
    maker = restore(settings.header, Codec.load(settings.header["codec_at"], text))
    while (message := _receive(requests)) is not None:
        path, error = Path(message.header["path"]), ""
        try:
            _save(maker.make(Message(message.header["request"], message.parts)), path)
        except UserError as problem:
            error = str(problem)
        except OSError as problem:
            error = f"{path}: cannot write: {problem.strerror or problem}"
        try:
            _send(answers, Message({"error": error}, ()))
        except BrokenPipeError:  # it was killed while it waited
            os._exit(0)  # without a last attempt to write what is left


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

    module = "regard.data.encode"

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
