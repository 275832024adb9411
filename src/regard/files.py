"""Files: atomic writes (a crash leaves the old file or the new one, never half of one), locks, JSON, TOML as text."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from regard.errors import UserError

if sys.platform != "win32":
    import fcntl

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # of a file system without them


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` by a file that `write` fills under a temporary name and that is synced before the rename."""
    temporary = _temporary(path)
    with _writing(path, temporary):
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)
    _sync_rename(path.parent)


def replace_directory(path: Path, write: Callable[[Path], object], temporary: Path | None = None) -> None:
    """The same for a directory.

    It is written to `temporary`, by default a unique name; under a given name remains of a killed process are removed.
    """
    temporary = temporary or _temporary(path)
    old = temporary.with_name(temporary.name + ".old")
    with _writing(path, temporary):
        for remains in (temporary, old):
            shutil.rmtree(remains, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        for file in temporary.rglob("*"):
            sync(file)
        sync(temporary)
        moved = path.exists()
        if moved:
            os.rename(path, old)
        try:
            os.rename(temporary, path)
        except BaseException:
            if moved:
                os.rename(old, path)
            raise
    shutil.rmtree(old, ignore_errors=True)
    _sync_rename(path.parent)


def _temporary(path: Path) -> Path:
    """A name next to `path` that no other process, thread or machine uses."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


@contextmanager
def _writing(path: Path, temporary: Path) -> Iterator[None]:
    """Remove `temporary` after any failure, and turn a failed write into a UserError."""
    try:
        yield
    except BaseException as error:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(OSError):  # it may never have come to be
                temporary.unlink()
        if not isinstance(error, OSError):
            raise
        message = f"{path}: cannot write: {error.strerror or error}; what was there before is untouched"
        raise UserError(message) from error


class LockHeld(UserError):
    """Another process has the lock."""


@contextmanager
def hold_lock(path: Path, name: str) -> Iterator[bool]:
    """Hold the lock on `path` -> whether the file system has locks; if another process has it, LockHeld names that.

    The kernel keeps the lock, so it ends with its process however that ends, and a file left behind is no obstacle.
    """
    try:
        handle, held = _lock(path, name)
    except OSError as error:
        raise UserError(f"{path}: cannot lock: {error.strerror or error}") from None
    try:
        yield held
    finally:
        try:
            with suppress(OSError):
                if os.path.samestat(os.stat(path), os.fstat(handle)):
                    os.unlink(path)  # while it is locked: a process that has opened it meanwhile opens it again
        finally:
            os.close(handle)


def _lock(path: Path, name: str) -> tuple[int, bool]:
    """Open and lock a file, and write into it who we are."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            held = _try_lock(handle)
            if held is None:
                raise LockHeld(f"{name}: {_holder(handle)} is writing here; wait until it ends, or stop it")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(handle)):
                    os.ftruncate(handle, 0)
                    since = time.strftime("%Y-%m-%d %H:%M:%S")
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()} (since {since})\n".encode())
                    return handle, held
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its last holder has removed it


def _try_lock(handle: int) -> bool | None:
    """Whether the file is locked now; None if another process has locked it, False if there are no locks."""
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


def _holder(handle: int) -> str:
    return os.pread(handle, 200, 0).decode("utf-8", "replace").strip() or "another process"


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot remove: {error.strerror or error}") from None


def _sync_rename(directory: Path) -> None:
    """Sync a rename; a file system that cannot is no error, since the new file is in place by then."""
    with suppress(OSError):
        sync(directory)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by the JSON of `value`."""
    text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Any:
    """The JSON in `path`; a missing or broken file is a UserError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None


def json_object(text: str) -> dict[str, Any]:
    """A JSON object without keys that come twice, NaN and half characters, all of which would be lost."""

    def refuse(word: str) -> None:
        raise UserError(f"not JSON: {word}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        for key in data if len(data) < len(pairs) else ():
            if sum(name == key for name, _ in pairs) > 1:
                raise UserError(f"{key}: comes twice")
        return data

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
        if "\\u" in text:
            json.dumps(data, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        wrong = f"{error.msg}, at column {error.colno}" if text.strip() else "a blank line"
        raise UserError(f"not JSON: {wrong}") from None
    except UnicodeEncodeError as error:
        raise UserError(f"not text: {error.object[error.start]!r} is half of a character") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON that can be read: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f'not a JSON object, such as {{"source": "abc"}}, but {str(data)[:40]!r}')
    return data


def sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def to_toml(tables: Mapping[str, Any]) -> str:
    """TOML that `tomllib` reads back as `tables`: text, numbers, booleans, lists and tables of them.

    TOML has no null: a key whose value is None is left out.
    """
    lines: list[str] = []
    _table(tables, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    """A table's own values first: whatever follows a header belongs to that header."""
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in table.items() if key not in inner and value is not None}
    if path and (plain or not inner):
        lines.append(f"\n[{'.'.join(map(_key, path))}]")
    lines.extend(f"{_key(key)} = {_toml(value)}" for key, value in plain.items())
    for key, value in inner.items():
        _table(value, (*path, key), lines)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # of floats, the shortest that reads back the same; 1e-09, inf and nan are TOML too
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_toml, value)) + "]"
    raise TypeError(f"not a TOML value: {value!r}")


def _string(text: str) -> str:
    return '"' + "".join(_SHORT.get(c) or (c if c.isprintable() else _escape(c)) for c in text) + '"'


def _escape(character: str) -> str:
    """The escape of an unprintable character; TOML has none for half a surrogate pair."""
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        code = 0xFFFD
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
