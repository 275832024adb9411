from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from regard.run import weights_of
from regard.training.step import Ema, lent, mean


def test_ema_is_its_recurrence() -> None:
    model = nn.Linear(2, 2)
    ema = Ema(model, 0.9)
    expected = model.weight.detach().clone()
    for step in range(1, 200):
        with torch.no_grad():
            model.weight.add_(step)
        ema.update(model, step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    torch.testing.assert_close(ema.weights["weight"], expected)


def test_a_long_ema_that_looks_now_and_then_is_nearly_the_one_that_looks_at_every_step() -> None:
    model, steps = nn.Linear(1, 1), 3000
    ema, expected, looks = Ema(model, 0.998), model.weight.detach().clone(), 0
    for step in range(1, steps):
        with torch.no_grad():
            model.weight.fill_(math.sin(step / 700))
        before = ema.weights["weight"].clone()
        ema.update(model, step)
        looks += not torch.equal(before, ema.weights["weight"])
        decay = min(0.998, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    torch.testing.assert_close(ema.weights["weight"], expected, rtol=0.01, atol=0.005)
    assert looks < steps / 2


def test_lent_weights_are_given_back_even_after_an_error() -> None:
    model = nn.Linear(2, 2)
    own, pointer = model.weight.detach().clone(), model.weight.data_ptr()
    other = {name: torch.zeros_like(x) for name, x in weights_of(model).items()}
    with pytest.raises(RuntimeError, match="inside"), lent(model, other):
        assert not model.weight.any()
        raise RuntimeError("inside")
    assert torch.equal(model.weight, own) and model.weight.data_ptr() == pointer


def test_mean_of_equals_is_the_same() -> None:
    weights = {"a": torch.randn(5), "b": torch.randn(2, 3)}
    assert all(torch.equal(x, weights[name]) for name, x in mean([weights] * 3).items())
    assert torch.equal(mean([{"a": torch.tensor([1.0])}, {"a": torch.tensor([2.0])}])["a"], torch.tensor([1.5]))
