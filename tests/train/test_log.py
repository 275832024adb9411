from __future__ import annotations

from pathlib import Path

import pytest

from regard.errors import UserError
from regard.training.report import Log, read_log


def test_a_reopened_log_is_cut_back_to_its_position(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path)
    log.write({"event": "train", "step": 1})
    position = log.position
    log.write({"event": "train", "step": 2, "loss": float("nan"), "norm": float("inf")})
    log.sync()
    log.close()
    assert read_log(path)[1] == {"event": "train", "step": 2, "loss": None, "norm": None}
    again = Log(path, position)
    again.write({"event": "é", "step": 3})
    again.close()
    assert [event["step"] for event in read_log(path)] == [1, 3]
    assert path.stat().st_size == again.position


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste')
    assert read_log(path) == [{"step": 1}]


def test_an_unwritable_log_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"log\.jsonl: cannot write"):
        Log(tmp_path / "missing" / "log.jsonl")
    log = Log(tmp_path / "log.jsonl")
    log.close()
    with Path("/dev/full").open("ab", buffering=0) as log._file, pytest.raises(UserError, match="No space left"):
        log.write({"event": "x"})
