"""The service as a deployment of Ray Serve: replicas on the machines of a cluster, as many as the requests need.

    serve run regard.serve.ray_serve:app runs=g2p=/shared/runs/g2p max_replicas=8

Each replica is the service of `regard serve` with its queue, batches, deadlines and worker process, and answers at the
same endpoints with the same JSON; Ray Serve listens, chooses a replica, and starts and ends them.
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

NAME = "regard"  # of the deployment
HEADERS = {"X-Content-Type-Options": "nosniff"}
SHARED = ("keys", "threads", "engine", "precision", "beam", "queue", "max_body", "max_inputs", "max_work", "deadline")


class DeploymentSettings(ServeSettings):
    """The arguments of `app`: what is served and by how many replicas, and settings of the server for each of them."""

    runs: tuple[str, ...] = option((), "Run directories, or NAME=DIRECTORY; as one text, with commas.")
    min_replicas: int = option(1, "Replicas when nobody asks.", ge=0)
    max_replicas: Count = option(4, "Most replicas.")
    target_ongoing_requests: float = option(4.0, "Requests at once that a replica should have.", gt=0)
    max_ongoing_requests: Count = option(64, "Requests at once that a replica takes; beyond, they wait in the proxy.")
    upscale_delay: Seconds = option(10.0, "Seconds of more requests until replicas are added.")
    downscale_delay: Seconds = option(120.0, "Seconds of fewer requests until replicas are ended.")
    cpus: float | None = option(None, "Processors of a replica. (default: its threads)", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _from_texts(cls, data: Any) -> Any:
        """Arguments on a command line are texts: numbers, and runs with commas."""
        if not isinstance(data, dict):
            return data
        texts = {name: value for name, value in data.items() if isinstance(value, str)}
        numbers = {name: float(text) if "." in text else int(text) for name, text in texts.items() if _is_number(text)}
        runs = {"runs": [part for part in texts["runs"].split(",") if part]} if "runs" in texts else {}
        return {**data, **numbers, **runs}

    def problems(self) -> Iterator[Problem]:
        for name in ServeSettings.model_fields:
            unused = name in self.model_fields_set and name not in SHARED
            yield unused, f"{name}: is set where Ray Serve is configured, or has no meaning for replicas"
        yield not self.runs, "runs: is required, run directories or NAME=DIRECTORY, with commas"
        more = self.min_replicas > self.max_replicas
        yield more, f"min_replicas: {self.min_replicas} are more than max_replicas, {self.max_replicas}"


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) is not None


class Replica:
    """A service of its own, started before the first request."""

    def __init__(self, runs: dict[str, str], arguments: dict[str, Any]) -> None:
        settings = parse(DeploymentSettings, arguments, "ray serve")
        self.settings = settings
        pool = PoolSettings(runs, 1, settings.engine, settings.precision, settings.threads)
        self.service = Service(pool, settings.queue, settings.deadline)
        handlers = Handlers(self.service, settings)
        # reloading the runs of one replica would make no sense
        api = [route for route in routes(handlers) if route.access != "admin"]
        self.endpoints = Endpoints(api, handlers, Keys.load(settings.keys))
        self._starting, self._started = asyncio.Lock(), False

    async def start(self) -> None:
        """Load the runs, once."""
        async with self._starting:
            if not self._started:
                await self.service.start()
                self._started = True

    async def check_health(self) -> None:
        """Ray Serve calls it before the first request and then again and again; what it raises ends the replica."""
        await self.start()

    async def __call__(self, request: Any) -> Any:
        """Answer a request of Ray Serve's proxy, one of Starlette."""
        from sse_starlette import EventSourceResponse
        from starlette.responses import Response

        data = bytearray()
        async for part in request.stream():
            if len(data) <= self.settings.max_body:  # what is too long is read to its end, but not kept
                data += part
        reply = await self.reply(request.method, request.url.path, request.headers, bytes(data))
        if isinstance(reply, EventStream):
            return EventSourceResponse(_events(reply), sep="\n", headers=HEADERS)
        return Response(reply.body, reply.status, {**reply.headers, **HEADERS})

    async def reply(self, method: str, path: str, headers: Mapping[str, str], data: bytes) -> Reply:
        """The answer to a request, as the server gives it."""
        await self.start()

        async def read() -> bytes:
            return data

        return await self.endpoints.answer(method, path, headers, read)


async def _events(stream: EventStream) -> AsyncIterator[dict[str, str]]:
    """The events of a stream in the form that sse-starlette takes."""
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
        read_config(Path(path))  # a mistake is reported here, and not in the log of a replica
    try:
        from ray import serve
    except ModuleNotFoundError as error:
        raise missing_extra("a deployment of Ray Serve", error.name or "ray", "ray") from None
    deployment = serve.deployment(Replica).options(
        name=NAME,
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
