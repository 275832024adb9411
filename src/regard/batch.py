"""A batch: padded ids with keep-masks, which are False at padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.config import Config, Value

TokenIds = Sequence[int] | np.ndarray
T = TypeVar("T")


class Batch(NamedTuple):
    """Examples as padded rows. A keep-mask is None when nothing is padded, which selects fast paths."""

    source_BS: Tensor
    source_keep_BS: Tensor | None
    input_BT: Tensor  # start token, then the target without its end
    label_BT: Tensor  # the target with its end; the padding token where keep_BT is False
    keep_BT: Tensor | None
    tokens: int  # labels of this batch, without padding
    total: int  # labels of the step, over all processes and accumulated batches: the divisor of the loss

    def to(self, device: torch.device | str) -> Batch:
        moved: dict[str, Any] = {name: x.to(device) for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(**moved)


def pad(rows: Sequence[TokenIds], fill: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor | None]:
    """Rows of ids as one tensor, and its keep-mask (None if nothing is padded)."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    keep = np.arange(lengths.max(initial=0)) < lengths[:, None]
    table = np.full(keep.shape, fill, dtype=np.int64)
    table[keep] = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows]) if len(rows) else 0
    return torch.from_numpy(table).to(device), None if keep.all() else torch.from_numpy(keep).to(device)


def collate(
    sources: Sequence[TokenIds], targets: Sequence[TokenIds], config: Config, total: int | None = None
) -> Batch:
    """A batch of source and target ids, each row ending in the end token."""
    source_BS, source_keep_BS = pad(sources, config.ids.pad)
    label_BT, keep_BT = pad(targets, config.ids.pad)
    input_BT = label_BT.roll(1, dims=1)
    input_BT[:, 0] = config.start_id
    if keep_BT is not None:
        input_BT.masked_fill_(~keep_BT, config.ids.pad)
    tokens = label_BT.numel() if keep_BT is None else int(keep_BT.sum())
    return Batch(source_BS, source_keep_BS, input_BT, label_BT, keep_BT, tokens, tokens if total is None else total)


class GlobalBatch(NamedTuple):
    """The batch of all processes: its counts, and a function (rows, labels of the step) that builds a part of it."""

    examples: int
    tokens: int  # labels
    all_tokens: int  # of source and target
    part: Callable[[slice, int], Batch]


def windows(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of `size`."""
    iterator = iter(items)
    while window := list(islice(iterator, size)):
        yield window


def by_length(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices in batches of similar length, longest first: items times longest stay within the budget."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class Pixels(Value):
    """How the numbers of an image are scaled before a model sees them: (x - mean) / scale, by channel."""

    mean: tuple[float, ...]
    scale: tuple[float, ...]

    def __call__(self, images_NCHW: NDArray[Any]) -> NDArray[np.float32]:
        mean, scale = (np.asarray(x, np.float32).reshape(-1, 1, 1) for x in (self.mean, self.scale))
        scaled: NDArray[np.float32] = (images_NCHW.astype(np.float32) - mean) / scale
        return scaled
