"""What is known about a family of models: its settings, its weights, and what of them may be passed over."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from regard.config import Activation, Config, Ids, Stack
from regard.convert.table import Table
from regard.errors import UserError, closest

Json = dict[str, Any]
T = TypeVar("T")

ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


class Fields:
    """A config.json that was written elsewhere; whatever it says that cannot be kept names its key."""

    def __init__(self, data: Json, where: str) -> None:
        self.data = data
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it is; null is as good as nothing."""
        value = self.data.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero."""
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise UserError(f"{self.where}: {key} must be a whole number above zero, not {value!r}")
        return value

    def choice(self, key: str, allowed: Mapping[str, T], default: str) -> T:
        """One of a few words, and what it means here."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            near = closest(str(value), allowed)
            raise UserError(
                f"{self.where}: {key} {value!r} is not supported{near}\n  supported: {', '.join(sorted(allowed))}"
            )
        return allowed[value]

    def fixed(self, key: str, *allowed: Any) -> None:
        """Refuse a setting that changes what the model computes; left out, it is the first of those allowed."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            only = " or ".join(repr(one) for one in allowed)
            raise UserError(f"{self.where}: {key} {value!r} is not supported, only {only}")

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: {key} must be true or false, not {value!r}")
        return value


def word_for(activation: Activation) -> str:
    """The name that an activation has there."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)


def start_at(ids: Ids, start_id: int | None, usual: str = "eos") -> Json:
    """The part of a config that says which symbol comes first; where several have its id, the usual one."""
    for name in (usual, "sos", "eos", "pad"):
        if start_id is None or getattr(ids, name) == start_id:
            return {"start": name, "ids": ids}
    return {"start": "sos", "ids": ids.model_copy(update={"sos": start_id})}


def class_count(hf: Fields) -> int:
    """How many classes a model tells apart; where nothing is said there are two."""
    labels = hf.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else hf.count("num_labels", 2)


@dataclass(frozen=True)
class Family:
    """Settings there and here, and the table of weights between them."""

    model_type: str
    architectures: tuple[str, ...]
    ours: Callable[
        [Fields, set[str], str, Ids], Json
    ]  # settings, weight names, architecture, ids -> tables of a Config
    theirs: Callable[[Config], Json]
    table: Callable[[Config, Fields], Table]
    towers: tuple[str, ...]  # what a run must have to become one of these
    images: bool = False  # read instead of symbols
    prefix: str = ""  # of the names of a model without its head, which may be left out
    heads: tuple[str, ...] = ()  # names that never have the prefix begin with one of these
    same: Callable[[Fields], Json] = lambda hf: {}  # second names of a tensor -> its first
    extra: Callable[[Config], Mapping[str, Tensor]] = lambda config: {}  # tensors there that ours does without
    ignored: tuple[str, ...] = ()  # patterns of names that hold nothing we need
    gone: str = ""  # why no transformers of today can prove it, and what is certain all the same

    def full(self, name: str) -> str:
        """A name with its prefix, as it is written today."""
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
        return name if not self.prefix or name.startswith((self.prefix, *self.heads)) else self.prefix + name

    def ignores(self, name: str) -> bool:
        """Whether a tensor of this name holds nothing we need."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)


def tied_to(name: str) -> Callable[[Fields], Json]:
    """The prediction layer is a second name of a table, unless the settings say that it is not."""
    return lambda hf: {} if hf.get("tie_word_embeddings") is False else {"lm_head.weight": name}


def stack_of(config: Config, name: str) -> Stack:
    """A tower that is known to be there."""
    stack = getattr(config, name)
    assert isinstance(stack, Stack)
    return stack
