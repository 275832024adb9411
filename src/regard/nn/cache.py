"""What decoding remembers: owned by the caller, passed in, returned, reordered by one `select`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

STEPS = 4  # for so many at least there is room when the keys of a tree have moved

Memory = tuple[Tensor, ...]  # what one layer remembers, rows first: keys and values, or recurrent states


@dataclass(frozen=True)
class CrossCache:
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
        """Which tokens are real, also where all are."""
        if self.keep_BS is not None:
            return self.keep_BS
        return self.pos_BS.new_ones(len(self.keys[0].k_BGSE), self.pos_BS.shape[1], dtype=torch.bool)

    def select(self, sentences: Tensor) -> CrossCache:
        keep = None if self.keep_BS is None else self.keep_BS.index_select(0, sentences)
        return CrossCache(tuple(kv.select(sentences) for kv in self.keys), keep, self.pos_BS)

    @classmethod
    def join(cls, sources: Sequence[CrossCache]) -> CrossCache:
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
    """The memory of every hypothesis after `length` tokens."""

    layers: tuple[Memory, ...]
    length: int = 0
    keep_NP: Tensor | None = None  # which of the past tokens are real; None: all
    source: CrossCache | None = None
    tree: Tree | None = None  # if there is one, `layers` have a row for each sentence and the tree knows what is real

    @classmethod
    def join(cls, states: Sequence[State]) -> State:
        """States before the first output token as one, their sentences one after the other."""
        if len(states) == 1:
            return states[0]
        memories = zip(*(state.layers for state in states), strict=True)
        layers = tuple(tuple(map(torch.cat, zip(*parts, strict=True))) for parts in memories)
        return cls(layers, source=CrossCache.join([state.source for state in states if state.source is not None]))

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
        """The state `count` tokens later."""
        return replace(self, layers=layers, length=self.length + count, keep_NP=self.kept(count, keep_NT))

    def positions(self, count: int, keep_NP: Tensor | None, device: torch.device) -> Tensor:
        """Positions of everything seen. Padding on the left does not count: a token's position is its own."""
        if keep_NP is None:
            return torch.arange(self.length + count, device=device).unsqueeze(0)
        return keep_NP.cumsum(1).sub(1).clamp(min=0)

    def kept(self, count: int, keep_NT: Tensor | None) -> Tensor | None:
        """Which tokens are real, past and new ones together."""
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
    """What an encoder hands over: a vector per token, and for recurrent ones the last state of each layer."""

    states_BSD: Tensor
    keep_BS: Tensor | None
    final: tuple[Tensor, ...] = ()

    @property
    def pos_BS(self) -> Tensor:
        return torch.arange(self.states_BSD.shape[1], device=self.states_BSD.device).unsqueeze(0)


SPARE = 16  # tokens that a new buffer has room for, at least


class KV(NamedTuple):
    """Keys and values of one attention. A cache is a KV that grew."""

    k_BGSE: Tensor
    v_BGSE: Tensor

    @property
    def length(self) -> int:
        return self.k_BGSE.shape[2]

    @property
    def room(self) -> int:
        """How many tokens can be added before anything has to be copied."""
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
        """Of these rows these tokens each, with room for more."""
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
        """At most the last `count` tokens."""
        if self.length <= count:
            return self
        return KV(self.k_BGSE[:, :, -count:], self.v_BGSE[:, :, -count:])


@dataclass
class Buffer:
    """Memory for keys and values with room at the end.

    Several caches may be views of one buffer: they share what they have in common. Only the one that ends where the
    buffer's content ends may write on behind itself; any other must copy first. So a cache never changes.
    """

    k_BSGE: Tensor  # a row's tokens lie together: they are read in one go, and the holes between rows do not matter
    v_BSGE: Tensor
    used: int = 0  # tokens

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
        """The tokens from `start` to `end`, behind which nothing is used now."""
        self.used = end
        cache = Cache(self.k_BSGE[:, start:end].transpose(1, 2), self.v_BSGE[:, start:end].transpose(1, 2))
        cache.buffer, cache.start = self, start
        return cache


class Cache(KV):
    """Keys and values in a buffer: growing costs the new tokens only, and reordering is one copy."""

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
    """Tokens of every row as one strip each."""
    size = x_BSGE[0, 0].numel()
    return x_BSGE.flatten(1)[:, start * size : (start + length) * size]


@dataclass(frozen=True)
class Tree:
    """Which of the tokens that a sentence remembers are the past of which hypothesis."""

    seen_AWP: Tensor
    pos_AP: Tensor
    next_A1: Tensor  # the position of the token to come; one row where all sentences agree

    def grow(self, memory: int) -> Tree:
        """Every hypothesis gets its next token, and sees no farther back than its `memory` (0: all the way)."""
        sentences, width, _ = self.seen_AWP.shape
        own_AWW = torch.eye(width, dtype=torch.bool, device=self.seen_AWP.device).expand(sentences, -1, -1)
        seen_AWP = torch.cat((self.seen_AWP, own_AWW), dim=2)
        pos_AP = torch.cat((self.pos_AP, self.next_A1.expand(sentences, width)), dim=1)
        if memory:
            seen_AWP = seen_AWP & (pos_AP >= self.next_A1 - memory).unsqueeze(1)
        return Tree(seen_AWP, pos_AP, self.next_A1 + 1)

    def select(self, rows_N: Tensor, sentences_A: Tensor | None) -> Tree:
        """Carry on these hypotheses, as many of each sentence; `sentences_A` are those left if some have gone."""
        count = len(self.seen_AWP) if sentences_A is None else len(sentences_A)
        seen_NP = self.seen_AWP.flatten(0, 1).index_select(0, rows_N)
        tree = replace(self, seen_AWP=seen_NP.unflatten(0, (count, len(rows_N) // count)))
        if sentences_A is None:
            return tree
        next_A1 = self.next_A1 if len(self.next_A1) == 1 else self.next_A1[sentences_A]
        return replace(tree, pos_AP=self.pos_AP[sentences_A], next_A1=next_A1)

    def alive(self) -> Tensor:
        """Places (A, L) of the tokens that some hypothesis comes from, filled up with others where they are fewer."""
        alive_AP = self.seen_AWP.any(1)
        most = int(alive_AP.sum(1).max())
        return alive_AP.byte().argsort(dim=1, descending=True, stable=True)[:, :most]

    def take(self, place_AL: Tensor) -> Tree:
        """Remember these tokens of every sentence, which must be all that are alive."""
        place_AWL = place_AL.unsqueeze(1).expand(-1, self.seen_AWP.shape[1], -1)
        return replace(self, seen_AWP=self.seen_AWP.gather(2, place_AWL), pos_AP=self.pos_AP.gather(1, place_AL))
