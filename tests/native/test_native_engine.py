"""The native engine of regard gives the answers of the torch engine, for one run and for ensembles."""

from __future__ import annotations

from typing import Any

import pytest

from kit.decoding import run_of
from regard.decode.engine import TokenStream
from regard.decode.request import Options, Request
from regard.decode.torch_engine import TorchEngine
from regard.run import Run

pytest.importorskip("regard_native")

from regard.decode.native import NativeEngine

TOLERANCE = 1e-4
REQUESTS = [
    Request("abc"),
    Request("cabba", require=("fa",), prefix="b", min_length=3),
    Request("fade", forbid=("ab",), stop=("dd",), max_length=7, seed=4),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"beam": 3, "nbest": 2, "top_tokens": 3, "alignment": True},
    {"sample": True, "nbest": 3, "top_k": 5, "temperature": 1.5},
    {"mbr": 4, "utility": "exact"},
    {"alternatives": 4, "alternatives_at": 2, "beam": 2},
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """A recurrent run and a Transformer with the same target vocabulary."""
    directory = tmp_path_factory.mktemp("runs")
    names = "rnn-luong", "transformer-tiny"
    for name in names:
        run_of(name, 1).save(directory / name)
    return [Run.load(directory / name) for name in names]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda chosen: "-".join(chosen) or "greedy")
def test_answers_equal_those_of_torch(runs, chosen, count):
    options = Options.of(max_length=12, weights=(1.0, 3.0) if count == 2 else (), **chosen)
    native, other = NativeEngine(runs[:count], options), TorchEngine(runs[:count], options)
    for row, reference in zip(native(REQUESTS), other(REQUESTS), strict=True):
        assert [(h.ids, h.text, h.flags) for h in row] == [(h.ids, h.text, h.flags) for h in reference]
        for hypothesis, expected in zip(row, reference, strict=True):
            assert hypothesis.token_scores == pytest.approx(expected.token_scores, abs=TOLERANCE)
            for ours, theirs in zip(hypothesis.top_tokens, expected.top_tokens, strict=True):
                assert [token for token, _ in ours] == [token for token, _ in theirs]
            if expected.alignment is not None:
                assert hypothesis.alignment.soft == pytest.approx(expected.alignment.soft, abs=TOLERANCE)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("chosen", [{"top_tokens": 2}, {"sample": True}], ids=["greedy", "sample"])
def test_streams_equal_those_of_torch(runs, chosen, count):
    options = Options.of(max_length=12, **chosen)
    engines = NativeEngine(runs[:count], options), TorchEngine(runs[:count], options)
    for request in REQUESTS:
        streams = [TokenStream(engine, engine.prepare([request])[0]) for engine in engines]
        ours, theirs = map(list, streams)
        assert [(piece.id, piece.text) for piece in ours] == [(piece.id, piece.text) for piece in theirs]
        assert [len(piece.top_tokens) for piece in ours] == [len(piece.top_tokens) for piece in theirs]
        assert streams[0].hypothesis.ids == streams[1].hypothesis.ids


def test_forced_scores_of_an_ensemble_equal_those_of_torch(runs):
    options = Options.of(weights=(1.0, 2.0))
    native, other = NativeEngine(runs, options), TorchEngine(runs, options)
    sources = [item.sources for item in native.prepare(["abc", "fade"])]
    targets = [[5, 6, 3], [7, 3]]
    for ours, theirs in zip(native.force(sources, targets), other.force(sources, targets), strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)
