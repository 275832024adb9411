"""The worker processes as the server sees them: forked from a template that has loaded the runs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, cast

from regard.errors import UserError
from regard.serve.protocol import Channel, Message, Unpacker, pack

ENDING = 3.0  # seconds that the processes have to end by themselves
PRIMITIVES = 256  # matrix products that a worker keeps compiled, one for each shape; oneDNN's 1,024 grow for long


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


class WorkerConnection(asyncio.Protocol):
    """A process, or a thread of one, that answers one batch after the other."""

    def __init__(
        self,
        pid: int,
        on_message: Callable[[WorkerConnection, Message], None],
        on_end: Callable[[WorkerConnection], None],
    ) -> None:
        """`on_end` is called when the connection has ended, and the process with it."""
        self.pid, self.alive = pid, False
        self._unpacker = Unpacker()
        self._on_message, self._on_end = on_message, on_end
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.alive = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            self._on_message(self, message)

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        self._closed.set()
        self._on_end(self)

    def send(self, message: Message) -> None:
        """Send a batch, or tell that nobody waits for the one at hand any more."""
        assert self._transport is not None
        self._transport.write(pack(message))

    def kill(self) -> None:
        """End the process at once; its batches fail."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Close the connection, with which the process ends."""
        assert self._transport is not None
        self._transport.close()
        await self._closed.wait()


class Pool:
    """The processes that hold one state of the runs."""

    def __init__(
        self,
        settings: PoolSettings,
        on_message: Callable[[WorkerConnection, Message], None],
        on_end: Callable[[WorkerConnection], None],
    ) -> None:
        """`on_message` gets what workers send, `on_end` each worker that has ended."""
        self.settings, self._on_message, self._on_end = settings, on_message, on_end
        self.workers: list[WorkerConnection] = []
        self.runs: dict[str, dict[str, Any]] = {}  # what clients can ask about each
        self._template: asyncio.subprocess.Process | None = None
        self._control: Channel | None = None
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
                except OSError:
                    await self._end_template()
                    await self._start_template()

    async def close(self) -> None:
        """End all processes."""
        workers, self.workers = self.workers, []
        for worker in workers:
            await worker.close()
        await self._end_template()

    async def _start_template(self) -> None:
        ours, theirs = socket.socketpair()
        self._control = Channel(ours)
        settings = self.settings
        environment = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(PRIMITIVES), **os.environ}
        environment |= {"OMP_NUM_THREADS": str(settings.threads), "TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            self._template = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "regard.serve.worker", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], env=environment, stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        self._control.send({**asdict(settings), "slots": settings.slots})
        try:
            answer = await self._answer_of_template()
        except ConnectionError:
            raise UserError("serve: the process that loads the runs has ended (too little memory?)") from None
        if "error" in answer:
            raise UserError(answer["error"])
        self.runs = {run["name"]: run for run in answer["runs"]}

    async def _answer_of_template(self) -> Message:
        """What the template says next; a ConnectionError if it has ended."""
        assert self._control is not None
        answer = await asyncio.to_thread(self._control.receive)
        if answer is None:
            raise ConnectionError
        return answer

    async def _fork(self) -> list[WorkerConnection]:
        """A new process, with its workers."""
        assert self._control is not None
        pairs = [socket.socketpair() for _ in range(self.settings.slots)]
        try:
            socket.send_fds(self._control.connection, [b"f"], [theirs.fileno() for _, theirs in pairs])
            pid = (await self._answer_of_template())["pid"]
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        loop, workers = asyncio.get_running_loop(), []
        for ours, _ in pairs:
            _, worker = await loop.create_unix_connection(
                lambda: WorkerConnection(pid, self._on_message, self._on_end), sock=ours
            )
            workers.append(worker)
        return workers

    async def _end_template(self) -> None:
        """Let it end after its workers: it is their parent, and what it leaves behind nobody might clear away."""
        if self._control is not None:
            with suppress(OSError):
                self._control.connection.shutdown(socket.SHUT_RDWR)
        if self._template is not None:
            try:
                async with asyncio.timeout(ENDING):
                    await self._template.wait()
            except TimeoutError:
                self._template.kill()
                await self._template.wait()
            self._template = None
        if self._control is not None:
            self._control.connection.close()
            self._control = None
