"""Weight tables: which of their tensors become which of ours. One table serves both directions.

A table is `{theirs: ours}`, with `{n}` for the number of a layer. A name is that of a tensor, or of a module and then
stands for its weight and its bias. Several names on one side are concatenated along the first dimension. A row whose
tensors our model does not have is not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from regard.errors import UserError


class Transform(NamedTuple):
    """A change of a tensor, and its inverse."""

    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor]


SAME = Transform(lambda x: x, lambda x: x)
TRANSPOSED = Transform(torch.t, torch.t)  # a vector stays as it is


def scaled(factor: float) -> Transform:
    """Ours is theirs times a number."""
    return Transform(lambda x: x * factor, lambda x: x / factor)


def shaped(*theirs: int) -> Transform:
    """The same numbers in another shape on their side; the shape of ours follows from the model."""
    return Transform(lambda x: x, lambda x: x.reshape(theirs))


class Transformed(NamedTuple):
    """Our names in a row that needs a transform."""

    ours: str | tuple[str, ...]
    transform: Transform


Table = dict[str | tuple[str, ...], str | tuple[str, ...] | Transformed]


@dataclass(frozen=True)
class TensorRule:
    """A row of a table, written out for certain tensors."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    transform: Transform

    def to_theirs(self, ours: Iterable[Tensor]) -> dict[str, Tensor]:
        joined = self.transform.to_theirs(torch.cat(list(ours)))
        return dict(zip(self.theirs, joined.chunk(len(self.theirs)), strict=True))

    def to_ours(self, theirs: Iterable[Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        joined = self.transform.to_ours(torch.cat(list(theirs)))
        wanted = [shapes[name] for name in self.ours]
        if len(wanted) == 1:
            return {self.ours[0]: joined.reshape(wanted[0])}
        return dict(zip(self.ours, joined.split([shape[0] for shape in wanted]), strict=True))


def expand(table: Table, parameters: Iterable[str]) -> list[TensorRule]:
    """The rules of a table for a model with these parameters."""
    have = set(parameters)
    layers = sorted({int(number) for name in have for number in re.findall(r"\.blocks\.(\d+)\.", name)})
    rules: list[TensorRule] = []
    for left, row in table.items():
        right, transform = row if isinstance(row, Transformed) else (row, SAME)
        theirs, ours = (left,) if isinstance(left, str) else left, (right,) if isinstance(right, str) else right
        for n in layers if "{n}" in ours[0] else [None]:
            for suffix in ("", ".weight", ".bias"):
                names, their_names = (
                    tuple(name.replace("{n}", str(n)) + suffix for name in side) for side in (ours, theirs)
                )
                if have.issuperset(names):
                    rules.append(TensorRule(their_names, names, transform))
    return rules


class Weights(Protocol):
    """Their tensors, by name."""

    def names(self) -> set[str]: ...
    def shape(self, name: str) -> list[int]: ...
    def tensor(self, name: str) -> Tensor: ...


def check_weights(
    parameters: Mapping[str, Tensor], table: Table, weights: Weights, ignores: Callable[[str], bool], where: str
) -> list[str]:
    """Require that their tensors fit our parameters -> names of tensors that are not needed; misfits are one error."""
    rules = expand(table, parameters)
    have, wanted = weights.names(), {name for rule in rules for name in rule.theirs}
    covered = {name for rule in rules for name in rule.ours}
    ignored = {name for name in have - wanted if ignores(name)}
    wrong = [f"nothing gives our {name}" for name in sorted(parameters.keys() - covered)]
    wrong += [f"missing: {name}" for name in sorted(wanted - have)]
    wrong += [f"not known: {name} {weights.shape(name)}" for name in sorted(have - wanted - ignored)]
    for name, shape in sorted(_their_shapes(rules, parameters).items()):
        if name in have and weights.shape(name) != shape:
            wrong.append(f"{name}: shape {weights.shape(name)} where config.json says {shape}")
    if wrong:
        raise UserError(f"{where}: weights do not fit config.json\n  " + "\n  ".join(wrong))
    return sorted(ignored)


def _their_shapes(rules: list[TensorRule], parameters: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The shapes that their tensors must have: ours, converted on the meta device."""
    shapes: dict[str, list[int]] = {}
    for rule in rules:
        theirs = rule.to_theirs(torch.empty_like(parameters[name], device="meta") for name in rule.ours)
        shapes |= {name: list(value.shape) for name, value in theirs.items()}
    return shapes


@torch.no_grad()
def import_weights(parameters: Mapping[str, Tensor], table: Table, weights: Weights) -> None:
    """Copy their tensors, which were checked, into our parameters."""
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    for rule in expand(table, parameters):
        for name, value in rule.to_ours((weights.tensor(name) for name in rule.theirs), shapes).items():
            parameters[name].copy_(value)


@torch.no_grad()
def export_weights(parameters: Mapping[str, Tensor], table: Table) -> dict[str, Tensor]:
    """Their tensors, made from our parameters."""
    rules = expand(table, parameters)
    missed = parameters.keys() - {name for rule in rules for name in rule.ours}
    if missed:
        raise UserError("these weights have no place there: " + ", ".join(sorted(missed)))
    tensors: dict[str, Tensor] = {}
    for rule in rules:
        tensors |= rule.to_theirs(parameters[name] for name in rule.ours)
    return tensors
