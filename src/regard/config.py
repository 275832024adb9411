"""The model config as frozen, typed values that refuse unknown keys.

A `Stack` describes the layers of an encoder or a decoder. A `Config` has one or two stacks, embeddings and an output
layer. A decoder is causal and attends to the encoder of the same config; an encoder is not causal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from regard.errors import UserError
from regard.suggest import closest, nearest, synonym

ScoreName = Literal["scaled_dot", "dot", "general", "additive", "concat", "cosine", "location"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]
PositionKind = Literal[
    "none", "sinusoid", "sinusoid_halves", "learned", "axial", "rotary", "alibi", "bucket", "relative"
]
Output = Literal["tokens", "transformed", "classes", "none"]
Frame = Literal["end", "both", "start", "none"]

# Larger values are mistakes or attacks. Up to this limit, torch can count the elements of every tensor.
MAX_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)]  # strict: true is not 1
Id = Annotated[int, Field(ge=0, le=MAX_COUNT, strict=True)]
MAX_TOKENS = 2**21  # in a vocabulary: eight times the largest published vocabularies
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS, strict=True)]
Width = Annotated[int, Field(ge=1, le=1_000_000, strict=True)]
Few = Annotated[int, Field(ge=1, le=1000, strict=True)]
Side = Annotated[int, Field(ge=1, le=16_384, strict=True)]  # of an image
Rate = Annotated[float, Field(ge=0, lt=1)]
Problem = tuple[object, str]  # (failed, message)
PYDANTIC_ERRORS = {"errors": "pydantic"}  # validation context: a Value raises ValidationError instead of UserError


class Value(BaseModel):
    """A frozen value that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _none(cls, data: Any) -> Any:
        """Read the word none as None in optional fields, because TOML has no null."""
        if not isinstance(data, dict):
            return data
        optional = {name for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)}
        return {key: None if value == "none" and key in optional else value for key, value in data.items()}

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """The fields that differ from their defaults."""
        for name, field in type(self).model_fields.items():
            if (value := getattr(self, name)) != field.get_default(call_default_factory=True):
                yield name, value

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(to_toml(self.model_dump(mode='json')))}</pre>"

    def problems(self) -> Iterator[Problem]:
        """Consistency checks as (failed, message) pairs; the first failed one is raised."""
        yield from ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for failed, message in self.problems():
            if failed:
                raise ValueError(message)
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _raise_user_error(cls, data: Any, handler: Callable[[Any], Self], info: ValidationInfo) -> Self:
        """Translate the errors of a direct construction, `Stack(layers=0)`; `parse` translates its own."""
        try:
            return handler(data)
        except ValidationError as error:
            if info.context == PYDANTIC_ERRORS:
                raise
            raise mistakes(cls, error, cls.__name__) from None


class RotaryConfig(Value):
    """Rotary positions; a `factor` above 1 lowers the slow rates, for texts longer than `original`."""

    base: float = Field(10000.0, gt=1)
    factor: float = Field(1.0, ge=1)
    low: float = Field(1.0, gt=0, description="pairs with fewer turns within `original` are slowed fully")
    high: float = Field(4.0, gt=0, description="pairs with more turns within `original` are not slowed")
    original: Count = 8192

    def problems(self) -> Iterator[Problem]:
        yield self.high <= self.low, f"high ({self.high:g}) must be above low ({self.low:g})"


class LshConfig(Value):
    """LSH attention: tokens are sorted by hash and attend within chunks of the sorted sequence."""

    hashes: Few = Field(2, description="rounds of hashing")
    buckets: Annotated[int, Field(ge=2, le=1_000_000, multiple_of=2)] | None = Field(
        None, description="hash buckets; none: about twice the number of chunks"
    )
    chunk: Width = Field(64, description="tokens in a chunk")
    before: Annotated[int, Field(ge=0, le=1000)] = Field(1, description="earlier chunks attended to")
    after: Annotated[int, Field(ge=0, le=1000)] = Field(0, description="later chunks attended to")
    once: bool = Field(False, description="count a key once if it occurs in several rounds")


class AxialConfig(Value):
    """Axial positions: the vectors of two short tables, concatenated; position = row * columns + column."""

    rows: Count
    columns: Count
    row_width: Width = Field(description="width of the row vector; the column vector has the remaining width")


class PatchConfig(Value):
    """Images cut into patches; the encoder reads a patch like a token."""

    height: Side
    width: Side
    channels: Few = 1
    size: Side = Field(description="side of a patch, in pixels")

    @property
    def count(self) -> int:
        return (self.height // self.size) * (self.width // self.size)

    def problems(self) -> Iterator[Problem]:
        uneven = self.height % self.size or self.width % self.size
        yield uneven, f"an image of {self.height} x {self.width} cannot be cut evenly into patches of {self.size}"


class Stack(Value):
    """The layers of an encoder or a decoder."""

    mixer: Literal["attention", "lsh", "gru", "lstm"] = Field("attention", description="layer that combines tokens")
    layers: Few = 6
    width: Width = Field(512, description="width of the hidden states")
    heads: Few = 8
    kv_heads: Few | None = Field(None, description="key/value heads; none: as many as heads")
    head_width: Width | None = Field(None, description="width of queries and keys; none: width / heads")
    value_width: Width | None = Field(None, description="width of values; none: as wide as keys")
    score: ScoreName = Field("scaled_dot", description="how attention compares a query with a key")
    window: Count | None = Field(None, description="largest distance of self-attention")
    cross_window: Count | None = Field(None, description="largest distance of cross-attention")
    cross_center: Literal["step", "predicted"] = Field(
        "step", description="centre of cross_window: the output step (local-m) or a predicted one (local-p)"
    )
    ff: Width = Field(2048, description="width of the feed-forward layer")
    activation: Activation = "relu"
    gated: bool = Field(False, description="gated feed-forward: act(Gate x) * Up x")
    norm: Literal["layer", "rms"] = "layer"
    norm_at: Literal["pre", "post"] = Field("post", description="norm before or after each sub-layer")
    norm_eps: float = Field(1e-5, gt=0)
    bias: Literal["all", "ff", "none"] = Field("all", description="which linear layers have a bias")
    residual: Literal["add", "reversible"] = "add"
    embed_norm: bool = Field(False, description="normalise the embedded input")
    position: PositionKind = Field("sinusoid", description="position encoding")
    rotary: RotaryConfig = RotaryConfig()
    axial: AxialConfig | None = None
    lsh: LshConfig = LshConfig()
    memory: Id = Field(0, description="tokens of earlier segments that a segment attends to")
    reach: Count | None = Field(None, description="largest distance of relative positions; none: no limit")
    max_length: Count = Field(1024, description="rows of the tables of learned positions and score location")
    dropout: Rate = 0.1
    attention_dropout: Rate = 0.0
    ff_dropout: Rate = 0.0
    input_feeding: bool = Field(False, description="recurrent decoder: feed the attentional vector into the next step")
    attend_first: bool = Field(False, description="recurrent decoder: attend before the step, not after")
    kept_heads: tuple[tuple[int, ...], ...] | None = Field(None, description="unpruned heads of each layer")
    kept_cross_heads: tuple[tuple[int, ...], ...] | None = Field(None, description="unpruned cross-attention heads")

    @property
    def recurrent(self) -> bool:
        return self.mixer in ("gru", "lstm")

    @property
    def out_width(self) -> int:
        """Width of the output: reversible layers concatenate two streams."""
        return 2 * self.width if self.residual == "reversible" else self.width

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def value(self) -> int:
        return self.value_width or self.head

    @property
    def step_window(self) -> int | None:
        """The cross_window around the output step (local-m)."""
        return self.cross_window if self.cross_center == "step" else None

    @property
    def max_positions(self) -> int | None:
        """The number of rows of the position table; None: inputs of any length."""
        if self.axial is not None:
            return self.axial.rows * self.axial.columns
        return self.max_length if self.position == "learned" and not self.recurrent else None

    def problems(self) -> Iterator[Problem]:
        unlimited = self.cross_center == "predicted" and self.cross_window is None
        yield unlimited, "cross_center predicted needs a cross_window around that position"
        if self.recurrent:
            yield self.residual == "reversible", f"residual reversible needs attention layers, not a {self.mixer}"
            yield self.width % 2, f"width must be even for a bidirectional {self.mixer}, not {self.width}"
        else:
            yield from self._attention_problems()

    def _attention_problems(self) -> Iterator[Problem]:
        indivisible = self.head_width is None and self.width % self.heads
        yield indivisible, f"width {self.width} is not divisible by heads {self.heads}; change one or set head_width"
        yield self.heads % self.kv, f"heads {self.heads} is not a multiple of kv_heads {self.kv}"
        if self.score == "concat":
            message = "score concat needs kv_heads equal to heads: one matrix reads a query and a key together"
            yield self.heads != self.kv, message
        if self.position == "rotary":
            yield self.head % 2, f"rotary positions need an even head width, not {self.head}"
        consistent = (self.position == "axial") == (self.axial is not None)
        yield not consistent, "position axial and the table axial (rows, columns, row_width) belong together"
        if self.axial is not None:
            too_wide = self.axial.row_width >= self.width
            yield too_wide, f"axial.row_width must leave room for columns in width {self.width}"
        if self.mixer == "lsh":
            unsupported = self.kv != self.heads or self.score != "scaled_dot" or self.window
            yield unsupported, "mixer lsh shares queries and keys: it does not support kv_heads, score or window"
            biased = self.position in ("alibi", "bucket", "relative")
            message = "mixer lsh does not support positions that are added to scores, memory or kept_heads"
            yield biased or self.memory or self.kept_heads, message
        if self.residual == "reversible":
            yield self.norm_at != "pre", "residual reversible needs norm_at pre"
            message = "residual reversible does not support memory or bucket positions"
            yield self.position == "bucket" or self.memory, message
        absolute = self.reach is not None and self.position != "relative"
        yield absolute, f"reach needs position relative, not {self.position}"
        absolute = self.memory > 0 and self.position not in ("none", "relative", "rotary", "alibi", "bucket")
        yield absolute, f"memory needs positions by distance (relative, rotary ...), not {self.position}"
        for name, layers in (("kept_heads", self.kept_heads), ("kept_cross_heads", self.kept_cross_heads)):
            invalid = [
                not heads or list(heads) != sorted(set(range(self.heads)) & set(heads)) for heads in layers or ()
            ]
            wrong = any(invalid) or (layers is not None and len(layers) != self.layers)
            yield wrong, f"{name} must list, for each layer ({self.layers}), some of the heads ({self.heads}) in order"
        only_recurrent = self.input_feeding or self.attend_first
        yield only_recurrent, "input_feeding and attend_first need a recurrent stack (mixer gru or lstm)"


class SpecialIds(Value):
    """The ids of the special tokens."""

    pad: Id = 0
    unk: Id = 1
    sos: Id = 2
    eos: Id = 3
    mask: Id | None = None  # of masked language models

    def around(self, frame: Frame) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        return [self.sos] * (frame in ("both", "start")), [self.eos] * (frame in ("both", "end"))


class Config(Value):
    """A whole model."""

    source_vocab: Count
    target_vocab: Count
    encoder: Stack | None = None
    decoder: Stack | None = None
    share_embeddings: bool = Field(False, description="source and target share one embedding")
    tie_output: bool = Field(True, description="the LM head shares the weight of the target embedding")
    scale_embeddings: bool = Field(True, description="multiply embeddings by sqrt(width)")
    token_types: Id = Field(0, description="token types of the encoder; 0: none")
    patches: PatchConfig | None = Field(None, description="the encoder reads images, cut into these patches")
    output: Output = Field("tokens", description="LM head, LM head after a transform, classifier or none")
    output_bias: bool = False
    pooler: bool = Field(False, description="tanh layer on the first token, before the classifier")
    classes: Count | None = None
    start: Literal["sos", "eos", "pad"] = Field("sos", description="the token that precedes the first predicted one")
    frame: Frame = Field("end", description="special tokens around a text: x eos, sos x eos (both), sos x, none")
    ids: SpecialIds = SpecialIds()

    @property
    def stacks(self) -> dict[str, Stack]:
        return {name: stack for name, stack in (("encoder", self.encoder), ("decoder", self.decoder)) if stack}

    @property
    def top(self) -> Stack:
        """The stack whose hidden states the output layer reads."""
        top = self.decoder or self.encoder
        assert top is not None
        return top

    @property
    def image_patches(self) -> PatchConfig:
        """The patches of a model that reads images."""
        assert self.patches is not None
        return self.patches

    @property
    def output_vocab(self) -> int:
        """The number of tokens that the LM head predicts."""
        return self.source_vocab if self.decoder is None else self.target_vocab

    @property
    def predicts_tokens(self) -> bool:
        return self.output in ("tokens", "transformed")

    @property
    def start_id(self) -> int:
        return {"sos": self.ids.sos, "eos": self.ids.eos, "pad": self.ids.pad}[self.start]

    @property
    def cross_heads(self) -> dict[int, int]:
        """The number of cross-attention heads of each decoder layer that has some."""
        decoder = self.decoder
        if decoder is None or self.encoder is None:
            return {}
        if decoder.recurrent:
            return {decoder.layers - 1: 1}
        kept = decoder.kept_cross_heads
        return {layer: decoder.heads if kept is None else len(kept[layer]) for layer in range(decoder.layers)}

    @property
    def has_memory(self) -> bool:
        """Whether a text is read in segments that attend to earlier segments."""
        return self.decoder is not None and self.decoder.memory > 0

    @field_validator("output", mode="before")
    @classmethod
    def _rename(cls, output: Any) -> Any:
        """Translate symbols, the name in runs and recipes of version 0.4 and older."""
        return "tokens" if output == "symbols" else output

    def problems(self) -> Iterator[Problem]:
        encoder = self.encoder
        decoder = self.decoder
        yield encoder is None and decoder is None, "a model needs an encoder, a decoder or both"
        ids = self.ids.model_dump(exclude_none=True)
        outside = self.patches is None and max(ids.values()) >= min(self.source_vocab, self.target_vocab)
        yield outside, f"ids must lie below both vocabularies, not {ids}"
        yield from self._output_problems()
        yield from self._stack_problems()
        recurrent = decoder is not None and decoder.recurrent
        yield recurrent and encoder is None, "a recurrent decoder needs an encoder to attend to"
        yield self.share_embeddings and len(self.stacks) < 2, "share_embeddings needs both an encoder and a decoder"
        if encoder is None or decoder is None:
            return
        uneven = encoder.width != decoder.width
        if self.share_embeddings:
            yield uneven, f"share_embeddings needs equal widths, not {encoder.width} and {decoder.width}"
            yield self.source_vocab != self.target_vocab, "share_embeddings needs one vocabulary for both sides"
        message = f"a recurrent decoder needs the width of the encoder: {decoder.width} is not {encoder.width}"
        yield recurrent and uneven, message

    def _output_problems(self) -> Iterator[Problem]:
        """Checks of the output layer, and of options that need an encoder without a decoder."""
        consistent = (self.output == "classes") == (self.classes is not None)
        yield not consistent, "output classes and the number of classes belong together"
        encoder_only = self.encoder is not None and self.decoder is None and not self.encoder.recurrent
        for name, used in (
            ("patches", self.patches is not None),
            ("token_types", self.token_types > 0),
            ("pooler", self.pooler),
            (f"output {self.output}", self.output != "tokens"),
        ):
            yield used and not encoder_only, f"{name} needs a Transformer encoder without a decoder"
        message = "a model that reads images needs output=classes or output=none"
        yield self.patches is not None and self.predicts_tokens, message
        tied = self.tie_output and self.predicts_tokens
        yield tied and self.top.out_width != self.top.width, "tie_output needs an output as wide as the embeddings"

    def _stack_problems(self) -> Iterator[Problem]:
        for name, stack in self.stacks.items():
            relative = stack.position == "relative" and name == "encoder"
            yield relative, "encoder.position: relative covers only earlier tokens; use bucket"
            memory = stack.memory and (name == "encoder" or self.encoder is not None)
            yield memory, f"{name}.memory: only a decoder without an encoder supports a segment memory"
            reversible = stack.residual == "reversible" and len(self.stacks) > 1
            yield reversible, f"{name}.residual: reversible layers do not support cross-attention"


V = TypeVar("V", bound=BaseModel)


def parse(kind: type[V], data: dict[str, Any], where: str) -> V:
    """Validate `data` as `kind`; the UserError has one line per mistake, with its key."""
    try:
        return kind.model_validate(data, context=PYDANTIC_ERRORS)
    except ValidationError as error:
        raise mistakes(kind, error, where) from None


def mistakes(kind: type[BaseModel], error: ValidationError, where: str) -> UserError:
    """The UserError for an invalid value, with one line per mistake."""
    lines = [explain(kind, dict(item)) for item in error.errors(include_url=False)]
    return UserError(f"{where}: " + "\n  ".join(["not valid", *lines]))


def explain(kind: type[BaseModel], item: dict[str, Any]) -> str:
    """Describe an error of pydantic about a value of this kind in a line that starts with its key."""
    path = [str(part) for part in item["loc"]]
    key = ".".join(f"{part:.100}" for part in path)
    if item["type"] == "value_error":
        return f"{key}: {item['ctx']['error']}" if key else str(item["ctx"]["error"])
    if item["type"] == "extra_forbidden":
        for part in path[:-1]:
            kind = _tables(kind).get(part, kind)
        return f"{key}: no such key{_probable_key(kind, path[-1])} (known: {', '.join(sorted(kind.model_fields))})"
    if item["type"] == "missing":
        return f"{key}: is required"
    try:
        value = repr(item["input"])[:80]
    except (ValueError, RecursionError):  # Python does not format integers of more than 4,300 digits
        value = f"this {type(item['input']).__name__}"
    if item["type"] in ("model_type", "dict_type"):
        return f"{key or 'it'} must be a table of keys and values, not {value}"
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        allowed = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        return f"{key}: {value} is not known{closest(item['input'], allowed)} (allowed: {', '.join(allowed)})"
    return f"{key}: {item['msg'][0].lower()}{item['msg'][1:]}, not {value}"


def _probable_key(kind: type[BaseModel], word: str) -> str:
    """A suggestion from the keys of a table, or else from the keys of its inner tables."""
    inner = {name: table.model_fields for name, table in _tables(kind).items()}
    if one := synonym(word, [*kind.model_fields, *(f"{name}.{key}" for name in inner for key in inner[name])]):
        return f"; did you mean {one!r}?"
    near = nearest(word, [key for fields in inner.values() for key in fields])
    keys = " and ".join(f"'{name}.{near}'" for name, fields in inner.items() if near in fields)
    return closest(word, kind.model_fields) or (f"; did you mean {keys}?" if keys else "")


def _tables(kind: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The types of the fields that hold tables, by name."""
    types = {name: (field.annotation, *get_args(field.annotation)) for name, field in kind.model_fields.items()}
    return {name: option for name, options in types.items() for option in options if hasattr(option, "model_fields")}


def to_toml(tables: Mapping[str, Any]) -> str:
    """TOML that `tomllib` reads back as `tables`, without keys whose value is None (TOML has no null)."""
    return tomli_w.dumps(_toml_value(tables))


def _toml_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _toml_value(x) for key, x in value.items() if x is not None}
    if isinstance(value, list | tuple):
        return [_toml_value(x) for x in value]
    if isinstance(value, str):  # lone surrogates cannot be encoded
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value
