from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from regard.recipe import Train
from regard.training.step import learning_rate, make_optimizer, optimizer_tensors, restore_optimizer, set_rate


def test_noam_is_the_papers_formula() -> None:
    train = Train(schedule="noam", lr=2.0, warmup=4000)
    for step in (1, 100, 4000, 4001, 100_000):
        expected = 2.0 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert learning_rate(train, step, 0.5, 512) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "linear", "constant"])
def test_rises_linearly_to_the_peak(schedule: str) -> None:
    train = Train(schedule=schedule, lr=0.5, warmup=10)  # type: ignore[arg-type]
    assert [learning_rate(train, step, 0.0, 512) for step in range(1, 11)] == pytest.approx(
        [0.05 * step for step in range(1, 11)]
    )


@given(st.integers(1, 10**6), st.floats(0, 1), st.integers(0, 1000))
def test_shapes_after_the_warm_up(step: int, done: float, warmup: int) -> None:
    def rate(schedule: str) -> float:
        train = Train(schedule=schedule, lr=1.0, warmup=warmup)  # type: ignore[arg-type]
        return learning_rate(train, step + warmup, done, 64)

    assert rate("constant") == 1
    assert rate("inverse_sqrt") == pytest.approx(math.sqrt(max(1, warmup) / (step + warmup)))
    assert rate("cosine") == pytest.approx((1 + math.cos(math.pi * done)) / 2)
    assert rate("linear") == pytest.approx(1 - done)


def test_a_spent_budget_ends_at_zero() -> None:
    assert learning_rate(Train(schedule="cosine"), 10_000, 1.0, 64) == pytest.approx(0, abs=1e-12)
    assert learning_rate(Train(schedule="linear"), 10_000, 1.7, 64) == 0


def test_biases_and_norms_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = make_optimizer(model, Train(weight_decay=0.5))
    decayed = [p for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]]
    assert decayed == [model[0].weight]


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_restored_goes_on_bit_for_bit(kind: str) -> None:
    train = Train(optimizer=kind, weight_decay=0.1)  # type: ignore[arg-type]

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            model(torch.full((2, 3), float(number))).square().sum().backward()
            set_rate(optimizer, 0.1 / number)
            optimizer.step()

    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = make_optimizer(model, train)
    assert optimizer_tensors(optimizer, model) == {}
    steps(model, optimizer, range(1, 4))
    saved = {name: x.clone() for name, x in optimizer_tensors(optimizer, model).items()}
    other.load_state_dict(model.state_dict())
    again = make_optimizer(other, train)
    restore_optimizer(again, other, saved)
    steps(model, optimizer, range(4, 7))
    steps(other, again, range(4, 7))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    del saved["bias:exp_avg"]
    with pytest.raises(KeyError, match="bias:exp_avg"):
        restore_optimizer(again, other, saved)
