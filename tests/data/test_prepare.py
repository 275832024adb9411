"""Preparing data from a recipe: tokenizers, vocabularies, split, reuse, and errors."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from regard import files
from regard.data import pairs, prepare as module, reader, tables
from regard.data.prepare import Prepared, changed_files, open_prepared, prepare
from regard.errors import UserError
from regard.recipe import load_recipe
from regard.text import learn as vocabulary
from regard.text.codec import Example

RANDOM = random.Random(3)
WORDS = sorted({"".join(RANDOM.choices("abcdefgh", k=RANDOM.randint(3, 9))) for _ in range(420)})
PAIRS = [(word, " ".join(word.upper())) for word in WORDS]


def table(path: Path, rows: list[tuple[str, ...]], compress: bool = False) -> str:
    data = "".join("\t".join(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if compress else data)
    return str(path)


def prepare_data(out: Path, data: dict, text: dict | None = None, seed: int = 1, **options) -> Prepared:
    return prepare(load_recipe({"data": data, "text": text or {}, "train": {"seed": seed}}), out, **options)


def rows(prepared: Prepared) -> list[tuple[str, str]]:
    codec = prepared.codec
    train = prepared.train
    return [(codec.source.decode(train.source(i)), codec.decode_target(train.target(i))) for i in range(len(train))]


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_table_is_split_into_training_and_validation_corpora(tmp_path: Path) -> None:
    prepared = prepare_data(tmp_path / "data", {"train": table(tmp_path / "t.tsv", PAIRS)})
    assert (prepared.codec.source.scheme, prepared.codec.target.scheme) == ("char", "space")
    held_out = [(example.source, example.target) for example in prepared.valid_examples]
    assert sorted(rows(prepared) + held_out) == sorted(PAIRS)
    assert len(held_out) == len(prepared.valid) == 50
    for index, example in enumerate(prepared.valid_examples):
        assert prepared.valid.source(index).tolist() == prepared.codec.encode_source([example])[0]
        assert prepared.valid.target(index).tolist() == prepared.codec.encode_target([example.target or ""])[0]
    message = "\n".join(prepared.notes)
    for part in (
        "source tokens: char: ",
        "target tokens: space: ",
        f"{len(PAIRS):,} of {len(PAIRS):,} lines",
        "50 examples",
    ):
        assert part in message


def test_prepared_data_is_written_once_and_reopened(tmp_path: Path) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS)}
    first = prepare_data(tmp_path / "data", data)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    for again in (prepare_data(tmp_path / "data", data), open_prepared(tmp_path / "data")):
        assert (again.notes, again.valid_examples, rows(again)) == (first.notes, first.valid_examples, rows(first))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == before
    prepare_data(tmp_path / "other", data)
    assert contents(tmp_path / "other") == contents(tmp_path / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "other", "t.tsv"]  # no temporary files are left


def test_changed_data_or_settings_are_prepared_again(tmp_path: Path) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS)}
    prepare_data(tmp_path / "data", data)
    table(tmp_path / "t.tsv", PAIRS[:-1])
    prepared = prepare_data(tmp_path / "data", data)
    assert len(prepared.train) + len(prepared.valid) == len(PAIRS) - 1
    assert prepare_data(tmp_path / "data", data, {"source_tokens": "byte"}).codec.source.scheme == "byte"
    (tmp_path / "t.tsv").unlink()
    with pytest.raises(UserError, match="no such file"):
        prepare_data(tmp_path / "data", data)


def test_strict_run_does_not_reuse_lenient_data(tmp_path: Path) -> None:
    data = {"train": table(tmp_path / "t.tsv", [*PAIRS, ("bad",)])}
    prepare_data(tmp_path / "data", data)
    before = contents(tmp_path / "data")
    with pytest.raises(UserError, match=rf"t\.tsv:{len(PAIRS) + 1}: wrong column count"):
        prepare_data(tmp_path / "data", {**data, "strict": True})
    assert contents(tmp_path / "data") == before
    # The key is absent, so caches of earlier versions stay valid.
    assert "data.strict" not in json.loads(before["prepared.json"])["made_from"]


@pytest.mark.parametrize("earlier", [False, True])
def test_changed_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool) -> None:
    """Changes are detected by size and hash; files with an unchanged modification time are not hashed.

    Records of earlier versions have no sizes and a different hash.
    """
    paths = [tmp_path / "t.tsv", tmp_path / "v.tsv"]
    data = {"train": table(paths[0], PAIRS), "valid": table(paths[1], PAIRS[:9])}
    recipe = load_recipe({"data": data})
    sizes = [path.stat().st_size for path in paths]
    files = prepare(recipe, tmp_path / "data").files
    assert list(files.values()) == [
        (path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in paths
    ]
    if earlier:
        record = json.loads((tmp_path / "data/prepared.json").read_text())
        del record["files"]
        for role, path in zip(files, paths, strict=True):
            record["made_from"][role] = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        (tmp_path / "data/prepared.json").write_text(json.dumps(record))
    with monkeypatch.context() as patched:
        if not earlier:
            patched.delattr(module, "_digest")
        assert list(changed_files(tmp_path / "data", recipe)) == []
    text = paths[1].read_text()
    paths[1].write_text(text[:-2] + "#\n")  # the size does not change
    (message,) = changed_files(tmp_path / "data", recipe)
    assert message.startswith(f"{paths[1]}: has changed") and f"now {sizes[1]:,} bytes" in message
    assert (f"then {sizes[1]:,} bytes" in message) == (not earlier)
    table(paths[0], PAIRS[1:])
    assert len(list(changed_files(tmp_path / "data", recipe))) == 2
    for path in paths:
        path.unlink()
    assert list(changed_files(tmp_path / "data", recipe)) == []  # a resumed run needs only the prepared data


@pytest.mark.parametrize("same", [False, True])
def test_validation_data_equal_to_training_data_is_noted(tmp_path: Path, same: bool) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "valid": table(tmp_path / "v.tsv", PAIRS[same is False :])}
    notes = "\n".join(prepare_data(tmp_path / "data", data).notes)
    assert ("the validation data is the training data" in notes) == same


SENTENCES = [(" ".join(RANDOM.choices(WORDS, k=6)), " ".join(RANDOM.choices(WORDS, k=6))) for _ in range(150)]


@pytest.mark.parametrize(
    ("task", "scheme"),
    [
        *(("pairs", scheme) for scheme in ("char", "nfd", "space", "word", "byte", "bpe:300", "unigram:300", "auto")),
        ("classify", "auto"),
        ("lm", "auto"),
        ("masked", "bpe:300"),
        ("span", "char"),
    ],
)
def test_prepared_data_does_not_depend_on_the_seed(task: str, scheme: str, tmp_path: Path) -> None:
    labelled = [(source, target[:1]) for source, target in SENTENCES]
    path = table(tmp_path / "t.tsv", labelled if task == "classify" else SENTENCES)
    tables = {"task": task, "data": {"train": path}, "text": {"source_tokens": scheme, "target_tokens": scheme}}
    for seed in (1, 2):
        prepare(load_recipe({**tables, "train": {"seed": seed}}), tmp_path / str(seed))
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


@pytest.mark.parametrize("scheme", ["char", "nfd", "space", "word", "byte", "bpe:300", "unigram:300"])
def test_order_of_lines_does_not_change_split_or_vocabulary(scheme: str, tmp_path: Path) -> None:
    lines = SENTENCES + SENTENCES[::3] + [(source, target + " x") for source, target in SENTENCES[::4]]
    results = []
    for index in range(3):
        shuffled = random.Random(index).sample(lines, len(lines))
        text = {"source_tokens": scheme, "target_tokens": scheme}
        prepared = prepare_data(tmp_path / str(index), {"train": table(tmp_path / "t", shuffled)}, text)
        tokenizers = {path.name: path.read_bytes() for path in (tmp_path / str(index)).glob("*.tokenizer.json")}
        results.append((sorted(prepared.valid_examples), sorted(rows(prepared)), tokenizers))
        assert not {e.source for e in prepared.valid_examples} & {source for source, _ in rows(prepared)}
        assert len(prepared.valid) + len(prepared.train) == len(lines)
    assert results[0] == results[1] == results[2]


def test_features_with_a_validation_file(tmp_path: Path) -> None:
    columns = ["source", "features", "target"]
    train = table(
        tmp_path / "t", [(word, "N;SG" if index % 2 else "N;PL", word + "s") for index, word in enumerate(WORDS)]
    )
    valid = table(tmp_path / "v", [("abc", "N;DU", "abcß"), ("a" * 20, "N", "b")])
    prepared = prepare_data(tmp_path / "data", {"train": train, "valid": valid, "columns": columns, "max_length": 15})
    assert prepared.codec.features == ("N", "PL", "SG")
    assert prepared.valid_examples == [Example("abc", "abcß", "N;DU")]
    message = "\n".join(prepared.notes)
    assert "1 of 2 lines; skipped 1 too long" in message
    assert "validation, source: 1 unknown token in 1 line: 'DU' 1x" in message
    assert "validation, target: 1 unknown token in 1 line: 'ß'" in message


@pytest.mark.parametrize("scheme", ["bpe:300", "unigram:300", "word", "byte"])
def test_parallel_files_are_prepared_with_a_shared_vocabulary(scheme: str, tmp_path: Path) -> None:
    sides = [[(" ".join(RANDOM.choices(WORDS, k=8)),) for _ in range(60)] for _ in range(2)]
    data = {"source": table(tmp_path / "a.gz", sides[0], True), "target": table(tmp_path / "b", sides[1])}
    prepared = prepare_data(tmp_path / "data", data, {"source_tokens": scheme, "shared": True})
    assert prepared.codec.shared
    assert prepared.codec.source.scheme.split(":")[0] == scheme.split(":")[0]
    held_out = [(e.source, e.target) for e in prepared.valid_examples]
    pairs = [(a, b) for (a,), (b,) in zip(*sides, strict=True)]
    if scheme == "word":  # held-out lines may contain unknown words
        assert set(rows(prepared)) < set(pairs)
    else:
        assert sorted(rows(prepared) + held_out) == sorted(pairs)


def test_vocabulary_is_not_learned_from_held_out_examples(tmp_path: Path) -> None:
    pairs = [(word, word + chr(0x4E00 + index)) for index, word in enumerate(WORDS)]
    prepared = prepare_data(tmp_path / "data", {"train": table(tmp_path / "t", pairs)}, {"target_tokens": "char"})
    assert all(prepared.codec.target.unknown_tokens(example.target or "") for example in prepared.valid_examples)


@pytest.fixture
def learning_texts(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the texts from which vocabularies are learned, with samples of about 100 lines."""
    monkeypatch.setattr(vocabulary, "MAX_LINES", 100)
    texts: list[list[str]] = []
    train = module.Tokenizer.train

    def record(scheme: str, some: Iterable[str], *rest: Any) -> Any:
        texts.append(list(some))
        return train(scheme, texts[-1], *rest)

    monkeypatch.setattr(module.Tokenizer, "train", record)
    return texts


def test_bpe_is_learned_from_a_sample_and_char_from_all_lines(tmp_path: Path, learning_texts: list[list[str]]) -> None:
    schemes = {"source_tokens": "bpe:270", "target_tokens": "char"}
    prepare_data(tmp_path / "data", {"train": table(tmp_path / "t", PAIRS)}, schemes)
    assert 60 < len(learning_texts[0]) < 140  # a sample of about 100 out of 370 lines
    assert len(learning_texts[1]) == len(PAIRS) - 50


def test_sample_of_large_files_reads_few_blocks_from_the_whole_file(
    tmp_path: Path, learning_texts: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for part, name, value in ((reader, "READ_BYTES", 100), (pairs, "READ_BYTES", 100), (pairs, "MIN_SAMPLE_BLOCKS", 4)):
        monkeypatch.setattr(part, name, value)
    reads: list[int] = []
    read_block = tables.Corpora.read_block
    monkeypatch.setattr(tables.Corpora, "read_block", lambda *args: (reads.append(1), read_block(*args))[1])
    rows = [(f"{source}{part}", f"{target} {part}") for part in range(10) for source, target in PAIRS]
    data = {"train": table(tmp_path / "t", rows), "valid": table(tmp_path / "v", PAIRS[:3])}
    prepare_data(tmp_path / "data", data, {"source_tokens": "bpe:270", "target_tokens": "bpe:270"})
    block_count = (tmp_path / "t").stat().st_size // 100  # approximate number of blocks in the file
    assert len(reads) < 2.5 * block_count  # the scan and the encoding read all blocks, the samples few
    for texts in learning_texts:
        assert 60 < len(texts) < 140
        assert {text[-1] for text in texts} == set("0123456789")  # from all parts of the file


def test_vocabularies_of_unspaced_scripts_are_learned_from_fewer_characters() -> None:
    spaced = ["some words " * 5] * 10
    unspaced = ["文" * 55] * 10
    assert vocabulary.learned_lines("char", spaced, 10**7) == 10**7
    assert vocabulary.learned_lines("bpe:8000", spaced, 500) == 500
    assert vocabulary.learned_lines("bpe:8000", spaced, 10**7) * 55 <= vocabulary.MAX_CHARACTERS
    assert vocabulary.learned_lines("bpe:8000", unspaced, 10**7) * 55 <= vocabulary.MAX_UNSPACED_CHARACTERS["bpe"]
    assert vocabulary.learned_lines("unigram:8000", ["x" * 10**6], 10**7) == 1


def test_stdin_and_pipes_give_the_same_data_as_files(tmp_path: Path, monkeypatch) -> None:
    path = table(tmp_path / "t.tsv", [*PAIRS, ("bad",)])
    expected = prepare_data(tmp_path / "file", {"train": path})
    monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": io.BytesIO(Path(path).read_bytes())}))
    from_stdin = prepare_data(tmp_path / "stdin", {"train": "-"})
    assert rows(from_stdin) == rows(expected)
    assert f"wrong column count (stdin:{len(PAIRS) + 1})" in "\n".join(from_stdin.notes)
    assert not list((tmp_path / "stdin").glob("spool*"))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(Path(path).read_bytes(),), daemon=True).start()
        assert rows(prepare_data(tmp_path / "fifo", {"train": str(tmp_path / "pipe")})) == rows(expected)


def test_single_source_is_used_for_training_and_validation(tmp_path: Path) -> None:
    path = table(tmp_path / "t", [("a", "b"), ("a", "long" * 9)])
    prepared = prepare_data(tmp_path / "data", {"train": path, "max_length": 9})
    assert (len(prepared.train), len(prepared.valid)) == (1, 1)
    message = "\n".join(prepared.notes)
    assert "cannot be split" in message
    assert "1 of 2 lines; skipped 1 too long" in message  # reported once


@pytest.mark.parametrize(
    ("data", "text", "message"),
    [
        ({}, {}, "no training data"),
        ({"train": "missing.tsv"}, {}, "missing.tsv: no such file"),
        ({"train": "good.tsv", "valid": "missing.tsv"}, {}, "missing.tsv: no such file"),
        ({"train": "three.tsv"}, {}, r"data\.columns=source,features,target"),
        ({"train": "good.tsv", "valid": "three.tsv"}, {}, "three.tsv: no usable example"),
        ({"train": "good.tsv", "max_length": 1}, {}, "raise data.max_length"),
        ({"train": "good.tsv", "valid": "good.tsv", "max_length": 1}, {}, "raise data.max_length"),
        ({"train": "good.tsv"}, {"source_tokens": "cahr"}, "text.source_tokens: .*did you mean 'char'"),
        ({"train": "good.tsv"}, {"target_tokens": "bpe"}, "text.target_tokens: "),
        ({"train": "good.tsv"}, {"source_tokens": "char", "target_tokens": "word", "shared": True}, "char and word"),
        ({"source": "good.tsv", "target": "good.tsv", "columns": ["source", "features", "target"]}, {}, "features are"),
    ],
)
def test_invalid_settings_leave_no_prepared_data(
    data: dict, text: dict, message: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "good.tsv", PAIRS)
    table(tmp_path / "three.tsv", [("a", "N", "b")] * 5)
    with pytest.raises(UserError, match=message):
        prepare_data(tmp_path / "data", data, text)
    assert not (tmp_path / "data").exists() and not (tmp_path / "data.tmp").exists()


def test_failed_preparation_leaves_existing_data_unchanged(tmp_path: Path, monkeypatch) -> None:
    path = table(tmp_path / "t.tsv", PAIRS)
    prepare_data(tmp_path / "data", {"train": path})
    before = contents(tmp_path / "data")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "rename", fail)
    with pytest.raises(UserError, match=r"data: cannot write: No space left"):
        prepare_data(tmp_path / "data", {"train": path}, {"min_count": 2})
    assert contents(tmp_path / "data") == before
    assert not (tmp_path / "data.tmp").exists()


def test_temporary_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / "data.tmp" / "train").mkdir(parents=True)
    prepare_data(tmp_path / "data", {"train": table(tmp_path / "t.tsv", PAIRS)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "t.tsv"]


@pytest.mark.parametrize("cached", [False, True])
def test_shards_left_next_to_complete_data_are_removed(tmp_path: Path, cached: bool) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), **({"cache": str(tmp_path / "cache")} if cached else {})}
    prepare_data(tmp_path / "data", data)
    (complete,) = (tmp_path / "cache").iterdir() if cached else [tmp_path / "data"]
    shards = complete.with_name(complete.name + ".shards")
    shards.mkdir()
    (shards / "0.shard").touch()
    prepare_data(tmp_path / ("other" if cached else "data"), data)
    assert not shards.exists()


def test_file_that_changes_during_preparation_is_refused(tmp_path: Path, monkeypatch) -> None:
    path = table(tmp_path / "t.tsv", PAIRS)
    kind = module.KINDS["pairs"]

    def append_and_write(*arguments: object) -> dict:
        with open(path, "a") as file:
            file.write("late\tl a t e\n")
        return kind.write(*arguments)

    monkeypatch.setitem(module.KINDS, "pairs", kind._replace(write=append_and_write))
    with pytest.raises(UserError, match="changed while it was read"):
        prepare_data(tmp_path / "data", {"train": path})


# Labels


def labelled(path: Path, *rows: tuple[str, str], valid: list[tuple[str, str]] | None = None) -> Prepared:
    data = {"train": table(path / "t.tsv", list(rows))}
    if valid is not None:
        data["valid"] = table(path / "v.tsv", valid)
    return prepare(load_recipe({"task": "classify", "data": data}), path / "data")


def test_labels_may_contain_spaces(tmp_path: Path) -> None:
    rows = [(word, "so so" if index % 3 else "good") for index, word in enumerate(WORDS)]
    prepared = labelled(tmp_path, *rows)
    assert prepared.labels == ("good", "so so") == open_prepared(tmp_path / "data").labels
    names = dict(rows)
    assert prepared.codec.shared and prepared.codec.frame == "both"
    ids = prepared.codec.ids
    for index in range(len(prepared.train)):
        row = prepared.train.source(index).tolist()
        assert (row[0], row[-1]) == (ids.sos, ids.eos)
        (number,) = prepared.train.target(index).tolist()
        assert prepared.labels[number] == names[prepared.codec.source.decode(row)]


def test_validation_labels_missing_from_training_are_skipped(tmp_path: Path) -> None:
    rows = [(word, str(index % 2)) for index, word in enumerate(WORDS)]
    prepared = labelled(tmp_path, *rows, valid=[("aa", "1"), ("bb", "new")])
    assert [example.target for example in prepared.valid_examples] == ["1"]
    assert any("label that training does not have" in note and "v.tsv:2" in note for note in prepared.notes)
    with pytest.raises(UserError, match="no validation example is left"):
        labelled(tmp_path, *rows, valid=[("bb", "new")])


def test_single_label_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="same label, 'x'"):
        labelled(tmp_path, *((word, "x") for word in WORDS))


def test_too_many_distinct_labels_are_refused(tmp_path: Path, monkeypatch) -> None:
    from regard.data import pairs as scan

    monkeypatch.setattr(scan, "MAX_LABELS", 10)
    with pytest.raises(UserError, match=r"t\.tsv:11: more than 10 different labels"):
        labelled(tmp_path, *((word, word) for word in WORDS))
