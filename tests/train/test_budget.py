from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from regard.recipe import Train
from regard.training.trainer import Budget, Since, validation_due


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
    every = next(n for n in range(1, 10**6) if validation_due(None, per_epoch, budget, Since(n, 0, 0, 0)))
    assert every >= per_epoch
    assert steps // every <= 40


def test_an_explicit_interval_is_obeyed() -> None:
    assert not validation_due(7, 3, Budget(600, None, None), Since(6, 1000, 0, 1000))
    assert validation_due(7, 3, Budget(600, None, None), Since(7, 0, 99, 99))


def test_time_budgets_validate_by_the_clock() -> None:
    budget = Budget(600, None, None)
    assert not validation_due(None, 100, budget, Since(200, 10, 0, 10))  # two epochs, but only 10 of 600 seconds
    assert validation_due(None, 100, budget, Since(100, 15, 0, 15))
    assert not validation_due(None, 100, budget, Since(99, 15, 0, 15))
    assert validation_due(None, 10**6, budget, Since(50, 60, 0, 60))  # no epoch in sight: every tenth of the time
    assert not validation_due(None, 100, budget, Since(200, 50, 6, 55))  # validation has had its share
