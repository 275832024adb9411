"""The cache of prepared data is shared by runs with the same text and settings, and only by them."""

from __future__ import annotations

import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from test_prepare import PAIRS, contents, made, table

from regard import files
from regard.data import prepare as module
from regard.errors import UserError
from regard.text.learn import BaseText


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A list that gets the directories in which data is prepared from now on."""
    written: list[Path] = []
    write = module._write

    def recorded(recipe: Any, train: Any, valid: Any, path: Path, *rest: Any) -> None:
        written.append(path)
        write(recipe, train, valid, path, *rest)

    monkeypatch.setattr(module, "_write", recorded)
    return written


def test_runs_share_cache_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "cache": str(tmp_path / "cache")}
    made(tmp_path / "alone", {"train": data["train"]})
    written = counted(monkeypatch)
    first = made(tmp_path / "one", data)
    moved = {**data, "train": table(tmp_path / "moved.tsv", PAIRS)}  # the key depends on the text, not on the path
    second = made(tmp_path / "two", moved, seed=2)
    assert len(written) == 1 and contents(tmp_path / "one") == contents(tmp_path / "two") == contents(
        tmp_path / "alone"
    )
    (entry,) = (tmp_path / "cache").iterdir()
    assert second.notes == [f"data: prepared before, in {entry}", *first.notes]
    for file in contents(entry):
        assert (entry / file).samefile(tmp_path / "one" / file) and (entry / file).samefile(tmp_path / "two" / file)
    made(tmp_path / "two", moved)
    assert len(written) == 1  # it has its data
    record = json.loads((entry / "prepared.json").read_text())
    record["made_from"]["training file 1"] = "0" * 64  # as if the file had changed while it was prepared
    (tmp_path / "cache" / "new").write_text(json.dumps(record))
    (tmp_path / "cache" / "new").replace(entry / "prepared.json")
    made(tmp_path / "three", data)
    assert len(written) == 2 and contents(tmp_path / "three") == contents(tmp_path / "alone")
    made(tmp_path / "tokens", data, {"target_tokens": "char"})
    made(tmp_path / "more", {**data, "train": table(tmp_path / "more.tsv", [*PAIRS, ("zz", "Z Z")])})
    assert len(written) == 4 and len(list((tmp_path / "cache").iterdir())) == 3


def test_the_cache_depends_on_the_tokenizers_of_a_base(tmp_path: Path) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "cache": str(tmp_path / "cache")}
    bases = [made(tmp_path / scheme, data, {"source_tokens": scheme}).codec for scheme in ("char", "byte")]
    for index, codec in enumerate(bases):
        prepared = made(tmp_path / f"from-{index}", data, base=BaseText(codec))
        assert prepared.codec.source.scheme == codec.source.scheme
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_stdin_and_memory_are_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f"{a}\t{b}\n" for a, b in PAIRS).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    made(tmp_path / "data", {"train": "-", "cache": str(tmp_path / "cache")})
    assert (tmp_path / "data").is_dir() and not (tmp_path / "cache").exists()


def test_one_process_prepares_and_others_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "cache": str(tmp_path / "cache")}
    messages: list[str] = []
    all_wait = Event()
    write = module._write
    monkeypatch.setattr(module, "_write", lambda *arguments: (all_wait.wait(20), write(*arguments)))
    written = counted(monkeypatch)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)

    def say(message: str) -> None:
        messages.append(message)
        if len(messages) == 3:
            all_wait.set()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: made(tmp_path / f"run-{i}", data, say=say), range(4)))
    assert len(written) == 1
    assert len(messages) == 3 and all("waiting for another training" in message for message in messages)
    assert all(contents(tmp_path / f"run-{i}") == contents(tmp_path / "run-0") for i in range(4))
    assert len(list((tmp_path / "cache").iterdir())) == 1  # no lock is left


def test_without_locks_a_run_prepares_its_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "cache": str(tmp_path / "cache")}
    monkeypatch.setattr(files, "_try_lock", lambda handle: False)
    made(tmp_path / "run", data)
    assert (tmp_path / "run").is_dir() and not list((tmp_path / "cache").iterdir())


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    data = {"train": table(tmp_path / "t.tsv", PAIRS), "cache": str(tmp_path / "t.tsv" / "cache")}
    with pytest.raises(UserError, match=r"data\.cache: .*t\.tsv/cache: cannot make this directory"):
        made(tmp_path / "run", data)


def test_a_strict_run_shares_only_with_strict_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = str(tmp_path / "cache")
    bad = {"train": table(tmp_path / "bad.tsv", [*PAIRS, ("bad",)]), "cache": cache}
    made(tmp_path / "lenient", bad)
    with pytest.raises(UserError, match=rf"bad\.tsv:{len(PAIRS) + 1}: wrong column count"):
        made(tmp_path / "refused", {**bad, "strict": True})
    assert not (tmp_path / "refused").exists()
    written = counted(monkeypatch)
    made(tmp_path / "again", bad)
    assert not written
    good = {"train": table(tmp_path / "good.tsv", PAIRS), "cache": cache, "strict": True}
    for name in ("one", "two"):
        made(tmp_path / name, good)
    assert len(written) == 1 and contents(tmp_path / "one") == contents(tmp_path / "two")
