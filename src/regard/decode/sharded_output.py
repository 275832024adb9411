"""Output in shards: a file of lines answered part by part, by any number of processes, and resumed after any kill.

Next to the output, `OUT.shards` holds `command.json`, which says whose state it is and where the shards of the input
begin, and a file for each shard that is done: complete, or not there. A process claims a shard by a lock, which the
kernel takes away when the process ends, however it ends. Where a file system has no locks a shard may be answered
twice, with the same result. When all shards are there they are joined, and the directory is removed: it is renamed
first, so that nobody finds a part of it, and what a kill leaves of it is removed by the next command.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from regard.data.reader import STDIN, Line, lines_of, open_bytes
from regard.errors import UserError, plural
from regard.files import LockHeld, hold_lock, read_json, remove, replace_file, sync, write_json

FORMAT = 1
COMMAND, LOCK, JOINED = "command.json", "lock", "joined"
DISCARDED = ".done"  # ends the name of a state that is being removed
REMAINS = re.compile(rf"\d{{6,}}\.(shard|lock)|{JOINED}|{LOCK}|.*\.tmp")  # what a state may have without its command
CHUNK = 1 << 20
POLL = 0.2  # seconds between two looks at shards that others have claimed
ENDING = 5.0  # seconds that the workers of a killed process may take to end, and to give up its lock
NAMED = 3  # differences that are named

Counts = dict[str, Any]  # about the lines of a shard, as JSON
Answer = Callable[[Iterable[Line]], tuple[Counts, str]]  # what is done with a shard: lines -> counts, output


class Shard(NamedTuple):
    """Some lines of the input: where they are, and the number of the first."""

    number: int
    first: int
    offset: int  # in bytes, unpacked
    size: int


class Input(NamedTuple):
    """The input as it was read: what identifies it, and where its shards begin and the last one ends."""

    sha256: str
    lines: int  # of a shard
    offsets: list[int]

    @classmethod
    def scan(cls, path: str, lines: int) -> Input:
        """Read a file once."""
        digest, offsets, size, ends = hashlib.sha256(), [0], 0, 0
        with open_bytes(path) as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
                ends_N = size + 1 + np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
                offsets += ends_N[lines - 1 - ends % lines :: lines].tolist()
                size, ends = size + len(chunk), ends + len(ends_N)
        return cls(digest.hexdigest(), lines, offsets if offsets[-1] == size else [*offsets, size])

    @property
    def shards(self) -> list[Shard]:
        starts, stops = self.offsets[:-1], self.offsets[1:]
        return [
            Shard(number, 1 + number * self.lines, start, stop - start)
            for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
        ]


class ShardDirectory:
    """The state of one command, as one process sees it; a context manager that closes the input."""

    def __init__(self, out: Path) -> None:
        """Open what `begin` has made."""
        self.out, self.path = out, state_of(out)
        saved = read_json(self.path / COMMAND)
        self.file: str = saved["file"]
        self.shards = Input(**saved["input"]).shards
        self._stack = ExitStack()
        self._stream: BinaryIO | None = None
        self._at = 0  # bytes of it that were read, or are about to be
        self._scanned: tuple[int, int] | None = None  # the state of the input, if this process has scanned it

    @classmethod
    @contextmanager
    def begin(cls, out: Path, file: str, lines: int, command: Mapping[str, Any]) -> Iterator[Self]:
        """Begin a command, or go on with it if it was interrupted; it is locked until the end.

        `lines` make a shard. `command` is all that the output depends on, beside the input, as JSON; the state of
        another command is refused.
        """
        path = state_of(out)
        _check_paths(out, file)
        scanned = _state(file)
        found = Input.scan(file, lines)
        saved = {"format": FORMAT, "file": str(Path(file).resolve()), "command": command, "input": found._asdict()}
        wanted = json.loads(json.dumps(saved))
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot make this directory: {error.strerror}") from None
        with _locked(path):
            shutil.rmtree(_discarded(path), ignore_errors=True)  # of a command that was killed when all was done
            _require_same(path, wanted)
            write_json(path / COMMAND, wanted)
            with cls(out) as directory:
                directory._scanned = scanned
                yield directory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def missing(self) -> list[Shard]:
        """Shards that are not done."""
        return [shard for shard in self.shards if not self._file(shard).exists()]

    def work(self, answer: Answer, rank: int = 0, ranks: int = 1) -> None:
        """Answer shards until there are none to claim; the first rank waits for those of others, and takes over.

        Each begins with every `ranks`-th shard, then goes on with what others have left.
        """
        try:
            left = sorted(self.missing(), key=lambda shard: (shard.number - rank) % ranks)
            while left := [shard for shard in left if not self.answer(shard, answer)]:
                if rank:
                    return
                time.sleep(POLL)
        except UserError:
            if rank and not self.path.exists():  # all was done, and joined meanwhile
                return
            raise

    def answer(self, shard: Shard, answer: Answer) -> bool:
        """Answer a shard -> whether it is done: not if another process has claimed it."""
        file = self._file(shard)
        if file.exists():
            return True
        try:
            with hold_lock(file.with_suffix(".lock"), str(file)):
                if not file.exists():
                    self._write(file, *answer(self._lines(shard)))
        except LockHeld:
            return False
        return True

    def _write(self, file: Path, counts: Counts, text: str) -> None:
        """A line of JSON, then the output; text that is no UTF-8 is replaced, as on stdout."""
        output = text.encode("utf-8", "replace")
        header = json.dumps({"bytes": len(output), "counts": counts}).encode()
        replace_file(file, lambda temporary: temporary.write_bytes(header + b"\n" + output))

    def _lines(self, shard: Shard) -> Iterator[Line]:
        """The lines of a shard; the input stays open, for in packed data the way back to a place is long."""
        if self._stream is None or (self._at > shard.offset and not self._stream.seekable()):
            self._stack.close()
            self._stream, self._at = self._stack.enter_context(open_bytes(self.file)), 0
        if self._stream.seekable():
            self._stream.seek(shard.offset)
        else:
            while self._at < shard.offset and (skipped := self._stream.read(min(CHUNK, shard.offset - self._at))):
                self._at += len(skipped)
        self._at = shard.offset + shard.size
        return lines_of(self._stream, shard.first, shard.size)

    def join(self) -> list[Counts]:
        """Write the output and remove the state -> the counts of the shards, in order."""
        counts: list[Counts] = []
        joined = self.path / JOINED
        try:
            with joined.open("wb") as output:
                for shard in self.shards:
                    counts.append(self._copy(self._file(shard), output))
            sync(joined)
            self._require_unchanged()
            os.replace(joined, self.out)
        except OSError as error:
            again = "the shards are kept; the same command goes on from there"
            raise UserError(f"{self.out}: cannot write: {error.strerror or error}; {again}") from None
        with suppress(OSError):  # not every file system can
            sync(self.out.parent)
        _discard(self.path)
        return counts

    def _require_unchanged(self) -> None:
        """Refuse an output of two inputs; its shards are of no use."""
        if self._scanned is not None and _state(self.file) != self._scanned:
            _discard(self.path)
            raise UserError(f"{self.file}: has changed while it was read; start the command again, from the beginning")

    def _copy(self, file: Path, output: BinaryIO) -> Counts:
        with file.open("rb") as shard:
            try:
                header = json.loads(shard.readline())
                size, counts = int(header["bytes"]), dict(header["counts"])
            except (ValueError, KeyError, TypeError):
                raise _broken(file) from None
            before = output.tell()
            shutil.copyfileobj(shard, output, CHUNK)
            if output.tell() - before != size:
                raise _broken(file)
        return counts

    def _file(self, shard: Shard) -> Path:
        return self.path / f"{shard.number:06}.shard"


def state_of(out: Path) -> Path:
    """The directory that holds the state of an output."""
    return out.with_name(out.name + ".shards")


def _discarded(path: Path) -> Path:
    return path.with_name(path.name + DISCARDED)


def _discard(path: Path) -> None:
    """Remove a state; under another name, for a part of it would look like another one, and late ranks add to it."""
    discarded = _discarded(path)
    shutil.rmtree(discarded, ignore_errors=True)
    try:
        os.rename(path, discarded)
    except OSError:  # a file system or system that cannot: what a kill leaves then is removed by `_require_same`
        discarded = path
    shutil.rmtree(discarded, ignore_errors=True)


def _state(file: str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _check_paths(out: Path, file: str) -> None:
    if file == STDIN:
        raise UserError("--out: standard input cannot be read again when the command goes on; name a file")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no directory {out.parent}")
    if os.path.exists(file) and not (os.path.isfile(file) or os.path.isdir(file)):
        raise UserError(f"--out: {file} is not a plain file, and cannot be read again when the command goes on")
    with open_bytes(file):  # a UserError says what is wrong with it
        pass
    if out.exists():
        if not out.is_file():
            raise UserError(f"--out {out}: is not a plain file; without --out the output goes to stdout")
        if os.path.samefile(out, file):
            raise UserError(f"--out {out}: is the input too; name another file")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock on a command; a process that was killed a moment ago may have workers that still end."""
    deadline = time.monotonic() + ENDING
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(hold_lock(path / LOCK, str(path)))
                break
            except LockHeld:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL)
        yield


def _require_same(path: Path, wanted: dict[str, Any]) -> None:
    """Refuse the state of another command, and a directory that is something else."""
    if not (path / COMMAND).exists():
        if others := sorted(x.name for x in path.iterdir() if not REMAINS.fullmatch(x.name)):
            raise UserError(f"{path}: is needed for the state of this command, but has other files ({others[0]})")
        for shard in path.glob("*.shard"):  # the rest of a removal: nothing says what it answers
            remove(shard)
        return
    if next(path.glob("*.shard"), None) is None:  # it ended before anything was done: nothing can be lost
        return
    saved = read_json(path / COMMAND)
    there, here = _flat(saved), _flat(wanted)
    if differences := [name for name in {**there, **here} if there.get(name) != here.get(name)]:
        shown = [f"{name}: {_shown(there, name)} there, {_shown(here, name)} now" for name in differences[:NAMED]]
        more = [f"and {plural(len(differences) - NAMED, 'other difference')}"] if len(differences) > NAMED else []
        advice = "finish that command, or remove the directory to begin anew"
        raise UserError("\n  ".join([f"{path}: belongs to another command; {advice}", *shown, *more]))


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """The values of nested objects by their dotted names, `offsets` aside, which follow from the input."""
    if not isinstance(value, dict):
        return {name: value}
    items = ((f"{name}.{key}" if name else key, each) for key, each in value.items() if key != "offsets")
    return {inner: found for key, each in items for inner, found in _flat(each, key).items()}


def _shown(values: dict[str, Any], name: str) -> str:
    text = json.dumps(values[name], ensure_ascii=False) if name in values else "nothing"
    return text if len(text) <= 60 else text[:57] + "..."


def _broken(file: Path) -> UserError:
    return UserError(f"{file}: is broken; remove it, and the same command makes it anew")
