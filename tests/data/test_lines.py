"""Lines are split on newlines alone, in bounded memory, from plain and packed files."""

from __future__ import annotations

import gzip
import io
import os
import sys
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import reader as module
from regard.data.reader import open_bytes, read_lines
from regard.errors import UserError

pieces = st.lists(
    st.binary(max_size=6)
    | st.sampled_from(
        [b"\n", b"\r\n", b"\r", b"\t", "\u2028\x85\x0b\x0c".encode(), b"\0", b"\xef\xbb\xbf", b"x" * 30, b"\xff"]
    )
).map(b"".join)


def magic(data: bytes) -> bool:
    return data.startswith((b"\x1f\x8b", *module._OTHER_FORMATS))


@given(pieces, st.booleans(), st.integers(1, 40))
@settings(deadline=None)
def test_every_line_once_whatever_the_bytes(data: bytes, packed: bool, chunk: int) -> None:
    if magic(data):
        return
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        patch.setattr(module, "LONGEST", 20)
        path = Path(directory, "f")
        path.write_bytes(gzip.compress(data) if packed else data)
        found = list(read_lines(str(path)))
    whole = data.split(b"\n")
    if whole[-1] == b"":
        whole.pop()
    assert [line.number for line in found] == list(range(1, len(whole) + 1))
    for index, (line, raw) in enumerate(zip(found, whole, strict=True)):
        raw = raw[:-1] if raw.endswith(b"\r") else raw
        raw = raw[3:] if index == 0 and raw.startswith(b"\xef\xbb\xbf") else raw
        if len(raw) > 20:
            assert line.problem == "too long"
        else:
            assert line.text == raw.decode("utf-8", "replace")
            assert (line.problem == "invalid UTF-8") == (raw.decode("utf-8", "ignore").encode() != raw)


def test_a_huge_line_needs_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"before\n")
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b"\nafter\n")
    tracemalloc.start()
    found = list(read_lines(str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(line.number, line.problem) for line in found] == [(1, None), (2, "too long"), (3, None)]
    assert peak < 16 << 20


def test_a_line_of_a_million_bytes_is_the_longest(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"\xef\xbb\xbf" + b"x" * 1_000_000 + b"\r\n" + b"y" * 1_000_001 + b"\n" + b"z" * 1_000_001 + b"\r")
    assert [line.problem for line in read_lines(str(path))] == [None, "too long", "too long"]


def test_stdin_plain_and_packed(monkeypatch) -> None:
    for data in (b"a\nb", gzip.compress(b"a\nb")):
        for buffer in (io.BytesIO(data), io.BufferedReader(io.BytesIO(data))):
            monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": buffer}))
            assert [line.text for line in read_lines("-")] == ["a", "b"]


def test_what_cannot_be_read_is_explained(tmp_path: Path) -> None:
    packed = gzip.compress(os.urandom(5000))
    cases = {
        "missing.tsv": (None, "no such file"),
        "cut.gz": (packed[:-100], "broken gzip"),
        "broken": (packed[:50] + b"\0\0\0\0" + packed[54:], "broken gzip"),
        "plain.gz": (b"a\tb\n", "not a gzip file"),
        "empty.gz": (b"", "not a gzip file"),
        "utf16": ("a\tb\n".encode("utf-16"), "UTF-16"),
        "a.zip": (b"PK\x03\x04rest", "zip archive"),
        "a.xz": (b"\xfd7zXZ\0", "xz data"),
    }
    for name, (data, told) in cases.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=told) as error:
            list(read_lines(str(tmp_path / name)))
        assert name in str(error.value)
    with pytest.raises(UserError, match="is a directory"):
        list(read_lines(str(tmp_path)))
    with pytest.raises(UserError, match="not readable"):
        list(read_lines("nul\0name"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_forbidden_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(mode=0)
    with pytest.raises(UserError, match="permission denied"), open_bytes(str(tmp_path / "secret")):
        pass
