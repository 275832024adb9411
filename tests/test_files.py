"""Atomic writes leave the old or the new content; locks; JSON."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from regard import files
from regard.errors import UserError
from regard.files import hold_lock, read_json, replace_directory, replace_file, scratch_directory, write_json


def raise_disk_full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write_half(path: Path) -> None:
    path.write_text("half")
    raise_disk_full()


def write_all(path: Path) -> None:
    path.write_text("new")


@contextmanager
def failing(function: str) -> Iterator[None]:
    """Make every call of one function of the operating system fail."""
    module = shutil if function == "rmtree" else os
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function, raise_disk_full)
        yield


@pytest.mark.parametrize("old", [None, "old"])
@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_failed_write_leaves_only_the_old_file(tmp_path: Path, where: str, old: str | None) -> None:
    path = tmp_path / "x.json"
    if old is not None:
        path.write_text(old)
    with pytest.raises(UserError, match=r"x\.json: cannot write: No space left on device"):
        if where == "write":
            replace_file(path, write_half)
        else:
            with failing(where):
                replace_file(path, write_all)
    assert names(tmp_path) == ([] if old is None else ["x.json"])
    assert old is None or path.read_text() == old


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, UserError])
def test_errors_of_the_writer_leave_no_partial_file(tmp_path: Path, error: type[BaseException]) -> None:
    """Errors of the writer are raised unchanged and leave no partial file."""

    def stop(path: Path) -> None:
        target = path / "inner" if path.is_dir() else path
        target.write_text("half")
        raise error("stop")

    with pytest.raises(error, match="stop"):
        replace_file(tmp_path / "x", stop)
    with pytest.raises(error, match="stop"):
        replace_directory(tmp_path / "d", stop)
    assert names(tmp_path) == []


@pytest.mark.parametrize("where", ["write", "fsync", "rename", "mkdir"])
@pytest.mark.parametrize("old", [None, "old"])
def test_failed_write_leaves_only_the_old_directory(tmp_path: Path, where: str, old: str | None) -> None:
    path = tmp_path / "d"
    if old is not None:
        path.mkdir()
        (path / "a").write_text(old)

    def write(directory: Path) -> None:
        (directory / "a").write_text("new")
        (directory / "b").write_text("new")
        if where == "write":
            raise_disk_full()

    with pytest.raises(UserError, match=r"d: cannot write: No space left on device"):
        if where == "write":
            replace_directory(path, write)
        else:
            with failing(where):
                replace_directory(path, write)
    assert names(tmp_path) == ([] if old is None else ["d"])
    assert old is None or (names(path) == ["a"] and (path / "a").read_text() == old)


def test_error_after_the_rename_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems cannot sync a directory; the new file is already in place."""
    path = tmp_path / "x"
    path.write_text("old")
    sync = files.sync
    monkeypatch.setattr(files, "sync", lambda p: raise_disk_full() if p.is_dir() else sync(p))
    try:
        replace_file(path, write_all)
    except UserError as error:
        assert "untouched" not in str(error)
    assert path.read_text() == "new"
    assert names(tmp_path) == ["x"]


def test_new_files_and_directories_replace_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for text in ("one", "two"):
        replace_file(path, lambda p, text=text: p.write_text(text) and None)
        assert path.read_text() == text
    directory = tmp_path / "d"
    for name in ("a", "b"):
        replace_directory(directory, lambda p, name=name: (p / name).write_text(name) and None)
        assert names(directory) == [name]
    assert names(tmp_path) == ["d", "x"]


def test_files_are_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync = os.fsync
    replace = os.replace

    def log_calls(name: str, function: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: (calls.append(name), function(*args))[1]

    monkeypatch.setattr(os, "fsync", log_calls("sync", fsync))
    monkeypatch.setattr(os, "replace", log_calls("replace", replace))
    replace_file(tmp_path / "x", write_all)
    assert calls == ["sync", "replace", "sync"]


def test_all_files_of_a_directory_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in subdirectories are synced too."""
    synced_names: list[str] = []
    sync = files.sync
    monkeypatch.setattr(files, "sync", lambda p: (synced_names.append(p.name), sync(p))[1])

    def write(directory: Path) -> None:
        (directory / "deep").mkdir()
        (directory / "a").write_text("a")
        (directory / "deep" / "b").write_text("b")

    replace_directory(tmp_path / "d", write)
    assert {"a", "b", "deep"} <= set(synced_names)


def test_concurrent_writers_use_different_temporary_files(tmp_path: Path) -> None:
    """Two threads of one process write at the same time, each to its own temporary file."""
    path = tmp_path / "x"
    barrier = threading.Barrier(2, timeout=10)
    errors = []

    def writer(text: str) -> None:
        def write(temporary: Path) -> None:
            temporary.write_text(text)
            barrier.wait()
            barrier.wait()

        try:
            replace_file(path, write)
        except UserError as error:
            errors.append(error)

    threads = [threading.Thread(target=writer, args=(text * 1000,)) for text in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert path.read_text() in ("a" * 1000, "b" * 1000)
    assert names(tmp_path) == ["x"]


@contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    """Limit files to `size` bytes, to simulate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with limited_file_size(100), pytest.raises(UserError, match=r"x\.json: cannot write"):
        write_json(path, {"a": "b" * 10_000})
    assert read_json(path) == {"a": 1}
    assert names(tmp_path) == ["x.json"]


def test_json_round_trip_in_any_alphabet(tmp_path: Path) -> None:
    value = {"ключ": ["ö", "\u2028", "\x00", 1.5, None, True]}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    assert "ключ" in (tmp_path / "x.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_broken_json_is_a_user_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.json: not readable as JSON"):
        read_json(tmp_path / "x.json")


def test_missing_json_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json: no such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot write"):
        write_json(tmp_path / "none" / "x.json", {})


# Locks


HOLD_LOCK_SCRIPT = """
import sys
from pathlib import Path
from regard.files import hold_lock
with hold_lock(Path(sys.argv[1]), "run"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a lock."""
    command = [sys.executable, "-c", HOLD_LOCK_SCRIPT, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


@pytest.mark.parametrize("killed", [False, True])
def test_lock_has_one_holder_and_ends_with_its_process(tmp_path: Path, killed: bool) -> None:
    path = tmp_path / "lock"
    with holder(path) as process:
        message = rf"run: process {process.pid} on {re.escape(socket.gethostname())} \(since .*\) is writing here"
        with pytest.raises(UserError, match=message), hold_lock(path, "run"):
            raise AssertionError
        if killed:
            process.kill()
    assert path.exists() == killed  # a leftover file does not block
    with hold_lock(path, "run"):
        with pytest.raises(UserError, match=f"run: process {os.getpid()} "), hold_lock(path, "run"):
            raise AssertionError
        assert path.read_text().startswith(f"process {os.getpid()} on ")
    assert names(tmp_path) == []


def test_lock_is_retried_if_its_holder_removes_the_file(tmp_path: Path, monkeypatch) -> None:
    """The holder may remove the file between open and lock; a lock on the removed file would exclude no one."""
    path = tmp_path / "lock"
    try_lock = files._try_lock
    attempts = []

    def remove_and_lock(handle: int) -> bool | None:
        if not attempts:
            path.unlink()
        attempts.append(handle)
        return try_lock(handle)

    monkeypatch.setattr(files, "_try_lock", remove_and_lock)
    with hold_lock(path, "run") as is_locked, pytest.raises(UserError, match="is writing here"), hold_lock(path, "run"):
        raise AssertionError
    assert is_locked and len(attempts) == 3


def test_lock_on_a_file_system_without_locks_is_reported_as_not_held(tmp_path: Path, monkeypatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", unsupported)
    with hold_lock(tmp_path / "lock", "run") as is_locked:
        assert not is_locked
    with pytest.raises(UserError, match=r"none/lock: cannot lock: No such file"), hold_lock(tmp_path / "none/lock", ""):
        raise AssertionError


# Temporary directories


SCRATCH_SCRIPT = """
import sys
from regard.files import scratch_directory
with scratch_directory() as path:
    (path / "store").write_text("store")
    print(path, flush=True)
    sys.stdin.read()
"""


def test_temporary_directory_of_a_killed_process_is_removed_by_the_next(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = [sys.executable, "-c", SCRATCH_SCRIPT]
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    (tmp_path / f"{files.SCRATCH}link").symlink_to(outside)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        monkeypatch.setattr(files, "SCRATCH_SECONDS", -1)
        with scratch_directory() as own:
            assert path.parent == own.parent == tmp_path and names(path) == ["lock", "store"]  # in use
        process.kill()
        process.wait()
        monkeypatch.setattr(files, "SCRATCH_SECONDS", 60)
        with scratch_directory():
            assert path.exists()  # it may have been made just now
        monkeypatch.setattr(files, "SCRATCH_SECONDS", -1)
        with scratch_directory() as own:
            assert not path.exists() and own.exists()
    assert names(tmp_path) == ["outside", f"{files.SCRATCH}link"] and names(outside) == ["precious"]
