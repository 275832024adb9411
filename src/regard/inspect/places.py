"""Where the attentions of a model are, and how its heads are counted."""

from __future__ import annotations

from regard.model import Model
from regard.nn.attention import Attention
from regard.nn.lsh import LSHAttention

AnyAttention = Attention | LSHAttention


def attentions(model: Model) -> dict[str, AnyAttention]:
    """Every attention of a model by name; one that two modules share has its first."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AnyAttention)}


def key_heads(attention: Attention) -> list[int]:
    """The key/value head that each query head reads."""
    each = attention.heads // attention.kv_heads
    return attention.groups or [head // each for head in range(attention.heads)]


def place(name: str) -> tuple[str, int]:
    """The kind of an attention, encoder, decoder or cross, and its layer."""
    tower, _, index, role = name.split(".")
    return ("cross" if role == "cross" else tower), int(index)


def head_numbers(model: Model, name: str) -> tuple[int, ...]:
    """The numbers of an attention's heads: those it had before any pruning."""
    attention = attentions(model)[name]
    kept = attention.kept if isinstance(attention, Attention) else None
    return tuple(kept) if kept is not None else tuple(range(attention.heads))
