"""Ray actors write the same file as a single process, and an interrupted command continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.toy import call, toy_words
from regard.decode.sharded_output import ShardDirectory, answer_on_ray
from regard.errors import UserError


def start(home: Path, *command: object) -> subprocess.Popen[bytes]:
    """Start the command line with a separate home directory, because Ray stores files there."""
    (home / "home").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "regard", *map(str, command)], stderr=subprocess.PIPE,
        env={**os.environ, "HOME": str(home / "home")}, start_new_session=True,
    )  # fmt: skip


def test_missing_ray_is_reported_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "in").write_text("a\n")
    with (
        ShardDirectory.begin(tmp_path / "out", str(tmp_path / "in"), 1, {}) as directory,
        pytest.raises(UserError, match=r"--ray needs ray, which is not installed.*\n.*\[ray\]"),
    ):
        answer_on_ray(directory, lambda: lambda lines: ({}, ""), "local", None, 1, 0)


@pytest.mark.slow
def test_ray_actors_write_the_same_output_as_one_process(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    Path("words").write_text("".join(f"{word}\n" for word in [*toy_words(300, 5), "", "a\tb\tc", "zzz"]))
    command = ["generate", toy / "run", "words", "--window", 20, "--beam", 3, "--json"]
    expected = call(*command)
    process = start(tmp_path, *command, "--out", "out", "--ray", "local", "--workers", 2)
    _, messages = process.communicate(timeout=300)
    assert process.returncode == 0, messages.decode()
    assert Path("out").read_bytes() == expected.out.encode()
    assert all(line in messages.decode() for line in expected.err.splitlines())
    assert not Path("out.shards").exists()


@pytest.mark.slow
def test_a_killed_command_continues_without_ray(toy: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = tmp_path / "words"
    out = tmp_path / "out"
    state = tmp_path / "out.shards"
    words.write_text("".join(f"{word}\n" for word in toy_words(1200, 5)))
    command = ["generate", toy / "run", words, "--window", 12, "--beam", 6, "--nbest", 2]
    process = start(tmp_path, *command, "--out", out, "--ray", "local")
    deadline = time.monotonic() + 200
    while len(list(state.glob("*.shard"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    done = len(list(state.glob("*.shard")))
    assert 2 <= done < 100 and not out.exists()
    process = start(tmp_path, *command, "--out", out)
    _, messages = process.communicate(timeout=300)
    assert process.returncode == 0, messages.decode()
    assert "of 100 shards are done; continuing with the others" in messages.decode()
    assert out.read_bytes() == call(*command).out.encode()


@pytest.mark.slow
def test_address_without_a_ray_cluster_is_reported(toy: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = tmp_path / "words"
    words.write_text("abc\n")
    process = start(tmp_path, "generate", toy / "run", words, "--out", tmp_path / "out", "--ray", "127.0.0.1:1")
    _, messages = process.communicate(timeout=300)
    assert process.returncode == 2 and "--ray 127.0.0.1:1: no cluster there" in messages.decode()


@pytest.mark.slow
def test_errors_of_ray_actors_end_the_command(toy: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = tmp_path / "words"
    words.write_text("abc\n")
    command = ["generate", toy / "run", words, "--out", tmp_path / "out", "--ray", "local"]
    for device, message in (
        ("mps", "error: device: this machine has no mps device"),
        ("cuda", "error: --ray: the cluster has no"),
    ):
        process = start(tmp_path, *command, "--device", device)
        _, messages = process.communicate(timeout=300)
        assert process.returncode == 2 and message in messages.decode(), messages.decode()
