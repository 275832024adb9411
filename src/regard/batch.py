"""A batch: padded ids and the masks that say what is real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.config import Config

TokenIds = Sequence[int] | np.ndarray


class Batch(NamedTuple):
    """Examples side by side. A keep-mask is None when nothing is padded: the fast paths like to know."""

    source_BS: Tensor
    source_keep_BS: Tensor | None
    input_BT: Tensor  # start token, then the target without its end
    label_BT: Tensor  # the target with its end; the padding token where keep_BT is False
    keep_BT: Tensor | None
    tokens: int  # real labels here
    total: int  # real labels in the whole step, over all processes and accumulated batches: what the loss is divided by

    def to(self, device: torch.device | str) -> Batch:
        moved: dict[str, Any] = {name: x.to(device) for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(**moved)


def pad(rows: Sequence[TokenIds], fill: int) -> tuple[Tensor, Tensor | None]:
    """Put rows of ids into one tensor, with the mask of what is real (None if all is)."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    keep = np.arange(lengths.max(initial=0)) < lengths[:, None]
    table = np.full(keep.shape, fill, dtype=np.int64)
    table[keep] = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows]) if len(rows) else 0
    return torch.from_numpy(table), None if keep.all() else torch.from_numpy(keep)


def collate(
    sources: Sequence[TokenIds], targets: Sequence[TokenIds], config: Config, total: int | None = None
) -> Batch:
    """Make a batch of source and target ids, each row ending in the end token."""
    source_BS, source_keep_BS = pad(sources, config.ids.pad)
    label_BT, keep_BT = pad(targets, config.ids.pad)
    input_BT = label_BT.roll(1, dims=1)
    input_BT[:, 0] = config.start_id
    if keep_BT is not None:
        input_BT.masked_fill_(~keep_BT, config.ids.pad)
    tokens = label_BT.numel() if keep_BT is None else int(keep_BT.sum())
    return Batch(source_BS, source_keep_BS, input_BT, label_BT, keep_BT, tokens, tokens if total is None else total)


class GlobalBatch(NamedTuple):
    """A batch before it is shared: its numbers, and a function (rows, labels of the step) that makes a part of it."""

    examples: int
    tokens: int
    symbols: int
    part: Callable[[slice, int], Batch]
