"""Worker processes answer batches. They are forked from the template process, which loads the runs once."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
import warnings
from contextlib import suppress
from typing import Any

import torch

from regard.answers import Answerer, BatchTask, Cancelled, Result, describe
from regard.api import load
from regard.decode.engine import TorchEngine
from regard.device import release_memory
from regard.parallel.children import Work
from regard.parallel.messages import Channel
from regard.serve.pool import body_message, read_body

RELEASE_SECONDS = 5.0  # between calls of release_memory: batches of different sizes fragment the heap
WORKER_NICENESS = 10  # so that the event loop of the server gets a core as soon as it needs one


def prepare(settings: dict[str, Any]) -> tuple[Work, dict[str, Any]]:
    """Load the runs -> the work of a worker, and a description of the runs."""
    _ignore_signals()
    torch.set_num_threads(settings["threads"])
    runs = {name: load(path) for name, path in settings["runs"].items()}
    slots: int = settings["slots"]
    answerer = Answerer(runs, settings["engine"], settings["precision"], slots)
    for run in runs.values():
        if run.task.name in ("pairs", "span", "lm"):
            TorchEngine(run)  # packs the weights, once for all workers
    warnings.simplefilter("ignore", UserWarning)  # warnings quote words of a request, which must not be logged
    gc.collect()
    gc.freeze()  # a garbage collection would write to memory pages that workers share

    def work(channel: Channel, _: dict[str, Any]) -> None:
        _ignore_signals()
        os.nice(WORKER_NICENESS)
        answer_in_threads(answerer, channel, slots)

    return work, {"runs": [describe(name, run) for name, run in runs.items()]}


def _ignore_signals() -> None:
    """Ignore signals that the server gets as well: the server decides when this process ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def answer_in_threads(answerer: Answerer, channel: Channel, slots: int) -> None:
    """Answer batches in one thread per slot; the connections of further slots arrive over the first channel."""
    threads = []
    for _ in range(1, slots):
        if channel.receive() is None:
            return
        further = Channel(socket.socket(fileno=channel.handles.popleft()))
        threads.append(threading.Thread(target=answer_batches, args=(answerer, further)))
    for thread in threads:
        thread.start()
    answer_batches(answerer, channel)
    for thread in threads:
        thread.join()


def answer_batches(answerer: Answerer, channel: Channel) -> None:
    """Answer batches until the server closes the connection."""

    def send(body: dict[str, Any]) -> None:
        channel.send(*body_message(body))

    released = time.monotonic()
    with suppress(OSError):  # the server has closed the connection
        while message := channel.receive():
            body = read_body(message)
            if "cancel" in body:  # the batch has been answered in the meantime
                continue
            # Until the results are sent, a message can only be the cancellation of this batch.
            task = BatchTask(**body, cancelled=lambda: channel.readable, send=send)
            try:
                results: list[Result] | None = answerer.answer(task)
            except Cancelled:
                results = None
            send({"results": results})
            if time.monotonic() - released > RELEASE_SECONDS:
                release_memory()
                released = time.monotonic()
