"""Every supported format of data in memory gives the same examples."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from regard.data.in_memory import in_memory
from regard.data.plain_text import read_pieces
from regard.data.reader import EMPTY, LineCounter
from regard.errors import UserError
from regard.text.codec import Example

ROWS = [("ab", "A B"), ("c\td", "C\nD"), ("e ", " E"), ("\u2028\x00", 'ä"\\')]
ROWS_WITH_FEATURES = [("ab", "N;PL", "A B"), ("cd", "", "C D")]


def read(data: Any, path: Path, reads: Any = "pairs", **options: Any) -> tuple[list[Example], LineCounter]:
    counter = LineCounter()
    source = in_memory(data, reads, **options).write(path / "spool")
    return [example for _, example in source.read(counter)], counter


class PandasLike:
    """The interface of a pandas frame that regard uses."""

    def __init__(self, columns: Mapping[str, list[Any]]) -> None:
        self._data = columns
        self.columns = list(columns)

    def __iter__(self) -> Iterator[str]:  # pandas iterates over column names
        return iter(self.columns)

    def itertuples(self, index: bool = True, name: str | None = "Pandas") -> Iterator[tuple[Any, ...]]:
        assert not index and name is None
        return zip(*self._data.values(), strict=True)


class PolarsLike:
    """The interface of a polars frame that regard uses."""

    def __init__(self, columns: Mapping[str, list[Any]]) -> None:
        self._data = columns
        self.columns = list(columns)

    def __iter__(self) -> Iterator[list[Any]]:  # polars iterates over columns
        return iter(self._data.values())

    def iter_rows(self) -> Iterator[tuple[Any, ...]]:
        return zip(*self._data.values(), strict=True)


class DatasetLike:
    """The interface of a Hugging Face dataset that regard uses."""

    def __init__(self, columns: Mapping[str, list[Any]]) -> None:
        self._data = columns
        self.column_names = list(columns)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self._data, row, strict=True)) for row in zip(*self._data.values(), strict=True))


class ArrowLike(DatasetLike):
    """The interface of an Arrow table that regard uses."""

    __iter__ = None  # type: ignore[assignment]

    def __arrow_c_stream__(self) -> None: ...

    def to_batches(self) -> list[Any]:
        return [self, self._replace({name: column[:0] for name, column in self._data.items()})]

    def _replace(self, data: Mapping[str, list[Any]]) -> ArrowLike:
        return ArrowLike(data)

    def to_pylist(self) -> list[dict[str, Any]]:
        return list(DatasetLike.__iter__(self))


COLUMNS = {"source": [source for source, _ in ROWS], "target": [target for _, target in ROWS]}
MIXED = {"id": list(range(len(ROWS))), "target": COLUMNS["target"], "source": COLUMNS["source"]}
FRAMES = [PandasLike, PolarsLike, DatasetLike, ArrowLike, dict]


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(map(list, ROWS)),
        iter(ROWS),
        np.array(ROWS, object),
        [Example(*row) for row in ROWS],
        [dict(zip(("source", "target"), row, strict=True)) for row in ROWS],
        *(
            kind(columns)
            for kind in FRAMES
            for columns in (COLUMNS, MIXED, {"en": COLUMNS["source"], "de": COLUMNS["target"]})
        ),
    ],
)
def test_every_data_format_gives_the_same_examples(data: Any, tmp_path: Path) -> None:
    assert read(data, tmp_path)[0] == [Example(*row) for row in ROWS]


def test_features_are_read_by_column_name_or_position(tmp_path: Path) -> None:
    expected = [Example(source, target, features) for source, features, target in ROWS_WITH_FEATURES]
    names = ("source", "features", "target")
    assert read(ROWS_WITH_FEATURES, tmp_path, columns=names)[0] == expected
    for kind in FRAMES:
        columns = dict(zip(names, map(list, zip(*ROWS_WITH_FEATURES, strict=True)), strict=True))
        assert read(kind(columns), tmp_path)[0] == expected
        without = [example._replace(features=None) for example in expected]
        assert read(kind(columns), tmp_path, columns=("source", "target"))[0] == without
    assert read([Example("ab", "A B", "N;PL"), Example("cd", "C D", "")], tmp_path)[0] == expected


class Missing:
    """Like pandas.NA, it has no truth value."""

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")


Missing.__name__ = "NAType"


@pytest.mark.parametrize("missing", [None, float("nan"), np.float64("nan"), Missing(), "", "  "])
def test_missing_values_are_skipped_and_counted_with_their_rows(missing: Any, tmp_path: Path) -> None:
    examples, counter = read([("a", "A"), ("b", missing), (missing, "C"), ("d", "D")], tmp_path)
    assert [example.source for example in examples] == ["a", "d"]
    assert counter.skipped == {EMPTY: 2} and counter.locations[EMPTY] == ["data[1]", "data[2]"]
    strict = LineCounter(strict=True)
    with pytest.raises(UserError, match=r"data\[1\]: empty side: target"):
        list(in_memory([("a", "A"), ("b", missing)], "pairs").write(tmp_path / "s").read(strict))


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=8))
def test_any_text_in_memory_is_read_unchanged(rows: list[tuple[str, str]]) -> None:
    with TemporaryDirectory() as path:
        examples, counter = read(rows, Path(path))
    expected = [Example(*row) for row in rows if row[0].strip() and row[1].strip()]
    assert examples == expected and counter.read == len(rows)


def test_numeric_labels_are_converted_to_text(tmp_path: Path) -> None:
    data = [{"label": label, "text": "a"} for label in (0, np.int64(1), True, "x")]
    assert [example.target for example in read(data, tmp_path, "labelled")[0]] == ["0", "1", "True", "x"]


TEXTS = ["ab", "c\nd", ""]


@pytest.mark.parametrize(
    "data",
    [
        TEXTS,
        np.array(TEXTS),
        {"text": ["ab", "c\nd", None]},
        [("ab",), ("c\nd",), ("\n",)],
        PandasLike({"id": [1, 2, 3], "text": TEXTS}),
        DatasetLike({"story": TEXTS}),
    ],
)
def test_plain_text_is_read_from_every_data_format(data: Any, tmp_path: Path) -> None:
    source = in_memory(data, "text").write(tmp_path / "spool")
    assert "".join(read_pieces(source, LineCounter())) == "ab\nc\nd\n\n"


@pytest.mark.parametrize(
    ("data", "reads", "message"),
    [
        (3, "pairs", "data: takes a file, or examples in memory, not int 3"),
        (b"ab", "pairs", "not bytes"),
        ([], "pairs", "is empty"),
        (PandasLike({"source": [], "target": []}), "pairs", "is empty"),
        ([("a", "b", "c")], "pairs", r"data\[0\]: 3 values instead of 2 .*columns=\('source', 'features', 'target'\)"),
        ([("a", "b"), ("c",)], "pairs", r"data\[1\]: 1 value instead of 2"),
        ([("a", "b"), ("c", 5)], "pairs", r"data\[1\]: target is int 5, not text"),
        ([("a", b"b")], "pairs", r"data\[0\]: target is bytes"),
        ([("a", "b"), None], "pairs", r"data\[1\]: a row is a tuple, a list or a mapping, not NoneType"),
        ([("a", "b"), {"source": "a"}], "pairs", r"data\[1\]: is a mapping, but the rows before have no names"),
        ([("a\ud800", "b")], "pairs", r"data\[0\]: source is not text: half a surrogate pair"),
        (["ab"], "pairs", r"data\[0\]: is one text.*task='lm'"),
        ([{"src": "a", "tgt": "b", "id": 3}], "pairs", "has the columns src, tgt, id; needed are source and target"),
        ([{"target": "a", "x": "b"}], "pairs", "has the columns target, x"),
        ({"source": ["a"], "target": "b"}, "pairs", "a list for each column; 'target' is str 'b'"),
        ({"source": ["a"], "target": ["b", "c"]}, "pairs", "equal length are needed, not source 1, target 2"),
        ({"train": DatasetLike(COLUMNS), "test": DatasetLike(COLUMNS)}, "pairs", r"data\['train'\], data\['test'\]"),
        ([("a", "b")], "text", r"data\[0\]: plain text is a list of texts"),
        ([{"a": "x", "b": "y"}], "text", "needed is one column, or one called text"),
        ([1.5], "text", r"data\[0\]: text is float 1.5"),
        ([("a", 1.5)], "labelled", "target is float 1.5"),
        ([("a", "b")], "images", "images come as {'images'"),
        ({"images": [[1], [1, 2]], "labels": [1]}, "images", "images is not an array of numbers"),
    ],
)  # fmt: skip
def test_invalid_data_in_memory_is_refused_with_its_location(
    data: Any, reads: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        in_memory(data, reads).write(tmp_path / "spool")


def test_arrow_streams_are_read_with_pyarrow(tmp_path: Path, monkeypatch) -> None:
    class Stream:
        def __arrow_c_stream__(self) -> None: ...

    monkeypatch.setitem(sys.modules, "pyarrow", None)  # not installed
    with pytest.raises(UserError, match="to read Stream, pyarrow is needed"):
        in_memory(Stream(), "pairs")
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(table=lambda stream: ArrowLike(COLUMNS)))
    assert read(Stream(), tmp_path)[0] == [Example(*row) for row in ROWS]


def test_lazy_frames_are_refused() -> None:
    class Lazy:
        def collect(self) -> None: ...

    with pytest.raises(UserError, match=r"Lazy is not computed yet; give what its collect\(\) returns"):
        in_memory(Lazy(), "pairs")


def test_pandas_frames_and_series_are_read(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"target": ["A", None, "C"], "source": ["a", "b", pandas.NA]})
    examples, counter = read(frame, tmp_path)
    assert examples == [Example("a", "A")] and counter.skipped == {EMPTY: 2}
    for texts in (pandas.Series(["x"]), pandas.DataFrame({"text": ["x"]})):
        source = in_memory(texts, "text").write(tmp_path / "texts")
        assert list(read_pieces(source, LineCounter())) == ["x\n"]


def test_polars_frames_are_read(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"target": ["A", None], "source": ["a", "b"]})
    examples, counter = read(frame, tmp_path)
    assert examples == [Example("a", "A")] and counter.skipped == {EMPTY: 1}
    with pytest.raises(UserError, match="not computed yet"):
        in_memory(frame.lazy(), "pairs")


def test_hugging_face_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"target": ["A", None], "source": ["a", "b"]})
    examples, counter = read(dataset, tmp_path)
    assert examples == [Example("a", "A")] and counter.skipped == {EMPTY: 1}
    with pytest.raises(UserError, match=r"give one of them: data\['train'\]"):
        in_memory(datasets.DatasetDict({"train": dataset}), "pairs")
