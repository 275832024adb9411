"""Weight tables, which map tensor names of another library to ours. One table serves both directions.

A table is `{theirs: ours}`, with `{n}` for the layer number. A name is that of a tensor, or of a module, and then means
its weight and its bias. Several names on one side are concatenated along the first dimension. Rows without tensors in
our model are not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import UserError
from regard.weight_files import require_shapes


class Transform(NamedTuple):
    """A transform of a tensor, and its inverse."""

    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor]


SAME = Transform(lambda x: x, lambda x: x)
TRANSPOSED = Transform(torch.t, torch.t)  # vectors do not change


def scaled(factor: float) -> Transform:
    """Our tensor is their tensor times a factor."""
    return Transform(lambda x: x * factor, lambda x: x / factor)


def shaped(*theirs: int) -> Transform:
    """Their tensor has another shape; our shape is taken from the model."""
    return Transform(lambda x: x, lambda x: x.reshape(theirs))


class Transformed(NamedTuple):
    """Our names in a row with a transform."""

    ours: str | tuple[str, ...]
    transform: Transform


Table = dict[str | tuple[str, ...], str | tuple[str, ...] | Transformed]


@dataclass(frozen=True)
class TensorRule:
    """A row of a table, expanded to the names of tensors."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    transform: Transform

    def to_theirs(self, ours: Iterable[Tensor]) -> dict[str, Tensor]:
        joined = self.transform.to_theirs(torch.cat(list(ours)))
        return dict(zip(self.theirs, joined.chunk(len(self.theirs)), strict=True))

    def to_ours(self, theirs: Iterable[Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        joined = self.transform.to_ours(torch.cat(list(theirs)))
        our_shapes = [shapes[name] for name in self.ours]
        if len(our_shapes) == 1:
            return {self.ours[0]: joined.reshape(our_shapes[0])}
        return dict(zip(self.ours, joined.split([shape[0] for shape in our_shapes]), strict=True))


def expand(table: Table, parameters: Iterable[str]) -> list[TensorRule]:
    """The rules of a table for a model with these parameters."""
    names = set(parameters)
    layers = sorted({int(number) for name in names for number in re.findall(r"\.blocks\.(\d+)\.", name)})
    rules: list[TensorRule] = []
    for left, row in table.items():
        right, transform = row if isinstance(row, Transformed) else (row, SAME)
        theirs = (left,) if isinstance(left, str) else left
        ours = (right,) if isinstance(right, str) else right
        for n in layers if "{n}" in ours[0] else [None]:
            for suffix in ("", ".weight", ".bias"):
                their_names, our_names = (
                    tuple(name.replace("{n}", str(n)) + suffix for name in side) for side in (theirs, ours)
                )
                if names.issuperset(our_names):
                    rules.append(TensorRule(their_names, our_names, transform))
    return rules


def check_weights(
    parameters: Mapping[str, Tensor],
    table: Table,
    shapes: Mapping[str, list[int]],
    ignores: Callable[[str], bool],
    where: str,
) -> list[str]:
    """Require that tensors of these shapes fit our parameters -> names of ignored tensors."""
    rules = expand(table, parameters)
    expected: dict[str, list[int]] = {}
    for rule in rules:
        theirs = rule.to_theirs(torch.empty_like(parameters[name], device="meta") for name in rule.ours)
        expected |= {name: list(value.shape) for name, value in theirs.items()}
    ignored = {name for name in shapes.keys() - expected.keys() if ignores(name)}
    needed = {name: shape for name, shape in shapes.items() if name not in ignored}
    uncovered = parameters.keys() - {name for rule in rules for name in rule.ours}
    require_shapes(needed, expected, where, [f"no tensor for our {name}" for name in sorted(uncovered)])
    return sorted(ignored)


@torch.no_grad()
def import_weights(parameters: Mapping[str, Tensor], table: Table, tensor: Callable[[str], Tensor]) -> None:
    """Copy their tensors, already checked, into our parameters; `tensor` reads one of theirs by name."""
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    for rule in expand(table, parameters):
        for name, value in rule.to_ours(map(tensor, rule.theirs), shapes).items():
            parameters[name].copy_(value)


@torch.no_grad()
def export_weights(parameters: Mapping[str, Tensor], table: Table) -> dict[str, Tensor]:
    rules = expand(table, parameters)
    unmapped = parameters.keys() - {name for rule in rules for name in rule.ours}
    if unmapped:
        raise UserError("these weights have no counterpart there: " + ", ".join(sorted(unmapped)))
    tensors: dict[str, Tensor] = {}
    for rule in rules:
        tensors |= rule.to_theirs(parameters[name] for name in rule.ours)
    return tensors
