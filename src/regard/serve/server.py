"""The HTTP server: who may ask, how long clients may take, and how it starts and ends.

aiohttp was chosen by a test of stalled clients (silent, half a header, a trickled header or body, no reading of the
answer): of the servers tried it alone, with tornado, lets go of all of them by its own timeouts and by what a handler
can do.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import ipaddress
import json
import logging
import signal
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from regard.errors import UserError, plural
from regard.parallel.cores import cores
from regard.serve.endpoints import Endpoints, Route, describe_api, routes
from regard.serve.handlers import Handlers
from regard.serve.monitor import Monitor
from regard.serve.pool import PoolSettings
from regard.serve.responses import (
    ASSETS,
    CODES,
    EventStream,
    Refused,
    asset_response,
    common_headers,
    error_response,
    send_events,
)
from regard.serve.service import Service
from regard.serve.settings import Keys, ServeSettings, is_address

log = logging.getLogger("regard.serve")
LISTEN_ON = 0.5  # seconds after a SIGTERM in which connections are still taken: clients learn late of it
LARGEST_BATCH = 16_384  # tokens times hypotheses
SO_ATTACH_FILTER, MAX = 26, 2**32 - 1
LAST_REQUESTS = 0.1  # seconds in which the first request of a connection that was just made arrives
MAX_HEADER = 8190  # bytes of a line of it
UNSENT = 65_536  # bytes of answers that the kernel takes beyond what it has sent


class Server:
    """A service behind HTTP."""

    def __init__(self, runs: dict[str, str], settings: ServeSettings) -> None:
        self.settings, self.keys = settings, Keys.load(settings.keys)
        settings.check(self.keys)
        workers = settings.workers or cores()
        pool = PoolSettings(runs, workers, settings.engine, settings.precision, settings.threads)
        self.service = Service(pool, settings.queue, LARGEST_BATCH, settings.deadline)
        self.handlers = Handlers(self.service, settings)
        self.monitor = Monitor(self.service)
        self.routes = routes(self.handlers)
        self.endpoints = Endpoints(self.routes, self.handlers, self.keys)
        self.port = settings.port
        self._proxies = [ipaddress.ip_network(text, strict=False) for text in settings.proxy]
        self._active = 0
        self._sending: dict[asyncio.Transport, float] = {}  # since when an answer is written there
        self._watching: asyncio.Task[None] | None = None
        self._manager: web.Server | None = None
        self._listening: asyncio.Server | None = None
        self._listener: socket.socket | None = None
        self._protocol: Callable[[], asyncio.Protocol] | None = None

    # requests

    def _endpoints(self) -> Endpoints:
        """The API, its description, the metrics and the web page."""
        api = json.dumps(describe_api(self.routes, list(self.service.runs))).encode()
        return Endpoints(
            [
                *self.routes,
                Route("GET", "/openapi.json", _fixed(lambda: api, "application/json")),
                Route("GET", "/metrics", _fixed(self.monitor.text, "text/plain; version=0.0.4")),
                *(Route("GET", path, partial(asset_response, name)) for path, name in ASSETS.items()),
            ],
            self.handlers,
            self.keys,
        )

    async def _read(self, request: web.BaseRequest) -> bytes:
        """The body of a request, if it comes in time."""
        try:
            if request.content.is_eof():  # it came with the header, as most do
                return await request.read()
            if request.headers.get("Expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0  # of the answer itself
            async with asyncio.timeout(self.settings.receive):
                return await request.read()
        except TimeoutError:
            raise Refused(408, f"the body did not come within {plural(self.settings.receive, 'second', 'g')}") from None
        except web.HTTPRequestEntityTooLarge:
            raise Refused(413, f"the body has more than {self.settings.max_body} bytes") from None
        except (ValueError, web.PayloadAccessError):
            raise Refused(400, "the body cannot be read") from None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, count it, and let go of clients that do not read."""
        began = time.monotonic()
        self._active += 1
        path = request.path if request.path in self.endpoints.paths else "none"
        try:
            response = await self._answer(request)
            if not response.prepared and (transport := request.transport) is not None:
                response.headers.update(common_headers(request, self.settings.cors, self.handlers.draining))
                self._sending[transport] = time.monotonic()
                try:
                    await response.prepare(request)
                    await response.write_eof()
                finally:
                    del self._sending[transport]
        finally:
            self._active -= 1
        if self.handlers.draining:
            response.force_close()
        seconds = time.monotonic() - began
        self.monitor.request(path, response.status, seconds)
        if log.isEnabledFor(logging.INFO):
            client = self._client(request)
            log.info("%s %s %s %d %.0f ms", client, request.method, path, response.status, 1000 * seconds)
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The answer to a request; if it is a stream, it has been sent."""
        if request.method == "OPTIONS" and request.headers.get("Origin") in self.settings.cors:
            return web.Response(status=204)
        read = partial(self._read, request)
        reply = await self.endpoints.answer(request.method, request.path, request.headers, read)
        if isinstance(reply, EventStream):
            headers = common_headers(request, self.settings.cors, self.handlers.draining)
            return await send_events(request, reply, headers, self.settings.send)
        if reply.status in (408, 413, 415):  # what the client still sends is not read
            reply.force_close()
        return reply

    def _client(self, request: web.BaseRequest) -> str:
        """The address of a client; behind proxies that are named, the last one before them."""
        address = request.remote or ""
        chain = [part.strip() for part in request.headers.get("X-Forwarded-For", "").split(",")]
        while chain and is_address(chain[-1]) and _within(address, self._proxies):
            address = chain.pop()
        return address

    async def _watch(self) -> None:
        """Let go of clients that do not read; a timer for each answer would cost more."""
        while True:
            await asyncio.sleep(min(1.0, self.settings.send / 4))
            now = time.monotonic()
            for transport in [each for each, began in self._sending.items() if now - began > self.settings.send]:
                transport.abort()

    # life

    async def start(self) -> None:
        """Load the runs and listen."""
        await self.service.start()
        self._watching = asyncio.create_task(self._watch())
        settings = self.settings
        self.endpoints = self._endpoints()
        listener, loop = self._listen(), asyncio.get_running_loop()
        self.port = listener.getsockname()[1]
        manager = self._manager = web.Server(
            self._handle,
            handler_cancellation=True,
            request_factory=lambda message, payload, protocol, writer, task: web.BaseRequest(
                message, payload, protocol, writer, task, loop, client_max_size=settings.max_body
            ),
        )

        def protocol() -> Protocol:
            return Protocol(
                manager,
                loop=loop,
                access_log=None,  # type: ignore[arg-type]  # what AppRunner gives for none
                keepalive_timeout=settings.receive,
                lingering_time=1.0,
                max_line_size=MAX_HEADER,
                max_field_size=MAX_HEADER,
            )

        self._listener, self._protocol = listener.dup(), protocol
        self._listening = await loop.create_server(protocol, sock=listener, backlog=1024)

    def _listen(self) -> socket.socket:
        settings = self.settings
        try:
            (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
                settings.host, settings.port, type=socket.SOCK_STREAM
            )
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections whose client takes nothing any more end by themselves
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * settings.send))
            # A client that asks and does not read made the kernel hold 4.1 MB, with this 0.09. A small SO_SNDBUF does
            # nearly the same (0.14), but would also bound how fast a distant client that reads can be sent to.
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
            listener.bind(address)
        except OSError as error:
            raise UserError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}") from None
        return listener

    async def stop(self) -> None:
        """Finish what was accepted, then end: not ready at once, no new connections a little later."""
        if self.handlers.draining:
            return
        self.handlers.draining = True
        await asyncio.sleep(LISTEN_ON)
        if self._listening is not None and self._manager is not None:
            self._listening.close()
            await self._take_waiting()
            await asyncio.sleep(LAST_REQUESTS)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.drain):
                    while self._active:
                        await asyncio.sleep(0.02)
            self._manager.pre_shutdown()
            await self._manager.shutdown(self.settings.drain)
        if self._watching is not None:
            self._watching.cancel()
        await self.service.close()

    async def _take_waiting(self) -> None:
        """Take the connections that clients have made and nobody has accepted yet: the kernel would reset them."""
        listener, protocol = self._listener, self._protocol
        assert listener is not None and protocol is not None
        listener.setblocking(False)
        _refuse_handshakes(listener)
        await asyncio.sleep(LAST_REQUESTS)  # those that have begun are completed
        connections = []
        with listener, suppress(OSError):  # no more of them
            while True:
                connections.append(listener.accept()[0])
        for connection in connections:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)


def _refuse_handshakes(listener: socket.socket) -> None:
    """Drop the first packet of new connections: else one of 20,000 is made after the last look for waiting ones."""
    if not sys.platform.startswith("linux"):
        return
    # A packet filter: load the flags of the TCP header; with SYN among them drop the packet, else take it.
    steps = ((48, 0, 0, 13), (69, 0, 1, 2), (6, 0, 0, 0), (6, 0, 0, MAX))
    program = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(program)
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 4, ctypes.addressof(buffer)))


class Protocol(web.RequestHandler):
    """HTTP over one connection; what is not HTTP, or too long, is refused in the shape of all errors."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status == 400:
            status = 431 if isinstance(exc, LineTooLong) else 400
            text = (
                f"a line of the header is longer than {MAX_HEADER} bytes"
                if status == 431
                else "not HTTP, or too many headers"
            )
        else:
            log.error("an error in a connection", exc_info=exc)
            text = "an error in the server; its log has the details"
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer was sent")
        response = error_response(Refused(status if status in CODES else 500, text))
        response.force_close()
        return response


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop, which takes less time for a request; there is none for Windows."""
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def _within(address: str, networks: list[Any]) -> bool:
    try:
        return any(ipaddress.ip_address(address) in network for network in networks)
    except ValueError:
        return False


def _fixed(data: Callable[[], bytes], kind: str) -> Callable[[], Awaitable[web.Response]]:
    async def handle() -> web.Response:
        return web.Response(body=data(), headers={"Content-Type": kind})

    return handle


def serve(runs: dict[str, str], settings: ServeSettings, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(runs, settings, say))


async def _serve(runs: dict[str, str], settings: ServeSettings, say: Callable[[str], None]) -> None:
    logging.basicConfig(
        format="%(asctime)s %(message)s", level=logging.INFO if settings.access_log else logging.WARNING
    )
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # else whoever sends no HTTP could fill the log
    server, ended = Server(runs, settings), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    say(f"loading {plural(len(runs), 'run')}")
    try:
        await server.start()
        gc.collect()
        gc.freeze()  # a full collection would look at all modules, and hold up every request for that time
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        workers = plural(server.service.settings.workers, "worker")
        say(f"serving {', '.join(runs)} on http://{host}:{server.port}/ ({workers})")
        await ended.wait()
        say("ending: requests that were accepted are finished")
        await server.stop()
    finally:
        await server.service.close()
