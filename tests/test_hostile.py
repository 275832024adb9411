"""Damaged, changed and malicious run directories are refused in bounded time and memory."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Library, models, pre_tokenizers

import regard
from kit.families import BOTH, DECODERS, ENCODERS, build, shrunk
from kit.fuzz import attack, in_child
from kit.toy import call
from regard.config import SpecialIds
from regard.errors import UserError
from regard.files import MANIFEST
from regard.run import Run
from regard.text.codec import Codec
from regard.text.tokenizer import ForeignTokenizer, Tokenizer

SEED = 13
LETTERS = ["abcab", "bca"]


def foreign_tokenizer() -> ForeignTokenizer:
    names = ["<pad>", "<unk>", "<s>", "</s>", "a", "b", "c", "ab"]
    library = Library(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    library.add_special_tokens(names[:4])
    return ForeignTokenizer(library.to_str(), SpecialIds())


def codec_of(name: str, number: int) -> Codec:
    """A different kind of tokenizer for each run."""
    mask = "bert" in name
    kinds = ("char", "word", "byte", "bpe:270", "unigram:270", "nfd", "space")
    if number % 8 == 7 and not mask:
        return Codec(foreign_tokenizer())
    return Codec(Tokenizer.train(kinds[number % 8 % len(kinds)], LETTERS, mask=mask))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A small run of every family, and one with features and two tokenizers."""
    directory = tmp_path_factory.mktemp("bases")
    for number, name in enumerate([*BOTH, *DECODERS, *ENCODERS]):
        codec = codec_of(name, number)
        config = shrunk(name, codec.source_vocab)
        labels = tuple(f"label {n}" for n in range(config.classes or 0))
        Run(config, codec, build(config), Path(name), labels).save(directory / name)
    sides = Codec(Tokenizer.train("char", LETTERS), Tokenizer.train("space", ["A B"]), ("N", "PL"))
    config = shrunk(BOTH[-1], 9, {"source_vocab": sides.source_vocab, "target_vocab": sides.target_vocab})
    Run(config, sides, build(config), Path("two")).save(directory / "two")
    for base in directory.iterdir():
        use(base)  # first use in the parent, so that children do not repeat the set-up
    return sorted(directory.iterdir())


def use(path: Path, rng: Random | None = None) -> None:
    """Load and use a run; with `rng`, usually after removing its manifest."""
    if rng is not None and rng.random() < 0.75 and (path / MANIFEST).is_file():
        (path / MANIFEST).unlink()
    run = regard.load(path, verify=True)
    if run.task.reads == "images":
        patches = run.config.image_patches
        run.model(torch.zeros(1, patches.channels, patches.height, patches.width), None)
    elif run.task.labels:
        run.classify(["abc"])
    elif "decoder" in run.config.stacks:
        run.generate(["abc"], beam=2, max_length=4)
    else:
        run.embed(["abc"])


def check(bases: list[Path], directory: Path, cases: range) -> None:
    faults, counts = attack(bases, directory, cases, SEED, use)
    print(counts)
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults)
    assert counts["refused"] > len(cases) / 2


def test_faults_of_a_child_process_are_reported() -> None:
    """Aborts, tracebacks, memory and time are observed from the parent."""
    assert in_child(lambda: os.kill(os.getpid(), signal.SIGKILL)).kind == "killed"
    assert in_child(lambda: 1 / 0).kind == "error"
    assert in_child(
        lambda: [b"x" * 2**20 for _ in range(1200)]
    ).fault  # part of it reuses memory that the parent has freed
    assert not in_child(lambda: None).fault


def test_mutated_runs_are_refused(bases: list[Path], tmp_path: Path) -> None:
    check(bases, tmp_path, range(60))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 5000, 500))
def test_many_mutated_runs_are_refused(bases: list[Path], tmp_path: Path, start: int) -> None:
    check(bases, tmp_path, range(start, start + 500))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = shrunk(BOTH[0], foreign_tokenizer().size)
    Run(config, Codec(foreign_tokenizer()), build(config), Path("run")).save(tmp_path / "run")
    return tmp_path / "run"


def edit(path: Path, *keys: Any, to: Any) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    holder = data
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = to
    path.write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize("is_own_tokenizer", [True, False], ids=["own", "foreign"])
def test_token_id_beyond_any_vocabulary_is_refused(run: Path, is_own_tokenizer: bool) -> None:
    """The tokenizer library would allocate a table of this size and abort."""
    path = run / "tokenizer.json"
    if is_own_tokenizer:
        Tokenizer.train("word", ["a b c"]).save(path)
        edit(run / "config.json", "text", "ids", to=None)
    (run / MANIFEST).unlink()
    edit(path, "model", "vocab", "a", to=2**31 - 1)
    outcome = in_child(lambda: Run.load(run))
    assert outcome.kind == "refused" and "2147483647" in outcome.text and not outcome.fault, outcome


def test_vocabulary_size_beyond_the_model_is_refused(run: Path) -> None:
    (run / MANIFEST).unlink()
    for size in (2**31 - 1, 2**21, 100):
        edit(run / "config.json", "text", "sizes", to=[size, size])
        outcome = in_child(lambda: Run.load(run))
        assert outcome.kind == "refused" and not outcome.fault, outcome


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", MANIFEST])
def test_links_that_leave_the_run_are_refused(run: Path, name: str) -> None:
    (run / name).rename(run.parent / name)
    (run / name).symlink_to(run.parent / name)
    with pytest.raises(UserError, match=f"{name}: points out of its directory"):
        Run.load(run)


def test_links_within_a_run_and_into_a_download_cache_are_followed(run: Path) -> None:
    (run / "config.json").rename(run / "other.json")
    (run / "config.json").symlink_to("other.json")
    assert Run.load(run).config
    snapshot = run.parent / "snapshots" / "1234"
    snapshot.parent.mkdir()
    run.rename(run.parent / "blobs")
    snapshot.mkdir()
    for file in (run.parent / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert Run.load(snapshot).config


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_every_flipped_bit_is_reported(run: Path, name: str) -> None:
    path = run / name
    data = path.read_bytes()
    for position in range(0, len(data), max(1, len(data) // 7)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(UserError, match=f"{name}: has changed"):
            Run.load(run)
    path.write_bytes(data)
    assert Run.load(run, verify=True).config


def test_large_weights_are_hashed_only_on_request(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.files.MAX_HASHED_BYTES", 10)
    path = run / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert Run.load(run).config
    with pytest.raises(UserError, match=r"model\.safetensors: has changed: same size, but another SHA-256"):
        regard.load(run, verify=True)
    path.write_bytes(data[:-4])
    with pytest.raises(UserError, match=r"model\.safetensors: has changed: [\d,]+ bytes instead of"):
        Run.load(run)


def test_info_accept_accepts_an_intended_change(run: Path) -> None:
    edit(run / "config.json", "model", "encoder", "dropout", to=0.5)
    result = call("info", run, "--verify")
    assert result.code == 2 and "config.json: has changed" in result.err
    with pytest.raises(UserError) as error:
        Run.load(run)
    command = str(error.value).rsplit("regard ", 1)[1].split()
    assert command == ["info", str(run), "--accept"]
    result = call(*command)
    assert result.code == 0 and "config.json: has changed" in result.err
    assert Run.load(run).config.encoder.dropout == 0.5  # type: ignore[union-attr]
    assert "3 files as saved" in call("info", run, "--verify").err


def test_run_without_a_manifest_loads_and_accept_adds_one(run: Path) -> None:
    (run / MANIFEST).unlink()
    assert Run.load(run, verify=True).config
    assert "no manifest.json" in call("info", run, "--verify").err
    assert call("info", run, "--accept").code == 0
    assert "3 files as saved" in call("info", run, "--verify").err
    (run / MANIFEST).write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json"):
        Run.load(run)
    assert call("info", run, "--accept").code == 0
    assert Run.load(run).config
    assert "needs a run directory" in call("info", "bert-base", "--verify").err


def test_killed_rewrite_leaves_a_valid_manifest(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewritten file has no entry until its new entry is written, as in runs without a manifest."""
    loaded = Run.load(run)
    for number in range(5):  # the process is killed after each write in turn
        loaded.save(run)
        remaining_writes = number

        def write(path: Path, fill: Any, real: Any = regard.files.replace_file) -> None:
            nonlocal remaining_writes
            remaining_writes -= 1
            if remaining_writes < 0:
                raise KeyboardInterrupt
            real(path, fill)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            for module in ("files", "text.tokenizer"):
                patch.setattr(f"regard.{module}.replace_file", write)
            loaded.save(run)
        assert Run.load(run, verify=True).config == loaded.config
    loaded.save(run)
    assert len(json.loads((run / MANIFEST).read_text())["files"]) == 3
