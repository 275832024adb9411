from __future__ import annotations

import time

import pytest

from regard.training.distributed import WorkerDied, Workers

SLEEP = ["-n1", "-r1", "import sys; sys.stdin.read()"]


def test_a_worker_that_cannot_start_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=r"(?s)process 1 of 3 ended with status 1.*No module named regard\.nowhere"):  # noqa: SIM117
        with Workers(3, "regard.nowhere", ["run"]) as workers:
            workers.wait()
    assert time.monotonic() - began < 20


def test_ones_own_error_is_not_blamed_on_a_worker() -> None:
    with pytest.raises(RuntimeError, match="mine"), Workers(2, "timeit", SLEEP) as workers, workers.watched():
        raise RuntimeError("mine")


def test_leaving_ends_the_workers() -> None:
    with pytest.raises(KeyError), Workers(2, "timeit", SLEEP) as workers:
        raise KeyError
    assert [process.returncode for process in workers._processes] == [0]  # its standard input was closed
