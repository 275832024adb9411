"""Refusals: requests that are not answered as asked, and the one shape of errors."""

from __future__ import annotations

import math
from typing import Any

from aiohttp import web
from pydantic_core import to_json


class Refused(Exception):
    """A request that is not answered as asked."""

    def __init__(self, status: int, message: str, code: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_after = status, message, code or CODES[status], retry_after


CODES = {
    400: "bad_request", 401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed",
    408: "request_timeout", 413: "too_large", 415: "unsupported_media_type", 422: "invalid", 429: "queue_full",
    431: "headers_too_large", 500: "internal", 503: "unavailable", 504: "deadline",
}  # fmt: skip


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """An answer in JSON."""
    return web.Response(body=to_json(data), status=status, headers=headers, content_type="application/json")


def error_json(status: int, message: str, code: str = "") -> dict[str, Any]:
    return {"status": status, "code": code or CODES[status], "message": message}


def error_response(refused: Refused) -> web.Response:
    """The one shape of errors."""
    error = error_json(refused.status, refused.message, refused.code)
    headers = {} if refused.retry_after is None else {"Retry-After": str(max(1, math.ceil(refused.retry_after)))}
    if refused.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="regard", charset="UTF-8"'
    return json_response({"error": error}, refused.status, headers)
