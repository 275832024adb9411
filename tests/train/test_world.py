"""Who we are among several processes, as the environment says."""

from __future__ import annotations

import pytest

from regard.errors import UserError
from regard.training.distributed import join, started_by_others

NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "REGARD_STORE")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("size", "others"), [(None, False), ("1", False), ("2", True)])
def test_whether_others_started_us(size: str | None, others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert started_by_others() == others


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"WORLD_SIZE": "2"}, "RANK: is not set, although WORLD_SIZE is"),
        ({"WORLD_SIZE": "2", "RANK": "first"}, "RANK: a whole number is expected in the environment, not 'first'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, r"RANK: of 2 processes \(WORLD_SIZE\) the last is 1, not 2"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR: is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, "MASTER_PORT: is not set"),
    ],
)
def test_an_environment_that_does_not_add_up(
    environment: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=told):
        join("cpu")


@pytest.mark.parametrize("size", ["abc", "", "-1", "2.5"])
def test_a_size_that_is_no_number(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UserError, match="WORLD_SIZE: a whole number"):
        started_by_others()
