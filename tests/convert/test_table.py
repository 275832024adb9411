"""Weight tables: export and import are inverse, and an unused name is an error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from regard.convert.table import (
    TRANSPOSED,
    Transformed,
    check_weights,
    expand,
    export_weights,
    import_weights,
    scaled,
    shaped,
)
from regard.errors import UserError

TABLE = {
    "emb": "table",
    ("layer.{n}.k", "layer.{n}.v"): "blocks.{n}.key_value",
    "layer.{n}.qkv": Transformed(("x.blocks.{n}.query", "x.blocks.{n}.both"), TRANSPOSED),
    "norm": Transformed("norm", scaled(0.25)),
    "kernel.weight": Transformed("project.weight", shaped(4, 3, 2, 2)),
    "gate": "not.there",
}
SHAPES = {
    "table.weight": (7, 4),
    "norm.weight": (4,),
    "norm.bias": (4,),
    "project.weight": (4, 12),
    **{
        f"x.blocks.{n}.{name}.{kind}": (rows, 4)[: 1 + (kind == "weight")]
        for n in (0, 1, 12)
        for name, rows in (("query", 4), ("both", 6))
        for kind in ("weight", "bias")
    },
}


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def parameters(seed: int) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=dice) for name, shape in SHAPES.items()}


@given(st.integers(0, 10**6))
@settings(deadline=None)
def test_export_and_import_are_inverse(seed):
    ours = parameters(seed)
    theirs = export_weights(ours, TABLE)
    empty = {name: torch.zeros_like(tensor) for name, tensor in ours.items()}
    assert check_weights(empty, TABLE, shapes(theirs), lambda name: False, "here") == []
    import_weights(empty, TABLE, theirs.__getitem__)
    assert all(torch.equal(ours[name], empty[name]) for name in ours)
    assert set(theirs) == {name for rule in expand(TABLE, ours) for name in rule.theirs}


def test_rows_scale_reshape_concatenate_and_transpose():
    ours = parameters(1)
    theirs = export_weights(ours, TABLE)
    assert torch.equal(theirs["norm.weight"], ours["norm.weight"] * 4)
    assert theirs["kernel.weight"].shape == (4, 3, 2, 2)
    both = torch.cat((ours["x.blocks.12.query.weight"], ours["x.blocks.12.both.weight"]))
    assert torch.equal(theirs["layer.12.qkv.weight"], both.t())
    assert theirs["layer.12.qkv.bias"].shape == (10,)
    assert not any(name.startswith(("gate", "layer.2.")) for name in theirs)


def test_several_names_of_theirs_are_concatenated_into_one_of_ours():
    keys = torch.randn(6, 4)
    values = torch.randn(6, 4)
    ours = {"x.blocks.0.key_value.weight": torch.zeros(12, 4)}
    table = {("a.{n}.k", "a.{n}.v"): "x.blocks.{n}.key_value"}
    import_weights(ours, table, {"a.0.k.weight": keys, "a.0.v.weight": values}.__getitem__)
    assert torch.equal(ours["x.blocks.0.key_value.weight"], torch.cat((keys, values)))


def test_unused_missing_and_misshapen_names_are_one_error():
    ours = parameters(1)
    theirs = export_weights(ours, TABLE)
    del theirs["emb.weight"]
    theirs |= {"extra": torch.zeros(2), "buffer": torch.zeros(3), "norm.bias": torch.zeros(5)}
    with pytest.raises(UserError) as error:
        check_weights(
            ours | {"forgotten": torch.zeros(1)}, TABLE, shapes(theirs), lambda name: name == "buffer", "here"
        )
    assert str(error.value).splitlines() == [
        "here: weights do not fit config.json",
        "  no tensor for our forgotten",
        "  missing: emb.weight",
        "  not known: extra [2]",
        "  norm.bias: shape [5] where config.json says [4]",
    ]
    fitting = shapes(export_weights(ours, TABLE) | {"buffer": torch.zeros(3)})
    assert check_weights(ours, TABLE, fitting, lambda name: name == "buffer", "here") == ["buffer"]
    with pytest.raises(UserError, match="no counterpart there: forgotten"):
        export_weights(ours | {"forgotten": torch.zeros(1)}, TABLE)
