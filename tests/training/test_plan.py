from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from kit.backwards import TINY, MakeRecipe, write_pairs
from regard.data.prepare import prepare
from regard.errors import plural
from regard.presets import PRESETS, preset
from regard.recipe import Recipe, Train, load_recipe
from regard.run import saved_recipe
from regard.tasks import TASKS
from regard.training import plan as planning
from regard.training.checkpoint import Progress
from regard.training.fit import fit
from regard.training.loader import make_loader
from regard.training.plan import (
    Budget,
    Plan,
    choose_workers,
    describe_plan,
    measure_step,
    plan_run,
    planned_rates,
    presets_for,
)
from regard.training.report import Reporter
from regard.training.trainer import validation_due


def since(steps: int, seconds: float, validation_seconds: float, total_seconds: float) -> Progress:
    """Progress so many steps and seconds after the last validation, which was at step 5."""
    return Progress(
        step=5 + steps,
        validated=5,
        seconds=total_seconds,
        validated_at=total_seconds - seconds,
        validation_seconds=validation_seconds,
    )


def test_without_a_budget_ten_minutes() -> None:
    assert Budget.of(Train()) == Budget(600, None, None)
    assert Budget.of(Train(steps=5)) == Budget(None, 5, None)


def test_the_first_to_run_out_counts() -> None:
    budget = Budget(seconds=100, steps=10, epochs=2)
    assert budget.done(5, 0.5, 90) == (0.9, "minutes")
    assert budget.done(10, 0.5, 90) == (1.0, "steps")
    assert budget.done(9, 2.0, 90) == (1.0, "epochs")


@given(st.integers(1, 500), st.integers(1, 100_000))
def test_step_budgets_validate_at_most_forty_times(per_epoch: int, steps: int) -> None:
    budget = Budget(None, steps, None)
    every = next(n for n in range(1, 10**6) if validation_due(None, per_epoch, budget, since(n, 0, 0, 0)))
    assert every >= per_epoch
    assert steps // every <= 40


def test_an_explicit_interval_is_obeyed() -> None:
    assert not validation_due(7, 3, Budget(600, None, None), since(6, 1000, 0, 1000))
    assert validation_due(7, 3, Budget(600, None, None), since(7, 0, 99, 99))


def test_time_budgets_validate_by_the_clock() -> None:
    budget = Budget(600, None, None)
    assert not validation_due(None, 100, budget, since(200, 10, 0, 10))  # two epochs, but only 10 of 600 seconds
    assert validation_due(None, 100, budget, since(100, 15, 0, 15))
    assert not validation_due(None, 100, budget, since(99, 15, 0, 15))
    assert validation_due(None, 10**6, budget, since(50, 60, 0, 60))  # no epoch in sight: every tenth of the time
    assert not validation_due(None, 100, budget, since(200, 50, 6, 55))  # validation has had its share


def test_processes() -> None:
    def workers(
        train: Train, device: str = "cpu", cores: int = 4, examples: int = 8000, rows: int = 80, length: int = 10
    ) -> int:
        return choose_workers(train, device, cores, examples, rows, rows * length)[0]

    assert workers(Train()) == 4
    assert workers(Train(workers=3), cores=1) == 3
    assert workers(Train(), device="cuda") == 1
    assert workers(Train(), cores=1) == 1
    assert workers(Train(), examples=500) == 1
    assert workers(Train(steps=50)) == 1
    assert workers(Train(minutes=0.1)) == 1
    assert workers(Train(), rows=16) == 2
    assert workers(Train(), rows=1) == 1
    assert workers(Train(), rows=16, length=64) == 4  # few rows, but long ones
    assert workers(Train(), rows=3, length=1000) == 3


CPU = torch.device("cpu")


class Messages(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def corpus(examples: int, length: int) -> Any:
    return SimpleNamespace(tokens=2 * examples * length)


def test_more_data_never_means_a_smaller_model() -> None:
    order = TASKS["pairs"].presets
    assert set(order) <= set(PRESETS)
    for device in ("cpu", "cuda"):
        largest = [presets_for(TASKS["pairs"], corpus(n, 10), device)[0] for n in (1, 500, 10**4, 10**5, 10**6)]
        assert [order.index(name) for name in largest] == sorted(order.index(name) for name in largest)
        assert largest[0] == order[0] and largest[-1] == order[-1 if device == "cuda" else -2]


def made_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float | None, **train: Any) -> tuple[Plan, str]:
    """The plan for 8,000 pairs of letters on a machine where a step of transformer-mini takes so many seconds."""

    def measured(recipe: Recipe, config: Any, loader: Any, device: torch.device) -> float:
        assert seconds is not None, "a budget of steps needs no measurement"
        return seconds * {"transformer-tiny": 0.5, "transformer-mini": 1.0}[recipe.preset]

    monkeypatch.setattr(planning, "measure_step", measured)
    monkeypatch.setattr(planning, "bf16_problem", lambda device: "not tried")
    messages = Messages()
    order = load_recipe({"data": {"train": str(write_pairs(tmp_path / "pairs.tsv", 8000))}, "train": train})
    prepared = prepare(order, tmp_path / "data")
    return plan_run(order, None, prepared, CPU, 1, messages), "\n".join(messages.lines)


@pytest.mark.parametrize(("minutes", "chosen"), [(0.5, "transformer-tiny"), (5, "transformer-mini")])
def test_the_budget_shapes_the_run(
    minutes: float, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, messages = made_plan(tmp_path, monkeypatch, 0.1, minutes=minutes)
    train = plan.recipe.train
    assert plan.recipe.preset == chosen and f"preset: {chosen}" in messages
    assert train.batch_examples == 64
    assert 0 < train.warmup <= 0.15 * plan.steps
    assert 0.5 < plan.steps * plan.seconds / (60 * minutes) <= 1  # type: ignore[operator]
    assert f"plan: about {plan.steps:,} steps of 64 examples" in messages and f"warm-up {train.warmup}" in messages
    assert 1 / (1 - train.ema) <= plan.steps / 4
    assert "warning" not in messages


def test_a_budget_of_steps_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, messages = made_plan(tmp_path, monkeypatch, None, steps=900)
    assert plan.steps == 900 and plan.recipe.train.warmup < 200
    assert "plan: 900 steps of 64 examples" in messages
    plan, _ = made_plan(tmp_path, monkeypatch, None, epochs=3)
    assert plan.steps == 3 * len(plan.loader.batches(0)) and plan.epochs == 3


def test_what_is_given_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"warmup": 7, "lr": 0.003, "ema": 0.0, "batch_tokens": 999, "metric": "loss", "precision": "fp32"}
    plan, _ = made_plan(tmp_path, monkeypatch, 0.1, minutes=5, **given)
    assert {name: getattr(plan.recipe.train, name) for name in given} == given
    assert plan.recipe.train.batch_examples is None


def test_a_budget_that_is_too_small_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, messages = made_plan(tmp_path, monkeypatch, 5.0, minutes=1.5)
    assert "warning: the budget is too small" in messages and "minutes on this machine" in messages
    _, messages = made_plan(tmp_path, monkeypatch, 0.1, minutes=5, warmup=2000)
    assert "warning: train.warmup is 2,000 of about" in messages


def described(planned: int, batches: int = 10, seconds: float | None = None, **train: Any) -> list[str]:
    """A plan of so many steps in words; an epoch has so many batches of 64 examples."""
    recipe = load_recipe({"train": {"batch_examples": 64, **train}})
    loader: Any = SimpleNamespace(batches=lambda epoch: range(batches), examples=64 * batches)
    config: Any = None  # is not described
    return describe_plan(Plan(recipe, config, loader, "", planned, seconds), recipe.train)


@pytest.mark.parametrize(("epochs", "words"), [(1, "1 epoch"), (140, "140 epochs"), (12_345, "12,345 epochs")])
def test_epochs_are_counted_in_plain_numbers(epochs: int, words: str) -> None:
    (line,) = described(1000 * epochs, batches=1000, epochs=epochs)
    assert line.startswith(f"plan: {1000 * epochs:,} steps of 64 examples, {words}; learning rate ")


@given(st.integers(1, 10**7), st.integers(1, 1000))
def test_the_epochs_of_a_plan_can_be_read_back(steps: int, batches: int) -> None:
    found = re.search(r" examples, ([0-9.,]+) (epochs?);", described(steps, batches, steps=steps)[0])
    assert found is not None and (found[1] == "1") == (found[2] == "epoch")
    assert float(found[1].replace(",", "")) == pytest.approx(steps / batches, rel=0.051)


@pytest.mark.parametrize(
    ("steps", "budget", "words"),
    [
        (1, {"steps": 1}, ": 1 step; use at least 200 steps"),
        (10, {"epochs": 1}, ": 1 epoch; use at least 20 epochs"),
        (5, {"steps": 5, "epochs": 1}, ": 5 steps; use at least 200 steps"),
        (10, {"steps": 50, "epochs": 1}, ": 1 epoch; use at least 20 epochs"),
        (10, {"minutes": 60, "epochs": 1}, ": 1 epoch; use at least 20 epochs"),
        (10, {"minutes": 0.05, "epochs": 9}, "; use at least about 1 minute on this machine"),
        (10, {"minutes": 1.5}, "; use at least about 30 minutes on this machine"),
    ],
)
def test_the_warning_speaks_of_the_budget_that_runs_out(steps: int, budget: dict[str, Any], words: str) -> None:
    plan, warning = described(steps, seconds=2.0 if "minutes" in budget else None, **budget)
    assert plan.startswith(f"plan: {'about ' * ('minutes' in budget)}{plural(steps, 'step')} of 64 examples, ")
    assert warning.startswith("warning: the budget is too small for this data") and warning.endswith(words)


@pytest.mark.parametrize("noun", ["step", "epoch"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_budget_that_is_recommended_is_enough(noun: str, count: int) -> None:
    def lines(count: int) -> list[str]:
        return described(count * (1 if noun == "step" else 10), **{f"{noun}s": count})

    enough = re.search(rf"{plural(count, noun)}; use at least ([0-9,]+) {noun}s", lines(count)[-1])
    assert enough is not None and len(lines(int(enough[1].replace(",", "")))) == 1


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "settings", [{}, {"start_from": "run"}, {"start_from": "run", "lora": 4}, {"schedule": "linear"}, {"l0": 0.1}]
)
@pytest.mark.parametrize("steps", [1, 60, 900, 1_000_000])
def test_the_warm_up_is_a_share_of_the_steps_for_every_task(task: str, settings: dict[str, Any], steps: int) -> None:
    order = load_recipe({"task": task, "train": settings})
    loader: Any = SimpleNamespace(examples=640, batches=lambda epoch: range(10))
    plan = Plan(order, preset(TASKS[task].presets[0], 50), loader, "", steps, None)
    assert planned_rates(order.train, plan)["warmup"] == max(1, min(4_000, round(steps / 8)))
    given = Train(warmup=3, **settings)
    plan = plan._replace(recipe=order.model_copy(update={"train": given}))
    assert "warmup" not in planned_rates(given, plan)


def test_time_for_many_steps_goes_into_larger_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, _ = made_plan(tmp_path, monkeypatch, 0.1, minutes=10)
    long, _ = made_plan(tmp_path, monkeypatch, 0.1, minutes=100)
    assert long.recipe.train.batch_examples == 4 * (short.recipe.train.batch_examples or 0)
    assert long.epochs == pytest.approx(10 * short.epochs, rel=0.1)


def test_measuring_leaves_no_trace(recipe: MakeRecipe, tmp_path: Path) -> None:
    prepared, order = prepare(recipe(), tmp_path / "data"), recipe()
    config = preset("transformer-tiny", 50)
    loader, state, threads = make_loader(order, prepared, config), torch.get_rng_state(), torch.get_num_threads()
    assert 0 < measure_step(order, config, loader, CPU) < 10
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_resuming_does_not_plan_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": str(write_pairs(tmp_path / "pairs.tsv", 60))}
    tables: dict[str, Any] = {"data": data, "model": {"encoder": TINY, "decoder": TINY}, "train": {"steps": 4}}
    fit(load_recipe(tables), tmp_path / "run", reporter=Reporter())
    planned = saved_recipe(tmp_path / "run")
    monkeypatch.setattr("regard.training.fit.plan_run", None)
    tables["train"]["steps"] = 8
    fit(load_recipe(tables), tmp_path / "run", resume=True, reporter=Reporter())
    resumed = saved_recipe(tmp_path / "run")
    assert resumed.train.steps == 8
    assert resumed.train.model_copy(update={"steps": 4}) == planned.train


def test_a_short_run_without_settings_learns(tmp_path: Path) -> None:
    draw = random.Random(5)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 5))) for _ in range(1500)]
    (tmp_path / "pairs.tsv").write_text("".join(f"{word}\t{' '.join(word.upper())}\n" for word in words))
    order = load_recipe({"data": {"train": str(tmp_path / "pairs.tsv")}, "train": {"steps": 300, "workers": 1}})
    report = fit(order, tmp_path / "run", reporter=Reporter())
    assert report.metric == "wer" and report.value is not None and report.value < 30
