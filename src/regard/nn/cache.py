"""Decoding state: KV caches, the prefix tree of the beam, the encoder output as keys and values, recurrent states.

The caller owns the state: it is passed in, returned, and reordered by one `select`. Modules do not store it.

A active sentences   W hypotheses per sentence   N hypotheses of all sentences   P past tokens   L cache slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_FREE_SLOTS = 16  # in a new buffer
MIN_FREE_STEPS = 4  # decoding steps that fit into a compacted cache

LayerState = tuple[Tensor, ...]  # keys and values (KV) or recurrent states of a layer; the first dimension is rows


class KV(NamedTuple):
    """Keys and values of one attention. A KV that grows during decoding becomes a `KVCache`."""

    k_BGSE: Tensor
    v_BGSE: Tensor

    @property
    def length(self) -> int:
        return self.k_BGSE.shape[2]

    @property
    def free(self) -> int:
        """The number of tokens that can be appended without a copy."""
        return 0

    def extend(self, new: KV) -> KV:
        """Concatenate along the sequence; the inputs are not modified."""
        if torch.is_grad_enabled():  # autograd may need the tensors, so they are not modified in place
            return KV(torch.cat((self.k_BGSE, new.k_BGSE), dim=2), torch.cat((self.v_BGSE, new.v_BGSE), dim=2))
        length = self.length + new.length
        buffer = KVBuffer.like(self, len(self.k_BGSE), length + max(MIN_FREE_SLOTS, length // 2))
        return buffer.write(self, 0, 0).extend(new)

    def select(self, rows: Tensor) -> KV:
        """Select rows in this order."""
        return KV(self.k_BGSE.index_select(0, rows), self.v_BGSE.index_select(0, rows))

    def gather(self, rows_A: Tensor, slot_AL: Tensor, free: int) -> KV:
        """The tokens `slot_AL` of the rows `rows_A`, in a new cache with `free` unused slots."""
        slot_AS = F.pad(slot_AL, (0, free))  # the content of free slots is arbitrary; padding makes this one copy

        def gathered(x_BSGE: Tensor) -> Tensor:
            index_AS = rows_A.unsqueeze(1) * x_BSGE.shape[1] + slot_AS
            out = x_BSGE.flatten(0, 1).flatten(1).index_select(0, index_AS.flatten())
            return out.view(*index_AS.shape, *x_BSGE.shape[2:])

        k_BSGE, v_BSGE = self._token_major()
        return KVBuffer(gathered(k_BSGE), gathered(v_BSGE)).view(0, slot_AL.shape[1])

    def _token_major(self) -> tuple[Tensor, Tensor]:
        return self.k_BGSE.transpose(1, 2), self.v_BGSE.transpose(1, 2)

    def last(self, count: int) -> KV:
        """At most the last `count` tokens."""
        if self.length <= count:
            return self
        return KV(self.k_BGSE[:, :, -count:], self.v_BGSE[:, :, -count:])


@dataclass
class KVBuffer:
    """Memory for keys and values with free slots at the end.

    Several caches may be views of one buffer and share a common prefix. Only the cache that ends at the end of the used
    part may append in place; the others copy first. So the content of a cache never changes.
    """

    k_BSGE: Tensor  # token-major: the tokens of a row are contiguous in memory
    v_BSGE: Tensor
    used: int = 0  # slots

    @classmethod
    def like(cls, kv: KV, rows: int, capacity: int) -> KVBuffer:
        shapes = [(rows, capacity, x.shape[1], x.shape[3]) for x in kv]
        return cls(kv.k_BGSE.new_empty(shapes[0]), kv.v_BGSE.new_empty(shapes[1]))

    def write(self, new: KV, start: int, at: int) -> KVCache:
        """Write `new` to slot `at` -> the cache from slot `start` to the end of `new`."""
        end = at + new.length
        self.k_BSGE[:, at:end] = new.k_BGSE.transpose(1, 2)
        self.v_BSGE[:, at:end] = new.v_BGSE.transpose(1, 2)
        return self.view(start, end)

    def view(self, start: int, end: int) -> KVCache:
        """The slots from `start` to `end`; `end` becomes the end of the used part."""
        self.used = end
        cache = KVCache(self.k_BSGE[:, start:end].transpose(1, 2), self.v_BSGE[:, start:end].transpose(1, 2))
        cache.buffer = self
        cache.start = start
        return cache


class KVCache(KV):
    """Keys and values in a buffer: appending writes only the new tokens, and reordering is one copy."""

    buffer: KVBuffer
    start: int  # first slot in the buffer

    @property
    def free(self) -> int:
        buffer = self.buffer
        end = self.start + self.length
        # Inference tensors cannot be modified outside inference mode, and autograd may need the content.
        allowed = not torch.is_grad_enabled() and buffer.k_BSGE.is_inference() <= torch.is_inference_mode_enabled()
        return buffer.k_BSGE.shape[1] - end if buffer.used == end and allowed else 0

    def extend(self, new: KV) -> KV:
        if new.length > self.free:
            return super().extend(new)
        return self.buffer.write(new, self.start, self.start + self.length)

    def select(self, rows: Tensor) -> KV:
        old = self.buffer
        length = self.length
        new = KVBuffer.like(self, len(rows), old.k_BSGE.shape[1] - self.start)
        for source, target in ((old.k_BSGE, new.k_BSGE), (old.v_BSGE, new.v_BSGE)):
            torch.index_select(_flat_rows(source, self.start, length), 0, rows, out=_flat_rows(target, 0, length))
        return new.view(0, length)

    def last(self, count: int) -> KV:
        if self.length <= count:
            return self
        end = self.start + self.length
        if self.buffer.used != end:  # another cache has appended to the buffer
            return super().last(count)
        return self.buffer.view(end - count, end)

    def _token_major(self) -> tuple[Tensor, Tensor]:
        return self.buffer.k_BSGE[:, self.start :], self.buffer.v_BSGE[:, self.start :]


def _flat_rows(x_BSGE: Tensor, start: int, length: int) -> Tensor:
    """A view of `length` tokens of every row, one flat vector per row."""
    size = x_BSGE[0, 0].numel()
    return x_BSGE.flatten(1)[:, start * size : (start + length) * size]


@dataclass(frozen=True)
class PrefixTree:
    """The prefix tree of the beam: the cached tokens that form the prefix of each hypothesis of a sentence.

    The hypotheses of a sentence share one cache row, so extending and reordering the beam copies no keys.
    """

    prefix_AWP: Tensor  # True where a cached token belongs to the prefix of a hypothesis
    pos_AP: Tensor
    next_pos_A1: Tensor  # the position of the next token; one row if it is the same for all sentences

    def extend(self, memory: int) -> PrefixTree:
        """Add a token to every hypothesis; it attends to the last `memory` tokens (0: all tokens)."""
        sentences, width, _ = self.prefix_AWP.shape
        own_AWW = torch.eye(width, dtype=torch.bool, device=self.prefix_AWP.device).expand(sentences, -1, -1)
        prefix_AWP = torch.cat((self.prefix_AWP, own_AWW), dim=2)
        pos_AP = torch.cat((self.pos_AP, self.next_pos_A1.expand(sentences, width)), dim=1)
        if memory:
            prefix_AWP = prefix_AWP & (pos_AP >= self.next_pos_A1 - memory).unsqueeze(1)
        return PrefixTree(prefix_AWP, pos_AP, self.next_pos_A1 + 1)

    def select(self, rows_N: Tensor, sentences_A: Tensor | None) -> PrefixTree:
        """Select hypotheses, the same number per sentence; `sentences_A` are the sentences that are not finished."""
        count = len(self.prefix_AWP) if sentences_A is None else len(sentences_A)
        prefix_NP = self.prefix_AWP.flatten(0, 1).index_select(0, rows_N)
        tree = replace(self, prefix_AWP=prefix_NP.unflatten(0, (count, len(rows_N) // count)))
        if sentences_A is None:
            return tree
        next_pos_A1 = self.next_pos_A1 if len(self.next_pos_A1) == 1 else self.next_pos_A1[sentences_A]
        return replace(tree, pos_AP=self.pos_AP[sentences_A], next_pos_A1=next_pos_A1)

    def compacted(self) -> tuple[Tensor, PrefixTree]:
        """Slots (A, L) of the tokens that are in a prefix, and their tree; shorter rows are filled with other slots."""
        live_AP = self.prefix_AWP.any(1)
        most = int(live_AP.sum(1).max())
        slot_AL = live_AP.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
        prefix_AWL = self.prefix_AWP.gather(2, slot_AL.unsqueeze(1).expand(-1, self.prefix_AWP.shape[1], -1))
        return slot_AL, replace(self, prefix_AWP=prefix_AWL, pos_AP=self.pos_AP.gather(1, slot_AL))


@dataclass(frozen=True)
class EncoderOutput:
    """A vector per source token, and the last state of each layer of a recurrent encoder."""

    states_BSD: Tensor
    keep_BS: Tensor | None
    final: tuple[Tensor, ...] = ()

    @property
    def pos_BS(self) -> Tensor:
        return torch.arange(self.states_BSD.shape[1], device=self.states_BSD.device).unsqueeze(0)


@dataclass(frozen=True)
class CrossCache:
    """The encoder output as keys and values of the cross-attention; all hypotheses of a sentence share a row."""

    layers: tuple[KV, ...]
    keep_BS: Tensor | None  # False at padding; None: nothing is padded
    pos_BS: Tensor

    def select(self, sentences: Tensor) -> CrossCache:
        keep = None if self.keep_BS is None else self.keep_BS.index_select(0, sentences)
        return CrossCache(tuple(kv.select(sentences) for kv in self.layers), keep, self.pos_BS)

    @classmethod
    def join(cls, caches: Sequence[CrossCache]) -> CrossCache:
        """Join the sentences of several caches, padded to the longest."""
        length = max(cache.pos_BS.shape[1] for cache in caches)
        layers = zip(*(cache.layers for cache in caches), strict=True)
        joined = tuple(KV(*(_pad_and_join(parts, length) for parts in zip(*layer, strict=True))) for layer in layers)
        keep_BS = torch.cat([F.pad(cache._keep_mask(), (0, length - cache.pos_BS.shape[1])) for cache in caches])
        return cls(joined, keep_BS, torch.arange(length, device=keep_BS.device).unsqueeze(0))

    def _keep_mask(self) -> Tensor:
        if self.keep_BS is not None:
            return self.keep_BS
        return self.pos_BS.new_ones(len(self.layers[0].k_BGSE), self.pos_BS.shape[1], dtype=torch.bool)


def _pad_and_join(parts_BGSE: Sequence[Tensor], length: int) -> Tensor:
    """The rows of all parts, padded with zeros to `length` tokens."""
    _, heads, _, width = parts_BGSE[0].shape
    out_BSGE = parts_BGSE[0].new_zeros(sum(map(len, parts_BGSE)), length, heads, width)
    for rows, part in zip(out_BSGE.split([len(part) for part in parts_BGSE]), parts_BGSE, strict=True):
        rows[:, : part.shape[2]] = part.transpose(1, 2)
    return out_BSGE.transpose(1, 2)


@dataclass(frozen=True)
class State:
    """The decoding state of every hypothesis after `length` tokens."""

    layers: tuple[LayerState, ...]
    length: int = 0
    keep_NP: Tensor | None = None  # False at padding of the past; None: nothing was padded
    source: CrossCache | None = None
    tree: PrefixTree | None = None  # with a tree, `layers` have one row per sentence instead of per hypothesis

    @classmethod
    def join(cls, states: Sequence[State]) -> State:
        """Join the sentences of several states before the first output token."""
        if len(states) == 1:
            return states[0]
        per_layer = zip(*(state.layers for state in states), strict=True)
        layers = tuple(tuple(map(torch.cat, zip(*parts, strict=True))) for parts in per_layer)
        return cls(layers, source=CrossCache.join([state.source for state in states if state.source is not None]))

    def with_prefix_tree(self, sentences: int, device: torch.device) -> State:
        """The state for beam search, from one hypothesis per sentence.

        Recurrent states need no tree: they do not grow, and every step computes new ones.
        """
        caches = [layer for layer in self.layers if isinstance(layer, KV)]
        if len(caches) < len(self.layers):
            return self
        first = self.length - caches[0].length if caches else 0  # earlier tokens were dropped from the cache
        pos_AP = self.positions(0, self.keep_NP, device).expand(sentences, -1)[:, first:]
        if self.keep_NP is None:
            prefix_AP = torch.ones_like(pos_AP, dtype=torch.bool)
            next_pos_A1 = torch.full((1, 1), self.length, device=device)
        else:
            prefix_AP = self.keep_NP[:, first:]
            next_pos_A1 = self.keep_NP.sum(1, keepdim=True)
        return replace(self, keep_NP=None, tree=PrefixTree(prefix_AP.unsqueeze(1), pos_AP, next_pos_A1))

    def select(self, rows: Tensor, sentences: Tensor | None = None) -> State:
        """Select the hypotheses `rows` in this order; `sentences` are the sentences that are not finished."""
        source = self.source if sentences is None or self.source is None else self.source.select(sentences)
        if self.tree is not None:
            layers, tree = self._compacted(self.tree.select(rows, sentences), sentences)
            return replace(self, layers=layers, source=source, tree=tree)
        return replace(
            self,
            layers=tuple(
                layer.select(rows) if isinstance(layer, KV) else tuple(x.index_select(0, rows) for x in layer)
                for layer in self.layers
            ),
            keep_NP=None if self.keep_NP is None else self.keep_NP.index_select(0, rows),
            source=source,
        )

    def _compacted(self, tree: PrefixTree, sentences_A: Tensor | None) -> tuple[tuple[LayerState, ...], PrefixTree]:
        """Drop finished sentences and unused tokens from the caches if a sentence has finished or a cache is full."""
        layers = self.layers
        count, width, _ = tree.prefix_AWP.shape
        if sentences_A is None and not any(isinstance(layer, KV) and layer.free < width for layer in layers):
            return layers, tree
        slot_AL, tree = tree.compacted()
        rows_A = torch.arange(count, device=slot_AL.device) if sentences_A is None else sentences_A
        free = max(MIN_FREE_STEPS * width, slot_AL.shape[1] // 2)
        layers = tuple(layer.gather(rows_A, slot_AL, free) for layer in layers if isinstance(layer, KV))
        return layers, tree

    def advance(self, layers: tuple[LayerState, ...], count: int, keep_NT: Tensor | None) -> State:
        """The state `count` tokens later."""
        return replace(self, layers=layers, length=self.length + count, keep_NP=self.keep_mask(count, keep_NT))

    def positions(self, count: int, keep_NP: Tensor | None, device: torch.device) -> Tensor:
        """Positions of past and `count` new tokens. Padding on the left does not count."""
        if keep_NP is None:
            return torch.arange(self.length + count, device=device).unsqueeze(0)
        return keep_NP.cumsum(1).sub(1).clamp(min=0)

    def keep_mask(self, count: int, keep_NT: Tensor | None) -> Tensor | None:
        """The keep-mask of past and `count` new tokens; None if nothing is padded."""
        if self.keep_NP is None and keep_NT is None:
            return None
        known = self.keep_NP if self.keep_NP is not None else keep_NT
        assert known is not None
        past = known.new_ones(len(known), self.length) if self.keep_NP is None else self.keep_NP
        new = known.new_ones(len(known), count) if keep_NT is None else keep_NT
        return torch.cat((past, new), dim=1)
