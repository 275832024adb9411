"""Planning of a run: budget, validation interval, processes, preset, batch size and learning rate."""

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


def progress_after(steps: int, seconds: float, validation_seconds: float, total_seconds: float) -> Progress:
    """Progress at the given number of steps and seconds after the last validation, which was at step 5."""
    return Progress(
        step=5 + steps,
        validated=5,
        seconds=total_seconds,
        validated_at=total_seconds - seconds,
        validation_seconds=validation_seconds,
    )


def test_default_budget_is_ten_minutes() -> None:
    assert Budget.of(Train()) == Budget(600, None, None)
    assert Budget.of(Train(steps=5)) == Budget(None, 5, None)


def test_budget_ends_at_the_first_limit_reached() -> None:
    budget = Budget(seconds=100, steps=10, epochs=2)
    assert budget.done(5, 0.5, 90) == (0.9, "minutes")
    assert budget.done(10, 0.5, 90) == (1.0, "steps")
    assert budget.done(9, 2.0, 90) == (1.0, "epochs")


@given(st.integers(1, 500), st.integers(1, 100_000))
def test_step_budgets_validate_at_most_forty_times(per_epoch: int, steps: int) -> None:
    budget = Budget(None, steps, None)
    every = next(n for n in range(1, 10**6) if validation_due(None, per_epoch, budget, progress_after(n, 0, 0, 0)))
    assert every >= per_epoch
    assert steps // every <= 40


def test_explicit_validation_interval_overrides_the_budget() -> None:
    assert not validation_due(7, 3, Budget(600, None, None), progress_after(6, 1000, 0, 1000))
    assert validation_due(7, 3, Budget(600, None, None), progress_after(7, 0, 99, 99))


def test_time_budgets_validate_by_elapsed_time() -> None:
    budget = Budget(600, None, None)
    # two epochs, but only 10 of 600 seconds
    assert not validation_due(None, 100, budget, progress_after(200, 10, 0, 10))
    assert validation_due(None, 100, budget, progress_after(100, 15, 0, 15))
    assert not validation_due(None, 100, budget, progress_after(99, 15, 0, 15))
    # the epoch is longer than the budget: validation after every tenth of the time
    assert validation_due(None, 10**6, budget, progress_after(50, 60, 0, 60))
    # validation has used its share of the time
    assert not validation_due(None, 100, budget, progress_after(200, 50, 6, 55))


def test_number_of_processes_depends_on_device_cores_data_and_budget() -> None:
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
    assert workers(Train(), rows=16, length=64) == 4  # few rows, but long
    assert workers(Train(), rows=3, length=1000) == 3


CPU = torch.device("cpu")


class Messages(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def corpus(examples: int, length: int) -> Any:
    return SimpleNamespace(tokens=2 * examples * length)


def test_more_data_never_selects_a_smaller_preset() -> None:
    order = TASKS["pairs"].presets
    assert set(order) <= set(PRESETS)
    for device in ("cpu", "cuda"):
        largest = [presets_for(TASKS["pairs"], corpus(n, 10), device)[0] for n in (1, 500, 10**4, 10**5, 10**6)]
        assert [order.index(name) for name in largest] == sorted(order.index(name) for name in largest)
        assert largest[0] == order[0] and largest[-1] == order[-1 if device == "cuda" else -2]


def make_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float | None, **train: Any) -> tuple[Plan, str]:
    """Plan and messages for 8,000 pairs if a step of transformer-mini takes the given number of seconds."""

    def measure(recipe: Recipe, config: Any, loader: Any, device: torch.device) -> float:
        assert seconds is not None, "a budget in steps needs no measurement"
        return seconds * {"transformer-tiny": 0.5, "transformer-mini": 1.0}[recipe.preset]

    monkeypatch.setattr(planning, "measure_step", measure)
    monkeypatch.setattr(planning, "bf16_problem", lambda device: "not tried")
    messages = Messages()
    order = load_recipe({"data": {"train": str(write_pairs(tmp_path / "pairs.tsv", 8000))}, "train": train})
    prepared = prepare(order, tmp_path / "data")
    return plan_run(order, None, prepared, CPU, 1, messages), "\n".join(messages.lines)


@pytest.mark.parametrize(("minutes", "preset_name"), [(0.5, "transformer-tiny"), (5, "transformer-mini")])
def test_preset_batch_size_and_rates_follow_the_time_budget(
    minutes: float, preset_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, messages = make_plan(tmp_path, monkeypatch, 0.1, minutes=minutes)
    train = plan.recipe.train
    assert plan.recipe.preset == preset_name and f"preset: {preset_name}" in messages
    assert train.batch_examples == 64
    assert 0 < train.warmup <= 0.15 * plan.steps
    assert 0.5 < plan.steps * plan.seconds / (60 * minutes) <= 1  # type: ignore[operator]
    assert f"plan: about {plan.steps:,} steps of 64 examples" in messages and f"warm-up {train.warmup}" in messages
    assert 1 / (1 - train.ema) <= plan.steps / 4
    assert "warning" not in messages


def test_budgets_in_steps_or_epochs_need_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, messages = make_plan(tmp_path, monkeypatch, None, steps=900)
    assert plan.steps == 900 and plan.recipe.train.warmup < 200
    assert "plan: 900 steps of 64 examples" in messages
    plan, _ = make_plan(tmp_path, monkeypatch, None, epochs=3)
    assert plan.steps == 3 * len(plan.loader.batches(0)) and plan.epochs == 3


def test_plan_keeps_explicit_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"warmup": 7, "lr": 0.003, "ema": 0.0, "batch_tokens": 999, "metric": "loss", "precision": "fp32"}
    plan, _ = make_plan(tmp_path, monkeypatch, 0.1, minutes=5, **settings)
    assert {name: getattr(plan.recipe.train, name) for name in settings} == settings
    assert plan.recipe.train.batch_examples is None


def test_small_budgets_and_long_warm_ups_cause_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, messages = make_plan(tmp_path, monkeypatch, 5.0, minutes=1.5)
    assert "warning: the budget is too small" in messages and "minutes on this machine" in messages
    _, messages = make_plan(tmp_path, monkeypatch, 0.1, minutes=5, warmup=2000)
    assert "warning: train.warmup is 2,000 of about" in messages


def describe(planned: int, batches: int = 10, seconds: float | None = None, **train: Any) -> list[str]:
    """The description of a plan with `planned` steps; an epoch has `batches` batches of 64 examples."""
    recipe = load_recipe({"train": {"batch_examples": 64, **train}})
    loader: Any = SimpleNamespace(batches=lambda epoch: range(batches), examples=64 * batches)
    config: Any = None  # not part of the description
    return describe_plan(Plan(recipe, config, loader, "", planned, seconds), recipe.train)


@pytest.mark.parametrize(("epochs", "words"), [(1, "1 epoch"), (140, "140 epochs"), (12_345, "12,345 epochs")])
def test_plan_line_contains_the_number_of_epochs(epochs: int, words: str) -> None:
    (line,) = describe(1000 * epochs, batches=1000, epochs=epochs)
    assert line.startswith(f"plan: {1000 * epochs:,} steps of 64 examples, {words}; learning rate ")


@given(st.integers(1, 10**7), st.integers(1, 1000))
def test_epochs_in_the_plan_line_match_the_steps(steps: int, batches: int) -> None:
    match = re.search(r" examples, ([0-9.,]+) (epochs?);", describe(steps, batches, steps=steps)[0])
    assert match is not None and (match[1] == "1") == (match[2] == "epoch")
    assert float(match[1].replace(",", "")) == pytest.approx(steps / batches, rel=0.051)


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
def test_warning_names_the_limit_that_is_reached_first(steps: int, budget: dict[str, Any], words: str) -> None:
    plan, warning = describe(steps, seconds=2.0 if "minutes" in budget else None, **budget)
    assert plan.startswith(f"plan: {'about ' * ('minutes' in budget)}{plural(steps, 'step')} of 64 examples, ")
    assert warning.startswith("warning: the budget is too small for this data") and warning.endswith(words)


@pytest.mark.parametrize("noun", ["step", "epoch"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_recommended_budget_causes_no_warning(noun: str, count: int) -> None:
    def lines(count: int) -> list[str]:
        return describe(count * (1 if noun == "step" else 10), **{f"{noun}s": count})

    recommendation = re.search(rf"{plural(count, noun)}; use at least ([0-9,]+) {noun}s", lines(count)[-1])
    assert recommendation is not None and len(lines(int(recommendation[1].replace(",", "")))) == 1


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "settings", [{}, {"start_from": "run"}, {"start_from": "run", "lora": 4}, {"schedule": "linear"}, {"l0": 0.1}]
)
@pytest.mark.parametrize("steps", [1, 60, 900, 1_000_000])
def test_warm_up_is_an_eighth_of_the_steps_for_every_task(task: str, settings: dict[str, Any], steps: int) -> None:
    order = load_recipe({"task": task, "train": settings})
    loader: Any = SimpleNamespace(examples=640, batches=lambda epoch: range(10))
    plan = Plan(order, preset(TASKS[task].presets[0], 50), loader, "", steps, None)
    assert planned_rates(order.train, plan)["warmup"] == max(1, min(4_000, round(steps / 8)))
    explicit_train = Train(warmup=3, **settings)
    plan = plan._replace(recipe=order.model_copy(update={"train": explicit_train}))
    assert "warmup" not in planned_rates(explicit_train, plan)


def test_longer_time_budgets_give_larger_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, _ = make_plan(tmp_path, monkeypatch, 0.1, minutes=10)
    long, _ = make_plan(tmp_path, monkeypatch, 0.1, minutes=100)
    assert long.recipe.train.batch_examples == 4 * (short.recipe.train.batch_examples or 0)
    assert long.epochs == pytest.approx(10 * short.epochs, rel=0.1)


def test_measuring_a_step_restores_random_state_and_threads(recipe: MakeRecipe, tmp_path: Path) -> None:
    order = recipe()
    prepared = prepare(order, tmp_path / "data")
    config = preset("transformer-tiny", 50)
    loader = make_loader(order, prepared, config)
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    assert 0 < measure_step(order, config, loader, CPU) < 10
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_resume_keeps_the_saved_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": str(write_pairs(tmp_path / "pairs.tsv", 60))}
    tables: dict[str, Any] = {"data": data, "model": {"encoder": TINY, "decoder": TINY}, "train": {"steps": 4}}
    fit(load_recipe(tables), tmp_path / "run", reporter=Reporter())
    first = saved_recipe(tmp_path / "run")
    monkeypatch.setattr("regard.training.fit.plan_run", None)
    tables["train"]["steps"] = 8
    fit(load_recipe(tables), tmp_path / "run", resume=True, reporter=Reporter())
    resumed = saved_recipe(tmp_path / "run")
    assert resumed.train.steps == 8
    assert resumed.train.model_copy(update={"steps": 4}) == first.train


def test_short_run_with_default_settings_learns(tmp_path: Path) -> None:
    draw = random.Random(5)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 5))) for _ in range(1500)]
    (tmp_path / "pairs.tsv").write_text("".join(f"{word}\t{' '.join(word.upper())}\n" for word in words))
    order = load_recipe({"data": {"train": str(tmp_path / "pairs.tsv")}, "train": {"steps": 300, "workers": 1}})
    report = fit(order, tmp_path / "run", reporter=Reporter())
    assert report.metric == "wer" and report.value is not None and report.value < 30
