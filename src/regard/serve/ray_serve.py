"""The service as a deployment of Ray Serve, with replicas on the machines of a cluster.

    serve run regard.serve.ray_serve:app runs=g2p=/shared/runs/g2p max_replicas=8

Each replica is the service of `regard serve`, with its own queue and worker process and the same endpoints and JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import model_validator

from regard.config import Count, Problem, parse
from regard.errors import missing_extra
from regard.recipe import option
from regard.run import read_config
from regard.serve.endpoints import Endpoints, routes
from regard.serve.handlers import Handlers
from regard.serve.pool import PoolSettings
from regard.serve.responses import EventStream, Reply
from regard.serve.service import Service
from regard.serve.settings import Keys, Seconds, ServeSettings, named_runs

DEPLOYMENT = "regard"
HEADERS = {"X-Content-Type-Options": "nosniff"}
SHARED_SETTINGS = (
    "keys", "host_name", "threads", "nice", "engine", "precision", "beam", "queue", "max_body", "max_inputs",
    "max_source", "max_work", "max_answer", "deadline",
)  # fmt: skip


class DeploymentSettings(ServeSettings):
    """The arguments of `app`: runs, number of replicas, and settings of the server for every replica."""

    runs: tuple[str, ...] = option((), "Run directories, or NAME=DIRECTORY; in one text, separated by commas.")
    min_replicas: int = option(1, "Replicas without requests.", ge=0)
    max_replicas: Count = option(4, "Maximum number of replicas.")
    target_ongoing_requests: float = option(4.0, "Target number of concurrent requests per replica.", gt=0)
    max_ongoing_requests: Count = option(
        64, "Maximum concurrent requests per replica; further requests wait in the proxy."
    )
    upscale_delay: Seconds = option(10.0, "Seconds above the target until replicas are added.")
    downscale_delay: Seconds = option(120.0, "Seconds below the target until replicas are stopped.")
    cpus: float | None = option(None, "CPUs per replica. (default: its threads)", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _from_texts(cls, data: Any) -> Any:
        """Convert the arguments of a command line, which are texts."""
        if not isinstance(data, dict):
            return data
        texts = {name: value for name, value in data.items() if isinstance(value, str)}
        numeric = {name: text for name, text in texts.items() if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text)}
        numbers = {name: float(text) if "." in text else int(text) for name, text in numeric.items()}
        lists = {name: texts[name].split(",") for name in ("runs", "host_name") if name in texts}
        return {**data, **numbers, **{name: [part for part in parts if part] for name, parts in lists.items()}}

    def problems(self) -> Iterator[Problem]:
        for name in ServeSettings.model_fields:
            unused = name in self.model_fields_set and name not in SHARED_SETTINGS
            yield unused, f"{name}: belongs to the configuration of Ray Serve, or has no meaning for replicas"
        yield not self.runs, "runs: is required: run directories or NAME=DIRECTORY, separated by commas"
        too_many = self.min_replicas > self.max_replicas
        yield too_many, f"min_replicas: {self.min_replicas} is more than max_replicas, {self.max_replicas}"


class Replica:
    """One service, started before the first request."""

    def __init__(self, runs: dict[str, str], arguments: dict[str, Any]) -> None:
        settings = parse(DeploymentSettings, arguments, "ray serve")
        self.settings = settings
        pool = PoolSettings(runs, 1, settings.engine, settings.precision, settings.threads, settings.nice)
        self.service = Service(pool, settings.queue, settings.deadline)
        handlers = Handlers(self.service, settings)
        # without reload, which would reach only one of several replicas
        api = [route for route in routes(handlers) if route.access != "admin"]
        self.endpoints = Endpoints(api, handlers, Keys.load(settings.keys))
        self._starting = asyncio.Lock()
        self._started = False

    async def start(self) -> None:
        """Load the runs; a second call does nothing."""
        async with self._starting:
            if not self._started:
                await self.service.start()
                self._started = True

    check_health = start  # called by Ray Serve before the first request and regularly; an error ends the replica

    async def __call__(self, request: Any) -> Any:
        """Answer a Starlette request of Ray Serve's proxy."""
        from sse_starlette import EventSourceResponse
        from starlette.responses import Response

        data = bytearray()
        async for part in request.stream():
            if len(data) <= self.settings.max_body:  # a body that is too long is read to its end, but not stored
                data += part
        url = request.url
        reply = await self.reply(request.method, url.path, request.headers, bytes(data), url.query)
        if isinstance(reply, EventStream):
            return EventSourceResponse(_events(reply), sep="\n", headers=HEADERS)
        return Response(reply.body, reply.status, {**reply.headers, **HEADERS})

    async def reply(self, method: str, path: str, headers: Mapping[str, str], data: bytes, query: str = "") -> Reply:
        """The answer to a request, the same as from the HTTP server."""
        await self.start()

        async def read() -> bytes:
            return data

        return await self.endpoints.answer(method, path, headers, read, query)


async def _events(stream: EventStream) -> AsyncIterator[dict[str, str]]:
    """The events of a stream in the form of sse-starlette."""
    try:
        async for data in stream.events:
            yield {"data": data}
    finally:
        stream.finish()


def app(arguments: dict[str, Any]) -> Any:
    """The application for `serve run`, `serve deploy` or `ray.serve.run`; arguments are `DeploymentSettings`."""
    settings = parse(DeploymentSettings, arguments, "ray serve")
    settings.check(Keys.load(settings.keys))
    runs = {name: str(Path(path).resolve()) for name, path in named_runs(list(settings.runs)).items()}
    for path in runs.values():
        read_config(Path(path))  # errors appear here, not in the log of a replica
    try:
        from ray import serve
    except ModuleNotFoundError as error:
        raise missing_extra("a deployment of Ray Serve", error.name or "ray", "ray") from None
    deployment = serve.deployment(Replica).options(
        name=DEPLOYMENT,
        max_ongoing_requests=settings.max_ongoing_requests,
        ray_actor_options={"num_cpus": settings.cpus or settings.threads},
        autoscaling_config={
            "min_replicas": settings.min_replicas,
            "max_replicas": settings.max_replicas,
            "target_ongoing_requests": settings.target_ongoing_requests,
            "upscale_delay_s": settings.upscale_delay,
            "downscale_delay_s": settings.downscale_delay,
        },
    )
    return deployment.bind(runs, json.loads(settings.model_dump_json(exclude_unset=True)))
