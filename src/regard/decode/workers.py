"""A pool of decoding processes. Small models decode faster with one process per core than with threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread, current_thread, main_thread

import torch

from regard.decode.generate import Engine, TorchEngine
from regard.decode.hypothesis import Hypothesis, empty_hypothesis
from regard.decode.options import Options
from regard.decode.request import SearchInput
from regard.errors import UserError
from regard.run import Run

SetUp = Callable[[], object]


class WorkerPool(Engine):
    """An engine and `workers` - 1 further processes, which load its runs from their directories.

    It decodes while they are still starting. The batches are those that the engine would make alone, so the outputs are
    exactly the same.
    """

    def __init__(self, engine: TorchEngine, workers: int, set_up: SetUp | None = None) -> None:
        self.engine, self.options, self.preparer = engine, engine.options, engine.preparer
        paths = [run.path for run in engine.runs]
        context = multiprocessing.get_context("spawn")  # forking a process that has threads may hang
        parent_alive, self._alive = context.Pipe(duplex=False)  # workers exit when our end is closed
        arguments = (paths, engine.options, torch.get_num_threads(), parent_alive, set_up)
        self._pool = ProcessPoolExecutor(workers - 1, context, _start_worker, arguments)

    def decode(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        indices = list(self.preparer.batches(dict(enumerate(inputs))))
        batches = [[inputs[i] for i in batch] for batch in indices]
        with _ignore_interrupts():
            futures = [self._pool.submit(_decode, batch) for batch in batches]
        decoded: list[list[list[Hypothesis]]] = [[] for _ in batches]
        for k in reversed(range(len(batches))):  # take over, from the end, batches that no worker has begun
            if futures[k].cancel():
                decoded[k] = self.engine.decode(batches[k])
        results = [[empty_hypothesis(item.flags)] if item.flags else [] for item in inputs]
        for batch, hypotheses, future in zip(indices, decoded, futures, strict=True):
            try:
                rows = hypotheses or future.result()
            except BrokenProcessPool:
                raise UserError("workers: a process was ended from outside (too little memory?); use fewer") from None
            for i, row in zip(batch, rows, strict=True):
                results[i] = row
        return results

    def close(self) -> None:
        """Let the workers finish what they have begun, and end them."""
        self._pool.shutdown(cancel_futures=True)
        self._alive.close()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:  # do not wait for what the workers have begun
            self._alive.close()
        self.close()


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Let processes started here ignore interrupts from the keyboard: the parent gets them, and ends its workers."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_engine: TorchEngine  # of a worker process


def _start_worker(
    paths: Sequence[Path], options: Options, threads: int, parent_alive: Connection, set_up: SetUp | None
) -> None:
    """Initialise a worker process."""
    global _engine

    def exit_with_parent() -> None:
        with suppress(EOFError, OSError):
            parent_alive.recv()
        os._exit(1)

    Thread(target=exit_with_parent, daemon=True).start()
    if set_up is not None:
        set_up()
    torch.set_num_threads(threads)
    _engine = TorchEngine([Run.load(path) for path in paths], options)


def _decode(batch: Sequence[SearchInput]) -> list[list[Hypothesis]]:
    return _engine.decode(batch)
