"""Places to look."""

from __future__ import annotations

import torch

from regard.nn.hooks import Tap


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
