"""Sharded output: every line is answered once, with any number of processes and after kills."""

from __future__ import annotations

import gzip
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from regard.data.reader import Line, read_lines
from regard.decode.sharded_output import Input, ShardDirectory, state_of
from regard.errors import UserError
from regard.files import hold_lock


def random_text(draw: random.Random, lines: int) -> bytes:
    """Random lines with unusual line ends, long lines and invalid UTF-8."""
    pieces = [b"", b"a", b"\r", "é\u2028ß".encode(), b"\xff", b"\x00", b"word " * 40, b"x" * 3000]
    end = draw.choice([b"", b"\n"])
    return draw.choice([b"", b"\xef\xbb\xbf"]) + b"\n".join(draw.choice(pieces) for _ in range(lines)) + end


def upper(lines: Iterable[Line]) -> tuple[dict[str, Any], str]:
    rows = list(lines)
    return {"read": len(rows)}, "".join(f"{line.number} {line.text.upper()} {line.problem}\n" for line in rows)


def expected_output(file: Path) -> bytes:
    return upper(read_lines(str(file)))[1].encode()


@pytest.mark.parametrize("seed", range(12))
def test_joined_shards_contain_the_answers_of_all_lines_in_order(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr("regard.decode.sharded_output.CHUNK_BYTES", draw.choice([1, 7, 1 << 20]))
    file = tmp_path / "in.txt"
    data = random_text(draw, draw.randint(0, 60))
    file.write_bytes(gzip.compress(data) if seed % 2 else data)
    with ShardDirectory.begin(tmp_path / "out", str(file), draw.randint(1, 9), {}) as directory:
        directory.work(upper)
        counts = directory.join()
    assert (tmp_path / "out").read_bytes() == expected_output(file)
    assert sum(each["read"] for each in counts) == len(list(read_lines(str(file))))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]


def test_an_empty_file_has_no_shards(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"")
    assert Input.scan(str(tmp_path / "in"), 5).shards == []


def file_of(path: Path, lines: int) -> Path:
    (path / "in.txt").write_text("".join(f"line {i}\n" for i in range(lines)))
    return path / "in.txt"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_answer_each_shard_once(tmp_path: Path, ranks: int) -> None:
    file = file_of(tmp_path, 50)
    first_lines = []

    def answer(lines: Iterable[Line]) -> tuple[dict[str, Any], str]:
        rows = list(lines)
        first_lines.append(rows[0].number)
        return upper(rows)

    with ShardDirectory.begin(tmp_path / "out", str(file), 4, {}) as directory:
        for rank in reversed(range(ranks)):
            with ShardDirectory(tmp_path / "out") as theirs:
                theirs.work(answer, rank, ranks)
        assert sorted(first_lines) == list(range(1, 50, 4))
        first = (ranks - 1) * 4 + 1
        assert first_lines[0] == first
        directory.join()
    assert (tmp_path / "out").read_bytes() == expected_output(file)


def test_only_the_first_rank_waits_for_claimed_shards(tmp_path: Path) -> None:
    file = file_of(tmp_path, 8)
    with ShardDirectory.begin(tmp_path / "out", str(file), 4, {}) as directory:
        with hold_lock(state_of(tmp_path / "out") / "000000.lock", "shard"), ShardDirectory(tmp_path / "out") as theirs:
            theirs.work(upper, 1, 2)
            assert [shard.number for shard in directory.missing()] == [0]
        directory.work(upper, 0, 2)
        directory.join()
    assert (tmp_path / "out").read_bytes() == expected_output(file)


def test_rank_that_starts_after_the_join_changes_nothing(tmp_path: Path) -> None:
    file = file_of(tmp_path, 8)
    begin = ShardDirectory.begin(tmp_path / "out", str(file), 4, {})
    with begin as directory, ShardDirectory(tmp_path / "out") as late:
        directory.work(upper)
        directory.join()
        late.work(upper, 1, 2)
    assert (tmp_path / "out").read_bytes() == expected_output(file)


SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_sharded_output import upper
from regard.decode.sharded_output import ShardDirectory

def slow(lines):
    rows = list(lines)
    time.sleep(0.01)
    return upper(rows)

with ShardDirectory.begin(Path(sys.argv[3]), sys.argv[2], 3, {"beam": 1}) as directory:
    directory.work(slow)
    directory.join()
"""


def test_a_command_killed_at_random_times_writes_the_same_output(tmp_path: Path) -> None:
    file = file_of(tmp_path, 200)
    out = tmp_path / "out"
    seed = os.getpid()
    print(f"seed {seed}")
    draw = random.Random(seed)
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(file), str(out)]
    state = state_of(out)
    kills = 0
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        process = subprocess.Popen(command)
        before = len(list(state.glob("*.shard")))
        while process.poll() is None and len(list(state.glob("*.shard"))) <= before and kills < 4:
            time.sleep(0.005)
        if kills < 4:
            time.sleep(draw.random() * 0.15)
            process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        kills += 1
        assert not out.exists() or out.read_bytes() == expected_output(file)
    assert kills and out.read_bytes() == expected_output(file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]


def begin_and_stop(tmp_path: Path, file: Path, command: dict[str, Any], lines: int = 3) -> None:
    """Start a command and stop it after the first shard."""

    def stop(lines: Iterable[Line]) -> tuple[dict[str, Any], str]:
        raise UserError("stopped")

    with (
        pytest.raises(UserError, match="stopped"),
        ShardDirectory.begin(tmp_path / "out", str(file), lines, command) as directory,
    ):
        directory.answer(directory.shards[0], upper)
        directory.work(stop)


class Killed(BaseException):
    """Simulates a kill: as a BaseException it passes error handlers, and no file is changed afterwards."""


CHANGES = ("rename", "replace", "unlink", "rmdir")  # the functions of os that rename or remove files


def kill_before(change: int, context: pytest.MonkeyPatch) -> list[str]:
    """Simulate a kill before the file change with this index; the result lists the changes made."""
    changes: list[str] = []

    def killed_at(name: str) -> Callable[..., None]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> None:
            if len(changes) >= change:
                raise Killed
            changes.append(name)
            real(*arguments, **options)

        return call

    for name in CHANGES:
        context.setattr(os, name, killed_at(name))
    return changes


def test_command_killed_at_any_step_of_the_join_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path, 10)
    out = tmp_path / "out"
    killed = True
    changes: list[str] = []
    for step in range(100):
        if not killed:
            break
        out.unlink(missing_ok=True)
        begin = ShardDirectory.begin(out, str(file), 3, {"beam": 1})
        with suppress(Killed), monkeypatch.context() as context, begin as directory:
            directory.work(upper)
            killed = True
            changes = kill_before(step, context)
            directory.join()
            killed = False
        assert not out.exists() or out.read_bytes() == expected_output(file)
        with ShardDirectory.begin(out, str(file), 3, {"beam": 1}) as directory:
            directory.work(upper)
            directory.join()
        assert out.read_bytes() == expected_output(file)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]
    # Rename output and directory, unlink four shards, command and lock, and remove the directory.
    assert not killed and changes[:2] == ["replace", "rename"] and changes[2:] == ["unlink"] * 6 + ["rmdir"]


def test_incomplete_removal_by_an_earlier_version_is_tolerated(tmp_path: Path) -> None:
    """Earlier versions removed the files without renaming the directory first, so shards could remain."""
    file = file_of(tmp_path, 8)
    begin_and_stop(tmp_path, file, {"beam": 5})
    state = state_of(tmp_path / "out")
    (state / "command.json").unlink()
    (state / "joined").touch()
    (state / "000000.shard").write_bytes(b'{"bytes": 4, "counts": {}}\nold\n')
    with ShardDirectory.begin(tmp_path / "out", str(file), 3, {"beam": 1}) as directory:
        directory.work(upper)
        directory.join()
    assert (tmp_path / "out").read_bytes() == expected_output(file)


def test_rank_that_starts_during_removal_adds_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path, 8)
    unlink = os.unlink
    removals = []
    begin = ShardDirectory.begin(tmp_path / "out", str(file), 4, {})
    with begin as directory, ShardDirectory(tmp_path / "out") as late:
        directory.work(upper)

        def unlink_after_late_rank(*arguments: Any, **options: Any) -> None:
            if not removals:
                removals.append(arguments)
                late.work(upper, 1, 2)
            unlink(*arguments, **options)

        monkeypatch.setattr(os, "unlink", unlink_after_late_rank)
        directory.join()
    assert removals and (tmp_path / "out").read_bytes() == expected_output(file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]


def test_the_state_of_another_command_is_refused(tmp_path: Path) -> None:
    file = file_of(tmp_path, 8)
    begin_and_stop(tmp_path, file, {"options": {"beam": 5}})
    with (
        pytest.raises(UserError, match=r"out\.shards: belongs to another.*\n  command\.options\.beam: 5 there, 1 now"),
        ShardDirectory.begin(tmp_path / "out", str(file), 3, {"options": {"beam": 1}}),
    ):
        pass
    with (
        pytest.raises(UserError, match=r"input\.lines: 3 there, 4 now"),
        ShardDirectory.begin(tmp_path / "out", str(file), 4, {"options": {"beam": 5}}),
    ):
        pass
    file.write_text("something else\n")
    with (
        pytest.raises(UserError, match=r"input\.sha256: "),
        ShardDirectory.begin(tmp_path / "out", str(file), 3, {"options": {"beam": 5}}),
    ):
        pass


def test_the_state_of_a_command_without_shards_is_replaced(tmp_path: Path) -> None:
    file = file_of(tmp_path, 8)
    with ShardDirectory.begin(tmp_path / "out", str(file), 3, {"beam": 5}):
        pass
    with ShardDirectory.begin(tmp_path / "out", str(file), 2, {"beam": 1}) as directory:
        directory.work(upper)
        directory.join()
    assert (tmp_path / "out").read_bytes() == expected_output(file)


def test_a_directory_with_foreign_files_is_not_touched(tmp_path: Path) -> None:
    file = file_of(tmp_path, 8)
    directory = tmp_path / "out.shards"
    directory.mkdir()
    (directory / "letter.txt").write_text("keep")
    with (
        pytest.raises(UserError, match=r"has other files \(letter.txt\)"),
        ShardDirectory.begin(tmp_path / "out", str(file), 3, {}),
    ):
        pass
    assert [path.name for path in directory.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("damage", [b"", b"{}", b"not json\nabc\n", b'{"bytes": 4, "counts": {}}\nabc'])
def test_broken_shard_is_an_error_with_its_path(tmp_path: Path, damage: bytes) -> None:
    file = file_of(tmp_path, 8)
    begin_and_stop(tmp_path, file, {})
    (state_of(tmp_path / "out") / "000000.shard").write_bytes(damage)
    with (
        pytest.raises(UserError, match=r"000000\.shard: is broken; remove it"),
        ShardDirectory.begin(tmp_path / "out", str(file), 3, {}) as directory,
    ):
        directory.work(upper)
        directory.join()
    assert not (tmp_path / "out").exists()


def test_input_that_changes_during_reading_is_an_error(tmp_path: Path) -> None:
    file = file_of(tmp_path, 8)
    with (
        pytest.raises(UserError, match="has changed while it was read"),
        ShardDirectory.begin(tmp_path / "out", str(file), 3, {}) as directory,
    ):
        directory.work(upper)
        file.write_text("other\n")
        directory.join()
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_second_process_with_the_same_output_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.decode.sharded_output.LOCK_SECONDS", 0.3)
    file = file_of(tmp_path, 8)
    with (
        ShardDirectory.begin(tmp_path / "out", str(file), 3, {}),
        pytest.raises(UserError, match=f"process {os.getpid()} on .* is writing here"),
        ShardDirectory.begin(tmp_path / "out", str(file), 3, {}),
    ):
        pass


def test_unusable_paths_are_refused(tmp_path: Path) -> None:
    file = file_of(tmp_path, 8)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for out, source, message in (
        (tmp_path / "out", str(pipe), "is not a plain file, and cannot be read again"),
        (tmp_path / "out", "-", "standard input cannot be read again"),
        (tmp_path / "no/out", str(file), "there is no directory"),
        (file, str(file), "is also the input"),
        (tmp_path, str(file), "is not a plain file"),
        (pipe, str(file), "is not a plain file"),
        (tmp_path / "out", str(tmp_path / "missing"), "no such file"),
    ):
        with pytest.raises(UserError, match=message), ShardDirectory.begin(out, source, 3, {}):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "pipe"]
