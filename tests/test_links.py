"""No file outside of a run, a cache or an output is read or changed through a link."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.backwards import TINY, write_pairs
from regard.data.prepare import prepare
from regard.decode.sharded_output import ShardDirectory, state_of
from regard.errors import UserError
from regard.files import hold_lock, open_file, read_json, read_manifest, require_no_links
from regard.recipe import Recipe, load_recipe
from regard.run import Run, verify_run
from regard.training.fit import fit
from regard.training.log import TENSORBOARD, read_log

LINK = "is a link; regard writes only into its own files"
OUT = "points out of its directory"


def make_recipe(directory: Path, steps: int = 4) -> Recipe:
    data = directory / "pairs.tsv"
    return load_recipe(
        {
            "preset": "transformer-tiny",
            "model": {"encoder": TINY, "decoder": TINY},
            "text": {"source_tokens": "char", "target_tokens": "space"},
            "data": {"train": str(data if data.exists() else write_pairs(data, 60)), "cache": str(directory / "cache")},
            "train": {"steps": steps, "batch_examples": 10, "validate_every": 2, "workers": 1, "average": 2},
        }
    )


def paths_below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def contents(directory: Path) -> dict[str, tuple[bytes | None, int]]:
    """The bytes of every file and the time of every change below a directory."""
    return {
        str(path): (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
    }


class Attack:
    """Links at the paths that a command writes; each attempt must be refused and leave the target as it was."""

    def __init__(self, place: Path, command: Callable[[], object]) -> None:
        self.outside = place / "outside"
        self.command = command

    def plant(self, path: Path) -> None:
        """Replace a file or directory by a link to its copy outside, or a missing one by a link to other content."""
        shutil.rmtree(self.outside, ignore_errors=True)
        self.outside.mkdir()
        target = self.outside / path.name
        if path.exists():
            path.rename(target)
        elif path.suffix in (".tmp", ".shards", ".old", ".done") or path.name in (TENSORBOARD, "training", "data"):
            target.mkdir()
            (target / "precious").write_text("precious")
        else:
            target.write_text("precious\n" * 100)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def run(self, path: Path) -> str | None:
        """Plant a link and run the command -> what is wrong, if anything."""
        self.plant(path)
        before = contents(self.outside)
        try:
            self.command()
        except UserError as error:
            refused = LINK in str(error) or OUT in str(error)
            return None if refused and contents(self.outside) == before else f"{path}: {error}"
        return f"{path}: accepted"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data, a cache, and a finished run of a few steps."""
    place = tmp_path_factory.mktemp("trained")
    fit(make_recipe(place), place / "run")
    return place


def transient(run: Path) -> list[str]:
    """Paths that exist only while a training runs, or with other settings."""
    return ["training/lock", *(f"training/data{end}" for end in (".tmp", ".tmp.old", ".shards")), TENSORBOARD]


@pytest.mark.parametrize("resume", [False, True], ids=["new", "resumed"])
def test_links_in_a_run_are_refused_by_training(trained: Path, tmp_path: Path, resume: bool) -> None:
    run = tmp_path / "run"
    attack = Attack(tmp_path, lambda: fit(make_recipe(trained, 6), run, resume=resume))
    names = paths_below(trained / "run") + transient(run)
    assert {"training", "training/lock", "log.jsonl", "README.md", "recipe.toml", "training/data/train/source.bin"} < {
        *names
    }
    assert any(name.startswith("training/step-") for name in names)
    problems = []
    for name in names:
        shutil.rmtree(run, ignore_errors=True)
        if resume:
            shutil.copytree(trained / "run", run)
        problems.append(attack.run(run / name))
        assert (run / name).is_symlink()
    assert not list(filter(None, problems)), "\n".join(filter(None, problems))


def test_a_run_directory_may_itself_be_a_link(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "elsewhere")
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    report = fit(make_recipe(trained, 6), tmp_path / "run", resume=True)
    assert report.progress.step == 6
    assert "as saved" in verify_run(tmp_path / "run")


def test_a_run_in_a_download_cache_is_read_through_its_links(trained: Path, tmp_path: Path) -> None:
    """Its files are links into the blobs of the cache, below several directories."""
    run = tmp_path / "snapshots" / "1234" / "runs" / "g2p"
    shutil.copytree(trained / "run", run)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(filter(Path.is_file, run.rglob("*")))):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    assert "as saved" in verify_run(run)
    assert Run.load(run).statistics == Run.load(trained / "run").statistics
    (run / "log.jsonl").unlink()
    (run / "log.jsonl").symlink_to(trained / "run" / "log.jsonl")
    with pytest.raises(UserError, match=OUT):
        read_log(run / "log.jsonl")
    with pytest.raises(UserError, match=LINK):
        fit(make_recipe(trained, 6), run, resume=True)


def test_links_in_a_cache_are_refused(trained: Path, tmp_path: Path) -> None:
    shutil.copy(trained / "pairs.tsv", tmp_path / "pairs.tsv")
    recipe = make_recipe(tmp_path)
    prepare(recipe, tmp_path / "first")
    (entry,) = (tmp_path / "cache").iterdir()
    attack = Attack(tmp_path, lambda: prepare(recipe, tmp_path / "second"))
    names = [entry.name, *(f"{entry.name}/{name}" for name in paths_below(entry))]
    names += [entry.name + end for end in (".lock", ".tmp", ".tmp.old", ".shards")]
    for name in names:
        shutil.rmtree(tmp_path / "cache")
        shutil.copytree(trained / "cache", tmp_path / "cache")
        problem = attack.run(tmp_path / "cache" / name)
        assert problem is None, problem
        assert not (tmp_path / "second").exists()


def test_links_in_the_state_of_an_output_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a\nb\n")
    out = tmp_path / "out"

    def answer(lines: Any) -> tuple[dict[str, Any], str]:
        return {}, "".join(f"{line.text}\n" for line in lines)

    def generate() -> None:
        with ShardDirectory.begin(out, str(tmp_path / "in"), 1, {}) as directory:
            directory.work(answer)
            directory.join()

    generate()
    assert out.read_text() == "a\nb\n"
    attack = Attack(tmp_path, generate)
    state = state_of(out)
    files = ("lock", "command.json", "joined", "000000.shard", "000000.lock", "000001.shard")
    for path in (state, state.with_name(state.name + ".done"), *(state / name for name in files)):
        shutil.rmtree(state, ignore_errors=True)
        problem = attack.run(path)
        assert problem is None, problem
        path.unlink()
    assert out.read_text() == "a\nb\n"


@pytest.mark.parametrize("name", ["training/lock", "log.jsonl"])
def test_a_hard_link_to_another_file_is_not_written(trained: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (run / name).unlink(missing_ok=True)
    os.link(precious, run / name)
    with pytest.raises(UserError, match=f"{name}: is a hard link to another file"):
        fit(make_recipe(trained, 6), run, resume=True)
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("platform", ["openat", "other"])
def test_a_link_in_any_component_is_refused(tmp_path: Path, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is planted after the check of a directory is refused when a file is opened."""
    if platform == "other":
        monkeypatch.setattr("regard.files.NO_FOLLOW", 0)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "lock").write_text("precious")
    root = tmp_path / "root"
    (root / "deep" / "deeper").mkdir(parents=True)
    (root / "deep" / "own").write_bytes(b"own")
    (root / "deep" / "inside").symlink_to("own")
    (root / "out").symlink_to(outside)
    for path in (root / "out" / "lock", root / "deep" / "inside"):
        for mode in ("wb", "ab", "r+b"):
            with pytest.raises(UserError, match=LINK):
                open_file(path, mode, root=root)
        with pytest.raises(UserError, match=LINK), hold_lock(path, "run", root=root):
            raise AssertionError
    with pytest.raises(UserError, match=OUT):
        open_file(root / "out" / "lock", root=root)
    with open_file(root / "deep" / "inside", root=root) as file:
        assert file.read() == b"own"
    with pytest.raises(UserError, match=r"root/out: is a link"):
        require_no_links(tmp_path, ["root"])
    (root / "deep" / "missing").symlink_to("nothing")
    with pytest.raises(UserError, match="is a link to a missing file"):
        open_file(root / "deep" / "missing")
    with open_file(root / "deep" / "new", "wb", root=root) as file:
        file.write(b"12345")
    with open_file(root / "deep" / "new", "wb", root=root) as file:  # replaces the content, like `open`
        file.write(b"123")
    with open_file(root / "deep" / "new", "ab", root=root) as file:
        file.write(b"4")
    assert (root / "deep" / "new").read_bytes() == b"1234" and (outside / "lock").read_text() == "precious"


def test_special_files_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(UserError, match="is not a plain file"):
        read_json(tmp_path / "pipe.json")
    with pytest.raises(UserError, match="is not a plain file"), hold_lock(tmp_path / "pipe.json", "run"):
        raise AssertionError
    (tmp_path / "manifest.json").symlink_to("missing")
    with pytest.raises(UserError, match="is a link to a missing file"):  # not a directory without a manifest
        read_manifest(tmp_path)
