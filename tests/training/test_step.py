"""Training steps: gradients, clipping, precision, schedules, optimizer state and weight averages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from regard.batch import Batch, collate
from regard.config import Config
from regard.loss import Loss
from regard.model import Model
from regard.parallel.ranks import ProcessGroup
from regard.presets import PRESETS, preset
from regard.recipe import Train
from regard.training.checkpoint import optimizer_tensors, restore_optimizer
from regard.training.fit import unused_settings
from regard.training.step import (
    Ema,
    Stepper,
    learning_rate,
    make_optimizer,
    swapped_weights,
)
from regard.weight_files import mean_weights, weights_of

TINY = {"layers": 1, "width": 16, "heads": 2, "ff": 32}
ROWS = [([5, 6, 3], [7, 3]), ([4, 3], [4, 5, 6, 3]), ([9, 9, 9, 3], [3]), ([8, 3], [10, 3])]


def config(name: str = "transformer-tiny", dropout: float = 0.0) -> Config:
    stack = {**TINY, "dropout": dropout, "kv_heads": "none"}
    if any("axial" in tower for tower in PRESETS[name].values() if isinstance(tower, dict)):
        stack["axial"] = {"rows": 4, "columns": 4, "row_width": 8}
    return preset(name, 12, changes={"encoder": stack, "decoder": stack})


def batch(rows: list[Any], config: Config, total: int) -> tuple[Batch, float]:
    return collate([source for source, _ in rows], [target for _, target in rows], config, total), 1.0


def make(config: Config, **settings: Any) -> Stepper:
    torch.manual_seed(1)
    return Stepper(Model(config), Train(label_smoothing=0.1, **settings), ProcessGroup())


def gradients(stepper: Stepper) -> list[torch.Tensor]:
    return [p.grad for p in stepper.model.parameters() if p.grad is not None]


def test_accumulated_batches_equal_one_large_batch() -> None:
    whole, parts = make(config()), make(config())
    total = sum(len(target) for _, target in ROWS)
    one = whole.backward(1, [batch(ROWS, config(), total)])
    empty = batch(ROWS[:1], config(), total)[0], 0.0
    many = parts.backward(1, [batch(ROWS[:1], config(), total), empty, batch(ROWS[1:], config(), total)])
    assert one == pytest.approx(many, rel=1e-5)
    for a, b in zip(gradients(whole), gradients(parts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_gradient_equals_the_gradient_of_the_mean_loss() -> None:
    stepper = make(config())
    total = sum(len(target) for _, target in ROWS)
    nll, smoothed, norm = stepper.backward(1, [batch(ROWS, config(), total)])
    reference = make(config()).model.train()
    inputs, _ = batch(ROWS, config(), total)
    logits = reference(inputs.source_BS, inputs.source_keep_BS, inputs.input_BT)
    for value, smoothing in ((nll, 0.0), (smoothed, 0.1)):
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), inputs.label_BT.flatten(), ignore_index=0, label_smoothing=smoothing
        )
        assert value / total == pytest.approx(float(loss.detach()), rel=1e-5)
    loss.backward()
    expected = torch.linalg.vector_norm(
        torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None])
    )
    assert norm == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_parameter_of_every_preset_gets_a_gradient(name: str) -> None:
    """Data-parallel training waits for the gradient of each parameter."""
    shape = config(name)
    stepper = make(shape)
    inputs, weight = batch(ROWS, shape, 9)
    if shape.encoder is None:
        inputs = inputs._replace(source_BS=inputs.source_BS[:, :0], source_keep_BS=None)
    if shape.decoder is None:
        inputs = inputs._replace(label_BT=inputs.source_BS, keep_BT=inputs.source_keep_BS)
    if shape.classes is not None:
        inputs = inputs._replace(label_BT=torch.zeros(len(ROWS), 1, dtype=torch.int64), keep_BT=None)
    if shape.patches is not None:
        patches = shape.patches
        images = torch.randn(len(ROWS), patches.channels, patches.height, patches.width)
        inputs = inputs._replace(source_BS=images, source_keep_BS=None)
    stepper.backward(1, [(inputs, weight)])
    assert [n for n, p in stepper.model.named_parameters() if p.grad is None] == []


def test_random_numbers_depend_only_on_the_step() -> None:
    shape = config(dropout=0.5)
    first, second = make(shape), make(shape)
    first.backward(1, [batch(ROWS, shape, 9)])
    a = first.backward(7, [batch(ROWS, shape, 9)])
    b = second.backward(7, [batch(ROWS, shape, 9)])
    c = second.backward(8, [batch(ROWS, shape, 9)])
    assert a == b != c
    sampling = [make(shape, scheduled_sampling=0.5) for _ in range(2)]
    sampling[0].backward(1, [batch(ROWS, shape, 9)])
    assert len({tuple(stepper.backward(7, [batch(ROWS, shape, 9)])) for stepper in sampling}) == 1


def test_clipping_bounds_the_norm_and_keeps_small_gradients() -> None:
    stepper = make(config(), clip=0.01)
    norm = stepper.backward(1, [batch(ROWS, config(), 9)])[2]
    before = [g.clone() for g in gradients(stepper)]
    stepper.train = stepper.train.model_copy(update={"clip": 2 * norm})
    assert stepper.update(1, 1e-3, norm)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(stepper), strict=True))
    stepper.train = stepper.train.model_copy(update={"clip": norm / 8})
    stepper.update(1, 1e-3, norm)
    clipped = torch.nn.utils.get_total_norm(gradients(stepper))
    assert float(clipped) == pytest.approx(norm / 8, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_losses_do_not_change_the_weights(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = make(config())
    stepper.backward(1, [batch(ROWS, config(), 9)])
    before = [p.detach().clone() for p in stepper.model.parameters()]
    original = stepper.objective.forward

    def non_finite(inputs: Batch) -> Loss:
        loss = original(inputs)
        return loss._replace(smoothed=loss.smoothed + value)  # its gradients are finite

    monkeypatch.setattr(stepper.objective, "forward", non_finite)
    norm = stepper.backward(2, [batch(ROWS[:2], config(), 9), batch(ROWS[2:], config(), 9)])[2]
    assert math.isnan(norm)
    assert not stepper.update(1, 1e-3, norm)
    assert all(torch.equal(a, b) for a, b in zip(before, stepper.model.parameters(), strict=True))
    assert not stepper.optimizer.state


def test_bf16_losses_and_norm_are_close_to_fp32() -> None:
    a = make(config()).backward(1, [batch(ROWS, config(), 9)])
    b = make(config(), precision="bf16").backward(1, [batch(ROWS, config(), 9)])
    assert a != b
    assert a == pytest.approx(b, rel=0.05)


def test_bf16_gradients_have_the_direction_of_fp32_gradients() -> None:
    steppers = [make(config(), precision=precision) for precision in ("fp32", "bf16")]
    for stepper in steppers:
        stepper.backward(1, [batch(ROWS, config(), 9)])
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in stepper.model.parameters())
    one, other = (torch.cat([p.grad.flatten() for p in stepper.model.parameters()]) for stepper in steppers)
    assert torch.cosine_similarity(one, other, dim=0) > 0.99


def test_noam_schedule_equals_the_formula_of_the_paper() -> None:
    train = Train(schedule="noam", lr=2.0, warmup=4000)
    for step in (1, 100, 4000, 4001, 100_000):
        expected = 2.0 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert learning_rate(train, step, 0.5, 512) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "linear", "constant"])
def test_warm_up_rises_linearly_to_the_peak(schedule: str) -> None:
    train = Train(schedule=schedule, lr=0.5, warmup=10)  # type: ignore[arg-type]
    assert [learning_rate(train, step, 0.0, 512) for step in range(1, 11)] == pytest.approx(
        [0.05 * step for step in range(1, 11)]
    )


@given(st.integers(1, 10**6), st.floats(0, 1), st.integers(0, 1000))
def test_schedules_follow_their_formulas_after_the_warm_up(step: int, done: float, warmup: int) -> None:
    def rate(schedule: str) -> float:
        train = Train(schedule=schedule, lr=1.0, warmup=warmup)  # type: ignore[arg-type]
        return learning_rate(train, step + warmup, done, 64)

    assert rate("constant") == 1
    assert rate("inverse_sqrt") == pytest.approx(math.sqrt(max(1, warmup) / (step + warmup)))
    assert rate("cosine") == pytest.approx((1 + math.cos(math.pi * done)) / 2)
    assert rate("linear") == pytest.approx(1 - done)


def test_cosine_and_linear_schedules_end_at_zero() -> None:
    assert learning_rate(Train(schedule="cosine"), 10_000, 1.0, 64) == pytest.approx(0, abs=1e-12)
    assert learning_rate(Train(schedule="linear"), 10_000, 1.7, 64) == 0


def test_weight_decay_excludes_biases_and_norms() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = make_optimizer(model, Train(weight_decay=0.5))
    weights = [p for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]]
    assert weights == [model[0].weight]


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_restored_optimizer_continues_bit_for_bit(kind: str) -> None:
    train = Train(optimizer=kind, weight_decay=0.1)  # type: ignore[arg-type]

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            model(torch.full((2, 3), float(number))).square().sum().backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / number
            optimizer.step()

    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = make_optimizer(model, train)
    assert optimizer_tensors(optimizer, model) == {}
    steps(model, optimizer, range(1, 4))
    saved = {name: x.clone() for name, x in optimizer_tensors(optimizer, model).items()}
    other.load_state_dict(model.state_dict())
    restored = make_optimizer(other, train)
    restore_optimizer(restored, other, saved)
    steps(model, optimizer, range(4, 7))
    steps(other, restored, range(4, 7))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    del saved["bias:exp_avg"]
    with pytest.raises(KeyError, match="bias:exp_avg"):
        restore_optimizer(restored, other, saved)


def test_ema_equals_its_recurrence() -> None:
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


def test_infrequent_updates_approximate_a_long_ema() -> None:
    steps = 3000
    updates = 0
    model = nn.Linear(1, 1)
    ema = Ema(model, 0.998)
    expected = model.weight.detach().clone()
    for step in range(1, steps):
        with torch.no_grad():
            model.weight.fill_(math.sin(step / 700))
        before = ema.weights["weight"].clone()
        ema.update(model, step)
        updates += not torch.equal(before, ema.weights["weight"])
        decay = min(0.998, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    torch.testing.assert_close(ema.weights["weight"], expected, rtol=0.01, atol=0.005)
    assert updates < steps / 2


def test_swapped_weights_are_restored_after_an_error() -> None:
    model = nn.Linear(2, 2)
    own = model.weight.detach().clone()
    pointer = model.weight.data_ptr()
    other = {name: torch.zeros_like(x) for name, x in weights_of(model).items()}
    with pytest.raises(RuntimeError, match="inside"), swapped_weights(model, other):
        assert not model.weight.any()
        raise RuntimeError("inside")
    assert torch.equal(model.weight, own) and model.weight.data_ptr() == pointer


def test_mean_of_equal_weights_equals_them() -> None:
    weights = {"a": torch.randn(5), "b": torch.randn(2, 3)}
    assert all(torch.equal(x, weights[name]) for name, x in mean_weights([weights] * 3).items())
    assert torch.equal(mean_weights([{"a": torch.tensor([1.0])}, {"a": torch.tensor([2.0])}])["a"], torch.tensor([1.5]))


@pytest.mark.parametrize(
    ("preset_name", "settings", "size", "device", "unused"),
    [
        ("transformer-tiny", {}, 1, "cpu", []),
        ("transformer-tiny", {"strategy": "fsdp"}, 1, "cpu", ["strategy"]),
        ("transformer-tiny", {"strategy": "fsdp", "offload": True}, 2, "cpu", ["offload"]),
        ("transformer-tiny", {"strategy": "fsdp", "offload": True, "recompute": True}, 2, "cuda", []),
        ("transformer-tiny", {"offload": True}, 2, "cuda", ["offload"]),
        ("rnn-luong", {"recompute": True}, 1, "cpu", ["recompute"]),
        ("xl-tiny", {"recompute": True}, 1, "cpu", ["recompute"]),
    ],
)
def test_settings_without_effect_cause_warnings(
    preset_name: str, settings: dict[str, Any], size: int, device: str, unused: list[str]
) -> None:
    warnings = unused_settings(Model(config(preset_name)), Train(**settings), ProcessGroup(size=size, device=device))
    assert [warning.partition(":")[0].partition("=")[0] for warning in warnings] == [f"train.{name}" for name in unused]
