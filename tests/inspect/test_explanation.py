"""Explanations of an output: importance of heads by ablation, and of inputs by gradient x input."""

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
    with torch.no_grad():  # with unscaled random weights, heads hardly change the output
        for name, x in run.model.named_parameters():
            if x.ndim > 1 and "embedding" not in name:
                x.mul_(2.0)
    return run


def make_trace(run: Run) -> Trace:
    if run.task.reads == "images":
        return trace_image(run, picture())
    return trace(run, Example("abcab"), run.codec.encode_target(["bcd"])[0] if run.task.seq2seq else ())


@pytest.mark.parametrize("kind", [*PAIRS, *(kind for kind in FAMILIES if kind != "vectors")])
def test_importance_equals_the_score_lost_without_the_head(kind: str) -> None:
    run = run_of(kind)
    result = make_trace(run)
    attentions = run.model.attentions()
    assert {name: len(changes) for name, changes in result.importance.items()} == {
        n: a.heads for n, a in attentions.items()
    }
    assert [m.name for m in result.maps] == list(result.importance)
    for name, changes in result.importance.items():
        for head, change in enumerate(changes):
            with patch(run.model, {f"{name}.mixed": without(head)}):
                silenced = make_trace(run)
            same_labels = [step.token for step in silenced.steps] == [step.token for step in result.steps]
            if same_labels:  # a classifier may predict another class
                assert change == pytest.approx(result.score - silenced.score, abs=1e-4)
    assert max(abs(change) for changes in result.importance.values() for change in changes) > 1e-3


def test_importance_does_not_depend_on_the_batch_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("transformer-tiny")
    ids = run.codec.encode_target(["bcd"])[0]
    inputs = (torch.tensor([[4, 5, 6, 3]]), None, torch.tensor([[run.config.start_id, *ids[:-1]]]))
    batched = head_importance(run.model, inputs, ids, 0.0)
    monkeypatch.setattr("regard.inspect.logit_lens.SILENCED_LOGITS", 1)
    single = head_importance(run.model, inputs, ids, 0.0)
    for name, changes in batched.items():
        assert single[name] == pytest.approx(changes, abs=1e-4)


def test_missing_importance_is_explained_by_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not make_trace(run_of("vectors")).importance  # it makes no prediction
    monkeypatch.setattr(tracing, "MAX_SILENCED", 1000)
    result = make_trace(run_of("transformer-tiny"))
    assert not result.importance and any("24 heads was not measured" in note.text for note in result.notes)


@pytest.mark.parametrize("kind", ["masked", "image", "classes"])
def test_attribution_equals_the_slope_along_the_embedding(kind: str) -> None:
    run = run_of(kind)
    result = make_trace(run).attribution
    assert result is not None
    table = run.model.image or run.model.source_embedding
    assert table is not None
    labels = [step.token for step in make_trace(run).steps]

    def scores(column: int, factor: float) -> list[float]:
        def grow(module: object, inputs: object, out: torch.Tensor) -> torch.Tensor:
            out = out.clone()
            out[:, column] *= factor
            return out

        handle = table.register_forward_hook(grow)
        try:
            steps = make_trace(run).steps
        finally:
            handle.remove()
        assert [step.token for step in steps] == labels
        return [float(np.log(step.probability)) for step in steps]

    for column in (0, 2, result.values_TS.shape[1] - 1):
        slope = (np.array(scores(column, 1.01)) - np.array(scores(column, 0.99))) / 0.02
        assert np.allclose(slope, result.values_TS[:, column], atol=5e-3, rtol=5e-2)
