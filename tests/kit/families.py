"""Every preset in a small size, for the tests of equalities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.config import Config
from regard.model import Model
from regard.nn.hooks import Tap
from regard.presets import PRESETS, merge, preset

VOCAB = 11
TINY: dict[str, Any] = {
    "width": 12,
    "layers": 2,
    "heads": 2,
    "ff": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "ff_dropout": 0.0,
    "max_length": 20,
}
IMAGE = {"height": 6, "width": 4, "channels": 3, "size": 2}


def shrunk(name: str, vocab: int = VOCAB, changes: dict[str, Any] | None = None) -> Config:
    """A preset with small sizes and without dropout, otherwise unchanged."""
    table = PRESETS[name]
    small: dict[str, Any] = {}
    for stack in ("encoder", "decoder"):
        if stack in table:
            small[stack] = dict(TINY)
            if "kv_heads" in table[stack]:
                small[stack]["kv_heads"] = 1
            if "head_width" in table[stack]:
                small[stack]["head_width"] = 5
            if "axial" in table[stack]:
                small[stack]["axial"] = {"rows": 4, "columns": 5, "row_width": 5}
    if "patches" in table:
        small |= {"patches": IMAGE, "classes": 7}
    return preset(name, vocab, changes=merge(small, changes or {}))


def _different() -> list[str]:
    """Presets that differ in more than their size."""
    return list(dict(reversed([(shrunk(name), name) for name in PRESETS])).values())[::-1]


BOTH = [name for name in _different() if {"encoder", "decoder"} <= PRESETS[name].keys()]
DECODERS = [name for name in _different() if "encoder" not in PRESETS[name]]
ENCODERS = [name for name in _different() if "decoder" not in PRESETS[name]]


def build(config: Config, seed: int = 0) -> Model:
    """A model whose parameters all affect the outputs: no bias of zero, no norm weight of one."""
    torch.manual_seed(seed)
    model = Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def left_padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    keep = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return torch.tensor([[0] * (width - len(row)) + row for row in rows]), keep


def watched(model: Model, *inputs: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Logits and attention weights; the hooks on every attention select the eager path."""
    weights: list[Tensor] = []
    taps = [tap for name, tap in model.named_modules() if name.endswith(".weights") and isinstance(tap, Tap)]
    hooks = [tap.register_forward_hook(lambda _m, _i, out: weights.append(out)) for tap in taps]
    scores = model(*inputs)
    for hook in hooks:
        hook.remove()
    assert taps and len(weights) >= len(taps)
    return scores, weights


def pixels(rows: int = 3) -> Tensor:
    shape = (rows, IMAGE["channels"], IMAGE["height"], IMAGE["width"])
    return torch.randn(shape, generator=torch.Generator().manual_seed(rows))
