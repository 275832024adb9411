"""Where the attentions of a model are, and how its heads are counted."""

from __future__ import annotations

from regard.model import Model
from regard.nn.attention import Attention


def attentions(model: Model) -> dict[str, Attention]:
    """Every attention of a model by name; one that two modules share has its first."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Attention)}


def place(name: str) -> tuple[str, int]:
    """The kind of an attention, encoder, decoder or cross, and its layer."""
    tower, _, index, role = name.split(".")
    return ("cross" if role == "cross" else tower), int(index)


def head_numbers(model: Model, name: str) -> tuple[int, ...]:
    """The numbers of an attention's heads: those it had before any pruning."""
    attention = attentions(model)[name]
    return tuple(attention.kept) if attention.kept is not None else tuple(range(attention.heads))
