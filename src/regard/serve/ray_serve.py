"""The service as a deployment of Ray Serve: replicas on the machines of a cluster, as many as the requests need.

    serve run regard.serve.ray_serve:app runs=g2p=/shared/runs/g2p max_replicas=8

Each replica is the service of `regard serve` with its queue, batches, deadlines and worker process, and answers at the
same endpoints with the same JSON; Ray Serve listens, chooses a replica, and starts and ends them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web
from pydantic import model_validator

from regard.config import Count, Problem, parse
from regard.errors import UserError, missing_extra
from regard.recipe import option
from regard.run import read_config
from regard.serve.bodies import BadBody, TranslateBody, parse_body
from regard.serve.handlers import Handlers, routes
from regard.serve.pool import PoolSettings
from regard.serve.responses import Refused, error_response
from regard.serve.server import LARGEST_BATCH
from regard.serve.service import Service
from regard.serve.settings import Keys, Seconds, ServeSettings, named_runs

log = logging.getLogger("regard.serve")
NAME = "regard"  # of the deployment
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


class Reply(NamedTuple):
    """An answer: status, headers and body."""

    status: int
    headers: dict[str, str]
    body: bytes


class Replica:
    """A service of its own, started before the first request."""

    def __init__(self, runs: dict[str, str], arguments: dict[str, Any]) -> None:
        settings = parse(DeploymentSettings, arguments, "ray serve")
        self.settings, self.keys = settings, Keys.load(settings.keys)
        pool = PoolSettings(runs, 1, settings.engine, settings.precision, settings.threads)
        self.service = Service(pool, settings.queue, LARGEST_BATCH, settings.deadline)
        self.routes = {
            (route.method, route.path): route
            for route in routes(Handlers(self.service, settings))
            if route.access != "admin"  # of one replica it would make no sense
        }
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
        from starlette.responses import Response

        data = bytearray()
        async for part in request.stream():
            if len(data) <= self.settings.max_body:  # what is too long is read to its end, but not kept
                data += part
        reply = await self.reply(request.method, request.url.path, request.headers, bytes(data))
        return Response(reply.body, reply.status, reply.headers)

    async def reply(self, method: str, path: str, headers: Mapping[str, str], data: bytes) -> Reply:
        """Answer a request, as the server does."""
        try:
            response = await self._answer(method, path, headers, data)
        except Refused as refused:
            response = error_response(refused)
        except UserError as error:
            response = error_response(Refused(error.status if isinstance(error, BadBody) else 422, str(error)))
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("an error while answering %s", path)
            response = error_response(Refused(500, "an error in the server; its log has the details"))
        assert isinstance(response, web.Response) and isinstance(response.body, bytes)
        return Reply(response.status, {**response.headers, "X-Content-Type-Options": "nosniff"}, response.body)

    async def _answer(self, method: str, path: str, headers: Mapping[str, str], data: bytes) -> web.StreamResponse:
        await self.start()
        route = self.routes.get((method, path))
        if route is None:
            allowed = [known for known, where in self.routes if where == path]
            known = f"{method} {path[:200]}: "
            if allowed:
                raise Refused(405, f"{known}Method Not Allowed (allowed: {', '.join(allowed)})")
            raise Refused(404, f"{known}Not Found (paths: {', '.join(where for _, where in self.routes)})")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        allowed_in = not self.keys.any or (scheme.lower() == "bearer" and self.keys.allows(key.strip()))
        if not allowed_in and route.access != "open" and path != "/translate":  # whose key may be in its body
            raise Refused(401, "a key is needed, as the header Authorization: Bearer KEY")
        if route.body is None:
            return await route.handle(None)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, f"the body is JSON: Content-Type: application/json, not {kind[:80]}")
        if len(data) > self.settings.max_body:
            raise Refused(413, f"the body has more than {self.settings.max_body} bytes")
        body = parse_body(route.body, data, self.settings.max_inputs)
        if isinstance(body, TranslateBody) and not allowed_in and not self.keys.allows(body.api_key):
            raise Refused(401, "a key is needed: api_key, or the header Authorization: Bearer KEY")
        if getattr(body, "stream", False):
            raise Refused(422, "stream: replicas of Ray Serve give whole answers; leave it out, or use regard serve")
        return await route.handle(None, body)


def app(arguments: dict[str, Any]) -> Any:
    """The application for `serve run`, `serve deploy` or `ray.serve.run`; arguments are `DeploymentSettings`."""
    settings = parse(DeploymentSettings, arguments, "ray serve")
    settings.check(Keys.load(settings.keys))
    runs = {name: str(Path(path).resolve()) for name, path in named_runs(list(settings.runs)).items()}
    for path in runs.values():
        read_config(Path(path))  # a mistake is told here, and not in the log of a replica
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
