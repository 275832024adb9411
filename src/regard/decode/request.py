"""Requests: what a user wants decoded, and what the search makes of it: token ids with limits and constraints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from regard.decode.options import Options, PhraseList
from regard.decode.phrases import Phrases
from regard.errors import UserError, explain, synonym
from regard.signatures import checked_call
from regard.text.codec import Example

MISSPELT = 0.75  # similarity from which on a key is taken for another; lower, and keys of the user's own would be
MAX_STAGES = 48  # stages of progress towards required phrases that a beam keeps apart


def _requirements(value: Any) -> tuple[tuple[str, ...], ...]:
    """Requirements as tuples of phrases; a text alone is a requirement of one phrase."""
    rows: list[Any] = list(value) if isinstance(value, list | tuple) else [None]
    rows = [(row,) if isinstance(row, str) else row for row in rows]
    for row in rows:
        if not (isinstance(row, list | tuple) and row and all(isinstance(x, str) and x for x in row)):
            raise ValueError(
                "takes a list, each item a phrase or a list of phrases of which one is enough, such as"
                f" ['a', ['b', 'c']], not {str(value)[:80]!r}"
            )
    return tuple(tuple(row) for row in rows)


Whole = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]


class Request(BaseModel):
    """A source with constraints of its own, beside those of the options.

    Its prefix, lengths and seed replace those of the options; its phrases and stop strings add to theirs. A requirement
    is a phrase, or a list of phrases of which one is enough.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    features: str | None = None
    prefix: str = ""
    require: Annotated[tuple[tuple[str, ...], ...], BeforeValidator(_requirements)] = ()
    forbid: PhraseList = ()
    stop: PhraseList = ()
    min_length: Whole | None = None
    max_length: Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)] | None = None
    seed: Whole | None = None

    @checked_call(hint="; options of the search, such as beam, go into generate(..., beam=5)")
    def __init__(
        self,
        source: str,
        features: str | None = None,
        prefix: str = "",
        require: Sequence[str | Sequence[str]] = (),
        forbid: Sequence[str] = (),
        stop: Sequence[str] = (),
        min_length: int | None = None,
        max_length: int | None = None,
        seed: int | None = None,
    ) -> None:
        try:
            super().__init__(
                source=source, features=features, prefix=prefix, require=require, forbid=forbid, stop=stop,
                min_length=min_length, max_length=max_length, seed=seed,
            )  # fmt: skip
        except ValidationError as error:
            lines = [explain(Request, dict(item)) for item in error.errors(include_url=False)]
            raise UserError("; ".join(lines)) from None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """The fields that differ from their defaults."""
        for name, field_info in type(self).model_fields.items():
            if (value := getattr(self, name)) != field_info.default:
                yield name, value


ANSWER_KEYS = ("hypotheses", "candidates", "label", "probabilities", "flags", "error")  # of JSON output


def parse_request(data: Mapping[str, Any], fields: Sequence[str] = tuple(Request.model_fields)) -> Request:
    """A request from JSON, with the keys that are `fields`; null stands for a key that was left out.

    Other keys are the caller's own. But those that look like a mistake are refused: names of options that are the same
    for all requests, misspelt keys, and keys that an answer has.
    """
    given = {key: value for key, value in data.items() if value is not None and key in fields}
    missing = [name for name in fields if name not in data]
    for key in (key for key in data if key not in fields):
        if key in ANSWER_KEYS:
            raise UserError(f"{key}: the answer has a key of this name; call it something else")
        if key in Request.model_fields:
            raise UserError(f"{key}: not for this run; a request has {', '.join(fields)} here")
        if key in Options.model_fields:
            raise UserError(
                f"{key}: is the same for all requests: give it as an option (--{key.replace('_', '-')}); a request has"
                f" {', '.join(fields)}"
            )
        if near := synonym(key, missing) or next(iter(get_close_matches(key, missing, 1, MISSPELT)), None):
            raise UserError(f"{key}: no such key; did you mean {near!r}?")
    if "source" not in given:
        raise UserError(f"source: is required; a request has {', '.join(fields)}, and keys of your own")
    return Request(**given)


Input = str | Example | Request


@dataclass(frozen=True)
class SearchInput:
    """One source to decode, in token ids; with flags it is not decoded, and its output is empty."""

    sources: tuple[Sequence[int], ...]  # per run, each with its end token; of a language model the prompt, not empty
    limit: int = 0  # most output tokens, the end not counted
    minimum: int = 0
    prefix: tuple[int, ...] = ()
    not_after_prefix: tuple[int, ...] = ()  # tokens that would change the last character of the prefix
    phrases: Phrases | None = None
    stop: tuple[str, ...] = ()  # strings before which the text ends; the phrases know them too
    key: int = 0  # of its random numbers, together with the seed
    seed: int | None = None  # None: that of the options
    open_end: bool = False  # a continuation: at the limit it stops without an end token
    unknown: tuple[str, ...] = ()  # what the source has outside the vocabulary: tokens, and names of features
    flags: dict[str, str] = field(default_factory=dict)  # why it is not decoded: name -> reason

    @property
    def stages(self) -> int:
        """Stages of progress from the beginning to where all required phrases are met."""
        return 0 if self.phrases is None else min(self.phrases.tokens_needed(()) or 0, MAX_STAGES)
