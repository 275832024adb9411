from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from regard.presets import PRESETS
from regard.recipe import Train
from regard.training.checkpoint import Progress
from regard.training.plan import Budget, choose_preset, choose_workers, validation_due


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


def test_more_data_never_means_a_smaller_model() -> None:
    order = ["transformer-tiny", "transformer-small", "transformer-base"]
    for device in ("cpu", "cuda"):
        sizes = [order.index(choose_preset(n, 20 * n, device)[0]) for n in (1, 500, 10**4, 10**5, 10**7)]
        assert sizes == sorted(sizes)
    assert set(order) <= set(PRESETS)
    assert choose_preset(10**6, 10**7, "cuda")[0] == "transformer-base"
    assert "8,000 training examples" in choose_preset(8000, 120_000, "cpu")[1]


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
