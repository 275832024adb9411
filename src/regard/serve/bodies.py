"""Request bodies: one validated value per endpoint. `GenerateBody` inherits all decoding options from `Options`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import unquote_plus

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from regard.config import PYDANTIC_ERRORS, Problem, explain
from regard.decode.request import Options, Request
from regard.errors import UserError
from regard.serve.responses import Refused
from regard.serve.settings import MAX_INPUTS, MAX_TEXT
from regard.suggest import closest

MAX_LENGTH = 100_000  # output tokens
# Upper bounds of options, in addition to the limit of work per request.
BOUNDS = {
    **dict.fromkeys(("beam", "nbest", "mbr", "groups", "alternatives", "top_tokens"), 1000),
    **dict.fromkeys(("min_length", "max_length", "alternatives_at", "max_source"), MAX_LENGTH),
    **dict.fromkeys(("no_repeat_ngram", "top_k"), MAX_LENGTH),
    **dict.fromkeys(("max_ratio", "min_ratio", "length_penalty", "coverage_penalty", "diversity"), 100),
    **dict.fromkeys(("repetition_penalty", "temperature"), 100),
    "seed": 2**63 - 1,
}
# Bodies are validated in the event loop, where millions of wrong values would take seconds.
MAX_VALUES = 50_000  # of a body
MAX_KEYS = 100  # of each object in a body
# The field api_key in JSON, in a form, and in a form with parts. It is found without parsing the body.
API_KEY = re.compile(
    rb'"api_key"\s*:\s*("(?:[^"\\]|\\.){1,400}")|(?:^|&)api_key=([^&]{1,400})|name="api_key"\r\n\r\n([^\r]{1,400})'
)

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
Name = Annotated[str, Field(max_length=200)]
LIST = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
Texts = Annotated[list[Text], LIST]


class Body(BaseModel):
    """A body without unknown keys."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


def _checked_keys(value: Any) -> Any:
    """Refuse unknown keys here: the constructor of `Request` would report them as a programming error."""
    if isinstance(value, dict):
        fields = Request.model_fields
        for key in value:
            if key not in fields:
                raise UserError(f"inputs: {key:.100}: no such key{closest(key, fields)} (keys: {', '.join(fields)})")
        if "source" not in value:
            raise UserError(f"inputs: source: is required (keys: {', '.join(fields)})")
    return value


Constrained = Annotated[Request, BeforeValidator(_checked_keys)]
Inputs = Text | Constrained | Annotated[list[Text | Constrained], LIST]


class GenerateBody(Options):
    """Inputs to decode, with any option of `regard generate`."""

    run: Name | None = Field(None, description="The name of a run; optional if only one run has these answers.")
    inputs: Inputs = Field(description="A text, an object with its own constraints, or a list of texts and objects.")
    attention: bool = Field(False, description="Add every attention map of the best output of each input.")
    stream: bool = Field(False, description="Send every token as it is decoded, as server-sent events; one input only.")

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        for name in BOUNDS.keys() & self.model_fields_set:
            yield (getattr(self, name) or 0) > BOUNDS[name], f"{name}: at most {BOUNDS[name]}"
        too_long = any(len(item["source"]) > MAX_TEXT for item in self.items())
        yield too_long, f"inputs: a source has at most {MAX_TEXT} characters"
        for name in ("window", "batch_tokens", "weights", "precision"):
            changed = getattr(self, name) != type(self).model_fields[name].default
            yield changed, f"{name}: is set by the server"

    def items(self) -> list[dict[str, Any]]:
        """The inputs as objects."""
        rows = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        return [
            {"source": row} if isinstance(row, str) else row.model_dump(exclude_defaults=True) | {"source": row.source}
            for row in rows
        ]

    def options(self) -> Options:
        return Options.model_construct(**{name: getattr(self, name) for name in Options.model_fields})


class TranslateBody(Body):
    """A request of a LibreTranslate client."""

    q: Text | Texts
    source: Name = "auto"
    target: Name = ""
    format: Literal["text"] = "text"
    alternatives: Annotated[int, Field(ge=0, le=20)] = 0
    api_key: Name = ""


class CompletionBody(Body):
    """A request of an OpenAI client to /v1/completions."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True)

    model: Name = ""
    prompt: Text | Texts
    max_tokens: Annotated[int, Field(ge=1, le=MAX_LENGTH)] | None = 16
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    stream: bool | None = False
    suffix: None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    def options(self) -> Options:
        """The decoding options; temperature 0 means greedy search."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        options: dict[str, Any] = {"max_length": self.max_tokens or 16, "stop": stop, "top_tokens": self.logprobs or 0}
        if self.temperature != 0:
            options |= {"sample": True, "temperature": self.temperature or 1.0}
            options |= {"top_p": self.top_p or 1.0, "nbest": self.n or 1}
        if self.seed is not None:
            options["seed"] = self.seed
        return Options.of(**options)


class LabelInput(Body):
    """A text to classify, with features."""

    source: Text
    features: Text | None = None


class Pair(LabelInput):
    """A source and a target to score."""

    target: Text


class ScoreBody(Body):
    """Pairs to score."""

    run: Name | None = None
    pairs: Annotated[list[Pair], LIST]


class ClassifyBody(Body):
    """Texts to classify."""

    run: Name | None = None
    inputs: Annotated[list[Text | LabelInput], LIST]


class EmbedBody(Body):
    """Texts to embed."""

    run: Name | None = None
    inputs: Texts
    normalize: bool = True


class InspectBody(LabelInput):
    """An example to inspect."""

    run: Name | None = None
    target: Text | None = None


class ReloadBody(Body):
    """An empty body."""


B = TypeVar("B", bound=BaseModel)


def parse_body(kind: type[B], data: bytes, max_inputs: int = MAX_INPUTS) -> B:
    """Validate a body; the error names the wrong fields, and the first wrong item of a list."""
    check_json(data, max_inputs)
    try:
        return kind.model_validate_json(data, strict=True, context=PYDANTIC_ERRORS)
    except ValidationError as error:
        items = error.errors(include_url=False)
        if items[0]["type"] == "json_invalid":
            raise Refused(400, f"not JSON: {items[0]['msg'].partition(': ')[2]}") from None
        raise Refused(422, "; ".join(explain(kind, dict(item)) for item in items[:20])) from None


def key_in_body(data: bytes) -> str:
    """The API key in a body that has not been parsed; empty if there is none."""
    match = API_KEY.search(data)
    if match is None:
        return ""
    text = match[match.lastindex or 0].decode("utf-8", "replace")
    with suppress(ValueError):
        return str(json.loads(text)) if match[1] else unquote_plus(text) if match[2] else text
    return ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a body; refuses duplicate keys, of which one would be ignored."""
    if len(pairs) > MAX_KEYS:
        raise Refused(413, f"an object has {len(pairs)} keys; at most {MAX_KEYS}")
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Refused(422, f"{twice:.100}: occurs twice in the same object")
    return values


def check_json(data: bytes, max_inputs: int) -> None:
    """Refuse duplicate keys and too many values, before the values are validated."""
    try:
        body = json.loads(data, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return  # `parse_body` reports the place of the error
    if isinstance(body, dict):
        for key in ("inputs", "q", "prompt", "pairs"):
            if isinstance(rows := body.get(key), list) and len(rows) > max_inputs:
                raise Refused(413, f"{key}: {len(rows)} inputs; at most {max_inputs} in one request")
    pending: list[Any] = [body] if isinstance(body, dict | list) else []
    values = 0
    while pending:
        item = pending.pop()
        values += len(item)
        if values > MAX_VALUES:
            raise Refused(413, f"the body has more than {MAX_VALUES} values")
        pending += [x for x in (item.values() if isinstance(item, dict) else item) if isinstance(x, dict | list)]
