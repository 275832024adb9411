"""Batches of padded ids with keep-masks (False at padding)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from regard.config import Config, Value
from regard.errors import is_out_of_memory

if TYPE_CHECKING:  # torch is imported when a batch is made: engines without torch group inputs, too
    import torch
    from torch import Tensor

TokenIds = Sequence[int] | np.ndarray
T = TypeVar("T")


class Batch(NamedTuple):
    """Examples as padded rows. A keep-mask is None if nothing is padded; this selects fast paths."""

    source_BS: Tensor
    source_keep_BS: Tensor | None
    input_BT: Tensor  # the start token and the target without its end token
    label_BT: Tensor  # the target with its end token; the padding token where keep_BT is False
    keep_BT: Tensor | None
    tokens: int  # labels of this batch, without padding
    total: int  # labels of the step, over all processes and accumulated batches: the divisor of the loss

    def to(self, device: torch.device | str) -> Batch:
        moved: dict[str, Any] = {name: x.to(device) for name, x in self._asdict().items() if hasattr(x, "to")}
        return self._replace(**moved)

    @property
    def size(self) -> int:
        """A measure of the required memory: the number of ids on both sides, with padding."""
        return self.source_BS.numel() + self.label_BT.numel()

    def rows(self, rows: slice) -> Batch:
        """A part of the rows, trimmed to its own longest row; the divisor of the loss is unchanged."""
        if rows.stop - rows.start == len(self.label_BT):
            return self
        source_BS, source_keep_BS = _trim(self.source_keep_BS, rows, self.source_BS)
        if self.input_BT.shape[1] == self.label_BT.shape[1]:
            input_BT, _ = _trim(self.keep_BT, rows, self.input_BT)
            label_BT, keep_BT = _trim(self.keep_BT, rows, self.label_BT)
        else:  # masked tokens, where keep_BT marks the labels that count, or one label per example
            input_BT = self.input_BT[rows]
            label_BT = self.label_BT[rows]
            keep_BT = None if self.keep_BT is None else self.keep_BT[rows]
        tokens = label_BT.numel() if keep_BT is None else int(keep_BT.sum())
        return Batch(source_BS, source_keep_BS, input_BT, label_BT, keep_BT, tokens, self.total)


def _trim(keep_BT: Tensor | None, rows: slice, x_BT: Tensor) -> tuple[Tensor, Tensor | None]:
    """A part of the rows, cut to the longest of them, and its keep-mask (None if nothing is padded)."""
    if keep_BT is None:
        return x_BT[rows], None
    longest = int(keep_BT[rows].sum(1).max())
    keep_BT = keep_BT[rows, :longest]
    return x_BT[rows, :longest], None if bool(keep_BT.all()) else keep_BT


def in_parts(work: Callable[[slice], T], rows: int) -> Iterator[tuple[slice, T | None]]:
    """Apply `work` to all rows, and halve a part that runs out of memory -> (rows, result) of each part.

    The result is None for a single row that runs out of memory.
    """
    pending = [slice(0, rows)]
    while pending:
        part = pending.pop()
        result: T | None = None
        try:
            result = work(part)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside the handler, the error and the memory that `work` allocated have been released.
        if result is None and part.stop - part.start > 1:
            middle = (part.start + part.stop) // 2
            pending += [slice(middle, part.stop), slice(part.start, middle)]
        else:
            yield part, result


def pad(rows: Sequence[TokenIds], fill: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor | None]:
    """Rows of ids as one tensor, and its keep-mask (None if nothing is padded)."""
    import torch

    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    keep = np.arange(lengths.max(initial=0)) < lengths[:, None]
    table = np.full(keep.shape, fill, dtype=np.int64)
    table[keep] = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows]) if len(rows) else 0
    return torch.from_numpy(table).to(device), None if keep.all() else torch.from_numpy(keep).to(device)


def collate(
    sources: Sequence[TokenIds], targets: Sequence[TokenIds], config: Config, total: int | None = None
) -> Batch:
    """A batch of source and target ids; each row ends in the end token."""
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
    all_tokens: int  # source and target
    part: Callable[[slice, int], Batch]


def windows(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`; the last list may be shorter."""
    iterator = iter(items)
    while window := list(islice(iterator, size)):
        yield window


def by_length(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Yield batches of indices of similar length, longest first; batch size times longest length is within `budget`."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class Pixels(Value):
    """Scaling of image values by channel: (x - mean) / scale."""

    mean: tuple[float, ...]
    scale: tuple[float, ...]

    def __call__(self, images_NCHW: NDArray[Any]) -> NDArray[np.float32]:
        mean, scale = (np.asarray(x, np.float32).reshape(-1, 1, 1) for x in (self.mean, self.scale))
        scaled: NDArray[np.float32] = (images_NCHW.astype(np.float32) - mean) / scale
        return scaled
