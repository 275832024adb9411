"""Named places where a forward hook can read or replace what passes."""

from __future__ import annotations

from torch import nn


class Tap(nn.Identity):
    """A place to look. It costs nothing until someone hooks it; being watched is what selects a slow path."""

    @property
    def watched(self) -> bool:
        return bool(self._forward_hooks)
