"""`regard generate --out` writes the bytes of stdout to a file, also after kills and with several processes."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.toy import call, small, toy_words

BOOK = "the cat sat on the mat. the dog sat on the cat. a cat is no dog, and a mat is no cat.\n"


def train(path: Path, name: str, data: str, *options: object) -> Path:
    (path / f"{name}.txt").write_text(data)
    order = ["--data", path / f"{name}.txt", "--valid", path / f"{name}.txt", "--out", path / name, *options]
    result = call("train", *order, "--steps", 3, "--workers", 1, *small())
    assert result.code == 0, result.err
    return path / name


@pytest.fixture(scope="module")
def runs(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run and 90 input lines for every task that reads lines."""
    path = tmp_path_factory.mktemp("out")
    draw = random.Random(3)
    topics = "".join(f"{'ab ' * n}\t{'long' if n > 3 else 'short'}\n" for n in range(1, 9))
    words = BOOK.split()
    prompts = [" ".join(draw.choice(words) for _ in range(draw.randint(0, 6))) for _ in range(90)]
    (path / "prompts").write_text("".join(f"{line}\n" for line in prompts))
    (path / "masks").write_text("".join(f"{line} <mask> mat <mask>\n" for line in prompts))
    bad = ["a\tb\tc\td", "", "zebra", "x" * 50]
    (path / "words").write_text("".join(f"{word}\n" for word in [*toy_words(86, 7), *bad]))
    rows = [f'{{"source": "{word}", "id": {i}}}' for i, word in enumerate(toy_words(88, 8))]
    (path / "requests.jsonl").write_text("".join(f"{row}\n" for row in [*rows, "{}", "no json"]))
    return {
        "pairs": toy / "run",
        "lm": train(path, "lm", BOOK * 30, "--task", "lm"),
        "masked": train(path, "masked", BOOK * 30, "--task", "masked"),
        "classify": train(path, "classify", topics, "--task", "classify"),
        "files": path,
    }


CASES = {
    "plain": ("pairs", "words", []),
    "nbest": ("pairs", "words", ["--beam", 3, "--nbest", 2]),
    "json": ("pairs", "words", ["--json", "--alignment"]),
    "samples": ("pairs", "words", ["--sample", "--seed", 4, "--json"]),
    "workers": ("pairs", "words", ["--workers", 2, "--batch-tokens", 20]),
    "requests": ("pairs", "requests.jsonl", []),
    "continuations": ("lm", "prompts", ["--max-length", 5]),
    "masks": ("masked", "masks", []),
    "candidates": ("masked", "masks", ["--top-tokens", 2]),
    "labels": ("classify", "prompts", []),
    "probabilities": ("classify", "prompts", ["--json"]),
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_messages_equal_those_of_stdout(runs: dict[str, Path], tmp_path: Path, case: str) -> None:
    task, file, options = CASES[case]
    command = ["generate", runs[task], runs["files"] / file, "--window", 7, *options]
    stdout_result = call(*command)
    file_result = call(*command, "--out", tmp_path / "out")
    assert stdout_result.code == file_result.code == 0, file_result.err
    assert (tmp_path / "out").read_bytes() == stdout_result.out.encode() and stdout_result.out
    assert file_result.out == "" and file_result.err == stdout_result.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_options_that_conflict_with_out_are_refused(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = runs["files"] / "words"
    out = tmp_path / "out"
    for options, message in (
        ([words, "--out", out, "--stream"], "--stream: cannot be combined with --out"),
        ([words, "--ray", "local"], "--ray: needs --out FILE"),
        (["--out", out], "--out: standard input cannot be read again"),
        ([words, "--out", out, "--engine", "ctranslate2", "--sample"], "use the engine torch"),
    ):
        result = call("generate", runs["pairs"], *options)
        assert result.code == 2 and message in result.err, result.err
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = call("generate", runs["pairs"], words)
    assert result.code == 2 and "--out: is required with several processes" in result.err
    result = call("generate", runs["pairs"], words, "--out", out, "--ray", "local")
    assert result.code == 2 and "--ray: Ray starts processes itself" in result.err
    assert list(tmp_path.iterdir()) == []


def test_shards_of_other_options_or_another_run_are_refused(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", runs["pairs"], runs["files"] / "words", "--out", tmp_path / "out", "--window", 30]
    with monkeypatch.context() as context:
        context.setattr("regard.decode.sharded_output.ShardDirectory._copy", _fail)
        assert "No space left on device; the shards are kept" in call(*command).err
    result = call(*command, "--beam", 2)
    assert result.code == 2 and "command.options.beam: 1 there, 2 now" in result.err
    result = call(*command[:1], runs["lm"], *command[2:])
    assert result.code == 2 and "command.runs: " in result.err
    result = call(*command)
    assert result.code == 0 and "3 of 3 shards are done" in result.err
    assert (tmp_path / "out").read_text() == call(*command[:3]).out


def _fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


# Killed processes


def start(*command: object, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *map(str, command)], stderr=subprocess.PIPE, env={**os.environ, **environment},
        start_new_session=True,
    )  # fmt: skip


def run_with_kills(command: list[object], state: Path, kills: int, group: bool) -> int:
    """Restart a command until it finishes, killing it at random times after a new shard -> the number of kills."""
    seed = os.getpid()
    count = 0
    print(f"seed {seed}")
    draw = random.Random(seed)
    while True:
        process = start(*command)
        before = len(list(state.glob("*.shard")))
        deadline = time.monotonic() + 200
        while count < kills and process.poll() is None and time.monotonic() < deadline:
            if len(list(state.glob("*.shard"))) > before:
                time.sleep(draw.random() * 0.1)
                if group:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
                break
            time.sleep(0.002)
        _, messages = process.communicate(timeout=200)
        if process.returncode == 0:
            return count
        assert process.returncode == -signal.SIGKILL, messages.decode()
        count += 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--beam", 4, "--nbest", 2], ["--json", "--workers", 2, "--batch-tokens", 40]])
def test_a_command_killed_at_random_times_writes_the_same_bytes(
    runs: dict[str, Path], tmp_path: Path, options: list[object]
) -> None:
    words = tmp_path / "words"
    words.write_text("".join(f"{word}\n" for word in toy_words(1000, 5)))
    command = ["generate", runs["pairs"], words, "--window", 25, *options]
    out = tmp_path / "out"
    kills = run_with_kills(["-m", "regard", *command, "--out", out], tmp_path / "out.shards", 4, group=False)
    assert kills and out.read_bytes() == call(*command).out.encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "words"]


def torchrun(ranks: int) -> list[object]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "regard"]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "file", "options"), [CASES[name] for name in ("nbest", "json", "labels")])
def test_several_ranks_write_the_bytes_of_one_process(
    runs: dict[str, Path], tmp_path: Path, task: str, file: str, options: list[object]
) -> None:
    command = ["generate", runs[task], runs["files"] / file, "--window", 7, *options]
    expected = call(*command)
    for ranks in (2, 3):
        process = start(*torchrun(ranks), *command, "--out", tmp_path / "out")
        _, messages = process.communicate(timeout=200)
        assert process.returncode == 0, messages.decode()
        assert (tmp_path / "out").read_bytes() == expected.out.encode()
        assert [messages.decode().count(line) for line in expected.err.splitlines()] == [1] * expected.err.count("\n")
        (tmp_path / "out").unlink()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_error_of_the_first_rank_is_reported_once(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out.shards").mkdir()
    (tmp_path / "out.shards/letter").touch()
    process = start(*torchrun(2), "generate", runs["pairs"], runs["files"] / "words", "--out", tmp_path / "out")
    _, messages = process.communicate(timeout=200)
    assert process.returncode != 0 and messages.decode().count("has other files (letter)") == 1


@pytest.mark.slow
def test_ranks_killed_at_random_times_write_the_same_bytes(runs: dict[str, Path], tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text("".join(f"{word}\n" for word in toy_words(1000, 5)))
    command = ["generate", runs["pairs"], words, "--window", 25, "--beam", 4, "--json"]
    out = tmp_path / "out"
    kills = run_with_kills([*torchrun(2), *command, "--out", out], tmp_path / "out.shards", 2, group=True)
    assert kills and out.read_bytes() == call(*command).out.encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "words"]


@pytest.mark.slow
def test_the_first_rank_takes_over_the_shards_of_a_killed_rank(runs: dict[str, Path], tmp_path: Path) -> None:
    """Started without a launcher: torchrun would also end the first rank."""
    words = tmp_path / "words"
    out = tmp_path / "out"
    words.write_text("".join(f"{word}\n" for word in toy_words(1000, 5)))
    command = ["generate", runs["pairs"], words, "--window", 25, "--beam", 4]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    first, second = (start("-m", "regard", *command, "--out", out, RANK=str(rank), **address) for rank in range(2))
    state = tmp_path / "out.shards"
    deadline = time.monotonic() + 200
    while not (state / "000001.shard").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    second.kill()
    second.communicate()
    _, messages = first.communicate(timeout=200)
    assert first.returncode == 0, messages.decode()
    assert out.read_bytes() == call(*command).out.encode()
