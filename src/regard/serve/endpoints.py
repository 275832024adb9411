"""The endpoints: what is at each path, who may ask, and every error as an answer of one shape.

The HTTP server and the replicas of Ray Serve answer by this table, so that they answer alike.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from regard import __version__
from regard.errors import UserError
from regard.serve.bodies import (
    BadBody,
    ClassifyBody,
    CompletionBody,
    EmbedBody,
    GenerateBody,
    InspectBody,
    ReloadBody,
    ScoreBody,
    TranslateBody,
    parse_body,
)
from regard.serve.handlers import Handlers
from regard.serve.responses import CODES, Refused, Reply, error_response
from regard.serve.settings import Keys

log = logging.getLogger("regard.serve")


@dataclass(frozen=True)
class Route:
    """An endpoint: where it is, what it takes, and who may use it."""

    method: str
    path: str
    handle: Callable[..., Awaitable[Reply]]
    body: type[BaseModel] | None = None
    access: str = "key"  # open, key or admin

    @property
    def summary(self) -> str:
        return (self.handle.__doc__ or "").strip().splitlines()[0]


def routes(handlers: Handlers) -> list[Route]:
    """The endpoints of the API."""
    return [
        Route("POST", "/v1/generate", handlers.generate, GenerateBody),
        Route("POST", "/translate", handlers.translate, TranslateBody),
        Route("GET", "/languages", handlers.languages),
        Route("POST", "/v1/completions", handlers.completions, CompletionBody),
        Route("GET", "/v1/models", handlers.models),
        Route("POST", "/v1/score", handlers.score, ScoreBody),
        Route("POST", "/v1/classify", handlers.classify, ClassifyBody),
        Route("POST", "/v1/embed", handlers.embed, EmbedBody),
        Route("POST", "/v1/inspect", handlers.inspect, InspectBody),
        Route("POST", "/v1/runs/reload", handlers.reload, ReloadBody, access="admin"),
        Route("GET", "/health/live", handlers.live, access="open"),
        Route("GET", "/health/ready", handlers.ready, access="open"),
    ]


class Endpoints:
    """Answers requests by a table of routes, whatever brought them here."""

    def __init__(self, routes: Iterable[Route], handlers: Handlers, keys: Keys) -> None:
        self.paths: dict[str, dict[str, Route]] = {}
        self._handlers, self._keys = handlers, keys
        for route in routes:
            self.paths.setdefault(route.path, {})[route.method] = route
        for methods in self.paths.values():
            if "GET" in methods:
                methods["HEAD"] = methods["GET"]

    async def answer(
        self, method: str, path: str, headers: Mapping[str, str], read: Callable[[], Awaitable[bytes]]
    ) -> Reply:
        """The answer to a request, also if it is refused; `read` gives its body, and is called only if one is wanted.

        The names of headers are in lower case, or their case does not matter.
        """
        try:
            return await self._answer(method, path, headers, read)
        except Refused as refused:
            return error_response(refused)
        except UserError as error:
            return error_response(Refused(error.status if isinstance(error, BadBody) else 422, str(error)))
        except (asyncio.CancelledError, ConnectionError, TimeoutError):
            raise
        except Exception:
            log.exception("an error while answering %s", path)
            return error_response(Refused(500, "an error in the server; its log has the details"))

    async def _answer(
        self, method: str, path: str, headers: Mapping[str, str], read: Callable[[], Awaitable[bytes]]
    ) -> Reply:
        key, methods = _key(headers), self.paths.get(path)
        route = methods.get(method) if methods else None
        known = not self._keys.any or self._keys.allows(key)
        keyless = path.startswith("/health/") or path == "/translate"  # whose key may be in its body
        if not known and not keyless:
            raise Refused(401, "a key is needed, as the header Authorization: Bearer KEY")
        if methods is None:
            raise Refused(404, f"{method} {path[:200]}: there is nothing here")
        if route is None:
            allowed = ", ".join(methods)
            raise Refused(405, f"{method} {path}: allowed are {allowed}", headers={"Allow": allowed})
        if route.access == "admin" and not self._keys.allows_admin(key):
            raise Refused(403, "an admin key is needed (a line 'admin KEY' in the file of --keys)")
        if route.body is None:
            return await route.handle()
        if route.access == "key":
            self._handlers.check_room()  # before the body is read
        body = parse_body(route.body, await self._read(headers, read), self._handlers.settings.max_inputs)
        if isinstance(body, TranslateBody) and not known and not self._keys.allows(body.api_key):
            raise Refused(401, "a key is needed: api_key, or the header Authorization: Bearer KEY")
        return await route.handle(body)

    async def _read(self, headers: Mapping[str, str], read: Callable[[], Awaitable[bytes]]) -> bytes:
        """The body of a request, if it is JSON and not too long."""
        kind, most = (
            headers.get("content-type", "none").partition(";")[0].strip().lower(),
            self._handlers.settings.max_body,
        )
        if kind != "application/json":
            raise Refused(415, f"the body is JSON: Content-Type: application/json, not {kind[:80]}")
        length = headers.get("content-length", "")
        announced = length.isdecimal() and (len(length) > len(str(most)) or int(length) > most)
        if announced or len(data := await read()) > most:
            raise Refused(413, f"the body has more than {most} bytes")
        return data


def _key(headers: Mapping[str, str]) -> str:
    """The key of a request: a bearer token, or the password that a browser asks for."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        with suppress(binascii.Error, UnicodeDecodeError):
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
    return ""


ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["status", "code", "message"],
            "properties": {
                "status": {"type": "integer"},
                "code": {"type": "string"},
                "message": {"type": "string"},
            },
        }
    },
}


def describe_api(routes: Sequence[Route], runs: Sequence[str]) -> dict[str, Any]:
    """The document that /openapi.json serves; it names the runs that there are."""
    schemas: dict[str, Any] = {"Error": ERROR}
    paths: dict[str, Any] = {}
    for route in routes:
        operation: dict[str, Any] = {
            "summary": route.summary,
            "operationId": route.path.strip("/").replace("/", "_"),
            "responses": _responses(route),
        }
        if route.access != "open":
            operation["security"] = [{"bearer": []}, {}]
        if route.body is not None:
            schema = route.body.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            schemas[route.body.__name__] = schema
            for name in {"run", "model"} & schema["properties"].keys():
                field = schema["properties"][name]
                next(part for part in field.get("anyOf", [field]) if part.get("type") == "string")["enum"] = list(runs)
            reference = {"$ref": f"#/components/schemas/{route.body.__name__}"}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "regard", "version": __version__, "description": "Sequence models built on attention."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _responses(route: Route) -> dict[str, Any]:
    ok: dict[str, Any] = {"description": "The answer.", "content": {"application/json": {"schema": {}}}}
    if route.body is not None and "stream" in route.body.model_fields:
        ok["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    statuses = [401, 429, 503, 504] if route.access != "open" else [503]
    if route.body is not None:
        statuses = [400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"200": ok} | {
        str(status): {"description": CODES[status].replace("_", " "), "content": error} for status in statuses
    }
