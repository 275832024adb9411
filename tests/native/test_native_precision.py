"""In double precision, the native engine equals the reference search."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from regard.decode.ensemble import Scorer
from regard.decode.request import Options
from regard.decode.search import search

pytest.importorskip("regard_native")

from regard_native import core

from kit.native_build import CAN_BUILD, build
from kit.native_models import (
    BLOCKED,
    configs,
    describe,
    double_precision,
    make_inputs,
    make_model,
    native_search,
    options,
)

TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def double_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The engine compiled in double precision."""
    directory = build(tmp_path_factory.mktemp("double"), "-O1", "-DRN_DOUBLE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "_library", core.load_library(directory))
        yield


@pytest.mark.skipif(not CAN_BUILD, reason="needs g++ and the sources")
@pytest.mark.slow
@settings(max_examples=300)
@given(config=configs(), chosen=options(), seed=st.integers(0, 1000))
def test_outputs_in_double_precision_equal_those_of_the_reference(double_library, config, chosen, seed):
    model = make_model(config, seed)
    description = describe(model)
    inputs = make_inputs(config, seed)
    with double_precision():
        expected = search(Scorer([model.double()], blocked=BLOCKED), inputs, Options(**chosen))
    engine = core.Core(description.numbers, description.tensors, kernels="portable")
    for outputs, reference in zip(native_search(engine, inputs, chosen), expected, strict=True):
        assert [tuple(output.ids) for output in outputs] == [output.ids for output in reference]
        for output, other in zip(outputs, reference, strict=True):
            assert output.token_scores == pytest.approx(other.token_scores, abs=TOLERANCE)
            if chosen["beam"] > 1:
                assert output.value == pytest.approx(other.value, abs=TOLERANCE)
