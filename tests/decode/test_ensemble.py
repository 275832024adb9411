"""Ensembles search with a weighted mean of log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kit.decoding import NAMES, blank, run_of, same, sources, tokenizer
from regard.decode.request import Options
from regard.decode.torch_engine import generate, score
from regard.errors import UserError
from regard.run import Run
from regard.text.codec import Codec, Example


@pytest.mark.parametrize("settings", [{}, {"beam": 3, "nbest": 3}, {"sample": True}])
@pytest.mark.parametrize("name", NAMES)
def test_ensemble_of_identical_runs_equals_the_single_run(name: str, settings: dict[str, object]) -> None:
    run = run_of(name, 1)
    texts = sources(1, 6)
    options = Options.of(max_length=9, **settings)
    assert all(map(same, generate(run, texts, options), generate([run, run], texts, options)))


def test_ensemble_members_may_differ_in_architecture_and_source_vocabulary() -> None:
    transformer, recurrent = run_of("transformer-tiny", 1), run_of("rnn-bahdanau", 2)
    byte = Codec(tokenizer("byte"), tokenizer("char"))
    other = Run((model := blank("rnn-luong", 3, byte)).config, byte, model, Path("bytes"))
    runs = [transformer, recurrent, other]
    texts = sources(2, 6)
    for settings in ({}, {"beam": 3}, {"beam": 3, "require": ("cab",), "prefix": "f", "coverage_penalty": 0.2}):
        options = Options.of(max_length=10, weights=(2.0, 1.0, 0.5), alignment=True, **settings)
        for text, (h, *_) in zip(texts, generate(runs, texts, options), strict=True):
            (scored,) = score(runs, [(text, h.text)], options)
            assert scored.token_scores == pytest.approx(h.token_scores, abs=1e-5)
            assert h.alignment is not None and len(h.alignment.soft) == len(h.ids) - 1


def test_ensemble_scores_are_the_weighted_mean_of_log_probabilities() -> None:
    runs = [run_of("transformer-tiny", 1), run_of("rnn-luong", 2)]
    (scored,) = score(runs, [("fad", "be")], Options(weights=(3.0, 1.0)))
    logits = []
    for run in runs:
        source = torch.tensor(run.codec.encode_source([Example("fad")]))
        target = run.codec.encode_target(["be"])[0]
        with torch.no_grad():
            logits.append(run.model(source, None, torch.tensor([[2, *target[:-1]]]))[0].log_softmax(-1))
    mean = (0.75 * logits[0] + 0.25 * logits[1]).log_softmax(-1)
    assert scored.token_scores == pytest.approx(
        mean.gather(1, torch.tensor(target)[:, None]).flatten().tolist(), abs=1e-5
    )


def test_incompatible_runs_are_refused() -> None:
    with pytest.raises(UserError, match="target vocabulary"):
        list(generate([run_of("rnn-luong", 0), run_of("rnn-luong", 0, "char", "ab")], ["a"]))
    with pytest.raises(UserError, match="target vocabulary"):
        list(generate([run_of("rnn-luong", 0), run_of("rnn-luong", 0, "char", "abcdeg")], ["a"]))
    with pytest.raises(UserError, match=r"weights: 1 given for 2 runs"):
        list(generate([run_of("rnn-luong", 0)] * 2, ["a"], Options(weights=(1.0,))))
    with pytest.raises(UserError, match="no run"):
        list(generate([], ["a"]))
