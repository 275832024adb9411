"""Taps and recordings."""

from __future__ import annotations

import torch
from torch import nn

from regard.nn.hooks import Tap, record


def test_a_tap_is_watched_while_it_is_hooked() -> None:
    tap, x = Tap(), torch.randn(3)
    assert tap(x) is x
    assert not tap.watched
    hook = tap.register_forward_hook(lambda _m, _i, out: out + 1)
    assert tap.watched
    assert torch.equal(tap(x), x + 1)
    hook.remove()
    assert not tap.watched
    assert tap(x) is x


def test_a_recording_concatenates_passes_and_can_be_cleared() -> None:
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
