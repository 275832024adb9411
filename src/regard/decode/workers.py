"""Several processes that decode together: small models gain more from a process per core than from threads."""

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
from types import TracebackType

import torch

from regard.decode.generate import Decoder
from regard.decode.hypothesis import Hypothesis
from regard.decode.options import Options
from regard.decode.request import Input
from regard.errors import UserError
from regard.run import Run

SetUp = Callable[[], object]


class WorkerPool:
    """A decoder with helpers, which load its runs from their directories. It works while they are still starting.

    The batches are those that the decoder would make alone, so the answers are the very same.
    """

    def __init__(self, decoder: Decoder, workers: int, set_up: SetUp | None = None) -> None:
        self.decoder = decoder
        paths = [run.path for run in decoder.runs]
        context = multiprocessing.get_context("spawn")  # a copy of a process that has threads may hang
        heard, self.line = context.Pipe(duplex=False)  # when we are gone, or hang up, the helpers leave
        given = (paths, decoder.options, torch.get_num_threads(), heard, set_up)
        self.pool = ProcessPoolExecutor(workers - 1, context, _begin, given)

    def __call__(self, inputs: Sequence[Input]) -> list[list[Hypothesis]]:
        """The outputs for some inputs."""
        places = self.decoder.batches(inputs)
        batches = [[inputs[i] for i in batch] for batch in places]
        with _deaf():
            waiting = [self.pool.submit(_answer, batch) for batch in batches]
        answers: list[list[list[Hypothesis]]] = [[] for _ in batches]
        for k in reversed(range(len(batches))):  # from the other end, whatever nobody has begun
            if waiting[k].cancel():
                answers[k] = self.decoder(batches[k])
        for k, future in enumerate(waiting):
            try:
                answers[k] = answers[k] or future.result()
            except BrokenProcessPool:
                raise UserError("workers: a process was ended from outside (too little memory?); use fewer") from None
        results: list[list[Hypothesis]] = [[] for _ in inputs]
        for batch, answer in zip(places, answers, strict=True):
            for i, hypotheses in zip(batch, answer, strict=True):
                results[i] = hypotheses
        return results

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.line.close()
        self.pool.shutdown(cancel_futures=True)
        self.line.close()


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes started here never hear an interrupt from the keyboard: the parent does, and tells them to stop."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_decoder: Decoder  # of a helper


def _begin(paths: Sequence[Path], options: Options, threads: int, heard: Connection, set_up: SetUp | None) -> None:
    """What a helper does first."""
    global _decoder
    Thread(target=_leave_when_silent, args=(heard,), daemon=True).start()
    if set_up is not None:
        set_up()
    torch.set_num_threads(threads)
    _decoder = Decoder([Run.load(path) for path in paths], options)


def _leave_when_silent(heard: Connection) -> None:
    with suppress(EOFError, OSError):
        heard.recv()
    os._exit(1)


def _answer(batch: Sequence[Input]) -> list[list[Hypothesis]]:
    return _decoder(batch)
