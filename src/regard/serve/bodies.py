"""Request bodies: one validated value per endpoint. `GenerateBody` inherits all decoding options from `Options`."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from email.message import Message as Header
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import parse_qsl, unquote_plus

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import to_json

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
    rb'api_key(?:"\s*:\s*("(?:[^"\\]|\\.){1,400}")|(?<![^&]api_key)=([^&]{1,400})|"\r\n\r\n([^\r]{1,400}))'
)
# Keys of OpenAI whose values must be zero or empty, with advice.
UNSUPPORTED = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), "repetition_penalty above 1 has a similar effect"),
    "logit_bias": "forbid of /v1/generate excludes words",
    "suffix": "a language model only continues a text",
}
MULTIPART = "multipart/form-data"
FORM_TYPES = ("application/x-www-form-urlencoded", MULTIPART)
FIELD_NAME = re.compile(rb';\s*name="?([^";\r\n]*)', re.IGNORECASE)

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


class DetectBody(Body):
    """A text of a LibreTranslate client, whose language is to be detected."""

    q: Text | Texts
    api_key: Name = ""


class TranslateBody(DetectBody):
    """A request of a LibreTranslate client."""

    source: Name = Field("auto", description="A language code, in upper or lower case, or auto.")
    target: Name = ""
    format: Literal["text", "html"] = "text"
    alternatives: Annotated[int, Field(ge=0, le=20)] = 0


class StreamOptions(Body):
    """Options of a stream for OpenAI clients."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = Field(None, description="Ignored.")


class OpenAIBody(Body):
    """The options of OpenAI clients, with those that other servers have added; null means the default."""

    model: Name = ""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_LENGTH)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(1.0, description="0: search, without sampling.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=0, le=MAX_LENGTH)] | None = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = 0.0
    repetition_penalty: Annotated[float, Field(ge=1, le=100)] | None = 1.0
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(
        1, description="Number of choices; with temperature 0, the best ones of a beam of this size."
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(None, description="By default, every draw differs.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: Text | None = Field(None, description="Ignored.")
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _supported(self) -> Self:
        for name, advice in UNSUPPORTED.items():
            if getattr(self, name, None):
                raise ValueError(f"{name}: not supported; {advice}")
        if getattr(self, "best_of", None) not in (None, self.choices):
            raise ValueError("best_of: only with the value of n; request more choices with n, rank them by logprobs")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def samples(self) -> bool:
        return self.temperature != 0

    def options(self, max_length: int | None, top_tokens: int | None = None) -> Options:
        """The decoding options. Temperature 0 means the best outputs; every sample is an input of its own."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        options: dict[str, Any] = {"max_length": max_length, "stop": stop, "top_tokens": top_tokens or 0}
        options["repetition_penalty"] = self.repetition_penalty or 1.0
        if self.samples:
            options |= {"sample": True, "temperature": 1.0 if self.temperature is None else self.temperature}
            options |= {"top_p": self.top_p or 1.0, "top_k": self.top_k or 0, "min_p": self.min_p or 0.0}
        else:
            options |= {"beam": self.choices, "nbest": self.choices}
        return Options.of(**options)

    def items(self, prompts: Sequence[str]) -> list[dict[str, Any]]:
        """The inputs: every prompt, once for each sample, with different seeds."""
        if not self.samples:
            return [{"source": prompt} for prompt in prompts]
        first = secrets.randbits(62) if self.seed is None else self.seed
        seeds = [(first + i) % 2**63 for i in range(self.choices)]
        return [{"source": prompt, "seed": seed} for prompt in prompts for seed in seeds]


class CompletionBody(OpenAIBody):
    """A request of an OpenAI client to /v1/completions."""

    prompt: Text | Texts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    suffix: Text | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class TextContent(Body):
    """A part of a chat message."""

    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    """A chat message."""

    role: Name
    content: Text | Annotated[list[TextContent], LIST]
    name: Name | None = Field(None, description="Ignored.")

    def __str__(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(OpenAIBody):
    """A request of an OpenAI client to /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], LIST]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_LENGTH)] | None = None


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


def form_as_json(content_type: str, data: bytes, query: str) -> bytes:
    """The query parameters and the fields of a form as a JSON object of texts; several `q` are a list."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=MAX_INPUTS)
        if data and content_type.lower().startswith(MULTIPART):
            pairs += _multipart_fields(content_type, data)
        elif data:
            pairs += parse_qsl(data.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_INPUTS)
    except ValueError as error:
        raise Refused(400, f"the form cannot be read: {error}") from None
    fields: dict[str, str | list[str]] = dict(pairs)
    texts = [value for name, value in pairs if name == "q"]
    return to_json(fields | ({"q": texts} if len(texts) > 1 else {}))


def _multipart_fields(content_type: str, data: bytes) -> list[tuple[str, str]]:
    """The fields of a multipart form; files are fields like others."""
    header = Header()
    header["Content-Type"] = content_type
    boundary = header.get_boundary("")
    parts = (b"\r\n" + data).split(b"\r\n--" + boundary.encode())
    if not boundary or len(parts) > MAX_INPUTS or not parts[-1].startswith(b"--"):
        raise ValueError("it has no boundary, no end, or too many parts")
    fields = []
    for part in parts[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        name = FIELD_NAME.search(head)
        if name is None:
            raise ValueError("a part has no name")
        fields.append((name[1].decode(), value.decode()))
    return fields


def parse_body(kind: type[B], data: bytes, max_inputs: int = MAX_INPUTS, strict: bool = True) -> B:
    """Validate a body; the error names the wrong fields, and the first wrong item of a list.

    Without `strict`, numbers may be texts, as in forms.
    """
    check_json(data, max_inputs)
    try:
        return kind.model_validate_json(data, strict=strict, context=PYDANTIC_ERRORS)
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
