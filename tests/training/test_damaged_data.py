"""Prepared data that has changed on disk is found before a training continues with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kit.backwards import MakeRecipe
from kit.fuzz import in_child, mutate
from regard import files
from regard.data.prepare import RECORD, find_damage
from regard.errors import UserError
from regard.files import MANIFEST
from regard.run import verify_run
from regard.training.fit import fit

SEED = 29


@pytest.fixture
def run(recipe: MakeRecipe, tmp_path: Path) -> Path:
    fit(recipe(steps=4), tmp_path / "run")
    return tmp_path / "run"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def resume_mutated(recipe: Any, run: Path, copy: Path, draw: Random, pattern: str) -> tuple[str, Any, bool]:
    """Mutate the data of a copy of a run and resume it -> the change, the outcome, whether changed data was used."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    data = copy / "training" / "data"
    before = contents(data)
    change = mutate(data, draw, pattern)
    outcome = in_child(lambda: fit(recipe, copy, resume=True))
    return change, outcome, outcome.kind == "ok" and contents(data) != before


def test_mutated_data_is_refused_on_resume(run: Path, recipe: MakeRecipe, tmp_path: Path) -> None:
    faults = []
    refused = 0
    for case in range(60):
        draw = Random(f"{SEED} {case}")
        change, outcome, accepted = resume_mutated(recipe(steps=6), run, tmp_path / "copy", draw, "*")
        refused += outcome.kind == "refused"
        if outcome.fault or accepted:
            faults.append(f"case {case} of seed {SEED}: {change}\n  {outcome}")
    assert not faults, "\n".join(faults)
    assert refused > 40


def test_mutated_records_of_early_versions_are_no_fault_of_regard(
    run: Path, recipe: MakeRecipe, tmp_path: Path
) -> None:
    """Their data has no manifest."""
    data = run / "training" / "data"
    (data / MANIFEST).unlink()
    (data / RECORD).write_text(json.dumps(json.loads((data / RECORD).read_text()) | {"format": 1}))
    assert in_child(lambda: fit(recipe(steps=4), run, resume=True)).kind == "ok"
    faults = []
    for case in range(20):
        draw = Random(f"{SEED} {case}")
        change, outcome, _ = resume_mutated(recipe(steps=5), run, tmp_path / "copy", draw, "*.json*")
        if outcome.fault:
            faults.append(f"case {case} of seed {SEED}: {change}\n  {outcome}")
    assert not faults, "\n".join(faults)


def test_every_file_of_the_data_is_verified(run: Path, recipe: MakeRecipe) -> None:
    """One flipped bit in any file stops `info --verify` and a resumed training, and names the file."""
    data = run / "training" / "data"
    paths = [path for path in sorted(data.rglob("*")) if path.is_file() and path.name != MANIFEST]
    assert len(paths) == 16
    for path in paths:
        content = path.read_bytes()
        position = len(content) // 2
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        for command in (lambda: verify_run(run), lambda: fit(recipe(steps=6), run, resume=True)):
            with pytest.raises(UserError, match=f"{path}: has changed"):
                command()
        path.write_bytes(content)
    assert not find_damage(data)
    (data / "valid.jsonl").rename(data / "other.jsonl")
    assert [line.rpartition("/")[2] for line in find_damage(data)] == [
        "valid.jsonl: is missing",
        "other.jsonl: is not in manifest.json",
    ]
    (data / "other.jsonl").rename(data / "valid.jsonl")
    (data / ".nfs0001").write_text("of the file system")
    assert "as saved" in verify_run(run)
    (data / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"is not in manifest\.json"):
        fit(recipe(steps=6), run, resume=True)


def test_verification_hashes_every_file_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    measure = files.measure_file
    monkeypatch.setattr(files, "measure_file", lambda path, root: hashed.append(str(path)) or measure(path, root))
    verify_run(run)
    names = [run / "model.safetensors", run / "training" / "data" / "prepared.json"]
    assert len(hashed) == len(set(hashed)) > 20 and {*map(str, names)} < {*hashed}


def test_damaged_data_of_an_interrupted_setup_is_prepared_again(run: Path, recipe: MakeRecipe, tmp_path: Path) -> None:
    before = contents(run / "training" / "data")
    (tmp_path / "new" / "training").mkdir(parents=True)
    shutil.copytree(run / "training" / "data", tmp_path / "new" / "training" / "data")
    target = tmp_path / "new" / "training" / "data" / "train" / "target.bin"
    target.write_bytes(target.read_bytes()[::-1])
    fit(recipe(steps=4), tmp_path / "new")
    assert contents(tmp_path / "new" / "training" / "data") == before
