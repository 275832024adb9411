"""Held-out examples do not share a source with training examples; columns of features are detected."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from regard.data import tables as holdout
from regard.data.pairs import laid_out
from regard.data.prepare import prepare
from regard.data.reader import Source
from regard.data.tables import Splitter, valid_count
from regard.recipe import Data, Recipe


def split(sources: list[str]) -> tuple[int, set[str]]:
    splitter = Splitter()
    for source in sources:
        splitter.see(source)
    count = splitter.choose()
    held_out = [source for source in sources if splitter.held_out(source)]
    assert len(held_out) == count
    return count, set(held_out)


@pytest.mark.parametrize("examples", [2, 10, 100, 250, 999, 8000, 40_000, 60_000])
def test_distinct_sources_give_exactly_valid_count(examples: int) -> None:
    count, _ = split([f"word {index}" for index in range(examples)])
    assert count == valid_count(examples)
    assert 1 <= count <= min(2000, max(1, examples // 5))
    if 250 <= examples <= 40_000:
        assert count == max(50, examples // 20)


@given(st.lists(st.sampled_from("abcdefghij") | st.text(max_size=3), min_size=1, max_size=60), st.randoms())
@settings(deadline=None)
def test_equal_sources_stay_together_and_both_parts_are_not_empty(sources: list[str], rng: Random) -> None:
    count, held_out = split(sources)
    if len(set(sources)) == 1:
        assert count == 0
    else:
        assert 0 < count < len(sources)
    shuffled = list(sources)
    rng.shuffle(shuffled)
    assert split(shuffled) == (count, held_out)


def test_held_out_sources_do_not_depend_on_the_order_of_lines(monkeypatch) -> None:
    monkeypatch.setattr(holdout, "CANDIDATES", 8)
    # Sources with many examples each: a rare source late in the file could fill the remaining held-out number.
    sources = [f"word {index}" for index in range(100) for _ in range(1 + index % 23)]
    assert len({frozenset(split(Random(seed).sample(sources, len(sources)))[1]) for seed in range(20)}) == 1


def test_very_frequent_sources_are_not_held_out() -> None:
    sources = ["frequent"] * 900 + [f"word {index}" for index in range(100)]
    assert "frequent" not in split(sources)[1]


FEATURES = ("source", "features", "target"), ("source", "target", "features")


@pytest.mark.parametrize("columns", [*FEATURES, None])
def test_features_column_is_detected(columns: tuple[str, ...] | None, tmp_path: Path) -> None:
    path = tmp_path / "forms.tsv"
    rows = [
        {"source": f"word{i}", "features": "V;PST" if i % 2 else "V;PRS;3", "target": f"worded{i}"} for i in range(40)
    ]
    names = columns or ("source", "target", "source")
    path.write_text("".join("\t".join(row[name] for name in names) + "\n" for row in rows))
    default = ("source", "target")
    table = Source((str(path),), default, keys=default)
    assert laid_out(table, None, ";").columns == (columns or default)
    assert laid_out(table, default, ";").columns == default  # the recipe names the columns
    path.write_text("a\tb\n")
    assert laid_out(table, None, ";").columns == default
    assert laid_out(Source(("nowhere.tsv",), keys=default), None, ";").columns == default


def test_detected_columns_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "forms.tsv"
    path.write_text("".join(f"word{i}\t{'V;PST' if i % 2 else 'V;PRS'}\tworded{i}\n" for i in range(40)))
    recipe = Recipe(data=Data(train=str(path)))
    for _ in range(2):  # the second call opens the prepared data
        prepared = prepare(recipe, tmp_path / "data")
        assert prepared.codec.columns == FEATURES[0]
        assert prepared.codec.features == ("PRS", "PST", "V")
        assert prepared.notes[0] == f"{path}: columns source, features, target"
    named = Recipe(data=Data(train=str(path), columns=FEATURES[0]))
    assert prepare(named, tmp_path / "data").notes[0].startswith("source tokens")
