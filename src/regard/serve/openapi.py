"""The description of the API in the OpenAPI format, made from the routes and the values that they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard import __version__
from regard.serve.endpoints import Route
from regard.serve.responses import CODES

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
