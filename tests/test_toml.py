"""Writing TOML."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, strategies as st

from regard.config import to_toml

scalars = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
keys = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


@given(st.dictionaries(keys, values, max_size=5))
def test_toml_round_trip(tables: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(tables)) == tables


@given(st.floats())
def test_floats_keep_every_bit_and_stay_floats(number: float) -> None:
    parsed_number = tomllib.loads(to_toml({"x": number}))["x"]
    assert isinstance(parsed_number, float) and repr(parsed_number) == repr(number)


def test_none_is_omitted_and_lone_surrogates_are_replaced() -> None:
    assert tomllib.loads(to_toml({"a": None, "b": {"c": None}, "d": "x\ud800"})) == {"b": {}, "d": "x\ufffd"}


def test_values_without_a_toml_form_are_refused() -> None:
    with pytest.raises(TypeError, match="not TOML serializable"):
        to_toml({"x": object()})
