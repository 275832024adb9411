"""Streams of bytes: files as they are, gzip, zstandard, and stdin. Every failure is a UserError."""

from __future__ import annotations

import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from glob import has_magic
from importlib import import_module
from typing import Any, BinaryIO, cast

from regard.errors import UserError, missing_extra

STDIN = "-"
PACKED = 1 << 11  # bytes of zstandard data unpacked at a time, which can become 64 MB of text

_OTHER_FORMATS = {
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8 first",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8 first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"BZh": "bzip2 data; only .gz and .zst are read directly",
    b"\xfd7zXZ": "xz data; only .gz and .zst are read directly",
    b"PAR1": "a Parquet file; training reads one whose name ends in .parquet, elsewhere write tab-separated text",
}
_REASONS: dict[type[Exception], str] = {
    FileNotFoundError: "no such file",
    IsADirectoryError: "is a directory, not a file",
    PermissionError: "not readable: permission denied",
}


def shown(path: str) -> str:
    """The name of a file in messages."""
    return "stdin" if path == STDIN else path


@contextmanager
def open_bytes(path: str) -> Iterator[BinaryIO]:
    """Open a file, compressed or not (by its first bytes), or `-` for stdin; every failure is a UserError."""
    with open_raw(path) as raw:
        try:
            head = raw.peek(8)[:8]  # type: ignore[attr-defined]
            for magic, what in _OTHER_FORMATS.items():
                if head.startswith(magic):
                    raise UserError(f"{shown(path)}: this is {what}")
            if head.startswith(b"\x1f\x8b"):
                with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked:
                    yield cast(BinaryIO, unpacked)
            elif head.startswith(b"\x28\xb5\x2f\xfd"):
                yield cast(BinaryIO, io.BufferedReader(_Unpacked(raw, path)))
            elif kind := {".gz": "gzip", ".zst": "zstandard"}.get(os.path.splitext(path)[1]):
                raise UserError(f"{path}: not a {kind} file, although its name says so")
            else:
                yield raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{shown(path)}: broken gzip data, perhaps cut short: {error}") from None


class _Unpacked(io.RawIOBase):
    """What a zstandard file holds; unlike the package's own reader it notices a file that was cut short."""

    def __init__(self, packed: BinaryIO, path: str) -> None:
        try:
            self._library: Any = import_module("zstandard")
        except ImportError:
            raise missing_extra(f"{shown(path)}: zstandard data", "zstandard", "corpora") from None
        self._packed, self._name = packed, shown(path)
        self._frame: Any = None  # the one being read; a file may be several, one after the other
        self._rest = b""  # packed
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            while not self._ready and self._more():
                pass
        except self._library.ZstdError as error:
            raise UserError(f"{self._name}: broken zstandard data, perhaps cut short: {error}") from None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _more(self) -> bool:
        """Unpack a little more, if there is more."""
        packed = self._rest or self._packed.read1(PACKED)  # type: ignore[attr-defined]
        self._rest = b""
        if not packed:
            if self._frame is not None:
                raise UserError(f"{self._name}: broken zstandard data, perhaps cut short")
            return False
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self._ready = memoryview(self._frame.decompress(packed))
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        return True


@contextmanager
def open_raw(path: str) -> Iterator[BinaryIO]:
    """Open a file as it is, or `-` for stdin."""
    try:
        if path == STDIN:
            if sys.stdin is None:
                raise UserError("stdin: is closed; name a file to read")
            stdin = sys.stdin.buffer
            yield stdin if hasattr(stdin, "peek") else cast(BinaryIO, io.BufferedReader(stdin))
        else:
            with open(path, "rb") as file:
                yield file
    except (OSError, ValueError) as error:
        reason = _REASONS.get(type(error), f"not readable: {error}")
        if isinstance(error, FileNotFoundError) and has_magic(path):
            reason = "no file matches this pattern"
        raise UserError(f"{shown(path)}: {reason}") from None
