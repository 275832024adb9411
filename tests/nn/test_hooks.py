"""Taps, recordings and patches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kit.models import TINY, tiny
from regard.config import Stack
from regard.errors import UserError
from regard.model import Model
from regard.nn.hooks import Tap, patch, record, taps, without

SOURCE = torch.tensor([[4, 5, 6, 7, 3], [8, 9, 3, 0, 0]])
KEEP = SOURCE != 0
INPUT = torch.tensor([[2, 4, 5, 6], [2, 7, 8, 9]])


@pytest.fixture(params=list(TINY))
def model(request: pytest.FixtureRequest) -> Model:
    return tiny(request.param)


@pytest.fixture
def transformer() -> Model:
    return tiny()


def test_tap_is_watched_while_it_has_a_hook() -> None:
    tap = Tap()
    x = torch.randn(3)
    assert tap(x) is x
    assert not tap.watched
    hook = tap.register_forward_hook(lambda _m, _i, out: out + 1)
    assert tap.watched
    assert torch.equal(tap(x), x + 1)
    hook.remove()
    assert not tap.watched
    assert tap(x) is x


def test_recording_concatenates_passes_and_can_be_cleared() -> None:
    tap = Tap()
    with record(nn.ModuleDict({"weights": tap})) as recording:
        tap(torch.ones(1, 2, 1, 3))
        tap(torch.ones(1, 2, 1, 4))
        assert recording["weights"].shape == (1, 2, 2, 4) and recording["weights"][0, 0, 0].tolist() == [1, 1, 1, 0]
        recording.clear()
        assert len(recording) == 0
        tap(torch.ones(1, 2, 1, 5))
    tap(torch.ones(1, 2, 1, 6))
    assert [x.shape[-1] for x in recording.passes("weights")] == [5]


def count_hooks(model: Model) -> int:
    return sum(len(tap._forward_hooks) for tap in taps(model).values())


def test_recording_does_not_change_the_output(model: Model) -> None:
    plain = model(SOURCE, KEEP, INPUT)
    with record(model, "*") as maps:
        recorded_output = model(SOURCE, KEEP, INPUT)
    assert torch.allclose(plain, recorded_output, atol=1e-5)
    assert torch.equal(plain, model(SOURCE, KEEP, INPUT))
    assert count_hooks(model) == 0
    assert set(maps) == set(taps(model))


@pytest.mark.parametrize("score", ["scaled_dot", "general", "cosine", "additive"])
@pytest.mark.parametrize("position", ["sinusoid", "rotary", "alibi", "bucket"])
def test_eager_path_equals_fused_path_for_every_score_and_position(score: str, position: str) -> None:
    model = tiny(score=score, position=position)
    plain = model(SOURCE, KEEP, INPUT)
    with record(model, "*.weights") as maps:
        assert torch.allclose(plain, model(SOURCE, KEEP, INPUT), atol=1e-5)
    for name, weights_BHTS in maps.items():
        assert torch.allclose(weights_BHTS.sum(-1), torch.ones(()), atol=1e-5), name


def test_attention_weights_are_distributions_over_visible_keys(model: Model) -> None:
    with record(model, "decoder.*.cross.weights") as maps:
        model(SOURCE, KEEP, INPUT)
    for weights_BHTS in maps.values():
        assert weights_BHTS.shape[0] == 2 and weights_BHTS.shape[2:] == (4, 5)
        assert torch.allclose(weights_BHTS.sum(-1), torch.ones(()), atol=1e-5)
        assert not weights_BHTS[1, :, :, 3:].any()


def test_recorded_single_steps_equal_a_full_pass(model: Model) -> None:
    with record(model, "decoder.*") as full_pass:
        model(SOURCE, KEEP, INPUT)
    with record(model, "decoder.*") as single_steps:
        state = model.encode(SOURCE, KEEP)
        for tokens_N in INPUT.unbind(1):
            _, state = model.step(tokens_N, state)
    for name, x in full_pass.items():
        assert torch.allclose(x, single_steps[name], atol=1e-5), name
        assert len(single_steps.passes(name)) == INPUT.shape[1]


def test_hooks_are_removed_after_an_error(transformer: Model) -> None:
    with pytest.raises(ZeroDivisionError), record(transformer, "*"), patch(transformer, {"*.mixed": without(0)}):
        raise ZeroDivisionError
    assert count_hooks(transformer) == 0
    with pytest.raises(UserError), patch(transformer, {"*.mixed": without(0), "no.such": without(0)}):
        pass
    assert count_hooks(transformer) == 0


def test_unknown_tap_name_gets_a_suggestion(transformer: Model) -> None:
    with (
        pytest.raises(UserError, match=r"did you mean 'decoder\.blocks\.0\.cross\.weights'"),
        record(transformer, "decoder.block.0.cross.weight"),
    ):
        pass


def test_patch_ablates_one_head(transformer: Model) -> None:
    plain = transformer(SOURCE, KEEP, INPUT)
    with (
        patch(transformer, {"decoder.blocks.1.cross.mixed": without(2)}),
        record(transformer, "*cross.mixed") as recording,
    ):
        ablated = transformer(SOURCE, KEEP, INPUT)
    mixed = recording["decoder.blocks.1.cross.mixed"]
    assert not mixed[:, 2].any() and mixed[:, [0, 1, 3]].any()
    assert not torch.allclose(plain, ablated, atol=1e-4)
    assert torch.equal(plain, transformer(SOURCE, KEEP, INPUT))


def test_patching_the_last_layer_transfers_the_output_of_another_input(transformer: Model) -> None:
    other = torch.tensor([[9, 8, 7, 6, 3], [4, 4, 3, 0, 0]])
    with record(transformer, "decoder.blocks.1.output") as recording:
        expected = transformer(other, KEEP, INPUT)
    with patch(transformer, {"decoder.blocks.1.output": lambda x: recording["decoder.blocks.1.output"]}):
        assert torch.equal(transformer(SOURCE, KEEP, INPUT), expected)


def test_patches_that_change_the_shape_or_overlap_are_refused(transformer: Model) -> None:
    with pytest.raises(ValueError, match="keep the shape"), patch(transformer, {"*.mixed": lambda x: x[:, :1]}):
        transformer(SOURCE, KEEP, INPUT)
    twice = {"decoder.*.mixed": without(0), "*.cross.mixed": without(1)}
    with pytest.raises(UserError, match="two patterns"), patch(transformer, twice):
        pass


def test_gradients_pass_through_a_patch(transformer: Model) -> None:
    gate_H = torch.ones(4, requires_grad=True)
    with patch(transformer, {"decoder.blocks.0.cross.mixed": lambda x: x * gate_H.view(-1, 1, 1)}):
        transformer(SOURCE, KEEP, INPUT).logsumexp(-1).sum().backward()
    assert gate_H.grad is not None and gate_H.grad.abs().min() > 0


def test_recorded_weights_have_one_row_per_unpruned_head() -> None:
    model = tiny(heads=4, kv_heads=2, kept_heads=((0, 3), (1,)))
    assert isinstance(model.config.encoder, Stack)
    plain = model(SOURCE, KEEP, INPUT)
    with record(model, "encoder.*.weights") as maps:
        assert torch.allclose(plain, model(SOURCE, KEEP, INPUT), atol=1e-5)
    assert [x.shape[1] for x in maps.values()] == [2, 1]
