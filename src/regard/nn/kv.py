"""Keys and values of one attention, and how they grow while a text is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SPARE = 16  # symbols that a new buffer has room for, at least


class KV(NamedTuple):
    """Keys and values of one attention. A cache is a KV that grew; beams reorder it."""

    k_BGSE: Tensor
    v_BGSE: Tensor

    @property
    def length(self) -> int:
        return self.k_BGSE.shape[2]

    def extend(self, new: KV) -> KV:
        """Both one after the other; neither changes."""
        if torch.is_grad_enabled():  # what a gradient may need is not written over
            return KV(torch.cat((self.k_BGSE, new.k_BGSE), dim=2), torch.cat((self.v_BGSE, new.v_BGSE), dim=2))
        length = self.length + new.length
        buffer = Buffer.of(self, len(self.k_BGSE), length + max(SPARE, length // 2))
        return buffer.write(self).extend(new)

    def select(self, rows: Tensor) -> KV:
        """These rows, in this order."""
        return KV(self.k_BGSE.index_select(0, rows), self.v_BGSE.index_select(0, rows))

    def last(self, count: int) -> KV:
        """At most the last `count` symbols."""
        if self.length <= count:
            return self
        return KV(self.k_BGSE[:, :, -count:], self.v_BGSE[:, :, -count:])


@dataclass
class Buffer:
    """Memory for keys and values with room at the end.

    Several caches may be views of one buffer: they share what they have in common. Only the one that ends where the
    buffer's content ends may write on behind itself; any other must copy first. So a cache never changes.
    """

    k_BSGE: Tensor  # a row's symbols lie together: they are read in one go, and the holes between rows do not matter
    v_BSGE: Tensor
    used: int = 0  # symbols

    @classmethod
    def of(cls, kv: KV, rows: int, capacity: int) -> Buffer:
        shapes = [(rows, capacity, x.shape[1], x.shape[3]) for x in kv]
        return cls(kv.k_BGSE.new_empty(shapes[0]), kv.v_BGSE.new_empty(shapes[1]))

    def write(self, new: KV, start: int = 0) -> Cache:
        """Put `new` behind the first `start` symbols -> all of them."""
        end = start + new.length
        self.k_BSGE[:, start:end] = new.k_BGSE.transpose(1, 2)
        self.v_BSGE[:, start:end] = new.v_BGSE.transpose(1, 2)
        return self.view(end)

    def view(self, length: int) -> Cache:
        """The first `length` symbols, which are now all that is used."""
        self.used = length
        cache = Cache(self.k_BSGE[:, :length].transpose(1, 2), self.v_BSGE[:, :length].transpose(1, 2))
        cache.buffer = self
        return cache


class Cache(KV):
    """Keys and values in a buffer: growing costs the new symbols only, and reordering is one copy."""

    buffer: Buffer

    def extend(self, new: KV) -> KV:
        buffer, length = self.buffer, self.length
        mine = buffer.used == length and length + new.length <= buffer.k_BSGE.shape[1]
        # What was made for inference may not be written elsewhere.
        allowed = not torch.is_grad_enabled() and buffer.k_BSGE.is_inference() <= torch.is_inference_mode_enabled()
        return buffer.write(new, length) if mine and allowed else super().extend(new)

    def select(self, rows: Tensor) -> KV:
        old, length = self.buffer, self.length
        new = Buffer.of(self, len(rows), old.k_BSGE.shape[1])
        for source, target in ((old.k_BSGE, new.k_BSGE), (old.v_BSGE, new.v_BSGE)):
            torch.index_select(_strips(source, length), 0, rows, out=_strips(target, length))
        return new.view(length)


def _strips(x_BSGE: Tensor, length: int) -> Tensor:
    """The first symbols of every row as one strip each."""
    return x_BSGE.flatten(1)[:, : length * x_BSGE[0, 0].numel()]
