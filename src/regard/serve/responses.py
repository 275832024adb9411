"""Responses: JSON, server-sent events, errors, and the files of the web page."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Collection
from functools import cache
from typing import Any, NamedTuple, cast

from aiohttp import web
from aiohttp_sse import sse_response
from pydantic_core import to_json

from regard.inspect.page import COLOURS, escaped_json, fill_template, page_hashes, read_asset, shared_constants

CODES = {
    400: "bad_request", 401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed",
    408: "request_timeout", 413: "too_large", 415: "unsupported_media_type", 421: "unknown_host", 422: "invalid",
    429: "queue_full",
    431: "headers_too_large", 500: "internal", 503: "unavailable", 504: "deadline",
}  # fmt: skip
HEADERS = {"X-Content-Type-Options": "nosniff", "Server": "regard"}  # without aiohttp's versions
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
# URL path -> file of regard/web
ASSETS = {"/": "server/index.html", "/docs": "server/docs.html"} | {
    f"/web/{name}": name
    for name in (
        "shared/constants.js", "shared/direction.js", "shared/dom.js", "shared/fields.js", "shared/text.js",
        "server/address.js", "server/api.js", "server/batch.js", "server/docs.js", "server/format.js",
        "server/icon.svg", "server/links.js", "server/main.js", "server/output.js", "server/single.js",
        "server/style.css",
    )
}  # fmt: skip


class Refused(Exception):
    """A refused request: status and message of the answer."""

    def __init__(self, status: int, message: str, retry_after: float | None = None, allow: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after  # seconds
        self.allow = allow  # methods of a path


def too_large(limit: int) -> Refused:
    return Refused(413, f"the body has more than {limit} bytes")


class EventStream(NamedTuple):
    """Server-sent events: their data, and a function to call when the stream has ended or the client has left."""

    events: AsyncIterator[str]
    finish: Callable[[], None]


Reply = web.Response | EventStream


async def send_events(
    request: web.BaseRequest, stream: EventStream, headers: dict[str, str], seconds: float
) -> web.StreamResponse:
    """Send events as they arrive; the connection is closed if the client does not read an event within `seconds`."""
    any_request = cast(web.Request, request)  # aiohttp_sse uses only attributes of BaseRequest
    try:
        async with sse_response(
            any_request, headers=headers, sep="\n", send_timeout=seconds, allow_all_methods=True
        ) as response:
            async for data in stream.events:
                await response.send(data)
        return response
    finally:
        stream.finish()


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=to_json(data), status=status, headers=headers, content_type="application/json")


def error_json(status: int, message: str) -> dict[str, Any]:
    return {"status": status, "code": CODES[status], "message": message}


def error_response(refused: Refused, text: bool = False) -> web.Response:
    """The answer to a refused request; all errors have this shape, or are texts in LibreTranslate's API."""
    headers = {"Allow": refused.allow} if refused.allow else {}
    if refused.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(refused.retry_after)))
    if refused.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="regard", charset="UTF-8"'
    error = refused.message if text else error_json(refused.status, refused.message)
    return json_response({"error": error}, refused.status, headers)


def common_headers(request: web.BaseRequest, origins: Collection[str], closing: bool) -> dict[str, str]:
    """The headers of every answer; pages of `origins` may read it."""
    headers = dict(HEADERS)
    origin = request.headers.get("Origin", "")
    if origin in origins:
        headers["Access-Control-Allow-Origin"] = origin
        headers["Access-Control-Allow-Headers"] = "Authorization, Content-Type"
        headers["Access-Control-Allow-Methods"] = "GET, POST"
        headers["Vary"] = "Origin"
    if closing:
        headers["Connection"] = "close"  # the client must not reuse a connection that is about to close
    return headers


@cache
def policy() -> str:
    """The content security policy: only files of this server."""
    page = page_hashes()  # the attention page is framed and inherits the policy
    return (
        f"default-src 'none'; script-src 'self' '{page['script']}'; style-src 'self' '{page['style']}';"
        " img-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


async def asset_response(name: str, max_inputs: int) -> web.Response:
    """A file of the web page."""
    headers = {"Content-Security-Policy": policy(), "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    content_type = TYPES[name.rpartition(".")[2]]
    return web.Response(body=_read(name, max_inputs), content_type=content_type, charset="utf-8", headers=headers)


@cache
def _read(name: str, max_inputs: int) -> bytes:
    if not name.endswith((".html", ".css")):
        return read_asset(name).encode()
    constants = shared_constants() | {"max_inputs": max_inputs}
    return fill_template(name, {"constants": escaped_json(constants), **COLOURS}).encode()
