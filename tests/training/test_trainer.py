"""The training loop: non-finite steps, the best weights, averages, budgets and intervals of saves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.backwards import MakeRecipe
from regard.errors import UserError
from regard.recipe import Recipe
from regard.run import Run
from regard.training.checkpoint import Checkpoints, Progress
from regard.training.fit import fit
from regard.training.log import read_log
from regard.training.report import Event, Reporter
from regard.training.step import Stepper
from regard.training.trainer import Trainer


def events(run: Path, kind: str) -> list[Event]:
    return [event for event in read_log(run / "log.jsonl") if event["event"] == kind]


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make the loss of the given steps NaN."""
    original = Stepper.backward

    def backward(self: Stepper, step: int, shares: Any) -> list[float]:
        if step in steps:
            shares = [(batch, math.nan) for batch, _ in shares]
        return original(self, step, shares)

    monkeypatch.setattr(Stepper, "backward", backward)


def test_non_finite_steps_are_skipped_and_counted(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {2, 5, 6, 8})
    progress = fit(recipe(steps=9), tmp_path / "run", reporter=Reporter()).progress
    assert (progress.skipped, progress.skipped_in_a_row) == (4, 0)
    assert [event["step"] for event in events(tmp_path / "run", "skip")] == [2, 5, 6, 8]
    model = Run.load(tmp_path / "run").model
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert all(math.isfinite(event["loss"]) for event in events(tmp_path / "run", "train"))


def test_three_consecutive_non_finite_steps_stop_the_run_with_advice(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {2, 6, 7, 8})
    with pytest.raises(UserError, match=r"(?s)diverges.*step 8.*train\.lr.*warm-up"):
        fit(recipe(steps=20), tmp_path / "run", reporter=Reporter())
    assert Checkpoints(tmp_path / "run").steps() == [4]
    assert all(torch.isfinite(x).all() for x in Checkpoints(tmp_path / "run").tensors(4, "model").values())


def script_scores(monkeypatch: pytest.MonkeyPatch, scores: list[float]) -> None:
    """Replace the scores of validations."""
    remaining = iter(scores)
    monkeypatch.setattr(
        "regard.training.validation.PairValidation.__call__", lambda self, model: {"loss": 1.0, "wer": next(remaining)}
    )


def record_weights(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """The output weights at each validation by step; -1 for the validation of the mean."""
    snapshots: dict[int, torch.Tensor] = {}
    original = Trainer._scores

    def scores(self: Trainer, weights: Any) -> Any:
        source = self.model.output.weight if weights is None else weights["target_embedding.weight"]
        snapshots[self.progress.step if self.progress.validated != self.progress.step else -1] = source.detach().clone()
        return original(self, weights)

    monkeypatch.setattr(Trainer, "_scores", scores)
    return snapshots


def train(order: Recipe, run: Path) -> torch.Tensor:
    fit(order, run, reporter=Reporter())
    return Run.load(run).model.output.weight.detach()


def test_run_has_the_weights_of_the_best_step(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_scores(monkeypatch, [50.0, 30.0, math.nan, 40.0])
    snapshots = record_weights(monkeypatch)
    weights = train(recipe(steps=8, validate_every=2, metric="wer"), tmp_path / "run")
    assert torch.equal(weights, snapshots[4])
    assert [event["best"] for event in events(tmp_path / "run", "valid")] == [True, True, False, False]
    assert events(tmp_path / "run", "end")[0]["best_step"] == 4


def test_patience_ends_the_run(recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script_scores(monkeypatch, [50.0, 30.0, 31.0, 30.0, 20.0])
    progress = fit(
        recipe(steps=99, validate_every=2, metric="wer", patience=2), tmp_path / "run", reporter=Reporter()
    ).progress
    assert (progress.step, progress.finished) == (8, "patience")


@pytest.mark.parametrize(("score", "used"), [(9.0, True), (10.0, True), (11.0, False)])
def test_mean_of_checkpoints_is_used_unless_it_is_worse(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, score: float, used: bool
) -> None:
    script_scores(monkeypatch, [40.0, 30.0, 20.0, 10.0, score])
    snapshots = record_weights(monkeypatch)
    weights = train(recipe(steps=8, validate_every=2, metric="wer", average=3), tmp_path / "run")
    mean = torch.stack([snapshots[4], snapshots[6], snapshots[8]]).double().mean(0).float()
    torch.testing.assert_close(snapshots[-1], mean, rtol=0, atol=1e-7)
    assert torch.equal(weights, snapshots[-1] if used else snapshots[8])
    assert events(tmp_path / "run", "average")[0]["best"] is used
    assert len(list((tmp_path / "run/training").glob("weights-*"))) == 3


def test_run_has_the_weights_of_the_moving_average(recipe: MakeRecipe, tmp_path: Path) -> None:
    weights = train(recipe(steps=8, ema=0.5), tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run")
    assert torch.equal(weights, checkpoints.tensors(8, "ema")["target_embedding.weight"])
    assert not torch.equal(weights, checkpoints.tensors(8, "model")["target_embedding.weight"])


def test_training_ends_at_the_budget(recipe: MakeRecipe, tmp_path: Path) -> None:
    def outcome(name: str, **settings: Any) -> Any:
        progress = fit(
            recipe(**{"steps": None, "validate_every": None, **settings}), tmp_path / name, reporter=Reporter()
        ).progress
        return progress.finished, progress.step, progress.epoch

    reason, steps, epochs = outcome("epochs", epochs=2)
    assert (reason, epochs) == ("epochs", 2) and steps >= 24
    assert outcome("both", epochs=2, steps=5)[:2] == ("steps", 5)
    reason, steps, _ = outcome("minutes", minutes=0.01)
    assert reason == "minutes" and steps > 0


def test_frequent_saves_do_not_change_the_weights(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = train(recipe(steps=8), tmp_path / "a")
    monkeypatch.setattr("regard.training.trainer.CHECKPOINT_SECONDS", 0.0)  # after every step
    monkeypatch.setattr("regard.training.trainer.SAVING_SHARE", 1.0)
    b = train(recipe(steps=8), tmp_path / "b")
    assert torch.equal(a, b)


@pytest.mark.parametrize(("save", "due"), [(0.5, 120.0), (5.9, 120.0), (60.0, 1200.0)])
def test_saving_takes_at_most_a_twentieth_of_the_time(save: float, due: float) -> None:
    trainer = Trainer.__new__(Trainer)
    trainer.progress, trainer._saved_at, trainer._save_seconds = Progress(seconds=100.0), 100.0, None
    # the first call after a save measures its duration
    for seconds, expected in ((save, False), (due - 1, False), (due, True)):
        trainer.progress.seconds = 100.0 + seconds
        assert trainer._checkpoint_due() == expected
