"""A server for tiny runs, in a thread of the test process, with real worker processes."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from regard.serve.server import Server, new_event_loop
from regard.serve.settings import ServeSettings


@dataclass
class Reply:
    status: int
    body: bytes
    headers: Any

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Client:
    """An HTTP client of a server."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.server, self.loop = server, loop
        self.url = f"http://127.0.0.1:{server.port}"

    def get(self, path: str, **headers: str) -> Reply:
        return self._open(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        headers = {"Content-Type": "application/json", **named}
        return self._open(urllib.request.Request(self.url + path, data, headers, method="POST"))

    def _open(self, request: urllib.request.Request) -> Reply:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return Reply(response.status, response.read(), response.headers)
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.read(), error.headers)

    def wait(self, coroutine: Any) -> Any:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)


@contextmanager
def serving(runs: dict[str, Path], **settings: Any) -> Iterator[Client]:
    """A running server."""
    loop = new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    paths = {name: str(path) for name, path in runs.items()}
    server = Server(paths, ServeSettings(**{"port": 0, "workers": 1, **settings}))

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    try:
        wait(server.start())
        yield Client(server, loop)
    finally:
        with mock.patch.multiple("regard.serve.server", LISTEN_SECONDS=0, LAST_REQUEST_SECONDS=0):  # no clients left
            wait(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
