"""What decoding remembers: owned by the caller, passed in, returned, reordered by one `select`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.nn.kv import KV

Memory = tuple[Tensor, ...]  # what one layer remembers, rows first: keys and values, or recurrent states


@dataclass(frozen=True)
class Source:
    """What the other tower offers, once per sentence however many hypotheses look at it."""

    keys: tuple[KV, ...]  # per layer
    keep_BS: Tensor | None
    pos_BS: Tensor

    def query_positions(self, pos_BT: Tensor, rows: int) -> Tensor:
        """Positions of `rows` hypotheses as Attention lines them up: those of a sentence one after the other."""
        sentences = self.keys[0].k_BGSE.shape[0]
        if pos_BT.shape[0] > 1:
            return pos_BT.reshape(sentences, -1)
        return pos_BT.repeat(1, rows // sentences)

    def select(self, sentences: Tensor) -> Source:
        keep = None if self.keep_BS is None else self.keep_BS.index_select(0, sentences)
        return Source(tuple(kv.select(sentences) for kv in self.keys), keep, self.pos_BS)


@dataclass(frozen=True)
class State:
    """The memory of every hypothesis after `length` symbols."""

    layers: tuple[Memory, ...]
    length: int = 0
    keep_NP: Tensor | None = None  # which of the past symbols are real; None: all
    source: Source | None = None

    def select(self, rows: Tensor, sentences: Tensor | None = None) -> State:
        """Carry on the hypotheses `rows`, in that order; `sentences` are those still alive when some have left."""
        return replace(
            self,
            layers=tuple(_select(memory, rows) for memory in self.layers),
            keep_NP=None if self.keep_NP is None else self.keep_NP.index_select(0, rows),
            source=self.source if sentences is None or self.source is None else self.source.select(sentences),
        )

    def advance(self, layers: tuple[Memory, ...], count: int, keep_NT: Tensor | None) -> State:
        """The state `count` symbols later."""
        return replace(self, layers=layers, length=self.length + count, keep_NP=self.kept(count, keep_NT))

    def positions(self, count: int, keep_NP: Tensor | None, device: torch.device) -> Tensor:
        """Positions of everything seen. Padding on the left does not count: a symbol's position is its own."""
        if keep_NP is None:
            return torch.arange(self.length + count, device=device).unsqueeze(0)
        return keep_NP.cumsum(1).sub(1).clamp(min=0)

    def kept(self, count: int, keep_NT: Tensor | None) -> Tensor | None:
        """Which symbols are real, past and new ones together."""
        if self.keep_NP is None and keep_NT is None:
            return None
        known = self.keep_NP if self.keep_NP is not None else keep_NT
        assert known is not None
        past = known.new_ones(len(known), self.length) if self.keep_NP is None else self.keep_NP
        new = known.new_ones(len(known), count) if keep_NT is None else keep_NT
        return torch.cat((past, new), dim=1)


def _select(memory: Memory, rows: Tensor) -> Memory:
    return memory.select(rows) if isinstance(memory, KV) else tuple(x.index_select(0, rows) for x in memory)


@dataclass(frozen=True)
class Encoded:
    """What an encoder hands over: a vector per symbol, and for recurrent ones the last state of each layer."""

    states_BSD: Tensor
    keep_BS: Tensor | None
    final: tuple[Tensor, ...] = ()

    @property
    def pos_BS(self) -> Tensor:
        return torch.arange(self.states_BSD.shape[1], device=self.states_BSD.device).unsqueeze(0)
