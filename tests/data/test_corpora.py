"""Reading several files as one sequence of examples: formats, patterns, filters, errors and sampling proportions."""

from __future__ import annotations

import gzip
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.data import tables as formats
from regard.data.encode import RATIO, TOO_SHORT
from regard.data.prepare import Prepared, changed_files, prepare
from regard.data.reader import LineCounter, Located
from regard.data.tables import DUPLICATE, Corpora
from regard.errors import UserError
from regard.presets import preset
from regard.recipe import load_recipe
from regard.training.loader import make_loader

WORDS = ["".join(letters) for letters in product("abcdef", repeat=4)][::3]
PAIRS = [(word, " ".join(word.upper())) for word in WORDS]
CHAR = {"source_tokens": "char", "target_tokens": "char"}


def write(path: Path, pairs: list[tuple[str, str]], names: tuple[str, str] = ("source", "target")) -> str:
    """Write pairs in the format given by the file name."""
    kind = path.name.removesuffix(".gz").removesuffix(".zst").rsplit(".", 1)[1]
    if kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = arrow.table({name: [pair[side] for pair in pairs] for side, name in enumerate(names)})
        parquet.write_table(table, path, row_group_size=50)
        return str(path)
    rows = [json.dumps(dict(zip(names, pair, strict=True))) if kind == "jsonl" else "\t".join(pair) for pair in pairs]
    data = "".join(f"{row}\n" for row in rows).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        data = pytest.importorskip("zstandard").compress(data)
    path.write_bytes(data)
    return str(path)


def prepare_data(out: Path, data: dict[str, Any], **tables: Any) -> Prepared:
    return prepare(load_recipe({"data": data, "text": CHAR, **tables}), out)


def rows(prepared: Prepared) -> list[tuple[str, str]]:
    codec = prepared.codec
    train = prepared.train
    return [(codec.source.decode(train.source(i)), codec.decode_target(train.target(i))) for i in range(len(train))]


RECORDS = ("prepared.json", "manifest.json")  # name the data files, or depend on those that do


def contents(path: Path) -> dict[str, bytes]:
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name not in RECORDS]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


KINDS = ["a.tsv", "a.tsv.gz", "a.tsv.zst", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]


@pytest.mark.parametrize("name", KINDS)
def test_every_file_format_gives_the_same_prepared_data(name: str, tmp_path: Path) -> None:
    prepare_data(tmp_path / "expected", {"train": write(tmp_path / "plain.tsv", PAIRS)})
    prepare_data(tmp_path / "found", {"train": write(tmp_path / name, PAIRS)})
    assert contents(tmp_path / "found") == contents(tmp_path / "expected")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_columns_are_found_by_their_names(name: str, tmp_path: Path) -> None:
    expected = prepare_data(tmp_path / "expected", {"train": write(tmp_path / "plain.tsv", PAIRS)})
    path = write(tmp_path / name, PAIRS, ("word ", "sound"))
    for key in ("column_names", "columns"):
        found = prepare_data(tmp_path / "found", {"train": path, key: ["word ", "sound"]})
        assert rows(found) == rows(expected)
    with pytest.raises(UserError, match=r"data\.columns") as error:
        prepare_data(tmp_path / "wrong", {"train": path})
    assert str(path) in str(error.value)


def test_invalid_jsonl_rows_are_counted_with_their_line_numbers(tmp_path: Path) -> None:
    bad = ["{", "[1]", '{"source": 1, "target": "b"}', '{"other": "x"}', '{"source": "", "target": "b"}', "", "5"]
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(f"{line}\n" for line in [*bad, *(json.dumps({"source": a, "target": b}) for a, b in PAIRS)])
    )
    corpora = Corpora.of_tables([str(path)], ("source", "target"), None)
    counter = LineCounter()
    assert [located.number for located in corpora.read(counter)] == list(range(8, 8 + len(PAIRS)))
    assert counter.locations == {
        "not a JSON object": [f"{path}:1", f"{path}:2", f"{path}:7"],
        "not text": [f"{path}:3"],
        "wrong column count": [f"{path}:4"],
        "empty side": [f"{path}:5"],
        "blank line": [f"{path}:6"],
    }
    with pytest.raises(UserError, match=r"a\.jsonl:1: not a JSON object: "):
        list(corpora.read(LineCounter(strict=True)))


def test_invalid_parquet_rows_are_counted_with_their_row_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [*PAIRS[:70], ("", "x"), *PAIRS[70:]])
    corpora = Corpora.of_tables([path], ("source", "target"), None)
    counter = LineCounter()
    assert [example for _, example in corpora.read(counter)] == [(*pair, None) for pair in PAIRS]
    assert counter.locations == {"empty side": [f"{path}[70]"]}
    (tmp_path / "broken.parquet").write_bytes(Path(path).read_bytes()[:-9])
    with pytest.raises(UserError, match=r"broken\.parquet: not a readable Parquet file"):
        list(Corpora.of_tables([str(tmp_path / "broken.parquet")], ("source", "target"), None).read(LineCounter()))


@pytest.mark.parametrize("group", [1, 13, 50, 1000])
@pytest.mark.parametrize("size", [0, 300, 1 << 20])
def test_parquet_is_read_in_blocks_for_any_row_group_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int, size: int
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(formats, "PARQUET_ROWS", 7)
    pairs = [*PAIRS[:20], (None, "x"), *PAIRS[20:40], ("x", None), *PAIRS[40:]]
    table = arrow.table({"source": [source for source, _ in pairs], "target": [target for _, target in pairs]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=group)
    corpora = Corpora.of_tables([str(tmp_path / "a.parquet")], ("source", "target"), None)
    counter = LineCounter()
    blocks = list(corpora.blocks(size))
    located = [each for block in blocks for each in corpora.read_block(block, counter)]
    assert located == list(corpora.read(LineCounter()))
    assert [example for _, example in located] == [(*pair, None) for pair in PAIRS]
    assert counter.read == len(pairs) and counter.skipped["empty side"] == 2
    lines = [corpora.parts[0].chunk_lines(block.chunk) for block in blocks]
    assert sum(lines) == len(pairs) and (size or max(lines) <= 7) and (size < 1 << 20 or len(lines) == 1)


def test_parquet_blocks_depend_on_the_text(tmp_path: Path) -> None:
    """Shards are named by the text of their block, so shards of changed files are not reused."""
    paths = [write(tmp_path / f"{name}.parquet", [(name, name.upper())] * 60) for name in ("a", "b", "a-again")]
    Path(paths[2]).write_bytes(Path(paths[0]).read_bytes())
    one, other, same = ([b.chunk for b in Corpora.of_tables([p], ("source", "target"), None).blocks()] for p in paths)
    assert one == same != other


def test_jsonl_and_parquet_are_refused_as_parallel_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", PAIRS)
    with pytest.raises(UserError, match=r"a\.jsonl: jsonl has both sides in one file, .*; name it in data\.train"):
        prepare_data(tmp_path / "data", {"source": [path], "target": [path]})


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.tsv.zst", "zstandard")])
def test_missing_package_is_reported_with_its_extra(name: str, package: str, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"x" * 99)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"{name}: .* needs {package}, which is not installed") as error:
        prepare_data(tmp_path / "data", {"train": str(path)})
    assert "pip install -c constraints.txt -e '.[corpora]'" in str(error.value)


def test_truncated_zstandard_data_is_detected(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.tsv.zst", PAIRS))
    data = path.read_bytes()
    path.write_bytes(data + data)  # zstandard frames may be concatenated
    assert len(list(Corpora.of_tables([str(path)], ("source", "target"), None).read(LineCounter()))) == 2 * len(PAIRS)
    for broken in (data[:-5], data[:40], data + data[:30], data[:30] + b"\0\0\0" + data[33:]):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"a\.tsv\.zst: broken zstandard data"):
            list(Corpora.of_tables([str(path)], ("source", "target"), None).read(LineCounter()))


def test_several_files_are_concatenated(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for number, name in enumerate(["a.tsv", "b.jsonl", "c.tsv.gz"]):
        write(tmp_path / "c" / name, PAIRS[100 * number : 100 * (number + 1) if number < 2 else None])
    expected = prepare_data(tmp_path / "expected", {"train": write(tmp_path / "all.tsv", PAIRS)})
    paths = [str(tmp_path / "c" / name) for name in ("a.tsv", "b.jsonl", "c.tsv.gz")]
    for number, train in enumerate(([str(tmp_path / "c" / "*")], paths)):
        prepared = prepare_data(tmp_path / str(number), {"train": train})
        assert rows(prepared) == rows(expected) and prepared.valid_examples == expected.valid_examples
        assert len(prepared.files) == 3
    assert sum(prepared.train.corpora) == len(prepared.train) and len(prepared.train.corpora) == 3
    lines = [line for _, line in sorted((index, prepared.train.line(index)) for index in range(len(prepared.train)))]
    corpora = Corpora.of_tables(paths, ("source", "target"), None)
    texts = {
        Path(path).name: pairs for path, pairs in zip(paths, (PAIRS[:100], PAIRS[100:200], PAIRS[200:]), strict=True)
    }
    for position, row in zip(lines, rows(prepared), strict=True):
        path, number = corpora.location(position).rsplit(":", 1)
        assert texts[Path(path).name][int(number) - 1] == row


def test_parallel_files_from_lists_and_patterns_are_concatenated(tmp_path: Path) -> None:
    expected = prepare_data(tmp_path / "expected", {"train": write(tmp_path / "all.tsv", PAIRS)})
    for number in range(2):
        for side, name in enumerate(("src", "tgt")):
            part = PAIRS[:99] if not number else PAIRS[99:]
            (tmp_path / f"{number}.{name}").write_text("".join(f"{pair[side]}\n" for pair in part))
    patterns = {"source": str(tmp_path / "?.src"), "target": str(tmp_path / "?.tgt")}
    lists = {"source": [str(tmp_path / "0.src"), str(tmp_path / "1.src")]}
    lists["target"] = [path.replace(".src", ".tgt") for path in lists["source"]]
    for number, data in enumerate((patterns, lists)):
        assert rows(prepare_data(tmp_path / f"found{number}", data)) == rows(expected)
    (tmp_path / "2.src").write_text("x\n")
    with pytest.raises(UserError, match=r"matches 3 files but .* matches 2"):
        prepare_data(tmp_path / "wrong", patterns)
    with pytest.raises(UserError, match=r"data\.source has 2 entries but data\.target has 1"):
        prepare_data(tmp_path / "wrong", {**lists, "target": lists["target"][:1]})
    (tmp_path / "1.tgt").write_text("x\n")
    with pytest.raises(UserError, match=r"1\.src has .* lines but .*1\.tgt has 1"):
        prepare_data(tmp_path / "wrong", lists)


def test_several_plain_text_files_are_concatenated(tmp_path: Path) -> None:
    texts = ["one line\nand two\n" * 40, "three\n" * 50]
    (tmp_path / "all.txt").write_text("".join(texts))
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.part").write_text(text)
    (tmp_path / "2.part").write_bytes(b"\xff\n")
    prepare_data(tmp_path / "expected", {"train": str(tmp_path / "all.txt")}, task="lm")
    prepared = prepare_data(tmp_path / "found", {"train": str(tmp_path / "*.part")}, task="lm")
    assert contents(tmp_path / "found") == contents(tmp_path / "expected")
    assert "2.part:1" in "\n".join(prepared.notes)


def test_new_matches_of_a_pattern_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "a.tsv", PAIRS)
    recipe = load_recipe({"data": {"train": str(tmp_path / "*.tsv")}, "text": CHAR})
    prepare(recipe, tmp_path / "data")
    assert list(changed_files(tmp_path / "data", recipe)) == []
    write(tmp_path / "b.tsv", PAIRS[:9])
    (message,) = changed_files(tmp_path / "data", recipe)
    assert "has 2 files now, and had 1 when the run began" in message
    with pytest.raises(UserError, match=r"\*\.csv: no file matches this pattern"):
        prepare_data(tmp_path / "none", {"train": str(tmp_path / "*.csv")})


# Filters


def test_duplicates_are_skipped_across_files(tmp_path: Path) -> None:
    first = [*PAIRS, *PAIRS[:20], ("bad", "")]
    second = [*PAIRS[50:60], ("new", "n e w"), ("new", "n e w")]
    paths = [write(tmp_path / "a.tsv", first), write(tmp_path / "b.jsonl", second)]
    expected = prepare_data(tmp_path / "expected", {"train": write(tmp_path / "all.tsv", [*PAIRS, ("new", "n e w")])})
    prepared = prepare_data(tmp_path / "found", {"train": paths, "deduplicate": True})
    assert rows(prepared) == rows(expected) and prepared.valid_examples == expected.valid_examples
    note = next(note for note in prepared.notes if note.startswith("training"))
    assert f"31 {DUPLICATE} ({paths[0]}:{len(PAIRS) + 1}, " in note and f"1 empty side ({paths[0]}:" in note


def test_deduplication_keeps_the_first_occurrence_of_every_example(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    pairs = [PAIRS[index] for index in random.integers(0, 300, 2000)]
    corpora = Corpora.of_tables([write(tmp_path / "a.tsv", pairs)], ("source", "target"), None).without_duplicates()
    assert [(e.source, e.target) for _, e in corpora.read(LineCounter())] == list(dict.fromkeys(pairs))


def test_length_and_ratio_limits_skip_training_examples(tmp_path: Path) -> None:
    unusual = [("a", "bbbb"), ("abc", "x" * 13), ("abcdef", "x"), ("abcd", "x" * 12), ("y" * 30, "y" * 30)]
    path = write(tmp_path / "a.tsv", [*unusual, *PAIRS])
    valid = write(tmp_path / "v.tsv", unusual)
    limits = {"min_length": 2, "max_ratio": 3, "max_length": 29}
    prepared = prepare_data(tmp_path / "found", {"train": path, "valid": valid, **limits})
    assert rows(prepared) == [unusual[3], *PAIRS]
    note = next(note for note in prepared.notes if note.startswith("training"))
    for reason, line in ((TOO_SHORT, 1), (RATIO, 2), (TOO_SHORT, 3), ("too long", 5)):
        assert f"{reason} (" in note and f"{path}:{line}" in note
    assert len(prepared.valid) == 4  # only max_length applies to a validation file
    with pytest.raises(UserError, match=r"a\.tsv:1: too short: 1 token; data\.min_length is 2"):
        prepare_data(tmp_path / "strict", {"train": path, **limits, "strict": True})
    with pytest.raises(UserError, match=r"no training example is left: .*too short"):
        prepare_data(tmp_path / "none", {"train": path, "min_length": 100})


@pytest.mark.parametrize(
    ("data", "task", "message"),
    [
        ({"train": "a.tsv", "max_ratio": 2}, "classify", r"data\.max_ratio: not for task classify"),
        ({"train": "a.tsv", "deduplicate": True}, "lm", r"data\.deduplicate: not for task lm"),
        ({"train": ["a.npz", "b.npz"], "weights": [1, 2]}, "image", r"data\.weights: not for task image"),
        ({"train": "a.jsonl"}, "lm", r"a\.jsonl: no usable text: .*\n  most lines lack text; name the keys"),
        ({"train": "a.jsonl", "column_names": ["x", "y"]}, "lm", "column_names must name a column for each of text"),
        ({"train": "a", "column_names": ["x", "x"]}, "pairs", "column_names names a column twice: x, x"),
        ({"train": ["a.npz", "b.npz"]}, "image", "takes one file of images, not 2"),
        ({"train": ["a", "b"], "weights": [1]}, "pairs", "weights has 1 number for 2 corpora"),
        ({"train": ["a", "b"], "weights": [1, 0]}, "pairs", r"data\.weights"),
        ({"train": ["a", "b"], "weights": [1, 2], "temperature": 2}, "pairs", "either weights or temperature"),
        ({"train": "a", "temperature": 2}, "pairs", "temperature needs several corpora"),
        ({"train": "a", "column_names": ["x"]}, "pairs", "column_names must name a column for each"),
        ({"train": "a", "min_length": 9, "max_length": 8}, "pairs", "min_length .* is more than max_length"),
        ({"train": ["a", ""]}, "pairs", "empty name"),
    ],
)
def test_invalid_data_settings_are_explained(data: dict, task: str, message: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.tsv", PAIRS)
    (tmp_path / "a.jsonl").write_text('{"x": "abc", "y": "d"}\n')
    with pytest.raises(UserError, match=message):
        prepare_data(tmp_path / "data", data, task=task)


def test_positions_in_a_single_file_are_line_numbers(tmp_path: Path) -> None:
    corpora = Corpora.of_tables([write(tmp_path / "a.tsv", PAIRS)], ("source", "target"), None)
    assert list(corpora.read(LineCounter())) == list(corpora.parts[0].read(LineCounter()))
    assert next(iter(corpora.read(LineCounter()))) == Located(1, (*PAIRS[0], None))


# Training


@pytest.mark.parametrize("setting", [{"weights": [1, 3]}, {"temperature": 4}, {}])
def test_training_samples_each_corpus_in_proportion(setting: dict, tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.tsv", PAIRS[:300]), write(tmp_path / "b.tsv", PAIRS[300:])]
    valid = write(tmp_path / "v.tsv", PAIRS[:9])
    recipe = load_recipe({"data": {"train": paths, "valid": valid, **setting}, "text": CHAR})
    prepared = prepare(recipe, tmp_path / "data")
    config = preset("transformer-tiny", 50)
    loader = make_loader(recipe, prepared, config)
    sizes = np.array([300, len(PAIRS) - 300])
    powers = {"weights": np.array([1, 3]), "temperature": sizes ** (1 / 4)}.get("".join(setting), sizes)
    for epoch in range(3):
        rows = np.concatenate(loader.batches(epoch))
        counts = np.bincount((rows >= 300).astype(int), minlength=2)
        assert np.allclose(counts, len(PAIRS) * powers / powers.sum(), atol=1)
    number, batch = next((number, batch) for number, batch in enumerate(loader.batches(0)) if 300 in batch)
    assert loader.step(0, number).locate(0, batch.tolist().index(300)).startswith(f"{paths[1]}:1 (")


@pytest.mark.parametrize(("setting", "share"), [({"weights": [1, 3]}, 0.25), ({"temperature": 1e9}, 0.5), ({}, 0.8)])
def test_text_windows_are_sampled_from_each_corpus_in_proportion(setting: dict, share: float, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{name}.txt") for name in ("a", "b", "v")]
    for path, text in zip(paths, ("a b\n" * 1600, "c d\n" * 400, "a c\n"), strict=True):
        Path(path).write_text(text)
    tables = {"task": "lm", "data": {"train": paths[:2], "valid": paths[2], **setting}, "text": CHAR}
    recipe = load_recipe({**tables, "train": {"context": 16}})
    prepared = prepare(recipe, tmp_path / "data")
    assert prepared.train.corpora == (1 + 6400, 1 + 6400 + 1600)  # the stream starts with an end token
    loader = make_loader(recipe, prepared, preset("gpt-tiny", 50))
    for epoch in range(3):
        starts = np.concatenate(loader.batches(epoch))
        assert abs((starts < 6401).mean() - share) < 0.01
        assert abs(len(starts) - loader.examples) <= 1
    if setting:
        with pytest.raises(UserError, match="a model with segment memory reads the text in order"):
            make_loader(recipe, prepared, preset("xl-tiny", 50))
