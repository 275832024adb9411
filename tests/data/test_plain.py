"""Plain text: reading, encoding and splitting keep every character."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from regard.data import plain_text as stream, store as corpus
from regard.data.plain_text import PieceEncoder, Stream, StreamWriter, divide, read_pieces, split_at, tokenize_text
from regard.data.prepare import Prepared, open_prepared, prepare
from regard.data.reader import LineCounter, Source
from regard.errors import UserError
from regard.recipe import load_recipe
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

TEXT = "".join(f"line {n}: the  quick (brown) fox,\n\n" for n in range(60)) + "Ende: äöü \u2028 and on\n"


def read(path: Path, data: bytes, counter: LineCounter | None = None) -> list[str]:
    path.write_bytes(data)
    return list(read_pieces(Source((str(path),)), counter or LineCounter()))


@given(st.lists(st.text(st.characters(exclude_characters="\n\r\ufeff", exclude_categories=["Cs"]), max_size=30)))
def test_lines_are_restored_with_their_ends(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    text = "".join(line + "\n" for line in lines)
    counter = LineCounter()
    assert "".join(read(path, text.encode(), counter)) == text
    assert counter.read == counter.kept == len(lines)


@pytest.mark.parametrize("letter", ["a", "ä", "€", "𝄞", "a b"])
def test_very_long_lines_are_read_in_pieces(letter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "READ_BYTES", 101)
    monkeypatch.setattr(stream, "MAX_PIECE_BYTES", 64)
    text = letter * 500
    counter = LineCounter()
    pieces = read(tmp_path / "long", text.encode(), counter)
    assert "".join(pieces) == text + "\n" and len(pieces) > 5 and counter.read == 1
    if " " in letter:
        assert all(piece.startswith(" ") for piece in pieces[1:])
    assert max(map(len, pieces)) < 200


def test_skipped_lines_of_plain_text_are_counted_with_their_numbers(tmp_path: Path) -> None:
    counter = LineCounter()
    assert read(tmp_path / "a", b"\xef\xbb\xbfone\r\nt\xffo\nthree", counter) == ["one\n", "three\n"]
    assert (counter.read, counter.kept) == (3, 2) and "a:2" in counter.summary()
    with pytest.raises(UserError, match=r"a:2: invalid UTF-8"):
        read(tmp_path / "a", b"one\nt\xffo\n", LineCounter(strict=True))
    gzipped = read(tmp_path / "b.gz", gzip.compress(TEXT.encode()))
    assert "".join(gzipped) == TEXT


@given(st.lists(st.text(min_size=1, max_size=9), max_size=9), st.integers(0, 60))
def test_divide_splits_text_at_a_character_position(pieces: list[str], at: int) -> None:
    parts = list(divide(iter(pieces), at))
    text = "".join(pieces)
    assert "".join(part for part, after in parts if not after) == text[:at]
    assert "".join(part for part, after in parts if after) == text[at:]
    assert all(part for part, _ in parts)


def test_validation_text_is_a_tenth_up_to_a_maximum() -> None:
    assert split_at(1_115_394) == 1_003_854  # exactly the first nine tenths
    assert split_at(10**9) == 10**9 - stream.MAX_VALID


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("key", ["text", "body"])
def test_jsonl_and_parquet_rows_are_read_as_lines_of_text(suffix: str, key: str, tmp_path: Path) -> None:
    """The rows have one or more lines, with and without a final line end."""
    lines = TEXT.split("\n")
    texts = [
        "".join(f"{line}\n" for line in lines[begin:end]) for begin, end in pairwise((0, 1, 3, 7, 31, len(lines) - 1))
    ]
    texts[1:4:2] = [text.removesuffix("\n") for text in texts[1:4:2]]
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps({key: text, "id": 1}) + "\n" for text in texts))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table({key: texts, "id": [1] * len(texts)}), path)
    counter = LineCounter()
    assert "".join(read_pieces(Source((str(path),), keys=(key,)), counter)) == TEXT
    assert counter.read == counter.kept == len(texts)
    (tmp_path / "a.txt").write_text(TEXT)
    streams = []
    for name in (f"a.{suffix}", "a.txt"):
        data = {"train": str(tmp_path / name)} | ({} if key == "text" else {"column_names": [key]})
        prepared = prepare(load_recipe({"task": "lm", "data": data}), tmp_path / f"{name}.data")
        streams.append((prepared.train.windows(np.array([0]), len(prepared.train)), prepared.valid.characters))
    assert (streams[0][0] == streams[1][0]).all() and streams[0][1] == streams[1][1]


@pytest.mark.parametrize("scheme", ["char", "nfd", "word", "byte", "bpe:300", "unigram:300"])
@pytest.mark.parametrize("max_mapped_bytes", [1 << 26, 0])  # memory-mapped, or read in pieces
def test_the_written_stream_restores_the_text(
    scheme: str, max_mapped_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "MAX_MAPPED_BYTES", max_mapped_bytes)
    lines = TEXT.splitlines(keepends=True)
    tokenizer = Tokenizer.train(scheme, lines)
    writer = StreamWriter(tmp_path / "s", tokenizer)
    for part in (lines[:1], lines[1:-1], lines[-1:]):
        shard = PieceEncoder(Codec(tokenizer)).make(next(stream._blocks((line, False, 0) for line in part)))
        writer.write(shard.parts[0], len("".join(part)))
    writer.finish()
    text_stream = Stream.open(tmp_path / "s")
    (ids,) = text_stream.windows(np.asarray([0]), len(text_stream))
    assert ids[0] == ids[-1] == tokenizer.ids.eos and tokenizer.ids.eos not in ids[1:-1]
    assert tokenizer.decode(ids.tolist()) == TEXT
    assert (text_stream.characters, writer.unknown) == (len(TEXT), 0)
    units = tokenize_text(TEXT.splitlines(keepends=True), tokenizer, "text")
    assert units.ids.tolist() == ids[:-1].tolist() and units.tokens.sum() == len(ids) - 2
    assert units.characters.sum() == len(TEXT)


def prepare_text(path: Path, content: str, **settings: object) -> Prepared[Stream]:
    (path / "text.txt").write_text(content)
    tables = {"task": "lm", "data": {"train": str(path / "text.txt")}, "text": {"source_tokens": "char"}}
    return prepare(load_recipe(tables | settings), path / "data")


def test_missing_text_files_are_reported(tmp_path: Path) -> None:
    for data in ({"valid": str(tmp_path / "missing.txt")}, {"train": str(tmp_path / "missing*.txt")}):
        (tmp_path / "text.txt").write_text(TEXT)
        tables = {"task": "lm", "data": {"train": str(tmp_path / "text.txt"), **data}}
        with pytest.raises(UserError, match=r"missing\*?\.txt: no (such file|file matches this pattern)"):
            prepare(load_recipe(tables), tmp_path / "data")


def test_vocabulary_is_not_learned_from_the_validation_tenth(tmp_path: Path) -> None:
    text = "ab" * 450 + "\n" + "xy" * 49 + "z"
    prepared = prepare_text(tmp_path, text)
    train, valid = (part.windows(np.asarray([0]), len(part))[0].tolist() for part in (prepared.train, prepared.valid))
    assert prepared.codec.source.decode(train) == text[:900]
    assert len(valid) == 103 and valid.count(prepared.codec.ids.unk) > 90
    message = "\n".join(prepared.notes)
    assert "the last 10.1 % of the text" in message and "unknown tokens (" in message
    assert prepared.codec.frame == "none" and prepared.codec.shared
    assert len(open_prepared(tmp_path / "data").train) == len(train)


def test_only_masked_language_models_have_a_mask_token(tmp_path: Path) -> None:
    assert prepare_text(tmp_path, TEXT).codec.ids.mask is None
    prepared = prepare_text(tmp_path, TEXT, task="masked")
    assert prepared.codec.ids.mask == 4 and prepared.codec.frame == "both"


def test_separate_validation_text_is_used(tmp_path: Path) -> None:
    (tmp_path / "valid.txt").write_text("held out\n")
    data = {"train": str(tmp_path / "text.txt"), "valid": str(tmp_path / "valid.txt")}
    prepared = prepare_text(tmp_path, TEXT, data=data)
    assert prepared.train.characters == len(TEXT) and prepared.valid.characters == 9
    (tmp_path / "valid.txt").write_text("")
    with pytest.raises(UserError, match=r"valid\.txt: contains no text"):
        prepare_text(tmp_path, TEXT, data=data)


@pytest.mark.parametrize("text", ["", "\xff"])
def test_text_without_usable_lines_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="empty" if not text else "no usable text"):
        prepare(load_recipe({"task": "lm", "data": {"train": str(tmp_path / "text.txt")}}), tmp_path / "data")


def test_space_separated_tokens_in_plain_text_use_the_word_scheme(tmp_path: Path) -> None:
    phones = "\n".join("AH B K D AH B" for _ in range(300))
    prepared = prepare_text(tmp_path, phones, text={})
    assert prepared.codec.source.scheme == "word"  # unlike the scheme space, it keeps line ends
