"""Attention among tokens that hash alike: queries are their own keys, sorted by hash, and look at near chunks.

Letters beyond the legend of attention.py:
X heads of all rows   R rounds of hashing   P places: the length in whole chunks   N chunks   C places of a chunk
K keys that a chunk looks at
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.config import Stack
from regard.nn.attention import KV, AttentionMask, softmax_seen
from regard.nn.dropout import Dropout
from regard.nn.hooks import Tap
from regard.nn.position import Position

# A query, being its own key, would always like itself best, so it looks at itself only where it can see nothing else:
# this score loses against all others, and a hidden key's loses against this. Powers of two multiply without rounding.
ITSELF, HIDDEN = -(2.0**13), -(2.0**30)


class Order(NamedTuple):
    """The tokens of a pass sorted by hash, once per round, and the way back."""

    symbol_XRP: Tensor  # which token stands at a place; numbers beyond the length fill the last chunk
    place_XRP: Tensor  # where a token stands


class LSHAttention(nn.Module):
    """Multi-head self-attention that compares each query with the few keys that hash alike.

    It is called like `Attention`. Rotations of a layer are drawn from a seed of its own, the same in every pass: what a
    resumed run hashes, the uninterrupted one had hashed as well. Attention is exact, with every key that may be seen,
    where hashing could not save anything: in short sequences, and when a few queries read on from a long past. It is
    what hashed attention becomes with ever more rounds if a key that was met in several rounds counts `once`.
    """

    def __init__(self, stack: Stack, index: int = 0) -> None:
        super().__init__()
        bias = stack.bias == "all"
        self.heads = stack.heads
        self.lsh = stack.lsh
        self.seed = index
        self.query_key = nn.Linear(stack.width, stack.heads * stack.head, bias=bias)
        self.value = nn.Linear(stack.width, stack.heads * stack.value, bias=bias)
        self.out = nn.Linear(stack.heads * stack.value, stack.width, bias=bias)
        self.dropout = Dropout(stack.attention_dropout)
        self.weights = Tap()  # (B, H, T, S) after the softmax
        self.mixed = Tap()  # (B, H, T, E): what each head brings back

    def keys(self, context_BSD: Tensor, pos_BS: Tensor, position: Position) -> KV:
        """What queries and keys are both made of, and values."""
        shared_BHSE, v_BHSE = (
            layer(context_BSD).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query_key, self.value)
        )
        return KV(position.rotate(shared_BHSE, pos_BS), v_BHSE)

    def forward(
        self, x_BTD: Tensor, kv: KV, sight: AttentionMask, position: Position, order: Order | None = None
    ) -> Tensor:
        """What each query gets. `order` is what `sort` said of the same pass, for those who run it again."""
        shared_BHSE, v_BHSE = kv.k_BGSE, kv.v_BGSE
        if order is None:
            order = self.sort(kv, sight)
        # Keys have length one, so a long query does not outweigh others when it is looked at.
        k_BHSE = shared_BHSE * torch.rsqrt(shared_BHSE.square().mean(-1, keepdim=True) + 1e-6)
        k_BHSE = k_BHSE / math.sqrt(k_BHSE.shape[-1])
        if order is None:
            z_BHTE = self._exact(shared_BHSE[:, :, -x_BTD.shape[1] :], k_BHSE, v_BHSE, sight)
        else:
            z_BHTE = self._hashed(shared_BHSE, k_BHSE, v_BHSE, sight, order)
        out: Tensor = self.out(self.mixed(z_BHTE).transpose(1, 2).flatten(2))
        return out

    def sort(self, kv: KV, sight: AttentionMask) -> Order | None:
        """The tokens by hash; None where attention is exact."""
        if not self._pays(sight.q_pos_BT.shape[1], kv.k_BGSE.shape[2]):
            return None
        symbol_XRP = self._hash(kv.k_BGSE, sight.keep_BS).argsort(dim=-1, stable=True)
        places = torch.arange(symbol_XRP.shape[-1], device=symbol_XRP.device).expand_as(symbol_XRP)
        return Order(symbol_XRP, torch.empty_like(symbol_XRP).scatter_(-1, symbol_XRP, places))

    def _pays(self, queries: int, keys: int) -> bool:
        """Whether hashing compares fewer pairs than there are."""
        met = self.lsh.hashes * self.lsh.chunk * (1 + self.lsh.before + self.lsh.after)
        return queries == keys and keys > met

    @torch.no_grad()
    def _hash(self, x_BHTE: Tensor, keep_BT: Tensor | None) -> Tensor:
        """The bucket of every token, (X, R, P): which axis of a turned space is nearest. Padding comes last."""
        length = x_BHTE.shape[2]
        whole = math.ceil(length / self.lsh.chunk) * self.lsh.chunk
        factors = self._buckets(whole)
        draws = torch.Generator().manual_seed(self.seed)
        axes = (self.heads, x_BHTE.shape[-1], self.lsh.hashes, sum(factors) // 2)
        turn_HEA = torch.randn(axes, generator=draws).to(x_BHTE).flatten(2)
        turned_BHRTA = (x_BHTE @ turn_HEA).unflatten(-1, axes[2:]).transpose(2, 3)
        bucket_BHRT = torch.zeros(turned_BHRTA.shape[:-1], dtype=torch.long, device=x_BHTE.device)
        known = 1
        for part, count in zip(turned_BHRTA.split([n // 2 for n in factors], dim=-1), factors, strict=True):
            axis = part.abs().argmax(-1, keepdim=True)
            backwards = part.gather(-1, axis) < 0
            bucket_BHRT += known * (axis + backwards * (count // 2)).squeeze(-1)
            known *= count
        if keep_BT is not None:
            bucket_BHRT.masked_fill_(~keep_BT[:, None, None], known)
        return F.pad(bucket_BHRT.flatten(0, 1), (0, whole - length), value=known)

    def _buckets(self, length: int) -> tuple[int, ...]:
        """How many buckets, as a product if they are too many for comparing each token with all their axes."""
        if self.lsh.buckets is not None:
            return (self.lsh.buckets,)
        power = (2 * (length // self.lsh.chunk)).bit_length() - 1
        if 2**power <= 2 * self.lsh.chunk:
            return (2**power,)
        return 2 ** (power // 2), 2 ** (power - power // 2)

    def _exact(self, q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, sight: AttentionMask) -> Tensor:
        scores_BHTS = q_BHTE @ k_BHSE.transpose(-1, -2)
        queries, keys = scores_BHTS.shape[-2:]
        own_TS = torch.ones(queries, keys, dtype=torch.bool, device=q_BHTE.device)
        own_TS = own_TS.tril(keys - queries).triu(keys - queries)  # queries are the last of the keys
        scores_BHTS = scores_BHTS.masked_fill(own_TS, ITSELF)
        if sight.mask_B1TS is not None:
            scores_BHTS = scores_BHTS.masked_fill(~sight.mask_B1TS, -math.inf)
        z_BHTE: Tensor = self.dropout(self.weights(softmax_seen(scores_BHTS))) @ v_BHSE
        return z_BHTE

    def _hashed(self, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, sight: AttentionMask, order: Order) -> Tensor:
        z_BHTE: Tensor
        q_XTE, k_XTE, v_XTE = (x.flatten(0, 1) for x in (q_BHTE, k_BHTE, v_BHTE))
        q_XRNC = order.symbol_XRP.unflatten(-1, (-1, self.lsh.chunk))
        k_XRNK = self._look(q_XRNC)
        # The largest tensor here is written over and over: it holds bias, scores and exponentials in turn.
        scores_XRNCK = self._bias(q_XRNC, k_XRNK, order, sight, q_XTE.dtype)
        scores_XRNCK.add_(_take(q_XTE, q_XRNC) @ _take(k_XTE, k_XRNK).transpose(-1, -2))
        top_XRNC1 = scores_XRNCK.detach().amax(-1, keepdim=True)
        strength_XRNCK = scores_XRNCK.sub_(top_XRNC1).exp_()

        def unsort(x_XRNCE: Tensor) -> Tensor:
            return _take(x_XRNCE.flatten(2, 3), order.place_XRP[..., : q_XTE.shape[1]])

        # Rounds are parts of one softmax: each counts by the sum of its exponentials.
        top_XRT1, sum_XRT1 = unsort(top_XRNC1), unsort(strength_XRNCK.sum(-1, keepdim=True))
        share_XRT1 = (top_XRT1 - top_XRT1.amax(1, keepdim=True)).exp()
        share_XRT1 = share_XRT1 / (sum_XRT1 * share_XRT1).sum(1, keepdim=True)
        if self.weights.watched:
            weights_XRNCK = strength_XRNCK * _take(share_XRT1, q_XRNC)
            weights_XTS = _spread(weights_XRNCK, q_XRNC, k_XRNK, order.place_XRP.shape[-1])
            weights_XTS = weights_XTS[:, : q_XTE.shape[1], : q_XTE.shape[1]]
            z_BHTE = self.dropout(self.weights(weights_XTS.unflatten(0, q_BHTE.shape[:2]))) @ v_BHTE
            return z_BHTE
        z_XRNCE = self.dropout(strength_XRNCK) @ _take(v_XTE, k_XRNK)
        z_BHTE = (unsort(z_XRNCE) * share_XRT1).sum(1).unflatten(0, q_BHTE.shape[:2])
        return z_BHTE

    def _look(self, x_XRNC: Tensor) -> Tensor:
        """What stands in each chunk and in those around it; the first chunk comes after the last."""
        ring = x_XRNC if self.lsh.once else x_XRNC.flatten(1, 2).unsqueeze(1)
        near = [ring.roll(shift, dims=2) for shift in range(self.lsh.before, -self.lsh.after - 1, -1)]
        return torch.cat(near, dim=3).view(*x_XRNC.shape[:3], -1)

    @torch.no_grad()
    def _bias(self, q_XRNC: Tensor, k_XRNK: Tensor, order: Order, sight: AttentionMask, dtype: torch.dtype) -> Tensor:
        """What is added to the scores. There is no past here, so the order of tokens is that of their positions."""
        # In steps of ITSELF: one for the query's own token, more for each that comes later, none for the others.
        q_XRNC1 = q_XRNC.unsqueeze(-1).to(torch.promote_types(dtype, torch.float32)) * -ITSELF
        k_XRN1K = k_XRNK.unsqueeze(-2).to(q_XRNC1.dtype) * -ITSELF
        bias_XRNCK = (q_XRNC1 + ITSELF) - k_XRN1K if sight.causal else (q_XRNC1 - k_XRN1K).abs_().add_(ITSELF)
        bias_XRNCK.clamp_(max=0)
        (rows, _, places), length = order.place_XRP.shape, sight.k_pos_BS.shape[-1]
        if sight.keep_BS is not None or length < places:
            keep_BT = torch.ones_like(sight.k_pos_BS, dtype=torch.bool) if sight.keep_BS is None else sight.keep_BS
            hidden_BP = F.pad(~keep_BT, (0, places - length), value=True)
            hidden_XP = hidden_BP.expand(rows // self.heads, -1).repeat_interleave(self.heads, dim=0)
            bias_XRNCK.add_(_take(hidden_XP.unsqueeze(-1).to(q_XRNC1.dtype), k_XRNK).transpose(-1, -2), alpha=HIDDEN)
        if self.lsh.once:
            self._hide_met(bias_XRNCK, q_XRNC, k_XRNK, order)
        return bias_XRNCK

    def _hide_met(self, bias_XRNCK: Tensor, q_XRNC: Tensor, k_XRNK: Tensor, order: Order) -> None:
        """Hide from each round the keys that a query has met in an earlier one."""
        chunks = q_XRNC.shape[2]
        chunk_XRP1 = (order.place_XRP // self.lsh.chunk).unsqueeze(-1)
        for later in range(1, self.lsh.hashes):
            for earlier in range(later):
                q_XNC1, k_XNK1 = (_take(chunk_XRP1[:, earlier], x[:, later]) for x in (q_XRNC, k_XRNK))
                ahead_XNCK = (q_XNC1 - k_XNK1.transpose(-1, -2) + self.lsh.after) % chunks
                bias_XRNCK[:, later].masked_fill_(ahead_XNCK <= self.lsh.before + self.lsh.after, HIDDEN)


def _take(x_XTE: Tensor, index_X: Tensor) -> Tensor:
    """Rows of `x` by number, where `index` shares all dimensions that stand before the rows.

    As an embedding, because of all ways to pick rows this one has the fastest gradient.
    """
    *lead, length, width = x_XTE.shape
    start = torch.arange(math.prod(lead), device=x_XTE.device).mul_(length)
    start = start.view(*lead, *[1] * (index_X.ndim - len(lead)))
    return F.embedding(index_X.clamp(max=length - 1) + start, x_XTE.reshape(-1, width))


def _spread(weights_XRNCK: Tensor, q_XRNC: Tensor, k_XRNK: Tensor, places: int) -> Tensor:
    """Weights of pairs in a table of all pairs, (X, P, P)."""
    pair_XRNCK = q_XRNC.unsqueeze(-1) * places + k_XRNK.unsqueeze(-2)
    table = weights_XRNCK.new_zeros(len(weights_XRNCK), places * places)
    table = table.scatter_add(1, pair_XRNCK.flatten(1), weights_XRNCK.flatten(1))
    return table.view(-1, places, places)
