"""Weights in another order give the same results, and leave the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from regard.nn import matmul as packed
from regard.nn.matmul import Packed


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 256), (5, 256), (2, 3, 256), (0, 256)])
def test_the_same_numbers(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], bias: bool) -> None:
    model, x = nn.Sequential(nn.Linear(256, 300, bias=bias), nn.Linear(300, 7)), torch.randn(shape)
    with torch.inference_mode():
        expected = model(x)
        for work in (0, packed.WORK):  # always, and where it pays
            monkeypatch.setattr(packed, "WORK", work)
            with Packed([model]).used():
                torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert "forward" not in model[0].__dict__


def test_hooks_still_see_what_passes() -> None:
    model, seen = nn.Linear(512, 512), []
    model.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with torch.inference_mode(), Packed([model]).used():
        model(torch.randn(4, 512))
    assert seen == [(4, 512)]


def test_an_error_leaves_nothing_behind() -> None:
    model = nn.Linear(512, 512)
    with pytest.raises(RuntimeError), Packed([model]).used():
        model(torch.randn(4, 511))
    assert "forward" not in model.__dict__


def test_bf16_is_each_matrix_and_input_rounded() -> None:
    model, x = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 7, bias=False)), torch.randn(2, 3, 64)
    with torch.inference_mode():
        with Packed([model], bf16=True).used():
            narrow = model(x)
        inner = F.linear(x.bfloat16(), model[0].weight.bfloat16(), model[0].bias.bfloat16())
        assert narrow.dtype == torch.float32
        assert torch.equal(narrow, F.linear(inner, model[1].weight.bfloat16()).float())
