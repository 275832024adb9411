"""Importance of heads by gradient and by ablation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from regard.errors import UserError
from regard.inspect.inputs import encode_pairs, pair_batches
from regard.inspect.prune import ablation_importance, gradient_importance, mean_loss
from regard.loss import Objective
from regard.model import Model
from regard.nn.hooks import patch
from regard.run import Run
from regard.text.codec import Example

PAIRS = [([4, 5, 6, 3], [5, 6, 3]), ([7, 3], [4, 4, 4, 4, 3]), ([8, 9, 4, 5, 6, 3], [7, 3]), ([4, 3], [3])]


def test_batches_contain_every_pair_once(transformer: Model) -> None:
    for tokens in (1, 8, 1000):
        batches = pair_batches(PAIRS, transformer.config, tokens)
        assert sum(len(batch.label_BT) for batch in batches) == len(PAIRS)
        assert sum(batch.tokens for batch in batches) == sum(len(target) for _, target in PAIRS)


def test_mean_loss_equals_the_training_objective(model: Model) -> None:
    batches = pair_batches(PAIRS, model.config, 8)
    with torch.no_grad():
        nll = sum(float(Objective(model)(batch).nll) for batch in batches)
    assert mean_loss(model, batches) == pytest.approx(nll / sum(batch.tokens for batch in batches), rel=1e-5)


def test_gradient_importance_does_not_depend_on_the_batch(model: Model) -> None:
    """One gate per example: the absolute value is taken before the sum over examples."""
    single = gradient_importance(model, pair_batches(PAIRS, model.config, 1))
    batched = gradient_importance(model, pair_batches(PAIRS, model.config, 1000))
    assert single.keys() == batched.keys()
    for head, value in single.items():
        assert value == pytest.approx(batched[head], rel=1e-3, abs=1e-7)


def test_gradient_importance_equals_the_slope_of_the_loss(transformer: Model) -> None:
    """Compared with a difference quotient for one example."""
    batches = pair_batches(PAIRS[:1], transformer.double().config)
    importance = gradient_importance(transformer, batches)
    for (name, head), value in list(importance.items())[::5]:

        def at(gate: float, name: str = name, head: int = head) -> float:
            def scale(x: torch.Tensor) -> torch.Tensor:
                factor = x.new_ones(x.shape[1])
                factor[head] = gate
                return x * factor.view(-1, 1, 1)

            with patch(transformer, {f"{name}.mixed": scale}):
                return mean_loss(transformer, batches)

        slope = (at(1 + 2e-3) - at(1 - 2e-3)) / 4e-3
        assert abs(slope) == pytest.approx(value, rel=3e-2, abs=1e-3)


def test_gradient_importance_does_not_modify_the_model(transformer: Model) -> None:
    gradient_importance(transformer, pair_batches(PAIRS, transformer.config))
    assert all(p.requires_grad and p.grad is None for p in transformer.parameters())
    assert not any(module._forward_hooks for module in transformer.modules())


def test_ablation_importance_equals_the_loss_without_the_head(transformer: Model) -> None:
    batches = pair_batches(PAIRS, transformer.config)
    importance = ablation_importance(transformer, batches)
    assert len(importance) == sum(attention.heads for attention in transformer.attentions().values())
    name, head = "encoder.blocks.1.attention", 2
    without = mean_loss(transformer, batches, {name: [head]})
    assert importance[name, head] == pytest.approx(without - mean_loss(transformer, batches), abs=1e-6)
    with torch.no_grad():  # a head with a zero output matrix contributes nothing
        attention = transformer.attentions()[name]
        attention.out.weight[:, head * attention.head_width : (head + 1) * attention.head_width] = 0  # type: ignore[index, operator]
    assert ablation_importance(transformer, batches)[name, head] == pytest.approx(0, abs=1e-7)
    assert gradient_importance(transformer, batches)[name, head] == pytest.approx(0, abs=1e-7)


def test_removed_heads_are_not_measured(transformer: Model) -> None:
    batches = pair_batches(PAIRS, transformer.config)
    removed = {"decoder.blocks.0.cross": [1, 2]}
    importance = gradient_importance(transformer, batches, removed)
    assert ("decoder.blocks.0.cross", 1) not in importance and ("decoder.blocks.0.cross", 0) in importance
    assert len(importance) == 22


def test_pairs_need_targets(make_letters: Callable[..., Run]) -> None:
    run = make_letters()
    assert len(encode_pairs(run, [Example("ab", "ba"), Example("ab")])) == 1
    with pytest.raises(UserError, match="measured on pairs"):
        encode_pairs(run, [Example("ab")])
