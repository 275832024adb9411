"""Files: opened without following links, atomic writes (a crash leaves the complete old or new file), locks, JSON,
and manifests of checksums.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import stat
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate, chain
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import IO, Annotated, Any, Literal

from pydantic import Field, StringConstraints

from regard.config import Value, parse
from regard.errors import UserError

if sys.platform != "win32":
    import fcntl

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # errors of a file system without locks
SCRATCH = "regard-scratch-"
SCRATCH_SECONDS = 60  # a younger directory may not be locked yet
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
PLAIN_FLAGS = NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)  # opening a pipe must not block
DIRECTORY_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)


def open_file(path: Path, mode: str = "rb", root: Path | None = None, buffering: int = -1) -> IO[bytes]:
    """Open a plain file without following links below the directory `root`, by default the directory of the file.

    `root` itself may be a link. Reading follows links that stay inside `root`, and those of a download cache into its
    own blobs. Raises UserError for other links and special files, and OSError like `open`.
    """

    def opener(_: str, flags: int) -> int:
        return _open(path, flags, root or path.parent)

    return open(path, mode, buffering, opener=opener)


def _open(path: Path, flags: int, root: Path) -> int:
    """Open a file or directory below `root` and check it; a file to be written has no other hard link."""
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        handle = _open_unlinked(path, flags & ~os.O_TRUNC, root)
    except OSError:
        if (link := _find_link(path, root)) is None:
            raise
        if writes:
            raise UserError(f"{link}: is a link; regard writes only into its own files, so remove it") from None
        target, root = _follow(path, root)
        handle = _open_unlinked(target, flags, root)
    try:
        state = os.fstat(handle)
        if not (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)):
            raise UserError(f"{path}: is not a plain file")
        if writes and state.st_nlink > 1:
            raise UserError(f"{path}: is a hard link to another file, which would change, too; replace it by a copy")
        if not writes and state.st_size > MAX_TEXT_BYTES and path.suffix in TEXT_SUFFIXES:
            most = MAX_TEXT_BYTES // 2**20
            raise UserError(f"{path}: has {state.st_size / 2**20:,.0f} MB; at most {most} MB are allowed")
        if flags & os.O_TRUNC:
            os.ftruncate(handle, 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _open_unlinked(path: Path, flags: int, root: Path) -> int:
    """Open a path below `root`, one component after the other; OSError if one of them is a link."""
    parts = path.relative_to(root).parts
    if not NO_FOLLOW or os.open not in os.supports_dir_fd:
        if _find_link(path, root):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return os.open(path, flags, 0o666)
    with ExitStack() as stack:
        directory = os.open(root, DIRECTORY_FLAGS)
        stack.callback(os.close, directory)
        for part in parts[:-1]:
            directory = os.open(part, DIRECTORY_FLAGS | NO_FOLLOW, dir_fd=directory)
            stack.callback(os.close, directory)
        return os.open(parts[-1] if parts else ".", flags | PLAIN_FLAGS, 0o666, dir_fd=directory)


def _find_link(path: Path, root: Path) -> Path | None:
    """The first component below `root` that is a link."""
    components = accumulate(path.relative_to(root).parts, Path.joinpath, initial=root)
    return next((component for component in components if component != root and component.is_symlink()), None)


def _follow(path: Path, root: Path) -> tuple[Path, Path]:
    """The target of a path with links, and the directory that it may lie in: `root`, or the blobs of its cache."""
    home = root.resolve()
    # In a download cache, files are links to blobs; no other link may point out of the directory.
    blobs = next((place.with_name("blobs") for place in home.parents if place.name == "snapshots"), home)
    try:
        target = path.resolve(strict=True)
    except FileNotFoundError:
        raise UserError(f"{path}: is a link to a missing file") from None
    except (OSError, RuntimeError) as error:  # a cycle of links
        raise UserError(f"{path}: cannot be read: {error}") from None
    for place in (home, blobs):
        if target.is_relative_to(place):
            return target, place
    raise UserError(f"{path}: points out of its directory; only files inside the directory are read")


def require_own_files(directory: Path, names: Iterable[str]) -> None:
    """Check files before a library reads them by path: like `open_file`, but a file may be missing or a directory."""
    for name in names:
        try:
            os.close(_open(directory / name, os.O_RDONLY, directory))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"{directory / name}: cannot be read: {error.strerror or error}") from None


def require_no_links(directory: Path, names: Iterable[str]) -> None:
    """Check files and directories, with everything below them, before a library writes there by path."""
    for path in map(directory.joinpath, names):
        below = (Path(base, name) for base, *lists in os.walk(path) for name in chain(*lists))
        for entry in chain([path], below):
            if entry.is_symlink():
                raise UserError(f"{entry}: is a link; regard writes only into its own files, so remove it")


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
def hold_lock(path: Path, name: str, root: Path | None = None) -> Iterator[bool]:
    """Hold the lock on `path` -> whether the file system supports locks. LockHeld names the process that holds it.

    The kernel releases the lock whenever its process exits, so a leftover lock file is harmless. `root` is that of
    `open_file`.
    """
    try:
        handle, supported = _lock(path, name, root or path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot lock: {error.strerror or error}") from None
    try:
        yield supported
    finally:
        try:
            with suppress(OSError):
                if os.path.samestat(os.lstat(path), os.fstat(handle)):
                    os.unlink(path)  # before the release: a process waiting with this file open then opens a new one
        finally:
            os.close(handle)


def _lock(path: Path, name: str, root: Path) -> tuple[int, bool]:
    """Open and lock a file, and write the name of this process into it."""
    while True:
        handle = _open(path, os.O_RDWR | os.O_CREAT, root)
        try:
            locked = _try_lock(handle)
            if locked is None:
                holder = os.pread(handle, 200, 0).decode("utf-8", "replace").strip() or "another process"
                raise LockHeld(f"{name}: {holder} is writing here; wait until it ends, or stop it")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(path), os.fstat(handle)):
                    os.ftruncate(handle, 0)
                    since = time.strftime("%Y-%m-%d %H:%M:%S")
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()} (since {since})\n".encode())
                    return handle, locked
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the previous holder has removed this file


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for temporary files. Those of killed processes are removed: their lock is free."""
    place = Path(gettempdir())
    for remains in place.glob(f"{SCRATCH}*"):
        with suppress(OSError, UserError):
            if time.time() - remains.lstat().st_mtime > SCRATCH_SECONDS:
                with hold_lock(remains / "lock", str(remains), root=place) as locked:
                    if locked:
                        shutil.rmtree(remains)
    with TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True) as path, hold_lock(Path(path) / "lock", path):
        yield Path(path)


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
        with open_file(path) as file:
            return json.loads(file.read().decode())
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
TEXT_SUFFIXES = (".json", ".toml", ".txt", ".model", ".spm", ".jinja")  # suffixes of files that are read as a whole

Name = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$", max_length=200)
]


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
    if not os.path.lexists(path):
        return Manifest()
    data = read_json(path)
    return parse(Manifest, data if isinstance(data, dict) else {"files": data}, str(path))


def update_manifest(directory: Path, names: Iterable[str]) -> None:
    """Write the entries of these files. Other entries are kept while their files exist."""
    files = {name: measure_file(directory / name, directory) for name in names if (directory / name).is_file()}
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


def measure_file(path: Path, root: Path | None = None) -> Entry:
    try:
        with open_file(path, root=root) as file:
            digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
            return Entry(sha256=digest.hexdigest(), size=file.tell())
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
        elif (verify or size <= MAX_HASHED_BYTES) and measure_file(path, directory) != entry:
            wrong.append(f"{path}: has changed: same size, but another SHA-256")
    return wrong


def require_unchanged(directory: Path, advice: str, names: Collection[str] | None = None, verify: bool = False) -> None:
    """Raise one error for all files that differ from the manifest, with `advice`."""
    if wrong := changed_files(directory, names, verify):
        raise UserError("\n  ".join([*wrong, advice]))


@contextmanager
def open_weights(path: Path, framework: str = "pt") -> Iterator[Any]:
    """Open a safetensors file; failures are UserErrors."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError(f"{path}: no such file; the run has no weights yet")
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None
