"""Shards: parts of a text turned into ids, by several processes if there is much to do, and kept until the end.

A shard is a file whose name is a hash of all that it depends on: the text, the tokenizers and the settings. So a
process that was killed leaves shards that the next one finds, and never uses others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, NamedTuple, Protocol

from regard.config import parse
from regard.errors import UserError
from regard.text.codec import Codec, TextConfig
from regard.text.scheme import threads

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
