"""What the modules of a model were given and gave back in one pass, for showing each step of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.inspect.places import key_heads
from regard.nn.attention import KV, Attention, Sight
from regard.nn.position import Position


class Looked:
    """One attention with what it was asked, over the whole pass. Batch of one; all tensors without the batch."""

    def __init__(self, attention: Attention, calls: list[tuple[Tensor, KV, Sight, Position]]) -> None:
        x_1TD = torch.cat([x for x, *_ in calls], dim=1)
        _, kv, sight, position = calls[-1]
        pos_1T = torch.cat([call[2].q_pos_BT.reshape(1, -1) for call in calls], dim=1)
        masks = [call[2].mask_B1TS for call in calls]
        self.mask_TS: Tensor | None = None if masks[0] is None else torch.cat([m[0, 0] for m in masks if m is not None])
        self.scale = attention.score.scale
        q_1HTE = attention.query(x_1TD).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        q_1HTE = position.rotate(q_1HTE, pos_1T)
        if attention.relative is not None:  # the distances' part of the scores depends on the queries
            q_1HTE, sight = attention.relative(q_1HTE, sight, self.scale)
        k_1HSE, v_1HSE = (x[:, key_heads(attention)] for x in kv)
        scores_1HTS = attention.score.compare(attention.score.query(q_1HTE), k_1HSE, sight.k_pos_BS)
        bias_BHTS = sight.bias_BHTS if attention.relative is not None else attention._of_kept(sight.bias_BHTS)
        self.q_HTE, self.k_HSE, self.v_HSE = q_1HTE[0], k_1HSE[0], v_1HSE[0]
        self.raw_HTS = scores_1HTS[0] / self.scale
        self.bias_HTS: Tensor | None = None if bias_BHTS is None else bias_BHTS[0]


class Calls:
    """Inputs and outputs of every module, by module."""

    def __init__(self) -> None:
        self.given: dict[nn.Module, list[tuple[Any, ...]]] = {}
        self.made: dict[nn.Module, list[Any]] = {}

    def output(self, module: nn.Module) -> Tensor:
        """All that a module made, one vector per token: (T, D)."""
        return torch.cat([x[0] if isinstance(x, tuple) else x for x in self.made[module]], dim=1)[0]

    def input(self, module: nn.Module) -> Tensor:
        """All that a module was given, one vector per token: (T, D)."""
        return torch.cat([args[0] for args in self.given[module]], dim=1)[0]

    def looked(self, attention: Attention) -> Looked:
        """The numbers inside an attention, computed again from what it was given."""
        return Looked(attention, [(args[0], args[1], args[2], args[3]) for args in self.given[attention]])


@contextmanager
def watch(model: nn.Module) -> Iterator[Calls]:
    """Keep what every module is given and makes, while the context lasts."""
    calls = Calls()
    handles: list[RemovableHandle] = []

    def keep(module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
        calls.given.setdefault(module, []).append(given)
        calls.made.setdefault(module, []).append(made)

    try:
        for name, module in model.named_modules():
            # The places to look are for `record`; a hook on them would change which path is taken.
            if name and not isinstance(module, nn.ModuleList) and type(module).__name__ != "Tap":
                handles.append(module.register_forward_hook(keep))
        yield calls
    finally:
        for handle in handles:
            handle.remove()
