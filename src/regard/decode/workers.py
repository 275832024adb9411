"""A pool of decoding processes. Small models decode faster with one process per core than with threads.

On Linux workers are forked, which takes a hundredth of the time that a new process needs to import torch and to load
the run. A fork copies no threads but the one that calls it, so it is used only where there is nothing to miss: no
other Python thread, none of the tokenizers, and one torch thread per worker, which then never asks OpenMP for those
that the parent had (the data loader of torch forks on the same terms). Elsewhere workers are spawned, and start anew.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.decode.constraints import SearchInput
from regard.decode.engine import Engine, TorchEngine
from regard.decode.hypothesis import Hypothesis, empty_hypothesis
from regard.decode.request import Options
from regard.errors import UserError
from regard.run import Run
from regard.text.tokenizer import SWITCH

SetUp = Callable[[], object]
Decoded = list[list[Hypothesis]]
FORK_SECONDS = 0.1  # until a forked worker decodes


class DecodeTask(NamedTuple):
    """A batch to decode, with its number."""

    number: int
    batch: list[SearchInput]

    @property
    def tokens(self) -> int:
        """A measure of how long it takes."""
        return sum(1 + max(map(len, item.sources)) for item in self.batch)


Queue = deque[DecodeTask]


class WorkerPool(Engine):
    """An engine and up to `workers` - 1 further processes, started when they pay off, or at once if `always` is set.

    They pay off when the rest, at the speed of the batch before, takes this process twice as long as their start.
    It never waits for a start, but decodes meanwhile. The batches are those that the engine would make alone, so the
    outputs are exactly the same.
    """

    def __init__(self, engine: TorchEngine, workers: int, set_up: SetUp | None = None, always: bool = False) -> None:
        """`set_up` is called in a spawned process before it loads the runs."""
        self.engine, self.options, self.preparer = engine, engine.options, engine.preparer
        self.most, self.set_up, self.always = workers - 1, set_up, always
        self.workers: list[Worker] = []
        self._feeders: list[Feeder] = []
        self._spawn_seconds = time.process_time()  # what this process did so far, a spawned one has to do as well
        self._rate = 0.0  # seconds per token of the last batch

    def decode(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        indices = list(self.preparer.batches(dict(enumerate(inputs))))
        decoded: list[Decoded] = [[] for _ in indices]
        queue = deque(DecodeTask(k, [inputs[i] for i in batch]) for k, batch in enumerate(indices))
        try:
            self._start_workers(queue)
            self._feed_workers(queue, decoded)
            while task := _take(queue.pop):  # from the end, where batches are small: the first one shows the speed
                began = time.perf_counter()
                decoded[task.number] = self.engine.decode(task.batch)
                self._rate = (time.perf_counter() - began) / task.tokens
                self._start_workers(queue)
                self._feed_workers(queue, decoded)
            for feeder in self._feeders:
                feeder.finish()
        finally:
            queue.clear()
        self._feeders.clear()
        results = [[empty_hypothesis(item.flags)] if item.flags else [] for item in inputs]
        for batch_indices, rows in zip(indices, decoded, strict=True):
            for i, row in zip(batch_indices, rows, strict=True):
                results[i] = row
        return results

    def _start_workers(self, queue: Queue) -> None:
        """Start workers for the batches of a queue if that pays off."""
        wanted = min(self.most, len(queue) - 1)  # one is for this process
        if len(self.workers) >= wanted:
            return
        fork, seconds = can_fork(), self._rate * sum(task.tokens for task in queue)
        if self.always or seconds > 2 * (FORK_SECONDS if fork else self._spawn_seconds):
            with _ignore_interrupts():
                while len(self.workers) < wanted:
                    self.workers.append(Worker(self.engine, self.set_up, fork, self.workers))

    def _feed_workers(self, queue: Queue, decoded: list[Decoded]) -> None:
        """Let every worker that has started take batches from the queue."""
        fed = [feeder.worker for feeder in self._feeders]
        self._feeders += [Feeder(each, queue, decoded) for each in self.workers if each not in fed and each.is_ready()]
        for feeder in self._feeders:
            feeder.check()

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join()
        for feeder in self._feeders:
            feeder.thread.join()
        for worker in self.workers:
            worker.connection.close()
        self.workers, self._feeders = [], []


def can_fork() -> bool:
    """Whether a fork of this process can decode, see above."""
    alone = threading.active_count() == 1 and torch.get_num_threads() == 1 and os.environ.get(SWITCH) == "false"
    return sys.platform == "linux" and alone and not torch.cuda.is_initialized()


def _take(pop: Callable[[], DecodeTask]) -> DecodeTask | None:
    """The next task from one end of a queue, or None if the others took the last one."""
    try:
        return pop()
    except IndexError:
        return None


class Worker:
    """A process that decodes what it receives, and ends with the connection."""

    def __init__(self, engine: TorchEngine, set_up: SetUp | None, fork: bool, others: Sequence[Worker]) -> None:
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        if fork:  # it inherits our ends of all connections, which it must close
            target: Any = _work
            arguments: Any = (engine, theirs, [self.connection, *(worker.connection for worker in others)])
        else:
            paths = [run.path for run in engine.runs]
            target, arguments = _start, (paths, engine.options, torch.get_num_threads(), theirs, set_up)
        self._ready = fork
        self.process: BaseProcess = context.Process(target=target, args=arguments, daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads: those of BLAS, which adapt
            self.process.start()
        theirs.close()

    def is_ready(self) -> bool:
        """Whether it has started; an error on its way is raised."""
        if not self._ready and self.connection.poll():
            self._ready = bool(self.receive())
        return self._ready

    def receive(self) -> Any:
        """Its next answer; an error that it met is raised."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise UserError("workers: a process was ended from outside (too little memory?); use fewer") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


class Feeder:
    """A thread that hands the batches of a queue to a worker, one after the other, until there are none."""

    def __init__(self, worker: Worker, queue: Queue, decoded: list[Decoded]) -> None:
        self.worker = worker
        self._queue, self._decoded = queue, decoded
        self._error: Exception | None = None
        self.thread = threading.Thread(target=self._feed, daemon=True)
        self.thread.start()

    def _feed(self) -> None:
        try:
            while task := _take(self._queue.popleft):
                with suppress(OSError):  # `receive` reports it
                    self.worker.connection.send(task.batch)
                self._decoded[task.number] = self.worker.receive()
        except Exception as error:  # raised by check
            self._error = error

    def check(self) -> None:
        """Raise the error that the worker met, if it did."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait for what the worker has begun."""
        self.thread.join()
        self.check()


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Let processes started here ignore interrupts from the keyboard: the parent gets them, and ends its workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start(paths: Sequence[Path], options: Options, threads: int, connection: Connection, set_up: SetUp | None) -> None:
    """The life of a spawned worker."""
    try:
        if set_up is not None:
            set_up()
        torch.set_num_threads(threads)
        engine = TorchEngine([Run.load(path) for path in paths], options)
        connection.send(True)
    except Exception as error:
        connection.send(error)
    else:
        _work(engine, connection)


def _work(engine: TorchEngine, connection: Connection, inherited: Sequence[Connection] = ()) -> None:
    """Decode what comes until the parent closes its end or is gone, which also ends what is being decoded."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    for each in inherited:
        each.close()
    with suppress(EOFError, OSError):
        while True:
            batch = connection.recv()
            try:
                answer: Any = engine.decode(batch)
            except Exception as error:
                answer = error
            connection.send(answer)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
