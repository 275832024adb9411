"""Everything that shapes a model, as frozen values: complete, typed, unknown keys refused with a suggestion.

A `Stack` describes one tower; a `Config` is one or two towers and what joins them to a vocabulary.
Its place makes a tower causal: `decoder` always is, `encoder` never. A decoder attends to the encoder if there is one.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from regard.errors import UserError, closest

Mixer = Literal["attention", "gru", "lstm"]
Score = Literal["scaled_dot", "dot", "general", "additive", "concat", "cosine", "location"]
Center = Literal["step", "predicted"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]
PositionKind = Literal["none", "sinusoid", "learned", "rotary", "alibi", "bucket"]

Count = Annotated[int, Field(ge=1, strict=True)]  # strict: true is not 1
Id = Annotated[int, Field(ge=0, strict=True)]
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


class Stack(Value):
    """One tower of layers."""

    mixer: Mixer = "attention"
    layers: Count = 6
    width: Count = 512
    heads: Count = 8
    kv_heads: Count | None = None  # None: as many as heads
    head_width: Count | None = None  # of queries and keys; None: width / heads
    value_width: Count | None = None  # of values; None: as wide as keys
    score: Score = "scaled_dot"
    window: Count | None = None  # self-attention sees at most this far to either side
    cross_window: Count | None = None  # the same for cross-attention
    cross_center: Center = "step"  # around the output step (local-m) or a predicted place (local-p)
    ff: Count = 2048
    activation: Activation = "relu"
    gated: bool = False
    norm: Literal["layer", "rms"] = "layer"
    norm_at: Literal["pre", "post"] = "post"
    norm_eps: float = Field(default=1e-5, gt=0)
    bias: Literal["all", "ff", "none"] = "all"
    position: PositionKind = "sinusoid"
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
        return self.mixer != "attention"

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def value(self) -> int:
        return self.value_width or self.head

    @model_validator(mode="after")
    def _fits(self) -> Stack:
        if self.cross_center == "predicted" and self.cross_window is None:
            raise ValueError("cross_center predicted needs a cross_window around that place")
        if self.recurrent:
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


class Ids(Value):
    """The ids of the symbols that are not text."""

    pad: Id = 0
    unk: Id = 1
    sos: Id = 2
    eos: Id = 3


class Config(Value):
    """A whole model."""

    source_vocab: Count
    target_vocab: Count
    encoder: Stack | None = None
    decoder: Stack | None = None
    share_embeddings: bool = False  # source and target read the same table
    tie_output: bool = True  # the prediction layer is the target table transposed
    scale_embeddings: bool = True  # multiply embeddings by sqrt(width)
    start: Literal["sos", "eos"] = "sos"
    ids: Ids = Ids()

    @property
    def start_id(self) -> int:
        return self.ids.sos if self.start == "sos" else self.ids.eos

    @model_validator(mode="after")
    def _joined(self) -> Config:
        if self.encoder is None and self.decoder is None:
            raise ValueError("a model needs an encoder, a decoder or both")
        ids = self.ids.model_dump()
        if len(set(ids.values())) < len(ids) or max(ids.values()) >= min(self.source_vocab, self.target_vocab):
            raise ValueError(f"ids must differ and lie below both vocabularies, not {ids}")
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
