"""Worker processes: they hold the runs and answer batches.

A template process loads the runs once and is forked for every worker, which takes milliseconds and shares the memory of
the weights. It is started as a program of its own (`python -m regard.serve.worker`), so that what is forked has neither
the server's event loop nor its threads.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
import warnings
from contextlib import suppress

import torch

from regard.answers import Answerer, BatchTask, Cancelled, Result, describe
from regard.api import load
from regard.decode.engine import TorchEngine
from regard.device import release_memory
from regard.errors import UserError
from regard.serve.protocol import Channel

RELEASE_SECONDS = 5.0  # between returns of freed memory: batches of many sizes leave gaps in the heap
NICENESS = 10  # of workers: the event loop, which needs little, gets a processor at once when it has something to do


def work(answerer: Answerer, connection: socket.socket) -> None:
    """Answer what comes over a connection until the server closes its end.

    While a task is at hand only its cancellation can come, or the end.
    """
    channel, released = Channel(connection), time.monotonic()
    with suppress(OSError):  # the server is gone
        while message := channel.receive():
            if "cancel" in message:  # a task that has been answered meanwhile
                continue
            task = BatchTask(**message, cancelled=lambda: channel.readable)
            try:
                results: list[Result] | None = answerer.answer(task, channel.send)
            except Cancelled:
                results = None
            channel.send({"results": results})
            if time.monotonic() - released > RELEASE_SECONDS:
                release_memory()
                released = time.monotonic()


def work_in_threads(answerer: Answerer, connections: list[socket.socket]) -> None:
    """The life of a worker process: a thread for each connection, which ends with the last of them."""
    threads = [threading.Thread(target=work, args=(answerer, each)) for each in connections[1:]]
    for thread in threads:
        thread.start()
    work(answerer, connections[0])
    for thread in threads:
        thread.join()


def template(control: Channel) -> None:
    """Load the runs, then become a worker for every connection that the server hands over."""
    settings = control.receive()
    if settings is None:
        return
    try:
        torch.set_num_threads(settings["threads"])
        runs = {name: load(path) for name, path in settings["runs"].items()}
        answerer = Answerer(runs, settings["engine"], settings["precision"], settings["slots"])
        for run in runs.values():
            if run.task.name in ("pairs", "span", "lm"):
                TorchEngine(run)  # packs the weights, once for all workers
        control.send({"runs": [describe(name, run) for name, run in runs.items()]})
    except UserError as error:
        control.send({"error": str(error)})
        return
    warnings.simplefilter("ignore", UserWarning)  # they name words of a request, which are not for the log
    gc.collect()
    gc.freeze()  # the collector would write to the pages that workers share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that have ended leave nothing behind
    while True:
        data, handles, _, _ = socket.recv_fds(control.connection, 1, settings["slots"])
        if not data:
            with suppress(ChildProcessError):
                os.wait()  # for all workers, since those that end are ignored
            return
        connections = [socket.socket(fileno=handle) for handle in handles]
        pid = os.fork()
        if pid == 0:
            control.connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.nice(NICENESS)
            work_in_threads(answerer, connections)
            os._exit(0)
        for connection in connections:
            connection.close()
        control.send({"pid": pid})


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server gets them, and closes the connections when it is done
    with suppress(ConnectionError):
        template(Channel(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
