"""Every preset is answered by the native engine as by torch, or refused with the reason."""

from __future__ import annotations

import pytest

from kit.families import build, shrunk
from regard.decode.ensemble import Scorer
from regard.decode.request import Options
from regard.decode.search import search
from regard.presets import PRESETS

pytest.importorskip("regard_native")

from regard_native.core import Core, NativeError

from kit.native_models import BLOCKED, TOLERANCE, describe, make_inputs, native_search

UNSUPPORTED = {"lsh": "mixer lsh", "classes": "generate text", "transformed": "generate text"}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_answered_as_by_torch_or_refused_with_the_reason(name: str) -> None:
    config = shrunk(name, 23, {"ids": {"pad": 0, "unk": 1, "sos": 2, "eos": 3}})
    model = build(config, 1)
    decoder = config.decoder
    if decoder is None or decoder.mixer == "lsh":
        with pytest.raises(NativeError, match=UNSUPPORTED["lsh" if decoder else config.output]):
            describe(model)
        return
    description = describe(model)
    core = Core(description.numbers, description.tensors)
    int8 = Core(description.numbers, description.tensors, int8=True)
    # The positions of these models are few.
    inputs = [item for seed in range(9) for item in make_inputs(config, seed) if len(item.sources[0]) + item.limit < 19]
    inputs = [item for item in inputs if item.phrases is None]
    assert len(inputs) > 3
    for chosen in ({"beam": 1}, {"beam": 4, "nbest": 3}):
        expected = search(Scorer([model], blocked=BLOCKED), inputs, Options(**chosen))
        outputs = native_search(core, inputs, chosen)
        assert [[tuple(x.ids) for x in row] for row in outputs] == [[x.ids for x in row] for row in expected]
        for row, reference in zip(outputs, expected, strict=True):
            for output, other in zip(row, reference, strict=True):
                assert output.token_scores == pytest.approx(other.token_scores, abs=TOLERANCE)
        assert [len(row) > 0 for row in native_search(int8, inputs, chosen)] == [len(row) > 0 for row in expected]
