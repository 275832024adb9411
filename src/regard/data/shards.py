"""Shards: blocks of the corpora turned into ids, by several processes if there is much to do, and kept until the end.

A shard is a file whose name is a hash of all that it depends on: the text of the block, the tokenizers and the
settings. So a process that was killed leaves shards that the next one finds, and never uses others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import numpy as np

from regard.config import parse
from regard.data.corpora import Block, Corpora
from regard.data.encoding import BlockEncoder, ExampleEncoder, Limits, Rows, Shard
from regard.data.formats import SOURCES
from regard.data.holdout import Splitter
from regard.errors import UserError
from regard.text.codec import Codec, Example, TextConfig
from regard.text.scheme import threads

BLOCK = 4 << 20  # bytes of text
PAYS = 48 << 20  # bytes of text from which on other processes pay: they start in a second
PACKED = 3  # bytes of text in a byte of a compressed file, or so
FORMAT = 1


def encode_blocks(encoder: BlockEncoder, codec_at: Path, shards: Path, processes: int) -> Iterator[Shard]:
    """The shards of all blocks, in order; by up to `processes` processes, if they pay.

    The codec was saved in `codec_at`. Shards are kept in the directory `shards`; of a single block there is none.
    """
    blocks = encoder.corpora.blocks(BLOCK)
    few = list(islice(blocks, 2))
    if len(few) < 2:
        with threads():
            yield from map(encoder.encode, few)
        return
    shards.mkdir(parents=True, exist_ok=True)
    settings = _settings(encoder)
    pays = text_size(encoder.corpora) >= PAYS
    pool = _Pool({**settings, "codec_at": str(codec_at)}, processes) if pays and processes > 1 else None
    try:
        yield from _in_order(encoder, chain(few, blocks), shards, settings, pool)
    finally:
        if pool is not None:
            pool.close()


def text_size(corpora: Corpora) -> int:
    """About how many bytes of text there are."""
    packed = (".gz", ".zst", ".parquet")
    return sum(os.stat(path).st_size * (PACKED if path.endswith(packed) else 1) for path in corpora.paths)


def _in_order(
    encoder: BlockEncoder, blocks: Iterator[Block], shards: Path, settings: dict[str, Any], pool: _Pool | None
) -> Iterator[Shard]:
    key = blake2b(json.dumps(settings).encode(), digest_size=16).digest()

    def make(block: Block) -> Shard:
        path = shards / f"{_block_hash(key, block)}.shard"
        if (shard := _load(path)) is None:
            if pool is None:
                with threads():
                    _save(encoder.encode(block), path)
            else:
                pool.encode(block, path)
            shard = _load(path)
            if shard is None:
                raise UserError(f"{path}: was removed or changed while it was needed")
        return shard

    if pool is None:
        yield from map(make, blocks)
        return
    waiting: deque[Future[Shard]] = deque()
    with ThreadPoolExecutor(pool.processes) as executor:
        try:
            for block in blocks:
                waiting.append(executor.submit(make, block))
                if len(waiting) > 2 * pool.processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            pool.close()  # ends those that are waited for


def _settings(encoder: BlockEncoder) -> dict[str, Any]:
    """All that a shard depends on beside its block, from which another process can do the same."""
    codec = encoder.encoder.codec
    tokenizers = "".join(tokenizer.to_json() for tokenizer in (codec.source, codec.target))
    chosen = sorted(encoder.splitter.chosen) if encoder.splitter else None
    parts = [[type(part).__name__, *part] for part in encoder.corpora.parts]
    return {
        "format": FORMAT,
        "text": codec.config.model_dump(mode="json"),
        "tokenizers": blake2b(tokenizers.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest(),
        "labels": encoder.encoder.labels,
        "limits": encoder.encoder.limits,
        "held_out": chosen and [[checksum, digest.hex()] for checksum, digest in chosen],
        "strict": encoder.strict,
        "parts": parts,
        "row_groups": [_stamp(part.paths[0]) for part in encoder.corpora.parts if not part.in_blocks],
    }


def _stamp(path: str) -> tuple[int, int]:
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns


def _restore(settings: dict[str, Any]) -> BlockEncoder:
    """The encoder that settings describe."""
    codec = Codec.load(settings["codec_at"], parse(TextConfig, settings["text"], "text"))
    parts = []
    for kind, *fields in settings["parts"]:
        fields = [tuple(field) if isinstance(field, list) else field for field in fields]
        parts.append(SOURCES[kind](*fields))
    corpora = Corpora(tuple(parts), (len(parts),), ())
    held_out = settings["held_out"]
    splitter = None if held_out is None else Splitter((checksum, bytes.fromhex(text)) for checksum, text in held_out)
    encoder = ExampleEncoder(codec, Limits(*settings["limits"]), settings["labels"])
    return BlockEncoder(corpora, encoder, splitter, settings["strict"])


def _block_hash(key: bytes, block: Block) -> str:
    digest = blake2b(key, digest_size=16)
    first, texts = block.chunk
    digest.update(f"{block.part} {first} {[len(text) for text in texts]} ".encode())
    for text in texts:
        digest.update(text)
    if block.duplicates is not None:
        digest.update(block.duplicates.tobytes())
    return digest.hexdigest()


# Files


def _save(shard: Shard, path: Path) -> None:
    """Write a shard under another name first, so that a file of this name is complete."""
    parts = [
        bytes_
        for rows in (shard.train, shard.valid)
        for bytes_ in (rows.source, rows.target, *(each.tobytes() for each in rows[2:]))
    ]
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    header = {
        "sizes": [len(part) for part in parts],
        "digest": digest.hexdigest(),
        "examples": shard.examples,
        "counts": shard.counts,
    }
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            file.writelines(parts)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _load(path: Path) -> Shard | None:
    """Read a shard; None if there is none, or not all of it (a machine may have stopped before it was on disk)."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline())
            parts = [file.read(size) for size in header["sizes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    if digest.hexdigest() != header["digest"]:
        return None
    rows = []
    for source, target, *numbers in (parts[:5], parts[5:]):
        source_lengths, target_lengths, positions = (np.frombuffer(each, np.int64) for each in numbers)
        rows.append(Rows(source, target, source_lengths, target_lengths, positions))
    return Shard(rows[0], rows[1], [Example(*example) for example in header["examples"]], header["counts"])


# Processes


class _Pool:
    """Processes that make shards, started when they are needed. They end with their input, so with this process."""

    def __init__(self, settings: dict[str, Any], processes: int) -> None:
        self.processes = processes
        self._settings = json.dumps(settings).encode()
        self._idle: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
        for _ in range(processes):
            self._idle.put(None)
        self._started: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def encode(self, block: Block, path: Path) -> None:
        """Have a block turned into a shard; called by one thread for each process."""
        process = self._idle.get()
        try:
            process = process or self._start()
            assert process.stdin is not None and process.stdout is not None
            first, texts = block.chunk
            mask = b"" if block.duplicates is None else block.duplicates.tobytes()
            header = {"part": block.part, "first": first, "sizes": [len(text) for text in (*texts, mask)]}
            header |= {"path": str(path), "marked": block.duplicates is not None}
            _send(process.stdin, header, (*texts, mask))
            answer = process.stdout.readline()
        except (BrokenPipeError, ValueError):
            answer = b""
        finally:
            self._idle.put(process)
        if not answer:
            raise UserError("a process that turns text into tokens has ended; perhaps memory ran out")
        if error := json.loads(answer)["error"]:
            raise UserError(error)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise BrokenPipeError
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, *sys.path]))
        process = subprocess.Popen(
            [sys.executable, "-m", "regard.data.shards"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._started.append(process)
        assert process.stdin is not None
        process.stdin.write(self._settings + b"\n")
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


def _send(stream: Any, header: dict[str, Any], parts: Sequence[bytes]) -> None:
    stream.write(json.dumps(header).encode() + b"\n")
    for part in parts:
        stream.write(part)
    stream.flush()


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Make shards as asked for, until there are no more requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks decides
    encoder = _restore(json.loads(requests.readline()))
    while line := requests.readline():
        header = json.loads(line)
        parts = [requests.read(size) for size in header["sizes"]]
        if [len(part) for part in parts] != header["sizes"]:  # the process that asks was killed while it wrote
            return
        *texts, mask = parts
        duplicates = np.frombuffer(mask, np.bool_) if header["marked"] else None
        error = ""
        try:
            block = Block(header["part"], (header["first"], tuple(texts)), duplicates)
            _save(encoder.encode(block), Path(header["path"]))
        except UserError as problem:
            error = str(problem)
        except OSError as problem:
            error = f"{header['path']}: cannot write: {problem.strerror or problem}"
        try:
            _send(answers, {"error": error}, ())
        except BrokenPipeError:  # it was killed while it waited
            os._exit(0)  # without a last attempt to write what is left


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
