"""Lines are split only at newlines, in bounded memory; every line is kept unchanged, or skipped and counted."""

from __future__ import annotations

import gzip
import io
import os
import random
import sys
import tempfile
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from regard.data import reader as module, reader as streams
from regard.data.reader import LineCounter, Located, Source, open_bytes, read_lines
from regard.errors import UserError
from regard.text.codec import Example

pieces = st.lists(
    st.binary(max_size=6)
    | st.sampled_from(
        [b"\n", b"\r\n", b"\r", b"\t", "\u2028\x85\x0b\x0c".encode(), b"\0", b"\xef\xbb\xbf", b"x" * 30, b"\xff"]
    )
).map(b"".join)


def has_magic_number(data: bytes) -> bool:
    return data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", *streams._OTHER_FORMATS))


@given(pieces, st.booleans(), st.integers(1, 40))
@settings(deadline=None)
def test_every_line_is_read_once_for_any_bytes(data: bytes, compress: bool, chunk: int) -> None:
    if has_magic_number(data):
        return
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "READ_BYTES", chunk)
        patch.setattr(module, "MAX_LINE_BYTES", 20)
        path = Path(directory, "f")
        path.write_bytes(gzip.compress(data) if compress else data)
        lines = list(read_lines(str(path)))
    whole = data.split(b"\n")
    if whole[-1] == b"":
        whole.pop()
    assert [line.number for line in lines] == list(range(1, len(whole) + 1))
    for index, (line, raw) in enumerate(zip(lines, whole, strict=True)):
        raw = raw[:-1] if raw.endswith(b"\r") else raw
        raw = raw[3:] if index == 0 and raw.startswith(b"\xef\xbb\xbf") else raw
        if len(raw) > 20:
            assert line.problem == "too long"
        else:
            assert line.text == raw.decode("utf-8", "replace")
            assert (line.problem == "invalid UTF-8") == (raw.decode("utf-8", "ignore").encode() != raw)


def test_huge_lines_need_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"before\n")
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b"\nafter\n")
    tracemalloc.start()
    lines = list(read_lines(str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(line.number, line.problem) for line in lines] == [(1, None), (2, "too long"), (3, None)]
    assert peak < 16 << 20


def test_lines_of_more_than_a_million_bytes_are_too_long(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"\xef\xbb\xbf" + b"x" * 1_000_000 + b"\r\n" + b"y" * 1_000_001 + b"\n" + b"z" * 1_000_001 + b"\r")
    assert [line.problem for line in read_lines(str(path))] == [None, "too long", "too long"]


def test_stdin_is_read_plain_and_gzipped(monkeypatch) -> None:
    for data in (b"a\nb", gzip.compress(b"a\nb")):
        for buffer in (io.BytesIO(data), io.BufferedReader(io.BytesIO(data))):
            monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": buffer}))
            assert [line.text for line in read_lines("-")] == ["a", "b"]


def test_unreadable_files_are_explained(tmp_path: Path) -> None:
    gzipped = gzip.compress(os.urandom(5000))
    cases = {
        "missing.tsv": (None, "no such file"),
        "cut.gz": (gzipped[:-100], "broken gzip"),
        "broken": (gzipped[:50] + b"\0\0\0\0" + gzipped[54:], "broken gzip"),
        "plain.gz": (b"a\tb\n", "not a gzip file"),
        "empty.gz": (b"", "not a gzip file"),
        "utf16": ("a\tb\n".encode("utf-16"), "UTF-16"),
        "a.zip": (b"PK\x03\x04rest", "zip archive"),
        "a.xz": (b"\xfd7zXZ\0", "xz data"),
    }
    for name, (data, message) in cases.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=message) as error:
            list(read_lines(str(tmp_path / name)))
        assert name in str(error.value)
    with pytest.raises(UserError, match="is a directory"):
        list(read_lines(str(tmp_path)))
    with pytest.raises(UserError, match="not readable"):
        list(read_lines("nul\0name"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_missing_read_permission_is_explained(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(mode=0)
    with pytest.raises(UserError, match="permission denied"), open_bytes(str(tmp_path / "secret")):
        pass


def valid_line(source: str, target: str, end: bytes = b"") -> tuple[bytes, Example | str]:
    return f"{source}\t{target}".encode() + end, Example(source, target)


# (line, its example or the reason to skip it); some lines get an additional \r
DIRTY_LINES: list[tuple[bytes, Example | str]] = [
    valid_line("word", "w ɜː d"),
    valid_line('"quoted', "open"),
    valid_line('"a""b"', "'x'"),
    valid_line(" lead", "trail "),
    valid_line("u2028\u2028here", "and\u2029there"),
    valid_line("next\x85line", "vertical\x0bform\x0c"),
    valid_line("nul\0inside", "\0"),
    valid_line("carriage\rinside", "re\r\rturn"),
    valid_line("twice", "returned\r", b"\r"),
    valid_line("\ufeffmark", "inside\ufeff"),
    valid_line("file\x1cgroup\x1drecord\x1e", "unit\x1f"),
    valid_line("#no comment", "\\escaped\\t"),
    valid_line("<pad>", "< eos >"),
    valid_line("🙂" * 5, "e\u0301"),
    (b"one column", "wrong column count"),
    (b"a\tb\tc", "wrong column count"),
    (b"a\tb\t", "wrong column count"),
    (b"\t\t", "blank line"),
    (b"", "blank line"),
    (b"\r", "blank line"),
    (b" \xc2\xa0 ", "blank line"),
    (b"\t", "blank line"),
    (b"\tonly target", "empty side"),
    (b"only source\t", "empty side"),
    (b"only source\t \xe2\x80\xa8 ", "empty side"),
    (b"bad \xff\tutf", "invalid UTF-8"),
    (b"cut \xe2\x82\tutf", "invalid UTF-8"),
    (b"surrogate \xed\xa0\x80\tutf", "invalid UTF-8"),
    (b"overlong \xc0\xaf\tutf", "invalid UTF-8"),
    (b"latin\xe9\t\xe9", "invalid UTF-8"),
]
LONG_LINE = (b"x" * (1 << 20) + b"\ty", "too long")


@pytest.mark.parametrize("seed", range(4))
def test_every_dirty_line_is_kept_or_counted(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    rows = rng.choices(DIRTY_LINES, k=12_000)
    rows[rng.randrange(12_000)] = LONG_LINE
    if rows[-1][0] == b"":
        rows[-1] = DIRTY_LINES[0]  # an empty string after the last newline is not a line
    data = b"\n".join(line + b"\r" * (line[-1:] != b"\r" and rng.random() < 0.3) for line, _ in rows)
    data = b"\xef\xbb\xbf" * (seed % 2) + data + b"\n" * (seed < 2)
    path = tmp_path / "dirty.tsv"
    path.write_bytes(gzip.compress(data, 1) if seed % 2 else data)

    counter = LineCounter()
    examples = list(Source((str(path),)).read(counter))
    assert examples == [Located(n, e) for n, (_, e) in enumerate(rows, 1) if isinstance(e, Example)]
    assert counter.skipped == Counter(e for _, e in rows if isinstance(e, str))
    assert counter.read == 12_000 == counter.kept + counter.skipped.total()
    for reason, locations in counter.locations.items():
        first = [f"{path}:{n}" for n, (_, e) in enumerate(rows, 1) if e == reason]
        assert locations == first[:5]
        assert f"{counter.skipped[reason]:,} {reason} ({first[0]}" in counter.summary()


@pytest.mark.parametrize("seed", range(2))
def test_dirty_parallel_files_stay_aligned(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    sides: list[tuple[bytes, str | None]] = [
        (b"good \x0b\xe2\x80\xa8", None),
        (b'"', None),
        (b"tab\tinside", None),
        (b"", "blank"),
        (b" \r", "blank"),
        (b"bad\xff", "invalid UTF-8"),
    ]
    pairs = [(rng.choice(sides), rng.choice(sides)) for _ in range(3000)]
    pairs[7] = ((b"y" * (1 << 20), "too long"), sides[0])
    names = [tmp_path / "a", tmp_path / "b.gz"]
    for index, path in enumerate(names):
        data = b"".join(pair[index][0] + b"\n" for pair in pairs)
        path.write_bytes(gzip.compress(data, 1) if path.suffix else data)

    counter = LineCounter()
    examples = list(Source(tuple(map(str, names))).read(counter))
    expected: Counter[str] = Counter()
    for left, right in (tuple(problem for _, problem in pair) for pair in pairs):
        hard = [problem for problem in (left, right) if problem not in (None, "blank")]
        if hard:
            expected[str(hard[0])] += 1
        elif left or right:
            expected["blank line" if left and right else "empty side"] += 1
    assert counter.skipped == expected
    valid_numbers = [n for n, pair in enumerate(pairs, 1) if not pair[0][1] and not pair[1][1]]
    assert [located.number for located in examples] == valid_numbers
    for number, example in examples:
        assert (example.source.encode(), (example.target or "").encode()) == tuple(p[0] for p in pairs[number - 1])


def test_parallel_files_of_unequal_length_are_refused_with_their_line_counts(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 1005)):
        (tmp_path / name).write_text("x\n" * count)
    for first, second, message in (
        ("a", "b", "a has 3 lines but .*b has 1,005"),
        ("b", "a", "b has 1,005 lines but .*a has 3"),
    ):
        with pytest.raises(UserError, match=message):
            list(Source((str(tmp_path / first), str(tmp_path / second))).read(LineCounter()))


def test_columns_are_assigned_by_name(tmp_path: Path) -> None:
    path = tmp_path / "f.tsv"
    path.write_text("Abmachung\tN;ACC(PL)\tAbmachungen\nLeer\t\tLeere\n")
    examples = [e for _, e in Source((str(path),), ("source", "features", "target")).read(LineCounter())]
    assert examples == [Example("Abmachung", "Abmachungen", "N;ACC(PL)"), Example("Leer", "Leere", "")]
    examples = [e for _, e in Source((str(path),), ("target", "features", "source")).read(LineCounter())]
    assert examples[0] == Example("Abmachungen", "Abmachung", "N;ACC(PL)")
    path.write_text("alone\n")
    assert [e for _, e in Source((str(path),), ("source",)).read(LineCounter())] == [Example("alone")]


@pytest.mark.parametrize(("line", "reason"), [(line, e) for line, e in [*DIRTY_LINES, LONG_LINE] if isinstance(e, str)])
def test_strict_reading_stops_at_the_first_invalid_line(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "f.tsv"
    path.write_bytes(b"a\tb\n" + line + b"\nc\td\n")
    with pytest.raises(UserError, match=reason) as error:
        list(Source((str(path),)).read(LineCounter(strict=True)))
    assert str(error.value).startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("columns", "text", "message"),
    [
        (("source", "target"), "", "the file is empty"),
        (("source", "target"), "a b\nc d\n", "is the separator a tab"),
        (("source", "target"), "a\tN\tb\n" * 3, r"data\.columns=source,features,target"),
        (("source", "features", "target"), "a\tb\n" * 3, r"data\.columns=source,target"),
        (("source", "target"), "\t".join("x" * 15), "at least 10 columns"),
        (("source", "target"), "\n\n", "2 blank line"),
    ],
)
def test_a_file_without_examples_is_explained(columns, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "f.tsv"
    path.write_text(text)
    source = Source((str(path),), columns)
    counter = LineCounter()
    assert not list(source.read(counter))
    with pytest.raises(UserError, match=message) as error:
        source.require(counter)
    assert str(path) in str(error.value)
