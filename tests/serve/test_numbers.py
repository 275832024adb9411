"""Numbers out of range are refused at once in every field of every body. The schemas provide the fields."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kit.models import family, letters
from kit.server import serving
from regard.serve.bodies import CompletionBody, GenerateBody, TranslateBody
from regard.serve.endpoints import routes
from regard.serve.handlers import Handlers

OUT_OF_RANGE = ("-1", "1" + "0" * 40, "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1" * 5000)
PLACEHOLDER = "@"  # replaced by the number
VALID: dict[str, dict[str, Any]] = {
    "/v1/generate": {"run": "toy", "inputs": "a"},
    "/translate": {"q": "a"},
    "/detect": {"q": "a"},
    "/v1/chat/completions": {"model": "lm", "messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"model": "lm", "prompt": "a"},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    path = tmp_path_factory.mktemp("numbers")
    for name, run in (("toy", letters()), ("lm", family("lm"))):
        run.save(path / name)
    with serving({"toy": path / "toy", "lm": path / "lm"}) as client:
        yield client


def places(schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[Any]:
    """Values that fit a schema, each with a placeholder for one number."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if schema.get("type") in ("integer", "number"):
        yield PLACEHOLDER
    for each in schema.get("anyOf", ()):
        yield from places(each, definitions)
    if isinstance(schema.get("items"), dict):
        yield from ([value] for value in places(schema["items"], definitions))
    pair = schema.get("prefixItems", ())
    for i, each in enumerate(pair):
        yield from ([value if i == j else 0 for j in range(len(pair))] for value in places(each, definitions))
    for name, each in schema.get("properties", {}).items():
        required = dict.fromkeys(schema.get("required", ()), "a")
        yield from (required | {name: value} for value in places(each, definitions))


def bodies() -> Iterator[Any]:
    """A path and a body for every number in a request."""
    for route in routes(Handlers.__new__(Handlers)):
        schema = route.body.model_json_schema() if route.body else {}
        for value in places(schema, schema.get("$defs", {})):
            body = VALID[route.path] | {key: x for key, x in value.items() if PLACEHOLDER in json.dumps(x)}
            yield pytest.param(route.path, body, id=f"{route.path} {json.dumps(value)}")


@pytest.mark.parametrize(("path", "body"), list(bodies()))
def test_number_out_of_range_is_refused_at_once(client, path, body):
    for number in OUT_OF_RANGE:
        start = time.monotonic()
        reply = client.post(path, json.dumps(body).replace(f'"{PLACEHOLDER}"', number).encode())
        assert 400 <= reply.status < 500, (number, reply.body)
        assert time.monotonic() - start < 20  # an accepted request with such a number would take hours
    assert client.post(path, json.dumps(body).replace(f'"{PLACEHOLDER}"', "0").encode()).status in (200, 404, 422)


def test_bodies_cover_known_number_fields():
    fields = {(param.values[0], key) for param in bodies() for key in param.values[1]}
    assert {("/v1/generate", "beam"), ("/v1/generate", "alignment_heads"), ("/v1/generate", "inputs")} <= fields
    assert {("/translate", "alternatives"), ("/v1/completions", "max_tokens"), ("/v1/completions", "top_p")} <= fields


@pytest.mark.parametrize("kind", [GenerateBody, TranslateBody, CompletionBody])
def test_schema_excludes_zero_where_it_is_invalid(kind):
    schema = kind.model_json_schema()["properties"]
    for name in {"beam", "nbest", "max_length", "temperature", "top_p", "max_tokens", "n"} & schema.keys():
        bounds = [each for each in (schema[name], *schema[name].get("anyOf", ())) if "type" in each]
        is_zero_valid = kind is CompletionBody and name == "temperature"  # OpenAI: zero means greedy search
        assert any(x.get("minimum", 0) >= 1 or x.get("exclusiveMinimum") == 0 for x in bounds) != is_zero_valid, name
