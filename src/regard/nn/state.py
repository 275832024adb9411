"""What decoding remembers: owned by the caller, passed in, returned, reordered by one `select`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.nn.kv import KV
from regard.nn.tree import Tree

STEPS = 4  # for so many at least there is room when the keys of a tree have moved

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

    @property
    def kept_BS(self) -> Tensor:
        """Which symbols are real, also where all are."""
        if self.keep_BS is not None:
            return self.keep_BS
        return self.pos_BS.new_ones(len(self.keys[0].k_BGSE), self.pos_BS.shape[1], dtype=torch.bool)

    def select(self, sentences: Tensor) -> Source:
        keep = None if self.keep_BS is None else self.keep_BS.index_select(0, sentences)
        return Source(tuple(kv.select(sentences) for kv in self.keys), keep, self.pos_BS)

    @classmethod
    def join(cls, sources: Sequence[Source]) -> Source:
        """Sources of several sets of sentences as one, with nothing behind the shorter ones."""
        length = max(source.pos_BS.shape[1] for source in sources)
        layers = zip(*(source.keys for source in sources), strict=True)
        keys = tuple(KV(*(_join(parts, length) for parts in zip(*layer, strict=True))) for layer in layers)
        keep_BS = torch.cat([F.pad(source.kept_BS, (0, length - source.pos_BS.shape[1])) for source in sources])
        return cls(keys, keep_BS, torch.arange(length, device=keep_BS.device).unsqueeze(0))


def _join(parts_BGSE: Sequence[Tensor], length: int) -> Tensor:
    """Rows of all parts, with zeros behind the shorter ones."""
    _, heads, _, width = parts_BGSE[0].shape
    out_BSGE = parts_BGSE[0].new_zeros(sum(map(len, parts_BGSE)), length, heads, width)
    for rows, part in zip(out_BSGE.split([len(part) for part in parts_BGSE]), parts_BGSE, strict=True):
        rows[:, : part.shape[2]] = part.transpose(1, 2)
    return out_BSGE.transpose(1, 2)


@dataclass(frozen=True)
class State:
    """The memory of every hypothesis after `length` symbols."""

    layers: tuple[Memory, ...]
    length: int = 0
    keep_NP: Tensor | None = None  # which of the past symbols are real; None: all
    source: Source | None = None
    tree: Tree | None = None  # if there is one, `layers` have a row for each sentence and the tree knows what is real

    @classmethod
    def join(cls, states: Sequence[State]) -> State:
        """States before the first output symbol as one, their sentences one after the other."""
        if len(states) == 1:
            return states[0]
        memories = zip(*(state.layers for state in states), strict=True)
        layers = tuple(tuple(map(torch.cat, zip(*parts, strict=True))) for parts in memories)
        return cls(layers, source=Source.join([state.source for state in states if state.source is not None]))

    def branching(self, sentences: int, device: torch.device) -> State:
        """The same for a search whose hypotheses part, from one of each sentence on.

        A recurrent memory stays as it is: it does not grow, and is made anew at every step.
        """
        keys = [memory for memory in self.layers if isinstance(memory, KV)]
        if len(keys) < len(self.layers):
            return self
        first = self.length - keys[0].length if keys else 0  # what lies before was forgotten
        pos_AP = self.positions(0, self.keep_NP, device).expand(sentences, -1)[:, first:]
        if self.keep_NP is None:
            seen_AP = torch.ones_like(pos_AP, dtype=torch.bool)
            next_A1 = torch.full((1, 1), self.length, device=device)
        else:
            seen_AP, next_A1 = self.keep_NP[:, first:], self.keep_NP.sum(1, keepdim=True)
        return replace(self, keep_NP=None, tree=Tree(seen_AP.unsqueeze(1), pos_AP, next_A1))

    def select(self, rows: Tensor, sentences: Tensor | None = None) -> State:
        """Carry on the hypotheses `rows`, in that order; `sentences` are those still alive when some have left."""
        if self.tree is not None:
            return self._climb(self.tree.select(rows, sentences), sentences)
        return replace(
            self,
            layers=tuple(_select(memory, rows) for memory in self.layers),
            keep_NP=None if self.keep_NP is None else self.keep_NP.index_select(0, rows),
            source=self.source if sentences is None or self.source is None else self.source.select(sentences),
        )

    def _climb(self, tree: Tree, sentences_A: Tensor | None) -> State:
        """Carry on the hypotheses of this tree.

        Keys move only when sentences have left or when there is no room for more; then the dead are left behind.
        """
        layers, source = self.layers, self.source
        count, width, _ = tree.seen_AWP.shape
        if sentences_A is not None or any(isinstance(memory, KV) and memory.room < width for memory in layers):
            place_AL = tree.alive()
            tree = tree.take(place_AL)
            rows_A = torch.arange(count, device=place_AL.device) if sentences_A is None else sentences_A
            room = max(STEPS * width, place_AL.shape[1] // 2)
            layers = tuple(memory.take(rows_A, place_AL, room) for memory in layers if isinstance(memory, KV))
        if sentences_A is not None and source is not None:
            source = source.select(sentences_A)
        return replace(self, layers=layers, source=source, tree=tree)

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
