"""Sharded output: any number of processes answer the lines of a file shard by shard; a kill loses no finished shard.

The directory `OUT.shards` holds the command, the offsets of the shards in the input (`command.json`), and a file per
finished shard. A process claims a shard with a lock, which the kernel releases at its exit. With Ray Data, actors read
the input and write the shards themselves, so all machines need the same file system paths.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, Self

import numpy as np

from regard import files
from regard.data.reader import STDIN, Line, lines_of, open_bytes
from regard.errors import UserError, plural
from regard.parallel.ray_cluster import connected

FORMAT = 1
COMMAND, LOCK, JOINED = "command.json", "lock", "joined"
REMAINS = re.compile(rf"\d{{6,}}\.(shard|lock)|{JOINED}|{LOCK}|.*\.tmp")  # files of a state without its command
CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.2  # between two attempts to claim a shard that another process holds
LOCK_SECONDS = 5.0  # wait for the lock of a killed process, whose workers may still be exiting
MAX_DIFFERENCES = 3  # shown in an error

Counts = dict[str, Any]  # statistics of the lines of a shard, as JSON
Answer = Callable[[Iterable[Line]], tuple[Counts, str]]  # lines of a shard -> counts, output


class Shard(NamedTuple):
    """A range of lines of the input."""

    number: int
    first: int  # line number
    offset: int  # in bytes, decompressed
    size: int


class Input(NamedTuple):
    """The input: its hash, the lines per shard, the offset of each shard and of the end."""

    sha256: str
    lines: int
    offsets: list[int]

    @classmethod
    def scan(cls, path: str, lines: int) -> Input:
        """Read the whole file once."""
        digest = hashlib.sha256()
        offsets = [0]
        size = ends = 0
        with open_bytes(path) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
                ends_N = size + 1 + np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
                offsets += ends_N[lines - 1 - ends % lines :: lines].tolist()
                size += len(chunk)
                ends += len(ends_N)
        return cls(digest.hexdigest(), lines, offsets if offsets[-1] == size else [*offsets, size])

    @property
    def shards(self) -> list[Shard]:
        spans = enumerate(pairwise(self.offsets))
        return [Shard(number, 1 + number * self.lines, start, stop - start) for number, (start, stop) in spans]


class ShardDirectory:
    """The state of one command, opened by one process. Also a context manager, which closes the input."""

    def __init__(self, out: Path) -> None:
        """Open a state that `begin` has created."""
        self.out = out
        self.path = state_of(out)
        saved = files.read_json(self.path / COMMAND)
        self.file: str = saved["file"]
        self.shards = Input(**saved["input"]).shards
        self._stack = ExitStack()
        self._stream: BinaryIO | None = None
        self._position = 0  # in the stream
        self._scanned: tuple[int, int] | None = None  # size and time of the input when this process scanned it

    @classmethod
    @contextmanager
    def begin(cls, out: Path, file: str, lines: int, command: Mapping[str, Any]) -> Iterator[Self]:
        """Begin a command, or continue an interrupted one; the state is locked until the end of the context.

        `lines` is the size of a shard. `command` (JSON) is everything the output depends on except the input.
        """
        path = state_of(out)
        _check_paths(out, file)
        scanned = _size_and_time(file)
        source = Input.scan(file, lines)._asdict()
        state = {"format": FORMAT, "file": str(Path(file).resolve()), "command": command, "input": source}
        state = json.loads(json.dumps(state))  # normalised, because it is compared with a saved state
        files.require_no_links(path.parent, (path.name, _discarded(path).name))
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot make this directory: {error.strerror}") from None
        with _locked(path):
            shutil.rmtree(_discarded(path), ignore_errors=True)  # left by a command that was killed while it cleaned up
            _require_same(path, state)
            files.write_json(path / COMMAND, state)
            with cls(out) as directory:
                directory._scanned = scanned
                yield directory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def missing(self) -> list[Shard]:
        """The unfinished shards."""
        return [shard for shard in self.shards if not self._file(shard).exists()]

    def work(self, answer: Answer, rank: int = 0, ranks: int = 1) -> None:
        """Answer shards until no more can be claimed.

        Each rank starts with every `ranks`-th shard and continues with the remaining ones. The first rank waits for
        shards that other processes hold, and answers them if those processes die.
        """
        try:
            missing = sorted(self.missing(), key=lambda shard: (shard.number - rank) % ranks)
            while missing := [shard for shard in missing if not self.answer(shard, answer)]:
                if rank:
                    return
                time.sleep(POLL_SECONDS)
        except UserError:
            if rank and not self.path.exists():  # all shards were finished and joined in the meantime
                return
            raise

    def answer(self, shard: Shard, answer: Answer) -> bool:
        """Answer a shard -> whether it is finished; it is not if another process has claimed it."""
        file = self._file(shard)
        if file.exists():
            return True
        try:
            with files.hold_lock(file.with_suffix(".lock"), str(file), root=self.out.parent):
                if not file.exists():
                    counts, text = answer(self._lines(shard))
                    output = text.encode("utf-8", "replace")  # lone surrogates are replaced, as on stdout
                    header = json.dumps({"bytes": len(output), "counts": counts}).encode()
                    files.replace_file(file, lambda temporary: temporary.write_bytes(header + b"\n" + output))
        except files.LockHeld:
            return False
        return True

    def _lines(self, shard: Shard) -> Iterator[Line]:
        """The lines of a shard. The input stays open: seeking back in compressed data means reading it again."""
        if self._stream is None or (self._position > shard.offset and not self._stream.seekable()):
            self._stack.close()
            self._stream = self._stack.enter_context(open_bytes(self.file))
            self._position = 0
        if self._stream.seekable():
            self._stream.seek(shard.offset)
        else:
            while skipped := self._stream.read(min(CHUNK_BYTES, shard.offset - self._position)):
                self._position += len(skipped)
        self._position = shard.offset + shard.size
        return lines_of(self._stream, shard.first, shard.size)

    def join(self) -> list[Counts]:
        """Write the output, then remove the state -> the counts of the shards, in order."""
        counts: list[Counts] = []
        joined = self.path / JOINED
        try:
            with files.open_file(joined, "wb", root=self.out.parent) as output:
                for shard in self.shards:
                    counts.append(self._copy(self._file(shard), output))
            files.sync(joined)
            if self._scanned is not None and _size_and_time(self.file) != self._scanned:
                _discard(self.path)
                raise UserError(f"{self.file}: has changed while it was read; run the command again from the beginning")
            os.replace(joined, self.out)
        except OSError as error:
            advice = "the shards are kept; the same command continues from there"
            raise UserError(f"{self.out}: cannot write: {error.strerror or error}; {advice}") from None
        with suppress(OSError):  # some file systems cannot sync a directory
            files.sync(self.out.parent)
        _discard(self.path)
        return counts

    def _copy(self, file: Path, output: IO[bytes]) -> Counts:
        start = output.tell()
        try:
            with files.open_file(file) as shard:
                header = json.loads(shard.readline())
                shutil.copyfileobj(shard, output, CHUNK_BYTES)
            if output.tell() - start != header["bytes"]:
                raise ValueError("incomplete")
            return dict(header["counts"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{file}: is broken; remove it, and the same command writes it again") from None

    def _file(self, shard: Shard) -> Path:
        return self.path / f"{shard.number:06}.shard"


def state_of(out: Path) -> Path:
    """The state directory of an output."""
    return out.with_name(out.name + ".shards")


def _discarded(path: Path) -> Path:
    """The new name of a state directory that is being removed."""
    return path.with_name(path.name + ".done")


def _discard(path: Path) -> None:
    """Rename a state, then remove it: late ranks must not add shards to a directory that is being removed."""
    discarded = _discarded(path)
    shutil.rmtree(discarded, ignore_errors=True)
    try:
        os.rename(path, discarded)
    except OSError:  # not possible on this system; `_require_same` handles an incomplete removal
        discarded = path
    shutil.rmtree(discarded, ignore_errors=True)


def _size_and_time(file: str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _check_paths(out: Path, file: str) -> None:
    if file == STDIN:
        raise UserError("--out: standard input cannot be read again when the command continues; name a file")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no directory {out.parent}")
    if os.path.exists(file) and not (os.path.isfile(file) or os.path.isdir(file)):
        raise UserError(f"--out: {file} is not a plain file, and cannot be read again when the command continues")
    with open_bytes(file):  # raises a UserError if it is not readable
        pass
    if out.exists():
        if not out.is_file():
            raise UserError(f"--out {out}: is not a plain file; without --out the output goes to stdout")
        if os.path.samefile(out, file):
            raise UserError(f"--out {out}: is also the input; name another file")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a state; the workers of a process that was just killed may hold it for a moment."""
    deadline = time.monotonic() + LOCK_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(files.hold_lock(path / LOCK, str(path), root=path.parent))
                break
            except files.LockHeld:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_SECONDS)
        yield


def _require_same(path: Path, state: dict[str, Any]) -> None:
    """Refuse the state of a different command, and a directory with unrelated files."""
    if not (path / COMMAND).exists():
        if foreign := sorted(x.name for x in path.iterdir() if not REMAINS.fullmatch(x.name)):
            raise UserError(f"{path}: is needed for the state of this command, but has other files ({foreign[0]})")
        for shard in path.glob("*.shard"):  # left by an incomplete removal: their command is unknown
            files.remove(shard)
        return
    if next(path.glob("*.shard"), None) is None:  # no shard is finished, so nothing can be lost
        return
    saved = _flat(files.read_json(path / COMMAND))
    current = _flat(state)
    if differences := [name for name in {**saved, **current} if saved.get(name) != current.get(name)]:
        lines = [f"{path}: belongs to another command; finish it, or remove the directory to start over"]
        for name in differences[:MAX_DIFFERENCES]:
            lines.append(f"{name}: {_shown(saved, name)} there, {_shown(current, name)} now")
        if len(differences) > MAX_DIFFERENCES:
            lines.append(f"and {plural(len(differences) - MAX_DIFFERENCES, 'other difference')}")
        raise UserError("\n  ".join(lines))


def _flat(tables: dict[str, Any], before: str = "") -> dict[str, Any]:
    """The values of nested objects by dotted name, without `offsets`, which follow from the input."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if key != "offsets":
            flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return flat


def _shown(values: dict[str, Any], name: str) -> str:
    text = json.dumps(values[name], ensure_ascii=False) if name in values else "nothing"
    return text if len(text) <= 60 else text[:57] + "..."


class ShardActor:
    """A Ray actor that answers shards by number; if it dies, Ray restarts it and reassigns its shard."""

    def __init__(self, out: str, make: Callable[[], Answer]) -> None:
        self.out = Path(out)
        self.make = make

    @cached_property
    def opened(self) -> tuple[ShardDirectory, Answer]:
        """Opened at the first shard, so that an error is reported for that shard."""
        return ShardDirectory(self.out), self.make()

    def __call__(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """Answer a shard -> the error message or an empty text. Ray would report an exception as a traceback."""
        [number] = numbers["number"]
        try:
            directory, answer = self.opened
            while not directory.answer(directory.shards[int(number)], answer):
                time.sleep(POLL_SECONDS)  # claimed by an actor of a killed driver, which exits soon
        except UserError as error:
            return {"error": [str(error)]}
        return {"error": [""]}


def answer_on_ray(
    directory: ShardDirectory, make: Callable[[], Answer], address: str, actors: int | None, cpus: int, gpus: int
) -> None:
    """Answer all missing shards with `actors` Ray actors, by default as many as its resources allow.

    Each actor calls `make` once, and gets `cpus` processors and `gpus` GPUs. For `address` see `ray_cluster.connected`.
    """
    missing = directory.missing()
    if not missing:
        return
    with connected(address) as ray:
        resources = ray.cluster_resources()
        actors = actors or (int(resources.get("GPU", 0)) // gpus if gpus else int(resources.get("CPU", 0)) // cpus)
        if not actors:
            need = "GPU" if gpus else f"{cpus} processors on it"
            raise UserError(f"--ray: the cluster has no machine with a {need}; its resources are {resources}")
        data = import_module("ray.data")
        data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        numbers = [{"number": shard.number} for shard in missing]
        # One block per shard: actors take whole blocks, and a block is repeated if its actor dies.
        rows = data.from_items(numbers, override_num_blocks=len(numbers)).map_batches(
            ShardActor,
            fn_constructor_args=(str(directory.out), make),
            batch_size=1,
            compute=data.ActorPoolStrategy(size=min(len(missing), actors)),
            num_cpus=cpus,
            num_gpus=gpus,
        )
        for row in rows.iter_rows():
            if row["error"]:
                raise UserError(row["error"])
