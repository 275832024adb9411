"""The endpoints of the HTTP server and of Ray Serve replicas: paths, access, and one shape for all errors."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import re
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

# Who may use a route if the server has keys: everyone, clients with a key, or clients with an admin key.
Access = Literal["open", "key", "admin"]
JSON_TYPE = "application/json"
TEXT_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
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
    """An endpoint: path, body and access.

    LibreTranslate's endpoints also take forms and query parameters, the key as the field `api_key`, and their errors
    are texts.
    """

    method: str
    path: str
    handle: Callable[..., Awaitable[Reply]]
    body: type[BaseModel] | None = None
    access: Access = "key"
    libretranslate: bool = False


def routes(handlers: Handlers) -> list[Route]:
    return [
        Route("POST", "/v1/generate", handlers.generate, bodies.GenerateBody),
        Route("POST", "/translate", handlers.translate, bodies.TranslateBody, libretranslate=True),
        Route("GET", "/languages", handlers.languages, libretranslate=True),
        Route("POST", "/detect", handlers.detect, bodies.DetectBody, libretranslate=True),
        Route("GET", "/frontend/settings", handlers.frontend_settings, libretranslate=True),
        Route("POST", "/v1/completions", handlers.completions, bodies.CompletionBody),
        Route("POST", "/v1/chat/completions", handlers.chat, bodies.ChatBody),
        Route("GET", "/v1/models", handlers.models),
        Route("GET", "/v1/models/{model}", handlers.model),
        Route("POST", "/v1/score", handlers.score, bodies.ScoreBody),
        Route("POST", "/v1/classify", handlers.classify, bodies.ClassifyBody),
        Route("POST", "/v1/embed", handlers.embed, bodies.EmbedBody),
        Route("POST", "/v1/inspect", handlers.inspect, bodies.InspectBody),
        Route("POST", "/v1/runs/reload", handlers.reload, bodies.ReloadBody, "admin"),
        Route("GET", "/health", handlers.health, access="open", libretranslate=True),
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
        self, method: str, path: str, headers: Mapping[str, str], read: Callable[[], Awaitable[bytes]], query: str = ""
    ) -> Reply:
        """The answer to a request; `read` returns the body. `headers` ignores case, or has names in lower case."""
        text = any(route.libretranslate for route in self.paths.get(path, {}).values())
        try:
            return await self._answer(method, path, query, headers, read)
        except Refused as refused:
            return error_response(refused, text)
        except UserError as error:
            return error_response(Refused(422, str(error)), text)
        except (asyncio.CancelledError, ConnectionError, TimeoutError):
            raise
        except Exception:
            log.exception("an error while answering %s", path)
            return error_response(Refused(500, INTERNAL_ERROR), text)

    async def _answer(
        self, method: str, path: str, query: str, headers: Mapping[str, str], read: Callable[[], Awaitable[bytes]]
    ) -> Reply:
        methods, arguments = self._find(path)
        access = next((route.access for route in methods.values()), "key")
        key = _key(headers)
        authorized = access == "open" or not self._keys.any or self._keys.allows(key)
        if not authorized and not any(route.libretranslate for route in methods.values()):
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
        if route.body is not None and access != "admin":
            self._handlers.check_room()  # before the body is read
        data = b""
        if route.body is not None or not authorized:
            data = await self._read(headers, read, route.libretranslate)
        if not authorized:  # before the body is parsed
            keys = map(bodies.key_in_body, (query.encode(), data))
            if not any(self._keys.allows(each) for each in keys):
                raise Refused(401, "a key is required: api_key, or the header Authorization: Bearer KEY")
        if route.body is None:
            return await route.handle(*arguments)
        is_json = _content_type(headers) == JSON_TYPE
        if not is_json:
            data = bodies.form_as_json(headers.get("content-type", ""), data, query)
        return await route.handle(bodies.parse_body(route.body, data, self._handlers.settings.max_inputs, is_json))

    def _find(self, path: str) -> tuple[dict[str, Route], tuple[str, ...]]:
        """The routes of a path by method, and the argument in the path, the last part of `/v1/models/NAME`."""
        if path in self.paths and "{" not in path:
            return self.paths[path], ()
        head, _, name = path.rpartition("/")
        return self.paths.get(f"{head}/{{model}}", {}), (name,)

    def _check_host(self, headers: Mapping[str, str]) -> None:
        """Refuse names of other web sites: their pages reach this server if their DNS server returns its address."""
        if not self._handlers.settings.is_own_host(host := headers.get("host", "")):
            advice = "start the server with --host-name NAME for each of its names, or use its address"
            raise Refused(421, f"Host: {host!r:.100} is not a name of this server; {advice}")

    async def _read(self, headers: Mapping[str, str], read: Callable[[], Awaitable[bytes]], forms: bool) -> bytes:
        """The body of a request, if it has a supported type and is not too long."""
        content_type = _content_type(headers)
        if content_type != JSON_TYPE:
            if not forms or content_type not in (*bodies.FORM_TYPES, ""):
                allowed = f"JSON{' or a form' if forms else ''}: Content-Type: {JSON_TYPE}"
                raise Refused(415, f"the body must be {allowed}, not {content_type[:80] or 'none'}")
            # Browsers send forms to any site, without asking it as they do for JSON.
            origin = headers.get("origin", "")
            own = origin.partition("://")[2] == headers.get("host", "")
            if origin and not own and origin not in self._handlers.settings.cors:
                raise Refused(403, "a form of another web site; --cors allows one")
        limit = self._handlers.settings.max_body
        length = headers.get("content-length", "")
        too_long = length.isdecimal() and (len(length) > len(str(limit)) or int(length) > limit)
        if too_long or len(data := await read()) > limit:
            raise too_large(limit)
        if data and not content_type:
            raise Refused(415, f"the body must have a type, such as Content-Type: {JSON_TYPE}")
        return data


def _content_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


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
    schemas: dict[str, Any] = {"Error": ERROR, "TextError": TEXT_ERROR}
    paths: dict[str, Any] = {}
    for route in routes:
        operation: dict[str, Any] = {
            "summary": (route.handle.__doc__ or "").strip(),
            "operationId": re.sub(r"\W+", "_", route.path).strip("_"),
            "responses": _responses(route),
        }
        if "{model}" in route.path:
            model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [model]
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
            types = [JSON_TYPE, *(bodies.FORM_TYPES if route.libretranslate else ())]
            operation["requestBody"] = {"required": True, "content": {each: {"schema": reference} for each in types}}
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
    statuses = [401, 421, 429, 503, 504] if route.access != "open" else [503]
    if "{" in route.path:
        statuses = [*statuses, 404]
    if route.body is not None:
        statuses = [400, 401, 403, 404, 408, 413, 415, 421, 422, 429, 500, 503, 504]
    schema = f"#/components/schemas/{'TextError' if route.libretranslate else 'Error'}"
    error = {JSON_TYPE: {"schema": {"$ref": schema}}}
    return {"200": ok} | {
        str(status): {"description": CODES[status].replace("_", " "), "content": error} for status in statuses
    }
