"""Files: atomic writes (a crash leaves the complete old or new file), locks, JSON, and manifests of checksums."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from regard.config import Value, parse
from regard.errors import UserError

if sys.platform != "win32":
    import fcntl

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # errors of a file system without locks


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file: `write` fills a temporary file, which is synced and renamed to `path`."""
    with _replacing(path) as temporary:
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)


def replace_directory(path: Path, write: Callable[[Path], object], temporary: Path | None = None) -> None:
    """Replace a directory, like `replace_file`.

    The temporary directory has a unique name by default. With a fixed name, remains of a killed process are removed.
    """
    with _replacing(path, temporary) as temporary:
        old = temporary.with_name(temporary.name + ".old")
        for remains in (temporary, old):
            shutil.rmtree(remains, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        for file in (*temporary.rglob("*"), temporary):
            sync(file)
        if path.exists():
            os.rename(path, old)
        try:
            os.rename(temporary, path)
        except BaseException:
            if old.exists():
                os.rename(old, path)
            raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """A temporary path, to be renamed to `path`; removed after a failure. A failed write becomes a UserError."""
    temporary = temporary or path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
    except BaseException as error:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(OSError):  # the file may not exist
                temporary.unlink()
        if not isinstance(error, OSError):
            raise
        message = f"{path}: cannot write: {error.strerror or error}; the previous content is unchanged"
        raise UserError(message) from error
    with suppress(OSError):  # the new file is already in place, and some file systems cannot sync a directory
        sync(path.parent)


def make_directory(path: Path, name: str) -> None:
    """Make a directory and its parents; `name` is its name in the error."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{name}: cannot make this directory: {error.strerror or error}") from None


class LockHeld(UserError):
    """Another process holds the lock."""


@contextmanager
def hold_lock(path: Path, name: str) -> Iterator[bool]:
    """Hold the lock on `path` -> whether the file system supports locks. LockHeld names the process that holds it.

    The kernel releases the lock whenever its process exits, so a leftover lock file is harmless.
    """
    try:
        handle, supported = _lock(path, name)
    except OSError as error:
        raise UserError(f"{path}: cannot lock: {error.strerror or error}") from None
    try:
        yield supported
    finally:
        try:
            with suppress(OSError):
                if os.path.samestat(os.stat(path), os.fstat(handle)):
                    os.unlink(path)  # before the release: a process waiting with this file open then opens a new one
        finally:
            os.close(handle)


def _lock(path: Path, name: str) -> tuple[int, bool]:
    """Open and lock a file, and write the name of this process into it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = _try_lock(handle)
            if locked is None:
                holder = os.pread(handle, 200, 0).decode("utf-8", "replace").strip() or "another process"
                raise LockHeld(f"{name}: {holder} is writing here; wait until it ends, or stop it")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(handle)):
                    os.ftruncate(handle, 0)
                    since = time.strftime("%Y-%m-%d %H:%M:%S")
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()} (since {since})\n".encode())
                    return handle, locked
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the previous holder has removed this file


def _try_lock(handle: int) -> bool | None:
    """True if the file is now locked, None if another process holds the lock, False if locks are not supported."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def remove(path: Path) -> None:
    """Remove a file if it exists."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot remove: {error.strerror or error}") from None


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by the JSON of `value`."""
    text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Any:
    """The JSON in `path`; a UserError if the file is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; refuse duplicate keys, NaN and lone surrogates, which would be lost silently."""

    def refuse(word: str) -> None:
        raise UserError(f"not JSON: {word}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            names = [name for name, _ in pairs]
            raise UserError(f"{next(name for name in data if names.count(name) > 1)}: occurs twice")
        return data

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
        if "\\u" in text:
            json.dumps(data, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        wrong = f"{error.msg}, at column {error.colno}" if text.strip() else "a blank line"
        raise UserError(f"not JSON: {wrong}") from None
    except UnicodeEncodeError as error:
        raise UserError(f"not text: {error.object[error.start]!r} is half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f'not a JSON object, such as {{"source": "abc"}}, but {str(data)[:40]!r}')
    return data


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


MANIFEST = "manifest.json"
MAX_HASHED_BYTES = 16 * 2**20  # larger files are hashed only by `verify`; hashing one of this size takes 10 to 40 ms
MAX_TEXT_BYTES = 64 * 2**20  # limit of files that are read as a whole: twice the largest published tokenizers
TEXT_SUFFIXES = (".json", ".toml", ".txt", ".model", ".spm")  # suffixes of files that are read as a whole

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]


class Entry(Value):
    """Size and checksum of a file when it was saved."""

    size: Annotated[int, Field(ge=0, strict=True)]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Manifest(Value):
    """The content of manifest.json."""

    format: Literal[1] = 1
    files: dict[Name, Entry] = Field(default_factory=dict, max_length=1000)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a directory; an empty one if it has none, like directories of early versions."""
    path = directory / MANIFEST
    if not path.exists():
        return Manifest()
    require_own_files(directory, [MANIFEST])
    data = read_json(path)
    return parse(Manifest, data if isinstance(data, dict) else {"files": data}, str(path))


def update_manifest(directory: Path, names: Iterable[str]) -> None:
    """Write the entries of these files. Other entries are kept while their files exist."""
    files = {name: measure_file(directory / name) for name in names if (directory / name).is_file()}
    _write(directory, {n: e for n, e in _entries(directory).items() if (directory / n).is_file()} | files)


@contextmanager
def rewriting(directory: Path, *names: str) -> Iterator[None]:
    """Update the entries of files that are written inside the context.

    The entries are removed first: after a kill, a file has no entry instead of a wrong one.
    """
    before = _entries(directory)
    if before.keys() & set(names):
        _write(directory, {name: entry for name, entry in before.items() if name not in names})
    yield
    update_manifest(directory, names)


def _entries(directory: Path) -> dict[str, Entry]:
    """The current entries; none if the manifest is invalid."""
    with suppress(UserError):
        return dict(read_manifest(directory).files)
    return {}


def _write(directory: Path, files: dict[str, Entry]) -> None:
    write_json(directory / MANIFEST, Manifest(files=dict(sorted(files.items()))).model_dump(mode="json"))


def measure_file(path: Path) -> Entry:
    try:
        with path.open("rb") as file:
            return Entry(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=file.tell())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def changed_files(directory: Path, names: Collection[str] | None = None, verify: bool = False) -> list[str]:
    """Differences from the manifest, one line per file; `names` selects files.

    `verify` also hashes files above MAX_HASHED_BYTES, which are otherwise compared by size, and reports missing files.
    """
    wrong = []
    for name, entry in read_manifest(directory).files.items():
        path = directory / name
        if names is not None and name not in names:
            continue
        if not path.is_file():
            if verify:
                wrong.append(f"{path}: is missing")
            continue
        require_own_files(directory, [name])
        size = path.stat().st_size
        if size != entry.size:
            wrong.append(f"{path}: has changed: {size:,} bytes instead of {entry.size:,}")
        elif (verify or size <= MAX_HASHED_BYTES) and measure_file(path) != entry:
            wrong.append(f"{path}: has changed: same size, but another SHA-256")
    return wrong


def require_unchanged(directory: Path, advice: str, names: Collection[str] | None = None, verify: bool = False) -> None:
    """Raise one error for all files that differ from the manifest, with `advice`."""
    if wrong := changed_files(directory, names, verify):
        raise UserError("\n  ".join([*wrong, advice]))


def require_own_files(directory: Path, names: Iterable[str]) -> None:
    """Refuse files that lie outside the directory, are not plain files, or are too large to be read as a whole."""
    home = directory.resolve()
    # In a download cache, files are links to blobs; no other link may point out of the directory.
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    for name in names:
        path = directory / name
        try:
            target = path.resolve(strict=True)
            size = target.stat().st_size
        except FileNotFoundError:
            if path.is_symlink():
                raise UserError(f"{path}: is a link to a missing file") from None
            continue
        except (OSError, RuntimeError) as error:  # a cycle of links, a directory without read permission
            raise UserError(f"{path}: cannot be read: {error}") from None
        if not (target.is_relative_to(home) or target.is_relative_to(blobs)):
            raise UserError(f"{path}: points out of its directory; only files inside the directory are read")
        if not (target.is_file() or target.is_dir()):
            raise UserError(f"{path}: is not a plain file")
        if size > MAX_TEXT_BYTES and path.suffix in TEXT_SUFFIXES:
            most = MAX_TEXT_BYTES // 2**20
            raise UserError(f"{path}: has {size / 2**20:,.0f} MB; at most {most} MB are allowed")
