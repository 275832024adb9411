"""The worker processes as the server sees them: forked from a template that has loaded the runs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from regard.errors import UserError
from regard.serve.protocol import Message, pack, receive_async


class WorkerEnded(Exception):
    """The process that worked on a batch has ended."""


@dataclass(frozen=True)
class PoolSettings:
    """What the processes hold and how they compute."""

    runs: dict[str, str]  # name -> directory
    workers: int  # batches at once
    engine: str = "torch"
    precision: str = "fp32"
    threads: int = 1  # of each worker

    @property
    def slots(self) -> int:
        """Workers in a process: CTranslate2 shares its weights between threads, torch between forked processes."""
        return self.workers if self.engine == "ctranslate2" else 1


class WorkerConnection:
    """A process, or a thread of one, that answers one batch after the other."""

    def __init__(
        self,
        pid: int,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        on_end: Callable[[WorkerConnection], None],
    ) -> None:
        """`on_end` is called when the process has ended by itself."""
        self.pid, self.free, self.alive = pid, True, True
        self._reader, self._writer = streams
        self._on_end = on_end
        self._answers: dict[int, asyncio.Future[list[dict[str, Any]] | None]] = {}
        self._on_piece: dict[int, Callable[[dict[str, Any]], None]] = {}
        self._listener = asyncio.create_task(self._listen())

    async def answer(self, message: Message, on_piece: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]] | None:
        """The results of a batch, or None if it was cancelled."""
        if not self.alive:
            raise WorkerEnded
        number = message["id"]
        answer: asyncio.Future[list[dict[str, Any]] | None]
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._on_piece[number] = on_piece
        try:
            self._writer.write(pack(message))
            return await answer
        finally:
            del self._answers[number], self._on_piece[number]

    def cancel(self, number: int) -> None:
        """Tell that nobody waits for a batch any more."""
        if self.alive:
            self._writer.write(pack({"cancel": number}))

    def kill(self) -> None:
        """End the process at once; its batches fail."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Close the connection, with which the process ends."""
        self._on_end = lambda worker: None
        self._writer.close()
        self._reader.feed_eof()
        await self._listener
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _listen(self) -> None:
        with suppress(EOFError, ConnectionError):
            while True:
                message = await receive_async(self._reader)
                number = message["id"]
                if "piece" in message and number in self._on_piece:
                    self._on_piece[number](message["piece"])
                elif "results" in message and number in self._answers and not self._answers[number].done():
                    self._answers[number].set_result(message["results"])
        self.alive = False
        self._writer.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(WorkerEnded())
        self._on_end(self)


class Pool:
    """The processes that hold one state of the runs."""

    def __init__(self, settings: PoolSettings, on_end: Callable[[WorkerConnection], None]) -> None:
        self.settings, self._on_end = settings, on_end
        self.workers: list[WorkerConnection] = []
        self.runs: dict[str, dict[str, Any]] = {}  # what clients are told about each
        self._template: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._control: socket.socket | None = None
        self._forking = asyncio.Lock()

    async def start(self) -> None:
        """Load the runs and start the workers; a UserError says why a run cannot be loaded."""
        try:
            await self._start_template()
            while len(self.workers) < self.settings.workers:
                self.workers += await self._fork()
        except BaseException:
            await self.close()
            raise

    async def replace(self) -> None:
        """Start workers in the place of those that have ended, and the template too if it has."""
        async with self._forking:
            self.workers = [worker for worker in self.workers if worker.alive]
            while len(self.workers) < self.settings.workers:
                try:
                    self.workers += await self._fork()
                except (EOFError, OSError):
                    await self._end_template()
                    await self._start_template()

    async def close(self) -> None:
        """End all processes."""
        for worker in self.workers:
            await worker.close()
        self.workers.clear()
        await self._end_template()

    async def _start_template(self) -> None:
        ours, theirs = socket.socketpair()
        settings = self.settings
        environment = {**os.environ, "OMP_NUM_THREADS": str(settings.threads), "TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            self._template = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "regard.serve.worker", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], env=environment, stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        ours.setblocking(False)
        self._control = ours
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(
            pack({
                "runs": settings.runs, "engine": settings.engine, "precision": settings.precision,
                "slots": settings.slots, "threads": settings.threads,
            })
        )  # fmt: skip
        try:
            answer = await receive_async(self._reader)
        except EOFError:
            raise UserError("serve: the process that loads the runs has ended (too little memory?)") from None
        if "error" in answer:
            raise UserError(answer["error"])
        self.runs = {run["name"]: run for run in answer["runs"]}

    async def _fork(self) -> list[WorkerConnection]:
        """A new process, with its workers."""
        assert self._control is not None and self._reader is not None
        pairs = [socket.socketpair() for _ in range(self.settings.slots)]
        try:
            socket.send_fds(self._control, [b"f"], [theirs.fileno() for _, theirs in pairs])
            pid = (await receive_async(self._reader))["pid"]
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        return [WorkerConnection(pid, await asyncio.open_connection(sock=ours), self._on_end) for ours, _ in pairs]

    async def _end_template(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()
            self._writer = None
        if self._template is not None:
            with suppress(ProcessLookupError):
                self._template.kill()
            await self._template.wait()
            self._template = None
