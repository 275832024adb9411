"""Weight tables: which of their tensors become which of ours. One table serves both directions.

A table is `{theirs: ours}`, with `{n}` for the number of a layer. A name is that of a tensor, or of a module and then
stands for its weight and its bias. Several names on a side are laid on each other, rows upon rows. A row whose tensors
our model does not have is not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from regard.errors import UserError


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
