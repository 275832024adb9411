"""Keys and values of one attention, and how they grow while a text is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SPARE = 16  # symbols that a new buffer has room for, at least


class KV(NamedTuple):
    """Keys and values of one attention. A cache is a KV that grew."""

    k_BGSE: Tensor
    v_BGSE: Tensor

    @property
    def length(self) -> int:
        return self.k_BGSE.shape[2]

    @property
    def room(self) -> int:
        """How many symbols can be added before anything has to be copied."""
        return 0

    def extend(self, new: KV) -> KV:
        """Both one after the other; neither changes."""
        if torch.is_grad_enabled():  # what a gradient may need is not written over
            return KV(torch.cat((self.k_BGSE, new.k_BGSE), dim=2), torch.cat((self.v_BGSE, new.v_BGSE), dim=2))
        length = self.length + new.length
        buffer = Buffer.of(self, len(self.k_BGSE), length + max(SPARE, length // 2))
        return buffer.write(self, 0, 0).extend(new)

    def select(self, rows: Tensor) -> KV:
        """These rows, in this order."""
        return KV(self.k_BGSE.index_select(0, rows), self.v_BGSE.index_select(0, rows))

    def take(self, rows_A: Tensor, place_AL: Tensor, room: int) -> KV:
        """Of these rows these symbols each, with room for more."""
        place_AS = F.pad(place_AL, (0, room))  # what fills the room does not matter, but all is one copy

        def taken(x_BSGE: Tensor) -> Tensor:
            index_AS = rows_A.unsqueeze(1) * x_BSGE.shape[1] + place_AS
            out = x_BSGE.flatten(0, 1).flatten(1).index_select(0, index_AS.flatten())
            return out.view(*index_AS.shape, *x_BSGE.shape[2:])

        k_BSGE, v_BSGE = self._by_symbol()
        return Buffer(taken(k_BSGE), taken(v_BSGE)).view(0, place_AL.shape[1])

    def _by_symbol(self) -> tuple[Tensor, Tensor]:
        return self.k_BGSE.transpose(1, 2), self.v_BGSE.transpose(1, 2)

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

    def write(self, new: KV, start: int, at: int) -> Cache:
        """Put `new` at place `at` -> all from place `start` to its end."""
        end = at + new.length
        self.k_BSGE[:, at:end] = new.k_BGSE.transpose(1, 2)
        self.v_BSGE[:, at:end] = new.v_BGSE.transpose(1, 2)
        return self.view(start, end)

    def view(self, start: int, end: int) -> Cache:
        """The symbols from `start` to `end`, behind which nothing is used now."""
        self.used = end
        cache = Cache(self.k_BSGE[:, start:end].transpose(1, 2), self.v_BSGE[:, start:end].transpose(1, 2))
        cache.buffer, cache.start = self, start
        return cache


class Cache(KV):
    """Keys and values in a buffer: growing costs the new symbols only, and reordering is one copy."""

    buffer: Buffer
    start: int  # its first place in the buffer

    @property
    def room(self) -> int:
        buffer, end = self.buffer, self.start + self.length
        # What was made for inference may not be written elsewhere, and what a gradient may need is not written over.
        allowed = not torch.is_grad_enabled() and buffer.k_BSGE.is_inference() <= torch.is_inference_mode_enabled()
        return buffer.k_BSGE.shape[1] - end if buffer.used == end and allowed else 0

    def extend(self, new: KV) -> KV:
        if new.length > self.room:
            return super().extend(new)
        return self.buffer.write(new, self.start, self.start + self.length)

    def select(self, rows: Tensor) -> KV:
        old, length = self.buffer, self.length
        new = Buffer.of(self, len(rows), old.k_BSGE.shape[1] - self.start)
        for source, target in ((old.k_BSGE, new.k_BSGE), (old.v_BSGE, new.v_BSGE)):
            strips = _strips(source, self.start, length)
            torch.index_select(strips, 0, rows, out=_strips(target, 0, length))
        return new.view(0, length)

    def last(self, count: int) -> KV:
        if self.length <= count:
            return self
        end = self.start + self.length
        if self.buffer.used != end:  # another has gone on behind this one
            return super().last(count)
        return self.buffer.view(end - count, end)

    def _by_symbol(self) -> tuple[Tensor, Tensor]:
        return self.buffer.k_BSGE[:, self.start :], self.buffer.v_BSGE[:, self.start :]


def _strips(x_BSGE: Tensor, start: int, length: int) -> Tensor:
    """Symbols of every row as one strip each."""
    size = x_BSGE[0, 0].numel()
    return x_BSGE.flatten(1)[:, start * size : (start + length) * size]
