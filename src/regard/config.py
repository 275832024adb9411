"""Everything that shapes a model, as frozen values: complete, typed, unknown keys refused with a suggestion.

A `Stack` describes one tower; a `Config` is one or two towers and what joins them to a vocabulary.
Its place makes a tower causal: `decoder` always is, `encoder` never. A decoder attends to the encoder if there is one.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from regard.errors import UserError, closest

Mixer = Literal["attention", "lsh", "gru", "lstm"]
ScoreName = Literal["scaled_dot", "dot", "general", "additive", "concat", "cosine", "location"]
Center = Literal["step", "predicted"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]
PositionKind = Literal[
    "none", "sinusoid", "sinusoid_halves", "learned", "axial", "rotary", "alibi", "bucket", "relative"
]
Output = Literal["tokens", "transformed", "classes", "none"]
Frame = Literal["end", "both", "start", "none"]

# What is larger is a slip or an attack: the sizes of all tensors stay numbers that torch can count with.
MOST = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MOST, strict=True)]  # strict: true is not 1
Id = Annotated[int, Field(ge=0, le=MOST, strict=True)]
Width = Annotated[int, Field(ge=1, le=1_000_000, strict=True)]
Few = Annotated[int, Field(ge=1, le=1000, strict=True)]
Side = Annotated[int, Field(ge=1, le=16_384, strict=True)]  # of an image
Rate = Annotated[float, Field(ge=0, lt=1)]


class Value(BaseModel):
    """A frozen value that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _none(cls, data: Any) -> Any:
        """TOML has no null: the word none stands for it where a field may be left open."""
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        empty = {key for key, value in data.items() if value == "none" and key in fields and _optional(fields[key])}
        return {key: None if key in empty else value for key, value in data.items()}


def _optional(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


class RotaryConfig(Value):
    """How fast rotary positions turn; `factor` above 1 stretches the slow ones to texts longer than `original`."""

    base: float = Field(default=10000.0, gt=1)
    factor: float = Field(default=1.0, ge=1)
    low: float = Field(default=1.0, gt=0)  # turns within `original` below which a pair is stretched in full
    high: float = Field(default=4.0, gt=0)  # and above which not at all
    original: Count = 8192

    @model_validator(mode="after")
    def _ordered(self) -> RotaryConfig:
        if self.high <= self.low:
            raise ValueError(f"high must be above low, not {self.high:g} against {self.low:g}")
        return self


class LshConfig(Value):
    """Attention among tokens that hash alike, in chunks of the sorted sequence."""

    hashes: Few = 2  # rounds
    buckets: Annotated[int, Field(ge=2, le=1_000_000, multiple_of=2)] | None = None  # None: about twice the chunks
    chunk: Width = 64
    before: Annotated[int, Field(ge=0, le=1000)] = 1  # chunks seen beside one's own
    after: Annotated[int, Field(ge=0, le=1000)] = 0
    once: bool = False  # a key that was met in several rounds counts once; else each time


class AxialConfig(Value):
    """A table of positions as two short ones, side by side in the vector: position = row * columns + column."""

    rows: Count
    columns: Count
    row_width: Width  # of the vector; the rest tells the column


class PatchConfig(Value):
    """Images cut into patches, each read like a token."""

    height: Side
    width: Side
    channels: Few = 1
    size: Side  # of a square's side

    @property
    def count(self) -> int:
        return (self.height // self.size) * (self.width // self.size)

    @model_validator(mode="after")
    def _whole(self) -> PatchConfig:
        if self.height % self.size or self.width % self.size:
            raise ValueError(f"an image of {self.height} x {self.width} is not cut evenly into patches of {self.size}")
        return self


class Stack(Value):
    """One tower of layers."""

    mixer: Mixer = "attention"
    layers: Few = 6
    width: Width = 512
    heads: Few = 8
    kv_heads: Few | None = None  # None: as many as heads
    head_width: Width | None = None  # of queries and keys; None: width / heads
    value_width: Width | None = None  # of values; None: as wide as keys
    score: ScoreName = "scaled_dot"
    window: Count | None = None  # self-attention sees at most this far to either side
    cross_window: Count | None = None  # the same for cross-attention
    cross_center: Center = "step"  # around the output step (local-m) or a predicted place (local-p)
    ff: Width = 2048
    activation: Activation = "relu"
    gated: bool = False
    norm: Literal["layer", "rms"] = "layer"
    norm_at: Literal["pre", "post"] = "post"
    norm_eps: float = Field(default=1e-5, gt=0)
    bias: Literal["all", "ff", "none"] = "all"
    residual: Literal["add", "reversible"] = "add"
    embed_norm: bool = False  # normalise the embedded input
    position: PositionKind = "sinusoid"
    rotary: RotaryConfig = RotaryConfig()
    axial: AxialConfig | None = None
    lsh: LshConfig = LshConfig()
    memory: Id = 0  # tokens of earlier segments that are remembered while reading on
    reach: Count | None = None  # relative positions: distances beyond this one count as it; None: all are told apart
    max_length: Count = 1024  # rows of a learned position table or of the location score; nothing else is bounded
    dropout: Rate = 0.1
    attention_dropout: Rate = 0.0
    ff_dropout: Rate = 0.0
    input_feeding: bool = False  # recurrent decoder: the last attentional vector joins the next input
    attend_first: bool = False  # recurrent decoder: attend from the state before the step instead of after it
    kept_heads: tuple[tuple[int, ...], ...] | None = None  # per layer, the heads that pruning left; None: all
    kept_cross_heads: tuple[tuple[int, ...], ...] | None = None

    @property
    def recurrent(self) -> bool:
        return self.mixer in ("gru", "lstm")

    @property
    def out_width(self) -> int:
        """Of the vectors that come out: reversible layers carry two streams side by side."""
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
    def max_positions(self) -> int | None:
        """The longest input that the position table has rows for; None: any length."""
        if self.axial is not None:
            return self.axial.rows * self.axial.columns
        return self.max_length if self.position == "learned" and not self.recurrent else None

    @model_validator(mode="after")
    def _fits(self) -> Stack:
        if self.cross_center == "predicted" and self.cross_window is None:
            raise ValueError("cross_center predicted needs a cross_window around that place")
        if self.recurrent:
            if self.residual == "reversible":
                raise ValueError(f"residual reversible belongs to layers of attention, not to a {self.mixer}")
            if self.width % 2:
                raise ValueError(f"width must be even for a two-directional {self.mixer}, not {self.width}")
            return self
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}; change one or set head_width")
        if self.heads % self.kv:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv}")
        if self.score == "concat" and self.heads != self.kv:
            raise ValueError(
                "score concat needs kv_heads equal to heads: its one matrix reads a query and a key together"
            )
        if self.position == "rotary" and self.head % 2:
            raise ValueError(f"rotary positions need an even head width, not {self.head}")
        if (self.position == "axial") != (self.axial is not None):
            raise ValueError("position axial and the table axial (rows, columns, row_width) belong together")
        if self.axial is not None and self.axial.row_width >= self.width:
            raise ValueError(f"axial.row_width must leave room for columns in width {self.width}")
        if self.mixer == "lsh" and (self.kv != self.heads or self.score != "scaled_dot" or self.window):
            raise ValueError("mixer lsh shares queries and keys: it has no kv_heads, score or window of its own")
        if self.mixer == "lsh" and (self.position in ("alibi", "bucket", "relative") or self.memory or self.kept_heads):
            raise ValueError("mixer lsh takes no positions that are added to scores, no memory and no kept_heads")
        if self.residual == "reversible" and self.norm_at != "pre":
            raise ValueError("residual reversible needs norm_at pre")
        if self.residual == "reversible" and (self.position == "bucket" or self.memory):
            raise ValueError("residual reversible has no memory, nor bucket positions, which layers share")
        if self.reach is not None and self.position != "relative":
            raise ValueError(f"reach belongs to position relative, not {self.position}")
        if self.memory and self.position not in ("none", "relative", "rotary", "alibi", "bucket"):
            raise ValueError(f"memory needs positions that count distances (relative, rotary ...), not {self.position}")
        for name in ("kept_heads", "kept_cross_heads"):
            kept = getattr(self, name)
            if kept is not None and (len(kept) != self.layers or any(not self._is_choice(heads) for heads in kept)):
                raise ValueError(
                    f"{name} must list, for each of {self.layers} layers, some of {self.heads} heads in order"
                )
        if self.input_feeding or self.attend_first:
            raise ValueError("input_feeding and attend_first belong to a recurrent stack (mixer gru or lstm)")
        return self

    def _is_choice(self, heads: tuple[int, ...]) -> bool:
        return bool(heads) and sorted(set(heads)) == list(heads) and heads[0] >= 0 and heads[-1] < self.heads


class SpecialIds(Value):
    """The ids of the tokens that are not text."""

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
    share_embeddings: bool = False  # source and target read the same table
    tie_output: bool = True  # the prediction layer is the target table transposed
    scale_embeddings: bool = True  # multiply embeddings by sqrt(width)
    token_types: Id = 0  # kinds of segments that the encoder tells apart
    patches: PatchConfig | None = None  # the encoder reads images
    output: Output = "tokens"
    output_bias: bool = False
    pooler: bool = False  # the vector of the first token passes a layer of its own before it stands for the whole
    classes: Count | None = None
    start: Literal["sos", "eos", "pad"] = "sos"
    frame: Frame = "end"  # the marks around a text: x eos, sos x eos, sos x, or none
    ids: SpecialIds = SpecialIds()

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks that there are, by name."""
        return {name: stack for name, stack in (("encoder", self.encoder), ("decoder", self.decoder)) if stack}

    @property
    def top(self) -> Stack:
        """The stack whose vectors the LM head, or the classifier, reads."""
        top = self.decoder or self.encoder
        assert top is not None
        return top

    @property
    def output_vocab(self) -> int:
        """Tokens that the LM head predicts."""
        return self.source_vocab if self.decoder is None else self.target_vocab

    @property
    def predicts_tokens(self) -> bool:
        return self.output in ("tokens", "transformed")

    @property
    def start_id(self) -> int:
        return {"sos": self.ids.sos, "eos": self.ids.eos, "pad": self.ids.pad}[self.start]

    @property
    def has_memory(self) -> bool:
        """Whether a text is read in segments, each remembering the ones before."""
        return self.decoder is not None and self.decoder.memory > 0

    @field_validator("output", mode="before")
    @classmethod
    def _old_name(cls, output: Any) -> Any:
        """Runs and recipes of version 0.4 and older say symbols."""
        return "tokens" if output == "symbols" else output

    @model_validator(mode="after")
    def _joined(self) -> Config:
        if self.encoder is None and self.decoder is None:
            raise ValueError("a model needs an encoder, a decoder or both")
        ids = self.ids.model_dump(exclude_none=True)
        if self.patches is None and max(ids.values()) >= min(self.source_vocab, self.target_vocab):
            raise ValueError(f"ids must lie below both vocabularies, not {ids}")
        self._heads_fit()
        if self.encoder is None and self.decoder is not None and self.decoder.recurrent:
            raise ValueError("a recurrent decoder needs an encoder to attend to")
        if self.share_embeddings:
            if self.encoder is None or self.decoder is None:
                raise ValueError("share_embeddings needs both an encoder and a decoder")
            if self.encoder.width != self.decoder.width:
                raise ValueError(
                    f"share_embeddings needs equal widths, not {self.encoder.width} and {self.decoder.width}"
                )
            if self.source_vocab != self.target_vocab:
                raise ValueError("share_embeddings needs one vocabulary for both sides")
        if self.encoder and self.decoder and self.decoder.recurrent and self.decoder.width != self.encoder.width:
            raise ValueError(
                f"a recurrent decoder needs the encoder's width, not {self.decoder.width} against {self.encoder.width}"
            )
        return self

    def _heads_fit(self) -> None:
        """What stands on top, and what only an encoder without a decoder can do."""
        if (self.output == "classes") != (self.classes is not None):
            raise ValueError("output classes and the number of classes belong together")
        alone = self.encoder is not None and self.decoder is None and not self.encoder.recurrent
        for name, used in (
            ("patches", self.patches is not None),
            ("token_types", self.token_types > 0),
            ("pooler", self.pooler),
            (f"output {self.output}", self.output != "tokens"),
        ):
            if used and not alone:
                raise ValueError(f"{name} belongs to a Transformer encoder without a decoder")
        if self.patches is not None and self.predicts_tokens:
            raise ValueError("a model that reads images predicts classes (output=classes), or nothing (output=none)")
        tied = self.tie_output and self.predicts_tokens
        if tied and self.top.out_width != self.top.width:
            raise ValueError("tie_output needs the vectors that come out to be as wide as the embeddings")
        for name, stack in self.stacks.items():
            if stack.position == "relative" and name == "encoder":
                raise ValueError("encoder.position: relative counts distances to what came before, use bucket")
            if stack.memory and not (name == "decoder" and self.encoder is None):
                raise ValueError(f"{name}.memory: only a decoder without an encoder reads on across segments")
            if stack.residual == "reversible" and self.encoder is not None and self.decoder is not None:
                raise ValueError(f"{name}.residual: reversible layers do not attend to another tower")


V = TypeVar("V", bound=BaseModel)


def parse(kind: type[V], data: dict[str, Any], where: str) -> V:
    """Validate `data` as `kind`; every mistake becomes one line that names its key, and all come in one error."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = [_explain(kind, dict(item)) for item in error.errors(include_url=False)]
        raise UserError(f"{where}: " + "\n  ".join(["not valid", *lines])) from None


def _explain(kind: type[BaseModel], item: dict[str, Any]) -> str:
    path = [str(part) for part in item["loc"]]
    key = ".".join(path) or kind.__name__
    if item["type"] == "extra_forbidden":
        fields = _fields_at(kind, path[:-1])
        return f"{key}: no such key{closest(path[-1], fields)} (known: {', '.join(sorted(fields))})"
    if item["type"] == "value_error":
        return f"{key}: {item['ctx']['error']}"
    if item["type"] == "missing":
        return f"{key}: is required"
    given = repr(item["input"])
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        allowed = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        return f"{key}: {given[:80]} is not known{closest(item['input'], allowed)} (allowed: {', '.join(allowed)})"
    return f"{key}: {item['msg'][0].lower()}{item['msg'][1:]}, not {given[:80]}"


def _fields_at(kind: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        field = kind.model_fields.get(part)
        if field is None:
            break
        inner = [t for t in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(t, type)]
        kind = next((t for t in inner if issubclass(t, BaseModel)), kind)
    return list(kind.model_fields)
