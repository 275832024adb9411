"""The endpoints of the HTTP server and of Ray Serve replicas: paths, access, and one shape for all errors."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from regard import __version__
from regard.errors import UserError
from regard.serve import bodies
from regard.serve.handlers import Handlers
from regard.serve.pool import INTERNAL_ERROR
from regard.serve.responses import CODES, Refused, Reply, error_response, too_large
from regard.serve.settings import Keys

log = logging.getLogger("regard.serve")

# Who may use a route if the server has keys: everyone, clients with a key (in the header, or optionally in a field of
# the body), or clients with an admin key.
Access = Literal["open", "key", "key or body", "admin"]
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["status", "code", "message"],
            "properties": {"status": {"type": "integer"}, "code": {"type": "string"}, "message": {"type": "string"}},
        }
    },
}


@dataclass(frozen=True)
class Route:
    """An endpoint: path, body and access."""

    method: str
    path: str
    handle: Callable[..., Awaitable[Reply]]
    body: type[BaseModel] | None = None
    access: Access = "key"


def routes(handlers: Handlers) -> list[Route]:
    return [
        Route("POST", "/v1/generate", handlers.generate, bodies.GenerateBody),
        Route("POST", "/translate", handlers.translate, bodies.TranslateBody, "key or body"),
        Route("GET", "/languages", handlers.languages),
        Route("POST", "/v1/completions", handlers.completions, bodies.CompletionBody),
        Route("GET", "/v1/models", handlers.models),
        Route("POST", "/v1/score", handlers.score, bodies.ScoreBody),
        Route("POST", "/v1/classify", handlers.classify, bodies.ClassifyBody),
        Route("POST", "/v1/embed", handlers.embed, bodies.EmbedBody),
        Route("POST", "/v1/inspect", handlers.inspect, bodies.InspectBody),
        Route("POST", "/v1/runs/reload", handlers.reload, bodies.ReloadBody, "admin"),
        Route("GET", "/health/live", handlers.live, access="open"),
        Route("GET", "/health/ready", handlers.ready, access="open"),
    ]


class Endpoints:
    """Answers the requests of any HTTP server by a table of routes."""

    def __init__(self, routes: Iterable[Route], handlers: Handlers, keys: Keys) -> None:
        self.paths: dict[str, dict[str, Route]] = {}
        self._handlers = handlers
        self._keys = keys
        for route in routes:
            methods = self.paths.setdefault(route.path, {})
            methods[route.method] = route
            if route.method == "GET":
                methods["HEAD"] = route

    async def answer(
        self, method: str, path: str, headers: Mapping[str, str], read: Callable[[], Awaitable[bytes]]
    ) -> Reply:
        """The answer to a request; `read` returns the body. `headers` ignores case, or has names in lower case."""
        try:
            return await self._answer(method, path, headers, read)
        except Refused as refused:
            return error_response(refused)
        except UserError as error:
            return error_response(Refused(422, str(error)))
        except (asyncio.CancelledError, ConnectionError, TimeoutError):
            raise
        except Exception:
            log.exception("an error while answering %s", path)
            return error_response(Refused(500, INTERNAL_ERROR))

    async def _answer(
        self, method: str, path: str, headers: Mapping[str, str], read: Callable[[], Awaitable[bytes]]
    ) -> Reply:
        methods = self.paths.get(path, {})
        access = next((route.access for route in methods.values()), "key")
        key = _key(headers)
        authorized = not self._keys.any or self._keys.allows(key)
        if not authorized and access in ("key", "admin"):
            raise Refused(401, "a key is required, as the header Authorization: Bearer KEY")
        if access != "open" and not self._keys.any:
            self._check_host(headers)
        if not methods:
            raise Refused(404, f"{method:.100} {path:.100}: no such path")
        route = methods.get(method)
        if route is None:
            allowed = ", ".join(methods)
            raise Refused(405, f"{method:.100} {path}: allowed methods: {allowed}", allow=allowed)
        if access == "admin" and not self._keys.allows_admin(key):
            raise Refused(403, "an admin key is required (a line 'admin KEY' in the file of --keys)")
        if route.body is None:
            return await route.handle()
        if access != "admin":
            self._handlers.check_room()  # before the body is read
        data = await self._read(headers, read)
        if not authorized and not self._keys.allows(bodies.key_in_body(data)):  # before the body is parsed
            raise Refused(401, "a key is required: api_key, or the header Authorization: Bearer KEY")
        return await route.handle(bodies.parse_body(route.body, data, self._handlers.settings.max_inputs))

    def _check_host(self, headers: Mapping[str, str]) -> None:
        """Refuse names of other web sites: their pages reach this server if their DNS server returns its address."""
        if not self._handlers.settings.is_own_host(host := headers.get("host", "")):
            advice = "start the server with --host-name NAME for each of its names, or use its address"
            raise Refused(421, f"Host: {host!r:.100} is not a name of this server; {advice}")

    async def _read(self, headers: Mapping[str, str], read: Callable[[], Awaitable[bytes]]) -> bytes:
        """The body of a request, if it is JSON and not too long."""
        content_type = headers.get("content-type", "none").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise Refused(415, f"the body must be JSON: Content-Type: application/json, not {content_type[:80]}")
        limit = self._handlers.settings.max_body
        length = headers.get("content-length", "")
        too_long = length.isdecimal() and (len(length) > len(str(limit)) or int(length) > limit)
        if too_long or len(data := await read()) > limit:
            raise too_large(limit)
        return data


def _key(headers: Mapping[str, str]) -> str:
    """The key of a request: a bearer token, or the password of HTTP basic authentication."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        with suppress(binascii.Error, UnicodeDecodeError):
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
    return ""


def describe_api(routes: Sequence[Route], runs: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI document, with the names of the runs."""
    schemas: dict[str, Any] = {"Error": ERROR}
    paths: dict[str, Any] = {}
    for route in routes:
        operation: dict[str, Any] = {
            "summary": (route.handle.__doc__ or "").strip(),
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
