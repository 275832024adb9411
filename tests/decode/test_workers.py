"""A worker pool gives the same outputs as a single process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kit.decoding import run_of, sources
from regard.decode.hypothesis import Hypothesis
from regard.decode.request import Options, Request
from regard.decode.search_inputs import SearchInput
from regard.decode.torch_engine import TorchEngine, WorkerPool, can_fork
from regard.errors import UserError
from regard.parallel.children import Child, ChildFault
from regard.run import Run


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("pool") / "run"
    run = run_of("transformer-tiny", 3)
    Run(run.config, run.codec, run.model, path).save(path)
    return Run.load(path)


def as_dicts(rows: list[list[Hypothesis]]) -> list[list[dict[str, Any]]]:
    return [[h.as_dict() for h in row] for row in rows]


@pytest.mark.parametrize("fork", [True, False])
def test_two_processes_give_the_same_outputs_in_order(
    saved_run: Run, monkeypatch: pytest.MonkeyPatch, fork: bool
) -> None:
    monkeypatch.setattr("regard.decode.torch_engine.can_fork", lambda: fork)
    decoder = TorchEngine(saved_run, Options(beam=3, nbest=2, max_length=8, batch_tokens=60, alignment=True))
    inputs = [*sources(1, 30), "", "a" * 3000, *sources(2, 10)]
    expected = decoder(inputs)
    requests = []
    ask = Child.ask

    def note(child: Child, *arguments: Any) -> Any:
        requests.append(arguments)
        return ask(child, *arguments)

    monkeypatch.setattr(Child, "ask", note)
    with WorkerPool(decoder, 2, always=True) as pool:
        assert as_dicts(pool(inputs)) == as_dicts(expected)
        (child,) = pool.children
        deadline = time.monotonic() + 120
        while not requests and time.monotonic() < deadline:  # a spawned worker must load the run first
            assert as_dicts(pool(inputs)) == as_dicts(expected)
        assert requests
        assert pool([]) == []
        good, bad = pool([Request("a"), Request("b", prefix="z")])
        assert good[0].ids == decoder(["a"])[0][0].ids and "prefix 'z'" in bad[0].flags["unsatisfied"]
        assert child.poll() is None
    assert child.poll() == -signal.SIGKILL


def slow_parent(monkeypatch: pytest.MonkeyPatch, note: Callable[[list[Hypothesis]], list[Hypothesis]]) -> None:
    """Slow down decoding in this process, and apply `note` to the outputs of forked workers."""
    monkeypatch.setattr("regard.decode.torch_engine.can_fork", lambda: True)
    real = TorchEngine.decode
    parent = os.getpid()

    def decode(engine: TorchEngine, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        if os.getpid() != parent:
            return [note(row) for row in real(engine, inputs)]
        time.sleep(0.2)
        return real(engine, inputs)

    monkeypatch.setattr(TorchEngine, "decode", decode)


def test_forked_worker_decodes_part_of_the_inputs(saved_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_parent(monkeypatch, lambda row: [replace(h, flags={"by": "worker"}) for h in row])
    inputs = sources(1, 30)
    decoder = TorchEngine(saved_run, Options(max_length=8, batch_tokens=20))
    with WorkerPool(decoder, 2, always=True) as pool:
        flags = [row[0].flags for row in pool(inputs)]
    assert {"by": "worker"} in flags


def test_workers_start_only_when_they_save_time(saved_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.decode.torch_engine.can_fork", lambda: True)
    decoder = TorchEngine(saved_run, Options(max_length=4, batch_tokens=20))
    inputs = decoder.prepare(sources(1, 30))
    batches = len(list(decoder.preparer.batches(dict(enumerate(inputs)))))

    def count_started(seconds: float, workers: int = 2, some: int | None = None) -> int:
        monkeypatch.setattr("regard.decode.torch_engine.FORK_SECONDS", seconds)
        with WorkerPool(decoder, workers) as pool:
            pool.decode(inputs[:some])
            return len(pool.children)

    assert batches > 4
    assert count_started(0.0) == 1 and count_started(0.0, 4) == 3
    assert count_started(0.0, some=1) == 0  # a single batch stays in this process
    assert count_started(1e9) == 0  # decoding ends before a worker could start
    assert count_started(0.0, 1000) == batches - 2  # this process decodes two


def test_running_threads_prevent_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    for python, native, tokenizers in ((1, 1, "false"), (2, 1, "false"), (1, 2, "false"), (1, 1, "true")):
        monkeypatch.setattr(threading, "active_count", lambda count=python: count)
        monkeypatch.setattr(torch, "get_num_threads", lambda count=native: count)
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", tokenizers)
        assert can_fork() == ((python, native, tokenizers) == (1, 1, "false") and sys.platform == "linux")


def test_user_error_in_a_worker_is_raised_in_the_parent(saved_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(row: list[Hypothesis]) -> list[Hypothesis]:
        raise UserError("not in this process")

    slow_parent(monkeypatch, fail)
    decoder = TorchEngine(saved_run, Options(batch_tokens=20))
    with WorkerPool(decoder, 2, always=True) as pool, pytest.raises(UserError, match=r"^not in this process$"):
        pool(sources(1, 30))


def test_exception_in_a_worker_is_raised_as_a_child_fault(saved_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(row: list[Hypothesis]) -> list[Hypothesis]:
        raise ZeroDivisionError("in the worker")

    slow_parent(monkeypatch, fail)
    decoder = TorchEngine(saved_run, Options(batch_tokens=20))
    with WorkerPool(decoder, 2, always=True) as pool, pytest.raises(ChildFault, match="ZeroDivisionError: in the work"):
        pool(sources(1, 30))


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_dead_worker_is_reported_with_its_last_lines(saved_run: Run, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    def die(row: list[Hypothesis]) -> list[Hypothesis]:
        print("last words", file=sys.stderr)
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)

    slow_parent(monkeypatch, die)
    decoder = TorchEngine(saved_run, Options(batch_tokens=20))
    cause = "ended with status 3" if end == "exit" else r"was killed by signal 9 \(out of memory\?\)"
    message = rf"^workers: decoding process 2 {cause}\n  last words\n  with fewer workers, each has more memory$"
    with WorkerPool(decoder, 2, always=True) as pool, pytest.raises(UserError, match=message):
        pool(sources(1, 30))


def test_pool_starts_new_workers_after_an_error(saved_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_parent(monkeypatch, lambda row: row if all(h.ids for h in row) else os._exit(1))
    decoder = TorchEngine(saved_run, Options(max_length=8, batch_tokens=20))
    inputs = decoder.prepare(sources(1, 30))
    with WorkerPool(decoder, 2, always=True) as pool:
        pool.decode(inputs)
        (first,) = pool.children
        first.kill()
        with pytest.raises(UserError, match="signal 9"):
            pool.decode(inputs)
        assert as_dicts(pool.decode(inputs)) == as_dicts(decoder.decode(inputs))


def test_interrupt_while_waiting_for_a_worker_ends_the_pool_promptly(
    saved_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_parent(monkeypatch, lambda row: time.sleep(60) or row)
    main = threading.main_thread().ident
    decoder = TorchEngine(saved_run, Options(max_length=8, batch_tokens=60))
    assert main is not None
    start = time.monotonic()
    with WorkerPool(decoder, 2, always=True) as pool, pytest.raises(KeyboardInterrupt):
        threading.Timer(2.0, signal.pthread_kill, (main, signal.SIGINT)).start()
        pool(sources(1, 12))
    assert 1.5 < time.monotonic() - start < 20


def test_run_that_a_spawned_worker_cannot_load_is_reported(saved_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.decode.torch_engine.can_fork", lambda: False)
    moved = Run(saved_run.config, saved_run.codec, saved_run.model, saved_run.path / "moved")
    deadline = time.monotonic() + 60
    with (
        WorkerPool(TorchEngine(moved, Options(batch_tokens=20)), 2, always=True) as pool,
        pytest.raises(UserError, match="no such run directory"),
    ):
        while time.monotonic() < deadline:
            pool(sources(1, 5))  # does not wait for the worker


CONSTRAINTS = Request("abc", prefix="a", require=["b", ["cc", "d"]], forbid=["e"], stop=["ff"], seed=3, max_length=20)


@pytest.mark.parametrize(
    "options",
    [
        Options(mbr=4, seed=2, top_tokens=2, alignment=True),
        Options(beam=3, nbest=3, require=("a",), forbid=("fe",), coverage_penalty=0.3),
        Options(beam=2, groups=2, alternatives=2, stop=("c",)),
        Options(sample=True, nbest=2, temperature=0.3, no_repeat_ngram=2),
    ],
    ids=["mbr", "phrases", "alternatives", "sample"],
)
def test_inputs_and_outputs_are_transferred_unchanged(
    saved_run: Run, monkeypatch: pytest.MonkeyPatch, options: Options
) -> None:
    """Including flags, alignments, candidates and the constraints of requests."""
    slow_parent(monkeypatch, lambda row: row)
    decoder = TorchEngine(saved_run, options)
    inputs = [*(CONSTRAINTS.model_copy(update={"source": text}) for text in sources(1, 8)), *sources(2, 12), "zé\ud800"]
    with WorkerPool(decoder, 2, always=True) as pool:
        assert list(map(comparable, pool(inputs))) == list(map(comparable, decoder(inputs)))


def comparable(row: list[Hypothesis]) -> list[Any]:
    """All fields of the hypotheses, with alignments as bytes."""
    return [
        (
            {**vars(h), "alignment": None, "candidates": comparable(list(h.candidates))},
            h.alignment
            and (h.alignment.soft.tobytes(), h.alignment.soft.dtype, h.alignment.source, h.alignment.output),
        )
        for h in row
    ]
