"""Lines of a file, without surprises: split on `\\n` alone, in bounded memory, gzip or not.

One trailing `\\r` is dropped, and a byte order mark at the start of the file. Everything else is text: U+2028, U+0085,
form feeds and NUL stand for themselves and never end a line.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple, cast

from regard.data.account import ENCODING, LONG
from regard.errors import UserError

LONGEST = 1_000_000  # bytes of a line
CHUNK = 1 << 18
BOM = b"\xef\xbb\xbf"
STDIN = "-"

_FOREIGN = {
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8 first",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8 first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"BZh": "bzip2 data; only .gz is read directly",
    b"\xfd7zXZ": "xz data; only .gz is read directly",
    b"\x28\xb5\x2f\xfd": "zstandard data; only .gz is read directly",
    b"PAR1": "a Parquet file; write it as tab-separated text first",
}


class Line(NamedTuple):
    """A line, its number from 1, and what is wrong with it (then the text is a makeshift: replaced or cut)."""

    number: int
    text: str
    problem: str | None = None


def shown(path: str) -> str:
    """The name of a file in messages."""
    return "stdin" if path == STDIN else path


@contextmanager
def open_bytes(path: str) -> Iterator[BinaryIO]:
    """Open a file, gzip or not (told by its first bytes), or `-` for stdin; every failure is a UserError."""
    with open_raw(path) as raw:
        try:
            head = raw.peek(8)[:8]  # type: ignore[attr-defined]
            for magic, what in _FOREIGN.items():
                if head.startswith(magic):
                    raise UserError(f"{shown(path)}: this is {what}")
            if head.startswith(b"\x1f\x8b"):
                with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked:
                    yield cast(BinaryIO, unpacked)
            elif path.endswith(".gz"):
                raise UserError(f"{path}: not a gzip file, although its name says so")
            else:
                yield raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{shown(path)}: broken gzip data, perhaps cut short: {error}") from None


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
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a directory, not a file") from None
    except PermissionError:
        raise UserError(f"{path}: not readable: permission denied") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{shown(path)}: not readable: {error}") from None


def read_lines(path: str) -> Iterator[Line]:
    """Yield every line of a file, good or bad."""
    with open_bytes(path) as stream:
        for number, raw in enumerate(_split(stream), start=1):
            if raw.endswith(b"\r"):
                raw = raw[:-1]
            if number == 1 and raw.startswith(BOM):
                raw = raw[len(BOM) :]
            if len(raw) > LONGEST:
                yield Line(number, raw[:80].decode("utf-8", "replace"), LONG)
                continue
            try:
                yield Line(number, raw.decode("utf-8"))
            except UnicodeDecodeError:
                yield Line(number, raw.decode("utf-8", "replace"), ENCODING)


def _split(stream: BinaryIO) -> Iterator[bytes]:
    """Split on newlines; of a line that is too long only so much is kept that it can be told to be."""
    rest = b""
    # read1 gives what a pipe has by now; read would wait for a full chunk while someone waits for an answer
    while chunk := stream.read1(CHUNK):  # type: ignore[attr-defined]
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
        if len(rest) > LONGEST + 4:  # a BOM and a \r may go
            rest = rest[: LONGEST + 5]
    if rest:
        yield rest
