"""The HTTP server: connections, time limits for clients, start and shutdown.

aiohttp can close the connections of all stalled clients: silent ones, incomplete headers, slow bodies, unread answers.
Its `Application` is not used: it costs 8 microseconds per request and cannot change the answer to invalid HTTP.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import json
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from regard.errors import UserError, plural
from regard.parallel.cores import cores
from regard.serve.endpoints import Endpoints, Route, describe_api, routes
from regard.serve.handlers import Handlers
from regard.serve.monitor import Monitor
from regard.serve.pool import INTERNAL_ERROR, PoolSettings
from regard.serve.responses import (
    ASSETS,
    CODES,
    HEADERS,
    EventStream,
    Refused,
    asset_response,
    common_headers,
    error_response,
    send_events,
    too_large,
)
from regard.serve.service import Service
from regard.serve.settings import Keys, ServeSettings, is_address

log = logging.getLogger("regard.serve")
LISTEN_SECONDS = 0.5  # of listening after a SIGTERM, while the readiness check fails
LAST_REQUEST_SECONDS = 0.1  # wait for the first request of the last accepted connection
MAX_HEADER_BYTES = 8190  # per line
MAX_UNSENT_BYTES = 65_536  # of answers, in the kernel


class Server:
    """A service behind HTTP."""

    def __init__(self, runs: dict[str, str], settings: ServeSettings) -> None:
        keys = Keys.load(settings.keys)
        settings.check(keys)
        self.settings = settings
        workers = settings.workers or cores()
        pool = PoolSettings(runs, workers, settings.engine, settings.precision, settings.threads, settings.nice)
        self.service = Service(pool, settings.queue, settings.deadline)
        self.handlers = Handlers(self.service, settings)
        self.monitor = Monitor(self.service)
        self.routes = routes(self.handlers)
        api = json.dumps(describe_api(self.routes, list(runs))).encode()
        more_routes = [
            Route("GET", "/openapi.json", _data_handler(lambda: api, "application/json")),
            Route("GET", "/spec", _data_handler(lambda: api, "application/json"), libretranslate=True),
            Route("GET", "/metrics", _data_handler(self.monitor.text, "text/plain; version=0.0.4")),
            *(Route("GET", path, partial(asset_response, name, settings.max_inputs)) for path, name in ASSETS.items()),
        ]
        self.endpoints = Endpoints([*self.routes, *more_routes], self.handlers, keys)
        self.port = settings.port
        self._proxies = [ipaddress.ip_network(text, strict=False) for text in settings.proxy]
        self._active = 0  # requests
        self._sending: dict[asyncio.Transport, float] = {}  # connection -> time when sending its answer began
        self._watching: asyncio.Task[None] | None = None
        self._manager: web.Server | None = None
        self._listener: asyncio.Server | None = None

    # requests

    async def _read(self, request: web.BaseRequest) -> bytes:
        """The body of a request, if it arrives in time."""
        try:
            if request.content.is_eof():  # it came with the header, as most bodies do
                return await request.read()
            if request.headers.get("Expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0  # counts only the answer
            async with asyncio.timeout(self.settings.receive):
                return await request.read()
        except TimeoutError:
            seconds = plural(self.settings.receive, "second", "g")
            raise Refused(408, f"the body did not arrive within {seconds}") from None
        except web.HTTPRequestEntityTooLarge:
            raise too_large(self.settings.max_body) from None
        except (ValueError, web.PayloadAccessError):
            raise Refused(400, "the body cannot be read") from None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, count it and log it."""
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
        """The answer to a request; a stream has already been sent."""
        if request.method == "OPTIONS" and request.headers.get("Origin") in self.settings.cors:
            return web.Response(status=204)
        query = request.rel_url.raw_query_string
        read = partial(self._read, request)
        reply = await self.endpoints.answer(request.method, request.path, request.headers, read, query)
        if isinstance(reply, EventStream):
            headers = common_headers(request, self.settings.cors, self.handlers.draining)
            return await send_events(request, reply, headers, self.settings.send)
        if reply.status in (408, 413, 415):  # the rest of the body is not read
            reply.force_close()
        return reply

    def _client(self, request: web.BaseRequest) -> str:
        """The address of a client; behind trusted proxies, the last address before them."""
        address = request.remote or ""
        chain = [part.strip() for part in request.headers.get("X-Forwarded-For", "").split(",")]
        while chain and is_address(chain[-1]) and self._is_proxy(address):
            address = chain.pop()
        return address

    def _is_proxy(self, address: str) -> bool:
        return is_address(address) and any(ipaddress.ip_address(address) in network for network in self._proxies)

    async def _watch(self) -> None:
        """Close the connections of clients that do not read; one timer per answer would cost more."""
        while True:
            await asyncio.sleep(min(1.0, self.settings.send / 4))
            limit = time.monotonic() - self.settings.send
            for transport in [each for each, began in self._sending.items() if began < limit]:
                transport.abort()

    # start and shutdown

    async def start(self) -> None:
        """Load the runs and listen."""
        await self.service.start()
        self._watching = asyncio.create_task(self._watch())
        listener = self._listen()
        self.port = listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        manager = self._manager = web.Server(
            self._handle,
            handler_cancellation=True,
            request_factory=lambda message, payload, protocol, writer, task: web.BaseRequest(
                message, payload, protocol, writer, task, loop, client_max_size=self.settings.max_body
            ),
        )
        protocol = partial(
            Protocol,
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # as AppRunner does
            keepalive_timeout=self.settings.receive,
            lingering_time=1.0,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )
        self._listener = await loop.create_server(protocol, sock=listener, backlog=1024)

    def _listen(self) -> socket.socket:
        settings = self.settings
        try:
            addresses = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = addresses[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # the kernel closes connections whose client takes no data
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * settings.send))
            # The kernel held 4.1 MB per client that sends requests and reads no answers; with this option, 0.09 MB.
            # A small SO_SNDBUF has nearly the same effect (0.14 MB), but it also slows down distant clients.
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
            listener.bind(address)
        except OSError as error:
            raise UserError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}") from None
        return listener

    async def stop(self) -> None:
        """Finish accepted requests, then end. The readiness check fails at once; the listener closes a little later."""
        if self.handlers.draining:
            return
        self.handlers.draining = True
        await asyncio.sleep(LISTEN_SECONDS)
        if self._listener is not None and self._manager is not None:
            self._listener.close()
            await asyncio.sleep(LAST_REQUEST_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.drain):
                    while self._active:
                        await asyncio.sleep(0.02)
            self._manager.pre_shutdown()
            await self._manager.shutdown(self.settings.drain)
        if self._watching is not None:
            self._watching.cancel()
        await self.service.close()


class Protocol(web.RequestHandler):
    """HTTP over one connection; the answer to invalid HTTP has the shape of all errors."""

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if isinstance(exc, LineTooLong):
            status = 431
            text = f"a line of the header is longer than {MAX_HEADER_BYTES} bytes"
        elif status == 400:
            text = "not HTTP, or too many headers"
        else:
            log.error("an error in a connection", exc_info=exc)
            text = INTERNAL_ERROR
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer was sent")
        response = error_response(Refused(status if status in CODES else 500, text))
        response.headers.update(HEADERS)
        response.force_close()
        return response


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop, which needs less time per request; on Windows, of asyncio."""
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def _data_handler(data: Callable[[], bytes], content_type: str) -> Callable[[], Awaitable[web.Response]]:
    async def handle() -> web.Response:
        return web.Response(body=data(), headers={"Content-Type": content_type})

    return handle


def serve(runs: dict[str, str], settings: ServeSettings, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(runs, settings, say))


async def _serve(runs: dict[str, str], settings: ServeSettings, say: Callable[[str], None]) -> None:
    level = logging.INFO if settings.access_log else logging.WARNING
    logging.basicConfig(format="%(asctime)s %(message)s", level=level)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # invalid HTTP would fill the log
    server = Server(runs, settings)
    shutdown = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, shutdown.set)
    say(f"loading {plural(len(runs), 'run')}")
    try:
        await server.start()
        gc.collect()
        gc.freeze()  # a full collection would visit the objects of all modules, and delay every request
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        workers = plural(server.service.settings.workers, "worker")
        say(f"serving {', '.join(runs)} on http://{host}:{server.port}/ ({workers}, nice {settings.nice})")
        await shutdown.wait()
        say("shutting down: finishing accepted requests")
        await server.stop()
    finally:
        await server.service.close()
