"""Prepared data does not depend on the number of processes and blocks, or on kills."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from regard.data import encode, pairs, plain_text, prepare as prepared, reader
from regard.data.prepare import prepare
from regard.errors import UserError
from regard.parallel.children import Child, Template
from regard.parallel.messages import Message
from regard.recipe import load_recipe

RANDOM = random.Random(7)
WORDS = ["".join(RANDOM.choices("abcdefgh'é9", k=RANDOM.randint(1, 8))) for _ in range(400)]


def random_text() -> str:
    return RANDOM.choice([" ", "  "] + [" "] * 9).join(RANDOM.choices(WORDS, k=RANDOM.randint(1, 12)))


def random_line() -> bytes:
    pair = f"{random_text()}\t{random_text()}".encode()
    return RANDOM.choice([b"", b"one", b"\xff\tx", b"x\t", b"long " * 99 + b"\tx", *[pair] * 60])


LINES = [random_line() for _ in range(1500)]


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "a.tsv").write_bytes(b"\n".join(LINES[:1000]))
    (tmp_path / "b.tsv").write_bytes(b"\n".join(LINES[1000:] + LINES[:50]) + b"\n")
    data = {"train": [str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv")], "max_length": 60}
    return {"data": data, "text": {"source_tokens": "bpe:400", "target_tokens": "word"}}


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def use_small_blocks(monkeypatch, size: int = 5000) -> None:
    monkeypatch.setattr(reader, "READ_BYTES", 1000)
    monkeypatch.setattr(encode, "BLOCK_BYTES", size)
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", size)
    monkeypatch.setattr(encode, "MIN_PARALLEL_BYTES", 0)


def keep_shards(monkeypatch) -> None:
    """Prevent the removal of shards after preparation."""
    monkeypatch.setattr(prepared, "shards_of", lambda path: path / "nothing")


def record_results(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Patch a function to record its results in the returned list."""
    function = getattr(owner, name)
    results: list[Any] = []

    def record(*arguments: Any) -> Any:
        results.append(function(*arguments))
        return results[-1]

    monkeypatch.setattr(owner, name, record)
    return results


@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("processes", [1, 3])
def test_prepared_data_does_not_depend_on_blocks_and_processes(
    processes, deduplicate, tables, tmp_path: Path, monkeypatch
) -> None:
    recipe = load_recipe({**tables, "data": {**tables["data"], "deduplicate": deduplicate}})
    prepare(recipe, tmp_path / "whole")
    use_small_blocks(monkeypatch)
    children = record_results(monkeypatch, Template, "start")
    prepare(recipe, tmp_path / "blocks", processes=processes)
    assert contents(tmp_path / "blocks") == contents(tmp_path / "whole")
    assert len(children) == (processes if processes > 1 else 0)
    assert all(child.poll() is not None for child in children)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv", "b.tsv", "blocks", "whole"]


def test_small_files_are_prepared_without_child_processes(tables, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    prepare(load_recipe(tables), tmp_path / "one", processes=8)
    monkeypatch.setattr(reader, "READ_BYTES", 1000)
    monkeypatch.setattr(encode, "BLOCK_BYTES", 5000)
    prepare(load_recipe(tables), tmp_path / "blocks", processes=8)
    assert contents(tmp_path / "one") == contents(tmp_path / "blocks")


@pytest.mark.parametrize("task", ["pairs", "classify"])
def test_parquet_and_classification_are_prepared_in_processes(task: str, tmp_path: Path, monkeypatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    sides = {"x": [random_text() for _ in range(900)], "y": [RANDOM.choice("ABC") for _ in range(900)]}
    parquet.write_table(table(sides), tmp_path / "a.parquet", row_group_size=100)
    data = {"train": str(tmp_path / "a.parquet"), "column_names": ["x", "y"]}
    recipe = load_recipe({"task": task, "data": data, "text": {"source_tokens": "bpe:300"}})
    prepare(recipe, tmp_path / "whole")
    use_small_blocks(monkeypatch, 1)
    prepare(recipe, tmp_path / "blocks", processes=2)
    assert contents(tmp_path / "blocks") == contents(tmp_path / "whole")


@pytest.mark.parametrize("processes", [1, 2])
def test_shards_of_a_killed_process_are_reused(processes, tables, tmp_path: Path, monkeypatch) -> None:
    recipe = load_recipe(tables)
    prepare(recipe, tmp_path / "expected")
    use_small_blocks(monkeypatch)
    write = pairs.CorpusWriter.write

    class Killed(BaseException):
        pass

    def write_and_kill(self: Any, rows: Any) -> None:
        write(self, rows)
        if self.count > 300:
            raise Killed

    monkeypatch.setattr(pairs.CorpusWriter, "write", write_and_kill)
    with pytest.raises(Killed):
        prepare(recipe, tmp_path / "data", processes=processes)
    monkeypatch.setattr(pairs.CorpusWriter, "write", write)
    shards = sorted((tmp_path / "data.shards").glob("*.shard"))
    assert len(shards) >= 3 and not (tmp_path / "data").exists()
    complete = shards[0].read_bytes()
    shards[0].write_bytes(complete[:-1])  # simulates an incomplete write
    before = {path: path.stat().st_mtime_ns for path in shards[1:]}
    keep_shards(monkeypatch)
    prepare(recipe, tmp_path / "data", processes=processes)
    assert contents(tmp_path / "data") == contents(tmp_path / "expected")
    assert {path: path.stat().st_mtime_ns for path in shards[1:]} == before
    assert shards[0].read_bytes() == complete


def test_changed_settings_do_not_reuse_shards(tables, tmp_path: Path, monkeypatch) -> None:
    use_small_blocks(monkeypatch)
    keep_shards(monkeypatch)
    prepare(load_recipe(tables), tmp_path / "data")
    first = set((tmp_path / "data.shards").iterdir())
    for text_settings, data in (
        ({"source_tokens": "char"}, {}),
        ({}, {"max_length": 9}),
        ({}, {"strict": False, "min_length": 2}),
    ):
        settings = {"text": {**tables["text"], **text_settings}, "data": {**tables["data"], **data}}
        prepare(load_recipe(settings), tmp_path / "other")
        assert not first & set((tmp_path / "other.shards").iterdir())


def test_errors_do_not_depend_on_the_number_of_processes(tables, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.tsv").write_text(
        "".join(f"{random_text()}\t{random_text()}\n" for _ in range(300)) + "long " * 99 + "\tx\n"
    )
    use_small_blocks(monkeypatch)
    recipe = load_recipe({**tables, "data": {"train": str(tmp_path / "a.tsv"), "max_length": 60, "strict": True}})
    messages = []
    for processes in (1, 2):
        with pytest.raises(UserError, match=r"a\.tsv:301: too long: ") as error:
            prepare(recipe, tmp_path / "data", processes=processes)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_dead_tokenisation_process_is_reported(tables, tmp_path: Path, monkeypatch) -> None:
    start = Template.start

    def start_and_kill(*arguments: Any) -> Child:
        child = start(*arguments)
        child.kill()
        return child

    use_small_blocks(monkeypatch)
    monkeypatch.setattr(Template, "start", start_and_kill)
    with pytest.raises(UserError, match="a process that turns text into tokens was killed by signal 9"):
        prepare(load_recipe(tables), tmp_path / "data", processes=2)


def test_processes_read_files_with_names_that_are_not_utf8(tables, tmp_path: Path, monkeypatch) -> None:
    odd = tmp_path / os.fsdecode(b"\xff\xed\xa0\x80.tsv")
    try:
        odd.write_bytes(b"\n".join(LINES))
    except OSError:
        pytest.skip("this file system requires names in UTF-8")
    recipe = load_recipe({**tables, "data": {"train": str(odd), "max_length": 60}})
    use_small_blocks(monkeypatch)
    prepare(recipe, tmp_path / "one")
    prepare(recipe, tmp_path / "two", processes=2)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_concurrent_equal_blocks_share_one_shard(tmp_path: Path) -> None:
    store = encode.ShardStore(tmp_path, {})
    shard = Message({"examples": ["\ud800"]}, [b"x" * 100_000, b""])
    with ThreadPoolExecutor(8) as threads:
        shards = list(threads.map(lambda _: store.shard(lambda block: shard, Message({}, [b"text"])), range(50)))
    assert shards == [({}, shard)] * 50
    assert len(list(tmp_path.iterdir())) == 1


def test_a_shard_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    store = encode.ShardStore(tmp_path / "shards", {})
    (tmp_path / "shards").rmdir()
    with pytest.raises(UserError, match="cannot write: No such file or directory"):
        store.shard(lambda block: block, Message({}, []))


# Plain text


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "a.txt").write_bytes(b"\n".join(LINES[:900]))
    (tmp_path / "b.txt").write_text("".join(f"{random_text()}\n" for _ in range(300)) + "x" * 9000)
    (tmp_path / "c.txt").write_text("the end, all of it held out\n")
    data = {"train": [str(tmp_path / f"{name}.txt") for name in "abc"]}
    return {"task": "lm", "data": data, "text": {"source_tokens": "bpe:400"}}


@pytest.mark.parametrize(("processes", "scheme"), [(1, "bpe:400"), (1, "char"), (1, "word"), (3, "bpe:400")])
def test_plain_text_does_not_depend_on_blocks_and_processes(
    processes, scheme, texts, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "valid.txt").write_text("".join(f"{random_text()}\n" for _ in range(100)))
    for valid in ({}, {"valid": str(tmp_path / "valid.txt")}):
        recipe = load_recipe({**texts, "text": {"source_tokens": scheme}, "data": {**texts["data"], **valid}})
        with monkeypatch.context() as patches:
            prepare(recipe, tmp_path / "whole")
            use_small_blocks(patches)
            children = record_results(patches, Template, "start")
            lookups = record_results(patches, encode, "_load")
            prepare(recipe, tmp_path / "parts", processes=processes)
        assert len(lookups) >= 5 and (len(children) > 1) == (processes > 1)
        assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
        corpora = json.loads((tmp_path / "parts" / "train" / "meta.json").read_text())["corpora"]
        assert len(corpora) == 3 and 0 < corpora[0] < corpora[1]
        assert (corpora[1] == corpora[2]) == (not valid)  # without a validation file, the last corpus is held out
        assert not list(tmp_path.glob("*.shards"))
        for name in ("whole", "parts"):
            shutil.rmtree(tmp_path / name)


@pytest.mark.parametrize("processes", [1, 2])
def test_plain_text_continues_after_a_kill(processes, texts, tmp_path: Path, monkeypatch) -> None:
    recipe = load_recipe(texts)
    prepare(recipe, tmp_path / "expected")
    use_small_blocks(monkeypatch)
    write = plain_text.StreamWriter.write
    calls = []

    class Killed(BaseException):
        pass

    def write_and_kill(self: Any, *arguments: Any) -> None:
        write(self, *arguments)
        calls.append(arguments)
        if len(calls) == 4:
            raise Killed

    monkeypatch.setattr(plain_text.StreamWriter, "write", write_and_kill)
    with pytest.raises(Killed):
        prepare(recipe, tmp_path / "data", processes=processes)
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "data.shards").glob("*.shard")}
    assert len(shards) >= 4 and not (tmp_path / "data").exists()
    keep_shards(monkeypatch)
    children = record_results(monkeypatch, Template, "start")
    prepare(recipe, tmp_path / "data", processes=processes)
    assert bool(children) == (processes > 1)
    assert contents(tmp_path / "data") == contents(tmp_path / "expected")
    assert {path: path.stat().st_mtime_ns for path in shards} == shards  # no shard was written again
    assert len(list((tmp_path / "data.shards").glob("*.shard"))) > len(shards)
