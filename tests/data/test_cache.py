"""The cache of prepared data is shared by exactly the runs with equal text and settings."""

from __future__ import annotations

import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from test_prepare import PAIRS, contents, prepare_data, table

from regard import files
from regard.data import prepare as module
from regard.errors import UserError
from regard.text.learn import BaseText


def record_writes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the directories in which data is prepared."""
    writes: list[Path] = []
    write = module._write

    def record(recipe: Any, train: Any, valid: Any, path: Path, *rest: Any) -> None:
        writes.append(path)
        write(recipe, train, valid, path, *rest)

    monkeypatch.setattr(module, "_write", record)
    return writes


def test_runs_with_equal_data_share_a_cache_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "cache": str(tmp_path / "cache")}
    prepare_data(tmp_path / "alone", {"train": data["train"]})
    writes = record_writes(monkeypatch)
    first = prepare_data(tmp_path / "one", data)
    moved = {**data, "train": table(tmp_path / "moved.tsv", PAIRS)}  # the cache key does not contain the path
    second = prepare_data(tmp_path / "two", moved, seed=2)
    assert len(writes) == 1 and contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "alone")
    (entry,) = (tmp_path / "cache").iterdir()
    assert second.notes == [f"data: prepared before, in {entry}", *first.notes]
    for file in contents(entry):
        assert (entry / file).samefile(tmp_path / "one" / file) and (entry / file).samefile(tmp_path / "two" / file)
    prepare_data(tmp_path / "two", moved)
    assert len(writes) == 1  # the run already has its data
    prepared_record = json.loads((entry / "prepared.json").read_text())
    prepared_record["made_from"]["training file 1"] = "0" * 64  # simulates a change during preparation
    (tmp_path / "cache" / "new").write_text(json.dumps(prepared_record))
    (tmp_path / "cache" / "new").replace(entry / "prepared.json")
    prepare_data(tmp_path / "three", data)
    assert len(writes) == 2 and contents(tmp_path / "three") == contents(tmp_path / "alone")
    prepare_data(tmp_path / "tokens", data, {"target_tokens": "char"})
    prepare_data(tmp_path / "more", {**data, "train": table(tmp_path / "more.tsv", [*PAIRS, ("zz", "Z Z")])})
    assert len(writes) == 4 and len(list((tmp_path / "cache").iterdir())) == 3


def reverse_targets(entry: Path) -> None:
    ids = (entry / "train" / "target.bin").read_bytes()
    (entry / "new").write_bytes(ids[::-1])
    (entry / "new").replace(entry / "train" / "target.bin")  # the runs keep the file


@pytest.mark.parametrize("damage", [reverse_targets, lambda entry: (entry / "valid.jsonl").unlink()])
def test_a_damaged_entry_is_prepared_again(tmp_path: Path, damage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "cache": str(tmp_path / "cache")}
    prepare_data(tmp_path / "one", data)
    (entry,) = (tmp_path / "cache").iterdir()
    damage(entry)
    writes = record_writes(monkeypatch)
    messages: list[str] = []
    prepared = prepare_data(tmp_path / "two", data, say=messages.append)
    assert len(writes) == 1 and contents(tmp_path / "one") == contents(tmp_path / "two") == contents(entry)
    assert len(messages) == 1 and f"{entry}: is damaged, and prepared again" in messages[0]
    assert not prepared.notes[0].startswith("data: prepared before")
    assert prepare_data(tmp_path / "three", data).notes[0].startswith("data: prepared before")


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_run_has_copies_of_entries_that_other_users_can_write(tmp_path: Path, mode: int) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "cache": str(tmp_path / "cache")}
    prepare_data(tmp_path / "one", data)
    (entry,) = (tmp_path / "cache").iterdir()
    for name in contents(entry):
        (entry / name).chmod(mode)
    prepare_data(tmp_path / "two", data)
    for name, content in contents(entry).items():
        assert not (entry / name).samefile(tmp_path / "two" / name)
        with (entry / name).open("wb") as file:  # by another user
            file.write(b"changed")
        assert (tmp_path / "two" / name).read_bytes() == content


def test_temporary_directories_of_killed_trainings_are_removed(tmp_path: Path) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "cache": str(tmp_path / "cache")}
    names = {name: f"{digit * 32}.tmp" for name, digit in zip(("killed", "preparing"), "ab", strict=True)}
    names |= {"other": "mine.tmp"}
    for name in names.values():
        (tmp_path / "cache" / name).mkdir(parents=True)
    with files.hold_lock(tmp_path / "cache" / f"{'b' * 32}.lock", "another training"):
        prepare_data(tmp_path / "run", data)
        assert not (tmp_path / "cache" / names["killed"]).exists()
        assert (tmp_path / "cache" / names["preparing"]).exists() and (tmp_path / "cache" / names["other"]).exists()


def test_named_columns_do_not_share_an_entry_with_recognised_ones(tmp_path: Path) -> None:
    rows = [f"{'abc'[i % 3]}{i}\tV;{'AB'[i % 2]}\tx{i}" for i in range(100)]
    data = {"train": str(tmp_path / "t.tsv"), "cache": str(tmp_path / "cache")}
    (tmp_path / "t.tsv").write_text("\n".join(rows) + "\n")
    assert prepare_data(tmp_path / "one", data).codec.columns == ("source", "features", "target")
    with pytest.raises(UserError, match="3 columns"):
        prepare_data(tmp_path / "two", {**data, "columns": ("source", "target")})


def test_a_tsv_that_is_renamed_to_csv_has_an_entry_of_its_own(tmp_path: Path) -> None:
    text = "".join(f'"{"ab"[i % 2]}{i}"\t"x{i}"\n' for i in range(100))
    sources = []
    for name in ("t.tsv", "t.csv"):
        (tmp_path / name).write_text(text)
        prepared = prepare_data(tmp_path / f"of {name}", {"train": str(tmp_path / name), "cache": str(tmp_path / "c")})
        sources.append(prepared.valid_examples[0].source)
    assert sources[0].startswith('"') and not sources[1].startswith('"')


def test_cache_key_includes_the_tokenizers_of_the_base_run(tmp_path: Path) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "cache": str(tmp_path / "cache")}
    bases = [prepare_data(tmp_path / scheme, data, {"source_tokens": scheme}).codec for scheme in ("char", "byte")]
    for index, codec in enumerate(bases):
        prepared = prepare_data(tmp_path / f"from-{index}", data, base=BaseText(codec))
        assert prepared.codec.source.scheme == codec.source.scheme
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_stdin_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f"{a}\t{b}\n" for a, b in PAIRS).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    prepare_data(tmp_path / "data", {"train": "-", "cache": str(tmp_path / "cache")})
    assert (tmp_path / "data").is_dir() and not (tmp_path / "cache").exists()


def test_one_process_prepares_and_others_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "cache": str(tmp_path / "cache")}
    messages: list[str] = []
    all_waiting = Event()
    write = module._write
    monkeypatch.setattr(module, "_write", lambda *arguments: (all_waiting.wait(20), write(*arguments)))
    writes = record_writes(monkeypatch)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)

    def say(message: str) -> None:
        messages.append(message)
        if len(messages) == 3:
            all_waiting.set()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: prepare_data(tmp_path / f"run-{i}", data, say=say), range(4)))
    assert len(writes) == 1
    assert len(messages) == 3 and all("waiting for another training" in message for message in messages)
    assert all(contents(tmp_path / f"run-{i}") == contents(tmp_path / "run-0") for i in range(4))
    assert len(list((tmp_path / "cache").iterdir())) == 1  # no lock is left


def test_cache_is_not_used_when_locks_are_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "cache": str(tmp_path / "cache")}
    monkeypatch.setattr(files, "_try_lock", lambda handle: False)
    prepare_data(tmp_path / "run", data)
    assert (tmp_path / "run").is_dir() and not list((tmp_path / "cache").iterdir())


def test_cache_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "cache": str(tmp_path / "t.tsv" / "cache")}
    with pytest.raises(UserError, match=r"data\.cache: .*t\.tsv/cache: cannot make this directory"):
        prepare_data(tmp_path / "run", data)


def test_strict_runs_do_not_share_the_cache_of_lenient_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = str(tmp_path / "cache")
    bad = {"train": table(tmp_path / "bad.tsv", [*PAIRS, ("bad",)]), "cache": cache}
    prepare_data(tmp_path / "lenient", bad)
    with pytest.raises(UserError, match=rf"bad\.tsv:{len(PAIRS) + 1}: wrong column count"):
        prepare_data(tmp_path / "refused", {**bad, "strict": True})
    assert not (tmp_path / "refused").exists()
    writes = record_writes(monkeypatch)
    prepare_data(tmp_path / "again", bad)
    assert not writes
    good = {"train": table(tmp_path / "good.tsv", PAIRS), "cache": cache, "strict": True}
    for name in ("one", "two"):
        prepare_data(tmp_path / name, good)
    assert len(writes) == 1 and contents(tmp_path / "one") == contents(tmp_path / "two")
