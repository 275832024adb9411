"""Batches are split when memory runs out; a single input that does not fit is flagged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_classify import classifier

from kit.decoding import run_of, same, sources
from regard.decode.encoder_only import classify
from regard.decode.request import Options
from regard.decode.torch_engine import TorchEngine, WorkerPool, score
from regard.model import Model
from regard.run import Run

TOO_LARGE = "abcdefabcdefabcd"
TEXTS = [*sources(1, 9), TOO_LARGE, *sources(2, 9)]


def limit_memory(monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int) -> list[int]:
    """Make batches with more rows or tokens run out of memory; the result has one entry per failure."""
    failures: list[int] = []

    def with_limit(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Model, source_BS: torch.Tensor, *others: Any) -> Any:
            if source_BS.shape[0] > rows or source_BS.shape[1] > tokens:
                failures.append(1)
                torch.empty(1 << 60)
            return original(self, source_BS, *others)

        return call

    for name in ("encode", "hidden", "forward"):
        monkeypatch.setattr(Model, name, with_limit(getattr(Model, name)))
    return failures


OPTIONS = [
    Options(max_length=8),
    Options(max_length=8, beam=3, nbest=2, alignment=True, top_tokens=2),
    Options(max_length=8, sample=True, nbest=2),
]


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "beam", "sample"])
@pytest.mark.parametrize("workers", [1, 2])
def test_generate_splits_batches_that_do_not_fit(
    options: Options, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.decode.torch_engine.can_fork", lambda: True)
    engine = TorchEngine(run_of("transformer-tiny", 3), options)
    expected = engine(TEXTS)
    failures = limit_memory(monkeypatch, rows=4, tokens=len(TOO_LARGE))
    with WorkerPool(engine, workers, always=True) if workers > 1 else engine as ours:
        answers = ours(TEXTS)
    assert failures
    for text, answer, reference in zip(TEXTS, answers, expected, strict=True):
        if text == TOO_LARGE:
            assert [h.text for h in answer] == [""] and "17 tokens, even on its own" in answer[0].flags["out_of_memory"]
        else:
            assert same(answer, reference) and [h.flags for h in answer] == [h.flags for h in reference]


def test_score_splits_batches_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("transformer-tiny", 3)
    pairs = [(text, text[::-1]) for text in TEXTS]
    expected = list(score(run, pairs))
    assert limit_memory(monkeypatch, rows=4, tokens=len(TOO_LARGE)) == []
    for (text, _), ours, reference in zip(pairs, score(run, pairs), expected, strict=True):
        if text == TOO_LARGE:
            assert "34 tokens" in ours.flags["out_of_memory"] and ours.as_dict()["score"] is None
        else:
            assert ours.score == pytest.approx(reference.score, abs=1e-5) and not ours.flags


def test_classify_splits_batches_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Run = classifier({"position": "rotary"})
    expected = classify(run, TEXTS)
    failures = limit_memory(monkeypatch, rows=4, tokens=len(TOO_LARGE) + 1)
    for text, ours, reference in zip(TEXTS, classify(run, TEXTS), expected, strict=True):
        if text == TOO_LARGE:
            assert "18 tokens" in ours.flags["out_of_memory"] and not ours.label
        else:
            assert ours.label == reference.label and ours.probabilities == pytest.approx(
                reference.probabilities, abs=1e-5
            )
    assert failures
