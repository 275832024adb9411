"""Weight tables: which of their tensors become which of ours. One table serves both directions.

A table is `{theirs: ours}`, with `{n}` for the number of a layer. A name is that of a tensor, or of a module and then
stands for its weight and its bias. Several names on a side are laid on each other, rows upon rows. A row whose tensors
our model does not have is not used.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from regard.config import Activation, Config, SpecialIds, Stack
from regard.errors import UserError, closest


class Transform(NamedTuple):
    """A change of a tensor, and the way back."""

    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor]


SAME = Transform(lambda x: x, lambda x: x)
TURNED = Transform(torch.t, torch.t)  # a vector stays as it is


def scaled(factor: float) -> Transform:
    """Ours is theirs times a number."""
    return Transform(lambda x: x * factor, lambda x: x / factor)


def shaped(*theirs: int) -> Transform:
    """The same numbers, in another shape on their side; ours follows from the model."""
    return Transform(lambda x: x, lambda x: x.reshape(theirs))


class Changed(NamedTuple):
    """Our names in a row that needs a transform."""

    ours: str | tuple[str, ...]
    transform: Transform


Table = Mapping[str | tuple[str, ...], str | tuple[str, ...] | Changed]


@dataclass(frozen=True)
class Rule:
    """A row of a table for certain tensors."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    transform: Transform

    def to_theirs(self, ours: Iterable[Tensor]) -> dict[str, Tensor]:
        whole = self.transform.to_theirs(torch.cat(list(ours)))
        return dict(zip(self.theirs, whole.chunk(len(self.theirs)), strict=True))

    def to_ours(self, theirs: Iterable[Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        whole = self.transform.to_ours(torch.cat(list(theirs)))
        wanted = [shapes[name] for name in self.ours]
        if len(wanted) == 1:
            return {self.ours[0]: whole.reshape(wanted[0])}
        return dict(zip(self.ours, whole.split([shape[0] for shape in wanted]), strict=True))


class Weights(Protocol):
    """Their tensors, by name."""

    def names(self) -> set[str]: ...
    def shape(self, name: str) -> list[int]: ...
    def tensor(self, name: str) -> Tensor: ...


def rules(table: Table, ours: Iterable[str]) -> list[Rule]:
    """The table written out for a model with these parameters."""
    have = set(ours)
    layers = {int(number) for name in have for number in re.findall(r"\.blocks\.(\d+)\.", name)}
    found: list[Rule] = []
    for theirs, row in table.items():
        to = row if isinstance(row, Changed) else Changed(row, SAME)
        for left, right in _numbered(_tuple(theirs), _tuple(to.ours), sorted(layers)):
            for suffix in ("", ".weight", ".bias"):
                names = tuple(name + suffix for name in right)
                if have.issuperset(names):
                    found.append(Rule(tuple(name + suffix for name in left), names, to.transform))
    return found


def _tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _numbered(
    left: tuple[str, ...], right: tuple[str, ...], layers: list[int]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    if "{n}" not in right[0]:
        yield left, right
        return
    for n in layers:
        yield tuple(name.replace("{n}", str(n)) for name in left), tuple(name.replace("{n}", str(n)) for name in right)


def check(
    parameters: Mapping[str, Tensor], table: Table, weights: Weights, ignores: Callable[[str], bool], where: str
) -> list[str]:
    """Make sure that their tensors fit our parameters -> the names that are passed over; all misfits are one error."""
    rows = rules(table, parameters)
    have, wanted = weights.names(), {name for rule in rows for name in rule.theirs}
    covered = {name for rule in rows for name in rule.ours}
    passed = {name for name in have - wanted if ignores(name)}
    wrong = [f"nothing gives our {name}" for name in sorted(parameters.keys() - covered)]
    wrong += [f"missing: {name}" for name in sorted(wanted - have)]
    wrong += [f"not known: {name} {weights.shape(name)}" for name in sorted(have - wanted - passed)]
    for name, shape in sorted(_shapes(rows, parameters).items()):
        if name in have and weights.shape(name) != shape:
            wrong.append(f"{name}: shape {weights.shape(name)} where config.json says {shape}")
    if wrong:
        raise UserError(f"{where}: weights do not fit config.json\n  " + "\n  ".join(wrong))
    return sorted(passed)


@torch.no_grad()
def fill(parameters: Mapping[str, Tensor], table: Table, weights: Weights) -> None:
    """Copy their tensors, which were checked, into our parameters."""
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    for rule in rules(table, parameters):
        for name, value in rule.to_ours((weights.tensor(name) for name in rule.theirs), shapes).items():
            parameters[name].copy_(value)


@torch.no_grad()
def unfill(parameters: Mapping[str, Tensor], table: Table) -> dict[str, Tensor]:
    """Their tensors, made from our parameters."""
    rows = rules(table, parameters)
    missed = parameters.keys() - {name for rule in rows for name in rule.ours}
    if missed:
        raise UserError("these weights have no place there: " + ", ".join(sorted(missed)))
    found: dict[str, Tensor] = {}
    for rule in rows:
        found |= rule.to_theirs(parameters[name] for name in rule.ours)
    return found


def _shapes(rows: list[Rule], parameters: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The shapes that their tensors must have, found by going back from ours without any numbers."""
    shapes: dict[str, list[int]] = {}
    for rule in rows:
        made = rule.to_theirs(torch.empty_like(parameters[name], device="meta") for name in rule.ours)
        shapes |= {name: list(value.shape) for name, value in made.items()}
    return shapes


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


def start_at(ids: SpecialIds, start_id: int | None, usual: str = "eos") -> Json:
    """The part of a config that says which token comes first; where several have its id, the usual one."""
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
        [Fields, set[str], str, SpecialIds], Json
    ]  # settings, weight names, architecture, ids -> tables of a Config
    theirs: Callable[[Config], Json]
    table: Callable[[Config, Fields], Table]
    towers: tuple[str, ...]  # what a run must have to become one of these
    images: bool = False  # read instead of tokens
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
