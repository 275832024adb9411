"""Explanations of an output: heads, silenced one at a time, and inputs, by gradient x input."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kit.models import FAMILIES, family, letters, picture
from regard.inspect import trace as tracing
from regard.inspect.logit_lens import head_importance
from regard.inspect.trace import Trace, trace, trace_image
from regard.nn.hooks import patch, without
from regard.run import Run
from regard.text.codec import Example

PAIRS = ("transformer-tiny", "rnn-bahdanau", "rnn-luong")


def run_of(kind: str) -> Run:
    run = letters(kind) if kind in PAIRS else family(kind)
    with torch.no_grad():  # random weights as they are drawn make heads that hardly matter
        for name, x in run.model.named_parameters():
            if x.ndim > 1 and "embedding" not in name:
                x.mul_(2.0)
    return run


def traced(run: Run) -> Trace:
    if run.task.reads == "images":
        return trace_image(run, picture())
    return trace(run, Example("abcab"), run.codec.encode_target(["bcd"])[0] if run.task.seq2seq else ())


@pytest.mark.parametrize("kind", [*PAIRS, *(kind for kind in FAMILIES if kind != "vectors")])
def test_importance_is_the_score_lost_without_the_head(kind: str) -> None:
    run = run_of(kind)
    found = traced(run)
    attentions = run.model.attentions()
    assert {name: len(lost) for name, lost in found.importance.items()} == {n: a.heads for n, a in attentions.items()}
    assert [m.name for m in found.maps] == list(found.importance)
    for name, lost in found.importance.items():
        for head, change in enumerate(lost):
            with patch(run.model, {f"{name}.mixed": without(head)}):
                silenced = traced(run)
            labels_kept = [step.token for step in silenced.steps] == [step.token for step in found.steps]
            if labels_kept:  # a classifier may predict another class
                assert change == pytest.approx(found.score - silenced.score, abs=1e-4)
    assert max(abs(change) for lost in found.importance.values() for change in lost) > 1e-3


def test_batches_of_heads_are_as_large_as_the_vocabulary_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("transformer-tiny")
    ids = run.codec.encode_target(["bcd"])[0]
    inputs = (torch.tensor([[4, 5, 6, 3]]), None, torch.tensor([[run.config.start_id, *ids[:-1]]]))
    whole = head_importance(run.model, inputs, ids, 0.0)
    monkeypatch.setattr("regard.inspect.logit_lens.SILENCED_LOGITS", 1)
    alone = head_importance(run.model, inputs, ids, 0.0)
    for name, lost in whole.items():
        assert alone[name] == pytest.approx(lost, abs=1e-4)


def test_what_is_not_measured_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not traced(run_of("vectors")).importance  # it predicts nothing
    monkeypatch.setattr(tracing, "MAX_SILENCED", 1000)
    found = traced(run_of("transformer-tiny"))
    assert not found.importance and any("24 heads was not measured" in note.text for note in found.notes)


@pytest.mark.parametrize("kind", ["masked", "image", "classes"])
def test_attribution_is_the_slope_along_the_embedding(kind: str) -> None:
    run = run_of(kind)
    found = traced(run).attribution
    assert found is not None
    table = run.model.image or run.model.source_embedding
    assert table is not None
    labels = [step.token for step in traced(run).steps]

    def scores(column: int, factor: float) -> list[float]:
        def grow(module: object, inputs: object, out: torch.Tensor) -> torch.Tensor:
            out = out.clone()
            out[:, column] *= factor
            return out

        handle = table.register_forward_hook(grow)
        try:
            steps = traced(run).steps
        finally:
            handle.remove()
        assert [step.token for step in steps] == labels
        return [float(np.log(step.probability)) for step in steps]

    for column in (0, 2, found.values_TS.shape[1] - 1):
        slope = (np.array(scores(column, 1.01)) - np.array(scores(column, 0.99))) / 0.02
        assert np.allclose(slope, found.values_TS[:, column], atol=5e-3, rtol=5e-2)
