"""The native engine of regard gives the answers of the torch engine, for one run and for ensembles."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from copy import deepcopy
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import regard
from kit.decoding import language_model, run_of
from kit.toy import call
from regard.decode.engine import TokenStream
from regard.decode.request import Options, Request
from regard.decode.torch_engine import TorchEngine
from regard.errors import UserError
from regard.run import Run
from regard.serve.worker import BatchAnswerer, WorkerBatch

pytest.importorskip("regard_native")

from regard.decode.native import NativeEngine, problem

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


@pytest.mark.parametrize("inputs", [1, 200])
def test_an_interrupt_ends_the_searches_of_all_threads(tmp_path, inputs):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    language_model("rotary", 1).save(tmp_path)
    engine = NativeEngine([Run.load(tmp_path)], Options(min_length=20_000, max_length=20_000), workers=2)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        engine(["ab"] * inputs)
    signal.signal(signal.SIGINT, handler)


def test_copies_of_a_run_pack_their_own_weights(runs):
    run = Run.load(runs[0].path, model=False)
    expected = NativeEngine([run])(["abc"])
    assert NativeEngine([deepcopy(run)])(["abc"]) == expected


def test_the_library_does_not_change_the_threads_of_torch(runs, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", calls.append)
    run = regard.load(runs[1].path)
    run.generate(["abc"], beam=2, coverage_penalty=0.1)  # with torch
    assert run.loaded and not calls


def test_weights_in_bfloat16_are_read_by_torch(tmp_path, runs):
    path = tmp_path / "run"
    shutil.copytree(runs[1].path, path)
    weights = load_file(path / "model.safetensors")
    save_file({name: x.bfloat16() for name, x in weights.items()}, path / "model.safetensors")
    (path / "manifest.json").unlink()
    assert call("generate", path, stdin="abc\n").code == 0
    assert "only torch reads weights of the type BF16" in call("generate", path, "--engine", "native").err


def test_what_an_engine_cannot_do_is_named(runs, monkeypatch: pytest.MonkeyPatch):
    run = regard.load(runs[1].path)
    with pytest.raises(UserError, match="engine: takes a name, not int 3"):
        run.generate(["abc"], engine=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"precision: int8 needs the engine native.*no compiled core"):
        monkeypatch.setattr("regard.decode.native.problem", lambda *_: "no compiled core")
        run.generate(["abc"], precision="int8")
    assert "ctranslate2 does not score" in call("score", run.path, "--engine", "ctranslate2", stdin="a\tb\n").err


def test_a_worker_loads_no_torch_model_for_a_mistake_in_a_request(runs):
    run = Run.load(runs[1].path, model=False)
    answerer = BatchAnswerer({"name": run}, "auto")
    [answer] = answerer.answer(WorkerBatch("name", "generate", '{"prefix": "ß"}', [{"source": "ab"}]))
    assert answer["status"] == 422 and not answerer._loaded["name"].loaded


def test_the_core_refuses_a_stream_with_the_error_of_a_search(tmp_path):
    language_model("rotary", 1).save(tmp_path)
    run = regard.load(tmp_path)
    with pytest.raises(UserError, match="above a million tokens"):
        list(run.stream("a", engine="native", max_length=2_000_000))


@pytest.mark.parametrize("options", [{"beam": 1001}, {"sample": True, "nbest": 1001}, {"max_length": 2_000_000}])
def test_what_is_too_large_for_the_core_is_left_to_torch(toy, options):
    run = Run.load(toy / "run", model=False)
    assert not problem([run], Options()) and "at most 1,000" in problem([run], Options.of(**options))
