"""Checkpoints: saving, verification, removal, disk errors, and the choice of the best scores."""

from __future__ import annotations

import errno
import math
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from hypothesis import given, strategies as st

from regard.errors import UserError
from regard.training.checkpoint import Best, Checkpoints, Progress, Window, read_tensors
from regard.training.trainer import better
from regard.weight_files import save_weights

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7, dtype=torch.int64)}


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1e9))
def test_progress_round_trips_through_json_exactly(value: float, seconds: float) -> None:
    progress = Progress(
        step=3,
        seconds=seconds,
        window=Window(nll=value),
        best=Best(step=1, value=value, scores={"loss": value}),
        kept=[1, 3],
    )
    assert Progress.model_validate_json(progress.model_dump_json()) == progress


def test_latest_checkpoint_is_used_and_older_ones_are_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.progress() is None
    for step in (5, 100_000_000, 20):
        checkpoints.save(Progress(step=step), {"model": WEIGHTS})
    assert checkpoints.steps() == [5, 20, 100_000_000]
    assert checkpoints.progress() == Progress(step=100_000_000)
    loaded = checkpoints.tensors(20, "model")
    assert all(torch.equal(loaded[name], x) for name, x in WEIGHTS.items())
    checkpoints.remove_old(kept=[])
    assert checkpoints.steps() == [100_000_000]


def test_saving_a_step_again_updates_only_its_progress(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(Progress(step=5), {"model": WEIGHTS})
    checkpoints.save(Progress(step=5, finished="steps"), {})
    assert checkpoints.progress() == Progress(step=5, finished="steps")
    assert set(checkpoints.tensors(5, "model")) == {"a", "b"}


def test_error_names_the_checkpoint_file_with_a_flipped_bit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(Progress(step=5), {"model": WEIGHTS, "optimizer": WEIGHTS})
    checkpoints.save(Progress(step=5, finished="steps"), {})
    checkpoints.keep(3, WEIGHTS)
    checkpoints.verify(5)
    assert checkpoints.kept(3).keys() == WEIGHTS.keys()
    for path in [
        *(tmp_path / "training" / "step-00000005").iterdir(),
        tmp_path / "training" / "weights-00000003.safetensors",
    ]:
        if path.name == "manifest.json":
            continue
        data = path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        with pytest.raises(UserError, match=f"{path.name}: has changed.*\n.*start_from"):
            checkpoints.verify(5)
            checkpoints.kept(3)
        path.write_bytes(data)
    (tmp_path / "training" / "step-00000005" / "optimizer.safetensors").unlink()
    with pytest.raises(UserError, match=r"optimizer\.safetensors: is missing"):
        checkpoints.verify(5)


def test_temporary_files_are_removed(tmp_path: Path) -> None:
    """All kinds that a killed process can leave: of atomic writes, of prepared data, of the safetensors library."""
    training = tmp_path / "training"
    unique = uuid4().hex
    for directory in (f".step-00000007.{unique}.tmp", f".x.{unique}.tmp.old", "data.tmp", "data.tmp.old"):
        (training / directory).mkdir(parents=True)
        (training / directory / ".tmpAb3_xY").touch()
    expected = [
        tmp_path / ".keep.tmp",
        tmp_path / "data.tmp",
        training / "step-00000003/model.safetensors",
        training / "lock",
    ]
    for path in (
        *expected,
        tmp_path / f".model.safetensors.{unique}.tmp",
        tmp_path / ".tmpAbCdE3",
        training / ".tmpAbCdE3",
        training / f"step-00000003/.progress.json.{unique}.tmp",
        training / f"uncut/.config.json.{unique}.tmp",
    ):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    Checkpoints(tmp_path).remove_temporary()
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == sorted(expected)
    assert sorted(p.name for p in training.iterdir()) == ["lock", "step-00000003", "uncut"]


def test_error_names_the_file_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(Progress(step=step), {"model": WEIGHTS})
        checkpoints.keep(step, WEIGHTS)
    monkeypatch.setattr(os, "unlink", busy)
    with pytest.raises(
        UserError, match=r"training/weights-0000000[12]\.safetensors: cannot remove: Input/output error"
    ):
        checkpoints.remove_old(kept=[])


def test_weights_have_the_file_mode_of_other_files(tmp_path: Path) -> None:
    save_weights(WEIGHTS, tmp_path / "x.safetensors")
    (tmp_path / "other").touch()
    assert stat.filemode((tmp_path / "x.safetensors").stat().st_mode) == stat.filemode(
        (tmp_path / "other").stat().st_mode
    )


def test_errors_name_corrupt_files(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"x\.safetensors: cannot be read"):
        read_tensors(tmp_path / "x.safetensors")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(Progress(step=1), {})
    (tmp_path / "training/step-00000001/progress.json").write_text('{"step": 1, "unknown": 2}')
    with pytest.raises(UserError, match="unknown: no such key"):
        checkpoints.progress()


FULL = """
import resource, sys, torch
from pathlib import Path
from regard.errors import UserError
from regard.training.checkpoint import Checkpoints
from regard.training.checkpoint import Progress

checkpoints = Checkpoints(Path(sys.argv[1]))
checkpoints.save(Progress(step=1), {"model": {"a": torch.zeros(100)}})
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    checkpoints.save(Progress(step=2), {"model": {"a": torch.zeros(100_000)}})
except UserError as error:
    sys.exit(str(error))
"""


def test_full_disk_is_reported_and_the_previous_checkpoint_loads(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 50_000
    process = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "step-00000002: cannot write: File too large" in process.stderr
    assert "unchanged" in process.stderr
    assert sorted(p.name for p in (tmp_path / "training").iterdir()) == ["step-00000001"]
    assert len(Checkpoints(tmp_path).tensors(1, "model")["a"]) == 100


def test_failed_writes_leave_no_files_and_keep_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(Progress(step=1), {"model": WEIGHTS})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("regard.weight_files.save_file", full)  # writes checkpoints
    monkeypatch.setattr("regard.weight_files.save", full)  # writes weights
    for write in (
        lambda: checkpoints.save(Progress(step=2), {"model": WEIGHTS}),
        lambda: checkpoints.keep(2, WEIGHTS),
        lambda: save_weights(WEIGHTS, tmp_path / "model.safetensors"),
    ):
        with pytest.raises(UserError, match="No space left on device"):
            write()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["training"]
    assert checkpoints.progress() == Progress(step=1)


def best(metric: str, value: float, loss: float = 1.0) -> Best:
    return Best(step=1, value=value, scores={"loss": loss, metric: value})


def test_better_compares_the_metric_first_and_the_loss_on_ties() -> None:
    assert better("loss", {"loss": 2.0}, None)
    assert better("loss", {"loss": 0.9}, best("loss", 1.0, 1.0))
    assert better("wer", {"loss": 9.0, "wer": 9.0}, best("wer", 10.0))
    assert not better("wer", {"loss": 0.1, "wer": 11.0}, best("wer", 10.0))
    assert better("bleu", {"loss": 9.0, "bleu": 11.0}, best("bleu", 10.0))
    assert better("bleu", {"loss": 0.9, "bleu": 10.0}, best("bleu", 10.0))
    assert not better("bleu", {"loss": 1.0, "bleu": 10.0}, best("bleu", 10.0))
    assert not better("loss", {"loss": math.nan}, None)


def test_window_means_are_per_token_step_and_second() -> None:
    window = Window(steps=2, examples=10, tokens=40, symbols=100, nll=20.0, smoothed=30.0, norm=3.0)
    means = window.means(4.0)
    assert means == {
        "loss": 0.5,
        "objective": 0.75,
        "norm": 1.5,
        "tokens_per_second": 25.0,
        "examples_per_second": 2.5,
    }
