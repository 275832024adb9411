"""Tables with headers and quotes, CSV in all dialects, translations and data sets of Hugging Face."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from regard.data.pairs import _is_header, laid_out, read_table
from regard.data.prepare import Prepared, prepare
from regard.data.reader import BAD_QUOTES, COLUMNS, EMPTY, ENCODING, LineCounter, Source
from regard.data.tables import Corpora, open_table
from regard.errors import UserError
from regard.recipe import Column, Data, load_recipe

PAIRS = [(f"word {index}", f"Wort {index}") for index in range(60)]
BOTH: tuple[Column, ...] = ("source", "target")
CHAR = {"source_tokens": "char", "target_tokens": "char"}


def tsv(*rows: tuple[str, ...]) -> str:
    return "".join("\t".join(row) + "\n" for row in rows)


def table(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def read(source: Source) -> list[tuple[str | None, ...]]:
    return [tuple(example) for _, example in source.read(LineCounter())]


def pairs_of(source: Source) -> list[tuple[str | None, ...]]:
    return [row[:2] for row in read(source)]


def prepared(out: Path, **data: Any) -> Prepared[Any]:
    return prepare(load_recipe({"data": data, "text": CHAR}), out)


def texts(data: Prepared[Any]) -> list[tuple[str, str]]:
    codec = data.codec
    rows = [(data.train.source(i), data.train.target(i)) for i in range(len(data.train))]
    pairs = [(codec.source.decode(source), codec.decode_target(target)) for source, target in rows]
    return sorted([*pairs, *((example.source, example.target) for example in data.valid_examples)])


# Headers


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        (("source", "target"), BOTH),
        (("Target", "Source"), ("target", "source")),
        (("id", "word", "pronunciation"), BOTH),
        (("text", "label"), BOTH),
        (("lemma", "tags", "form"), ("source", "features", "target")),
    ],
)
def test_usual_names_in_the_first_line_are_a_header(
    header: tuple[str, ...], columns: tuple[Column, ...], tmp_path: Path
) -> None:
    known = {"id": "7", "tags": "N", "target": "t{}", "pronunciation": "t{}", "label": "t{}", "form": "t{}"}
    rows = [tuple(known.get(name.lower(), "s{}").format(n) for name in header) for n in range(3)]
    notes: list[str] = []
    path = table(tmp_path / "a.tsv", tsv(header, *rows))
    source = laid_out(open_table(path, BOTH, None), None, ";", say=notes.append)
    assert source.columns == columns and source.header == header
    assert pairs_of(source) == [(f"s{n}", f"t{n}") for n in range(3)]
    assert len(notes) == 1 and f"{path}: the first line is not an example" in notes[0]
    assert read_table(path, BOTH).columns == BOTH and pairs_of(read_table(path, BOTH)) == pairs_of(source)


def test_words_above_columns_of_several_words_are_a_header(tmp_path: Path) -> None:
    path = table(tmp_path / "a.tsv", tsv(("German", "en-US"), *PAIRS))
    assert pairs_of(read_table(path, BOTH)) == PAIRS
    for first in (("Hallo!", "Hello"), ("a b", "c"), ("1", "2"), ("de", "en", "x")):
        same = table(tmp_path / "b.tsv", tsv(first, *PAIRS))
        assert read_table(same, BOTH).header == ()
    for other in (("Ja", "Yes indeed"), ("Na gut", "Well"), ("", "x y")):  # one line with a single word suffices
        same = table(tmp_path / "c.tsv", tsv(("German", "English"), *PAIRS, other))
        assert read_table(same, BOTH).header == ()
    few = table(tmp_path / "d.tsv", tsv(("German", "English"), *PAIRS[:10]))
    assert read_table(few, BOTH).header == ()


@given(st.lists(st.tuples(st.text("ab c.T"), st.text("xy z")), min_size=1, max_size=40), st.data())
@settings(deadline=None, max_examples=60)
def test_no_line_of_data_is_a_header(rows: list[tuple[str, str]], data: st.DataObject) -> None:
    """Each line could be the first one; words of the usual names are among the data, on one side."""
    name = data.draw(st.sampled_from(["word", "text", "target", "label"]))
    rows = [*rows, (name, "x y"), ("single", "word")]
    Random(1).shuffle(rows)
    cells = [list(row) for row in rows]
    assert not any(_is_header(row, [other for other in cells if other is not row]) for row in cells)


def test_header_setting_decides(tmp_path: Path) -> None:
    content = tsv(("source", "target"), *PAIRS)
    path = table(tmp_path / "a.tsv", content)
    found = prepared(tmp_path / "auto", train=path)
    assert texts(found) == sorted(PAIRS)
    assert [note for note in found.notes if "data.header = false" in note]
    assert texts(prepared(tmp_path / "data", train=path, header=False)) == sorted([("source", "target"), *PAIRS])
    unusual = table(tmp_path / "b.tsv", tsv(("x1", "y 1"), *PAIRS))
    assert texts(prepared(tmp_path / "none", train=unusual)) == sorted([("x1", "y 1"), *PAIRS])
    assert texts(prepared(tmp_path / "true", train=unusual, header=True)) == sorted(PAIRS)


def test_columns_are_named_as_in_the_header(tmp_path: Path) -> None:
    rows = [(str(n), de, en) for n, (en, de) in enumerate(PAIRS)]
    path = table(tmp_path / "a.tsv", tsv(("id", "de", "en"), *rows))
    assert texts(prepared(tmp_path / "data", train=path, columns=["en", "de"])) == sorted(PAIRS)
    with pytest.raises(UserError, match=r"a\.tsv: has no column 'englisch'.*\n  columns: id, de, en"):
        prepared(tmp_path / "wrong", train=path, columns=["englisch", "de"])
    with pytest.raises(UserError, match="most lines have 3 columns"):
        prepared(tmp_path / "default", train=path)
    data = Data(columns=["a", "b", "c"])  # type: ignore[arg-type]
    assert (data.columns, data.column_names) == (("source", "features", "target"), ("a", "b", "c"))


def test_rows_with_another_number_of_cells_than_the_header_are_skipped(tmp_path: Path) -> None:
    path = table(
        tmp_path / "a.tsv", tsv(("id", "source", "target"), ("1", "a", "b"), ("2", "c"), ("",), ("3", "d", ""))
    )
    counter = LineCounter()
    assert [located.number for located in read_table(path, BOTH).read(counter)] == [2]
    assert counter.locations == {COLUMNS: [f"{path}:3"], "blank line": [f"{path}:4"], EMPTY: [f"{path}:5"]}
    assert counter.read == 4


def test_validation_data_has_the_columns_of_the_training_data(tmp_path: Path) -> None:
    train = table(tmp_path / "a.tsv", tsv(("target", "source"), *((b, a) for a, b in PAIRS)))
    for name, rows in (("plain", [(b, a) for a, b in PAIRS[:5]]), ("named", [("source", "target"), *PAIRS[:5]])):
        valid = table(tmp_path / f"{name}.tsv", tsv(*rows))
        found = prepared(tmp_path / name, train=train, valid=valid)
        assert [(example.source, example.target) for example in found.valid_examples] == PAIRS[:5]
        assert found.codec.columns == ("target", "source")


def test_quoted_cells_of_a_tsv_are_reported_and_kept(tmp_path: Path) -> None:
    rows = [(source, f'"{target}"') for source, target in PAIRS]
    found = prepared(tmp_path / "data", train=table(tmp_path / "a.tsv", tsv(*rows)))
    assert texts(found) == sorted(rows)
    assert any("quotes around column 2" in note and ".csv" in note for note in found.notes)
    assert texts(prepared(tmp_path / "csv", train=table(tmp_path / "a.csv", tsv(*rows)))) == sorted(PAIRS)


# CSV


def written(rows: list[tuple[str, ...]], **dialect: Any) -> str:
    stream = io.StringIO(newline="")
    csv.writer(stream, **dialect).writerows(rows)
    return stream.getvalue()


CELLS = st.text(st.sampled_from("ab,;\t\"'\\ \n"), max_size=8).map(lambda text: f"x{text}x")
WRITERS = [
    *({"dialect": name} for name in csv.list_dialects()),
    {"delimiter": ";"},
    {"delimiter": "\t", "quoting": csv.QUOTE_ALL, "lineterminator": "\n"},
    {"delimiter": ";", "quoting": csv.QUOTE_ALL, "escapechar": "\\", "doublequote": False},
]


@pytest.mark.parametrize("dialect", WRITERS, ids=str)
@given(rows=st.lists(st.tuples(CELLS, CELLS), max_size=12), size=st.integers(0, 200))
@settings(deadline=None, max_examples=40)
def test_csv_of_any_writer_is_read_back(
    dialect: dict[str, Any], rows: list[tuple[str, str]], size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cells may have several lines. Chunks of any size give the same examples."""
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    rows = [("source", "target"), ('plain "quotes"', 'of "this" dialect'), *rows]
    path.write_bytes(written(rows, **dialect).encode())
    source = read_table(str(path), BOTH)
    assert pairs_of(source) == rows[1:]
    counter = LineCounter(strict=True)
    located = [each for chunk in source.chunks(size) for each in source.read_chunk(chunk, counter)]
    assert located == list(source.read(LineCounter())) and counter.read == len(rows) - 1
    assert sum(map(source.chunk_lines, source.chunks(size))) == path.read_bytes().rstrip(b"\n").count(b"\n") + 1


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
def test_bad_records_of_csv_are_counted_with_their_lines(size: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("regard.data.reader.READ_BYTES", 7)
    lines = [
        b"source,target", b"a,b", b'"c\nd",e', b"f,g,h", b'"i" j,k', b"\xff,l", b'"m\xff\nn",o', b"", b",p", b'q,"r,s',
        b't,"u"', b'v,"w',
    ]  # fmt: skip
    path = table(tmp_path / "a.csv", b"\n".join(lines))
    source = read_table(path, BOTH)
    counter = LineCounter()
    examples = [each for chunk in source.chunks(size) for each in source.read_chunk(chunk, counter)]
    assert [(number, *example[:2]) for number, example in examples] == [(2, "a", "b"), (3, "c\nd", "e"), (13, "t", "u")]
    assert counter.locations == {
        COLUMNS: [f"{path}:5"],
        BAD_QUOTES: [f"{path}:6", f"{path}:12", f"{path}:14"],
        ENCODING: [f"{path}:7", f"{path}:8"],
        "blank line": [f"{path}:10"],
        EMPTY: [f"{path}:11"],
    }
    assert counter.read == counter.kept + counter.skipped.total() == 11
    with pytest.raises(UserError, match=r"a\.csv:5: wrong column count: 3 instead of 2"):
        list(source.read(LineCounter(strict=True)))


def test_a_quote_that_is_never_closed_does_not_swallow_the_file(tmp_path: Path) -> None:
    rows = [(f"{n} text", f"{n} Text") for n in range(40_000)]
    content = "source,target\n" + '"open,x\n' + written(rows, lineterminator="\n")
    source = read_table(table(tmp_path / "a.csv", content), BOTH)
    counter = LineCounter()
    assert [example[:2] for _, example in source.read(counter)] == rows
    assert counter.locations == {BAD_QUOTES: [f"{tmp_path}/a.csv:2"]}


def test_csv_is_described_and_compressed_csv_is_read(tmp_path: Path) -> None:
    rows = [("id", "de", "en"), *((str(n), b, a) for n, (a, b) in enumerate(PAIRS))]
    path = table(tmp_path / "a.csv.gz", gzip.compress(written(rows, delimiter=";", quoting=csv.QUOTE_ALL).encode()))
    found = prepared(tmp_path / "data", train=path, columns=["en", "de"])
    assert texts(found) == sorted(PAIRS)
    assert found.notes[0] == (
        f"{path}: semicolons between columns, cells in quotes; the first line is not an example but names the columns: "
        "source is en, target is de"
    )


def test_csv_is_tokenised_in_processes_and_without_duplicates(tmp_path: Path, monkeypatch) -> None:
    rows = [(f'a "{n}"\nb', f"c,{n % 50}") for n in range(300)] * 2
    path = table(tmp_path / "a.csv", written([("source", "target"), *rows]))
    recipe = load_recipe({"data": {"train": path, "deduplicate": True}, "text": CHAR})
    expected = texts(prepare(recipe, tmp_path / "one"))
    assert expected == sorted(rows[:300])
    monkeypatch.setattr("regard.data.encode.BLOCK_BYTES", 500)
    monkeypatch.setattr("regard.data.encode.MIN_PARALLEL_BYTES", 0)
    assert texts(prepare(recipe, tmp_path / "two", processes=2)) == expected


def test_csv_is_plain_text_too(tmp_path: Path) -> None:
    rows = [("id", "text"), *((str(n), f"first, {n}\nsecond") for n in range(40))]
    path = table(tmp_path / "a.csv", written(rows))
    found = prepare(
        load_recipe({"task": "lm", "data": {"train": path}, "text": {"source_tokens": "byte"}}), tmp_path / "d"
    )
    assert found.train.characters + found.valid.characters == sum(len(text) + 1 for _, text in rows[1:])


# Hugging Face


def translations(pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"id": str(n), "translation": {"en": en, "de": de}} for n, (en, de) in enumerate(pairs)]


def save_to_disk(directory: Path, shards: list[list[dict[str, Any]]]) -> str:
    """The layout of `Dataset.save_to_disk`."""
    arrow = pytest.importorskip("pyarrow")
    directory.mkdir(parents=True)
    names = [f"data-{n:05}-of-{len(shards):05}.arrow" for n in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        data = arrow.Table.from_pylist(rows)
        with arrow.ipc.new_stream(directory / name, data.schema) as stream:
            stream.write_table(data, max_chunksize=7)
    (directory / "cache-0.arrow").write_bytes(b"")
    (directory / "dataset_info.json").write_text("{}")
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return str(directory)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_translations_are_read_by_language(kind: str, tmp_path: Path) -> None:
    rows = translations(PAIRS)
    if kind == "jsonl":
        path = table(tmp_path / "a.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    elif kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        path = str(tmp_path / "a.parquet")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    else:
        path = save_to_disk(tmp_path / "saved", [rows[:30], rows[30:]])
    found = prepared(tmp_path / "data", train=path)
    assert texts(found) == sorted(PAIRS)
    assert "source is en, target is de" in found.notes[0]
    turned = prepared(tmp_path / "turned", train=path, columns=["de", "en"])
    assert texts(turned) == sorted((b, a) for a, b in PAIRS)


def test_splits_of_a_saved_data_set_are_used(tmp_path: Path) -> None:
    rows = translations(PAIRS)
    for name, part in (("train", rows[:40]), ("validation", rows[40:50]), ("test", rows[50:])):
        save_to_disk(tmp_path / "set" / name, [part])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    found = prepared(tmp_path / "data", train=str(tmp_path / "set"))
    assert len(found.train) == 40
    assert [(example.source, example.target) for example in found.valid_examples] == PAIRS[40:50]
    assert pairs_of(read_table(str(tmp_path / "set"), BOTH)) == PAIRS[50:]
    assert pairs_of(read_table(str(tmp_path / "set" / "validation"), BOTH)) == PAIRS[40:50]


def test_splits_of_a_directory_of_parquet_files_are_used(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "set" / "data").mkdir(parents=True)
    for name, part in (("train-0", PAIRS[:20]), ("train-1", PAIRS[20:40]), ("validation-0", PAIRS[40:])):
        data = arrow.table({"text": [a for a, _ in part], "label": [b for _, b in part]})
        parquet.write_table(data, tmp_path / "set" / "data" / f"{name}-of-2.parquet")
    found = prepared(tmp_path / "data", train=str(tmp_path / "set"))
    assert len(found.train) == 40 and len(found.valid) == 20
    with pytest.raises(UserError, match=r"set: is a directory with splits; name one: train, validation"):
        read_table(str(tmp_path / "set"), BOTH)


def test_other_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a directory without"):
        prepared(tmp_path / "data", train=str(tmp_path))
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(UserError, match="not a data set"):
        prepared(tmp_path / "data", train=str(tmp_path))


def test_missing_package_is_reported_for_saved_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_to_disk(tmp_path / "set", [translations(PAIRS)])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match="needs pyarrow, which is not installed"):
        prepared(tmp_path / "data", train=path)


def test_corpora_of_csv_name_their_lines(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "source,target\na,\nb,c\n")
    corpora = Corpora((read_table(path, BOTH),), (1,), (path,))
    counter = LineCounter()
    assert len(list(corpora.read(counter))) == 1 and counter.locations == {EMPTY: [f"{path}:2"]}
