"""Dropout whose random numbers can come from a pool drawn ahead of time.

New random numbers for every layer cost a small model much of its training step on a CPU. Slices of a pool of masks, at
random offsets, cost almost nothing. The pool is a pure function of (seed, step): a resumed run drops what the
uninterrupted one would have dropped.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MaskPool:
    """Dropout masks of one process, drawn again from (seed, step) every `renew` steps."""

    def __init__(self, seed: int, size: int = 1 << 22, renew: int = 64) -> None:
        self.seed = seed
        self.size = size
        self.renew = renew
        self._offsets = random.Random(seed)
        self._masks: dict[float, Tensor] = {}
        self._drawn_for = -1

    def begin(self, step: int) -> None:
        """Enter a training step: its masks depend only on (seed, step) and the order of calls."""
        self._offsets.seed(f"{self.seed} {step}")
        if step // self.renew != self._drawn_for:
            self._drawn_for = step // self.renew
            self._masks.clear()

    def mask(self, like: Tensor, rate: float) -> Tensor:
        """A mask of `like`'s shape: zero with probability `rate`, else 1 / (1 - rate)."""
        count, most = like.numel(), self.size // 2
        pieces = [self._piece(min(most, count - start), rate) for start in range(0, count, most)]
        mask = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return mask.view(like.shape).to(like.dtype)

    def get_state(self) -> Any:
        """The state of the offsets within a step."""
        return self._offsets.getstate()

    def set_state(self, state: Any) -> None:
        """Repeat the masks that followed `state`, which is of the same step."""
        self._offsets.setstate(state)

    def _piece(self, count: int, rate: float) -> Tensor:
        masks = self._masks.get(rate)
        if masks is None:
            # The seed includes the rate, or masks of two rates would drop the same elements.
            draws = torch.Generator().manual_seed(hash((self.seed, self._drawn_for, rate)) & (2**63 - 1))
            keep = torch.rand(self.size, generator=draws) >= rate
            masks = self._masks[rate] = keep.to(torch.float32).div_(1 - rate)
        start = self._offsets.randrange(self.size - count)
        return masks[start : start + count]


class Dropout(nn.Module):
    """Dropout with torch's random numbers, or with masks from a pool after `use_pool`."""

    pool: MaskPool | None = None

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        if self.pool is None or not x.is_cpu:
            return F.dropout(x, self.rate)
        return x * self.pool.mask(x, self.rate)

    def extra_repr(self) -> str:
        return f"{self.rate}"


def use_pool(model: nn.Module, pool: MaskPool | None) -> None:
    """Let every dropout of a model take its masks from `pool`."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.pool = pool
