"""The server's view of its worker processes: children of a template process that has loaded the runs."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

from pydantic_core import from_json, to_json

from regard.parallel.children import Child, ChildDied, Template
from regard.parallel.messages import Message, Unpacker, pack

INTERNAL_ERROR = "an error in the server; its log has the details"

EXIT_SECONDS = 3.0  # grace period before a process that should have exited is killed
ONEDNN_PRIMITIVES = 256  # compiled matrix products that a worker caches, one per shape; the default is 1,024

OnMessage = Callable[["WorkerConnection", dict[str, Any]], None]
OnEnd = Callable[["WorkerConnection"], None]


@dataclass(frozen=True)
class PoolSettings:
    """The runs of the workers, and how they compute."""

    runs: dict[str, str]  # name -> directory
    workers: int  # batches at once
    engine: str = "auto"
    precision: str = "fp32"
    threads: int = 1  # per worker
    nice: int = 10  # so that the event loop of the server gets a core as soon as it needs one

    @property
    def slots(self) -> int:
        """Workers per process: CTranslate2 shares weights between threads, torch between forked processes."""
        return self.workers if self.engine == "ctranslate2" else 1


class WorkerConnection(asyncio.Protocol):
    """The connection to a worker: a process, or a thread of a process, that answers one batch at a time."""

    def __init__(self, child: Child, on_message: OnMessage, on_end: OnEnd) -> None:
        """`on_end` is called when the connection ends, which means that the process has ended."""
        self.child = child
        self.alive = False
        self._unpacker = Unpacker()
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.Event()

    @property
    def pid(self) -> int:
        return self.child.pid

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.alive = True

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            self._on_message(self, read_body(message))

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        self._closed.set()
        self._on_end(self)

    def send(self, message: dict[str, Any]) -> None:
        """Send a batch, or the cancellation of the current one."""
        assert self._transport is not None
        self._transport.write(pack(body_message(message)))

    async def close(self) -> None:
        """Close the connection; the process exits when all its connections are closed."""
        assert self._transport is not None
        self._transport.close()
        await self._closed.wait()


class Pool:
    """The template process and its workers; a reload replaces the whole pool."""

    def __init__(self, settings: PoolSettings, on_message: OnMessage, on_end: OnEnd) -> None:
        """`on_message` receives the messages of workers, `on_end` every worker that has ended."""
        self.settings = settings
        self.workers: list[WorkerConnection] = []
        self.runs: dict[str, dict[str, Any]] = {}  # name -> description, for clients
        self._on_message = on_message
        self._on_end = on_end
        self._template: Template | None = None
        self._replacing = asyncio.Lock()

    async def start(self) -> None:
        """Load the runs and start the workers; raises a UserError if a run cannot be loaded."""
        try:
            await self._start_template()
            while len(self.workers) < self.settings.workers:
                await self._start_workers()
        except BaseException:
            await self.close()
            raise

    async def replace(self) -> None:
        """Replace workers that have ended, and the template if it has ended."""
        async with self._replacing:
            children = {worker.child for worker in self.workers}
            self.workers = [worker for worker in self.workers if worker.alive]
            await _close_children(children - {worker.child for worker in self.workers})
            while len(self.workers) < self.settings.workers:
                try:
                    await self._start_workers()
                except ChildDied:
                    await self._close_template()
                    await self._start_template()

    async def close(self) -> None:
        """End all processes."""
        workers = self.workers
        self.workers = []
        await asyncio.gather(*(worker.close() for worker in workers))
        await _close_children({worker.child for worker in workers})
        await self._close_template()

    async def _start_template(self) -> None:
        settings = self.settings
        capacity = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(ONEDNN_PRIMITIVES))
        self._template = Template(
            "regard.serve.worker:prepare",
            {**asdict(settings), "slots": settings.slots},
            {
                "ONEDNN_PRIMITIVE_CACHE_CAPACITY": capacity,
                "OMP_NUM_THREADS": str(settings.threads),
                "TOKENIZERS_PARALLELISM": "false",
            },
            "serve: the process that loads the runs",
        )
        description = await asyncio.to_thread(self._template.wait)
        self.runs = {run["name"]: run for run in description["runs"]}

    async def _close_template(self) -> None:
        """Stop the template last: it must reap its workers."""
        if self._template is not None:
            await asyncio.to_thread(self._template.close, EXIT_SECONDS)
            self._template = None

    async def _start_workers(self) -> None:
        """Start one process and connect to its workers."""
        assert self._template is not None
        child, connections = await asyncio.to_thread(_start_child, self._template, self.settings.slots)
        loop = asyncio.get_running_loop()
        protocol = partial(WorkerConnection, child, self._on_message, self._on_end)
        for connection in connections:
            _, worker = await loop.create_unix_connection(protocol, sock=connection)
            self.workers.append(worker)


def _start_child(template: Template, slots: int) -> tuple[Child, list[socket.socket]]:
    """A new process, and a connection to each of its workers."""
    child = template.start({}, "a worker process", capture=False)
    connections = [child.channel.connection]
    for _ in range(1, slots):
        ours, theirs = socket.socketpair()
        connections.append(ours)
        with theirs:
            child.channel.send({}, handles=[theirs.fileno()])
    return child, connections


def body_message(body: dict[str, Any]) -> Message:
    """A message between the server and a worker: JSON by pydantic, in a third of the time that a header would take."""
    return Message({}, [to_json(body)])


def read_body(message: Message) -> dict[str, Any]:
    """The body of a message between the server and a worker."""
    body: dict[str, Any] = from_json(message.parts[0])
    return body


async def _close_children(children: set[Child]) -> None:
    """Wait until processes with closed connections exit; kill a process that does not exit in time."""
    await asyncio.gather(*(asyncio.to_thread(child.close, EXIT_SECONDS) for child in children))
