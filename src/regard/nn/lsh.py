"""LSH attention: queries are their own keys, sorted by hash, and attend within chunks of the sorted sequence.

Letters in addition to the legend of attention.py:
X heads of all rows   R rounds of hashing   P sorted positions (the length rounded up to chunks)   N chunks
C positions of a chunk   K keys that a chunk attends to
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.config import Stack
from regard.nn.attention import AttentionMask, masked_softmax
from regard.nn.cache import KV
from regard.nn.hooks import Tap
from regard.nn.position import Position
from regard.nn.primitives import Dropout, Linear

# A query is also a key and would score itself highest, so it attends to itself only if it has no other key: SELF is
# below every score, and MASKED is below SELF. Products with powers of two are exact.
SELF = -(2.0**13)
MASKED = -(2.0**30)


class SortOrder(NamedTuple):
    """The tokens sorted by hash, for each round, and the inverse permutation."""

    token_XRP: Tensor  # the token at each sorted position; larger indices than the length pad the last chunk
    sorted_XRP: Tensor  # the sorted position of each token


class LSHAttention(nn.Module):
    """Multi-head self-attention that compares each query only with keys of similar hashes.

    Called like `Attention`. The random rotations of a layer depend only on its seed, so a resumed run hashes like an
    uninterrupted one. For short sequences and in decoding steps, where hashing saves nothing, attention is exact.
    """

    def __init__(self, stack: Stack, index: int = 0) -> None:
        super().__init__()
        bias = stack.bias == "all"
        self.heads = self.kv_heads = stack.heads
        self.head_numbers = tuple(range(stack.heads))
        self.head_width = stack.head
        self.value_width = stack.value
        self.lsh = stack.lsh
        self.compared_keys = stack.lsh.hashes * stack.lsh.chunk * (1 + stack.lsh.before + stack.lsh.after)  # per query
        self.seed = index
        self.query_key = Linear(stack.width, stack.heads * stack.head, bias=bias)
        self.value = Linear(stack.width, stack.heads * stack.value, bias=bias)
        self.out = Linear(stack.heads * stack.value, stack.width, bias=bias)
        self.dropout = Dropout(stack.attention_dropout)
        self.weights = Tap()  # (B, H, T, S) after the softmax
        self.mixed = Tap()  # (B, H, T, E): the output of each head

    def project_kv(self, context_BSD: Tensor, pos_BS: Tensor, position: Position) -> KV:
        """The projection that queries and keys share, and values."""
        shared_BHSE, v_BHSE = (
            layer(context_BSD).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query_key, self.value)
        )
        return KV(position.rotate(shared_BHSE, pos_BS), v_BHSE)

    def forward(
        self, x_BTD: Tensor, kv: KV, mask: AttentionMask, position: Position, order: SortOrder | None = None
    ) -> Tensor:
        """The output for each query; a recomputation passes the `order` that `sort` returned in the first pass."""
        shared_BHSE = kv.k_BGSE
        v_BHSE = kv.v_BGSE
        if order is None:
            order = self.sort(kv, mask)
        # Keys are normalised: the norm of a query must not affect its weight as a key.
        k_BHSE = shared_BHSE * torch.rsqrt(shared_BHSE.square().mean(-1, keepdim=True) + 1e-6)
        k_BHSE = k_BHSE / math.sqrt(k_BHSE.shape[-1])
        if order is None:
            z_BHTE = self._exact(shared_BHSE[:, :, -x_BTD.shape[1] :], k_BHSE, v_BHSE, mask)
        else:
            z_BHTE = self._hashed(shared_BHSE, k_BHSE, v_BHSE, mask, order)
        out: Tensor = self.out(self.mixed(z_BHTE).transpose(1, 2).flatten(2))
        return out

    def sort(self, kv: KV, mask: AttentionMask) -> SortOrder | None:
        """The tokens sorted by hash; None if attention is exact, because hashing would not save comparisons."""
        if mask.q_pos_BT.shape[1] != kv.length or kv.length <= self.compared_keys:
            return None
        token_XRP = self._hash(kv.k_BGSE, mask.keep_BS).argsort(dim=-1, stable=True)
        sorted_P = torch.arange(token_XRP.shape[-1], device=token_XRP.device).expand_as(token_XRP)
        return SortOrder(token_XRP, torch.empty_like(token_XRP).scatter_(-1, token_XRP, sorted_P))

    @torch.no_grad()
    def _hash(self, x_BHTE: Tensor, keep_BT: Tensor | None) -> Tensor:
        """The bucket of every token, (X, R, P): the nearest axis after a rotation. Padding is in the last bucket."""
        length = x_BHTE.shape[2]
        padded = math.ceil(length / self.lsh.chunk) * self.lsh.chunk
        factors = self._buckets(padded)
        draws = torch.Generator().manual_seed(self.seed)
        axes = (self.heads, x_BHTE.shape[-1], self.lsh.hashes, sum(factors) // 2)
        rotation_HEA = torch.randn(axes, generator=draws).to(x_BHTE).flatten(2)
        rotated_BHRTA = (x_BHTE @ rotation_HEA).unflatten(-1, axes[2:]).transpose(2, 3)
        bucket_BHRT = torch.zeros(rotated_BHRTA.shape[:-1], dtype=torch.long, device=x_BHTE.device)
        buckets = 1
        for part, count in zip(rotated_BHRTA.split([n // 2 for n in factors], dim=-1), factors, strict=True):
            axis = part.abs().argmax(-1, keepdim=True)
            negative = part.gather(-1, axis) < 0
            bucket_BHRT += buckets * (axis + negative * (count // 2)).squeeze(-1)
            buckets *= count
        if keep_BT is not None:
            bucket_BHRT.masked_fill_(~keep_BT[:, None, None], buckets)
        return F.pad(bucket_BHRT.flatten(0, 1), (0, padded - length), value=buckets)

    def _buckets(self, length: int) -> tuple[int, ...]:
        """The number of buckets, as two factors if it is too large to compare each token with an axis per bucket."""
        if self.lsh.buckets is not None:
            return (self.lsh.buckets,)
        power = (2 * (length // self.lsh.chunk)).bit_length() - 1
        if 2**power <= 2 * self.lsh.chunk:
            return (2**power,)
        return 2 ** (power // 2), 2 ** (power - power // 2)

    def _exact(self, q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, mask: AttentionMask) -> Tensor:
        scores_BHTS = q_BHTE @ k_BHSE.transpose(-1, -2)
        queries, keys = scores_BHTS.shape[-2:]
        own_TS = torch.ones(queries, keys, dtype=torch.bool, device=q_BHTE.device)
        own_TS = own_TS.tril(keys - queries).triu(keys - queries)  # the queries are the last keys
        scores_BHTS = scores_BHTS.masked_fill(own_TS, SELF)
        if mask.mask_B1TS is not None:
            scores_BHTS = scores_BHTS.masked_fill(~mask.mask_B1TS, -math.inf)
        z_BHTE: Tensor = self.dropout(self.weights(masked_softmax(scores_BHTS))) @ v_BHSE
        return z_BHTE

    def _hashed(self, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, mask: AttentionMask, order: SortOrder) -> Tensor:
        z_BHTE: Tensor
        q_XTE, k_XTE, v_XTE = (x.flatten(0, 1) for x in (q_BHTE, k_BHTE, v_BHTE))
        q_XRNC = order.token_XRP.unflatten(-1, (-1, self.lsh.chunk))
        k_XRNK = self._neighbours(q_XRNC)
        # The largest tensor is reused for bias, scores and exponentials.
        scores_XRNCK = self._bias(q_XRNC, k_XRNK, order, mask, q_XTE.dtype)
        scores_XRNCK.add_(_take(q_XTE, q_XRNC) @ _take(k_XTE, k_XRNK).transpose(-1, -2))
        top_XRNC1 = scores_XRNCK.detach().amax(-1, keepdim=True)
        exp_XRNCK = scores_XRNCK.sub_(top_XRNC1).exp_()

        def unsort(x_XRNCE: Tensor) -> Tensor:
            return _take(x_XRNCE.flatten(2, 3), order.sorted_XRP[..., : q_XTE.shape[1]])

        # The rounds form one softmax: each is weighted by the sum of its exponentials.
        top_XRT1 = unsort(top_XRNC1)
        sum_XRT1 = unsort(exp_XRNCK.sum(-1, keepdim=True))
        share_XRT1 = (top_XRT1 - top_XRT1.amax(1, keepdim=True)).exp()
        share_XRT1 = share_XRT1 / (sum_XRT1 * share_XRT1).sum(1, keepdim=True)
        if self.weights.watched:
            weights_XRNCK = exp_XRNCK * _take(share_XRT1, q_XRNC)
            weights_XTS = _dense(weights_XRNCK, q_XRNC, k_XRNK, order.sorted_XRP.shape[-1])
            weights_XTS = weights_XTS[:, : q_XTE.shape[1], : q_XTE.shape[1]]
            z_BHTE = self.dropout(self.weights(weights_XTS.unflatten(0, q_BHTE.shape[:2]))) @ v_BHTE
            return z_BHTE
        z_XRNCE = self.dropout(exp_XRNCK) @ _take(v_XTE, k_XRNK)
        z_BHTE = (unsort(z_XRNCE) * share_XRT1).sum(1).unflatten(0, q_BHTE.shape[:2])
        return z_BHTE

    def _neighbours(self, x_XRNC: Tensor) -> Tensor:
        """The tokens of each chunk and its neighbours, (X, R, N, K); the first chunk follows the last."""
        ring = x_XRNC if self.lsh.once else x_XRNC.flatten(1, 2).unsqueeze(1)
        near = [ring.roll(shift, dims=2) for shift in range(self.lsh.before, -self.lsh.after - 1, -1)]
        return torch.cat(near, dim=3).view(*x_XRNC.shape[:3], -1)

    @torch.no_grad()
    def _bias(
        self, q_XRNC: Tensor, k_XRNK: Tensor, order: SortOrder, mask: AttentionMask, dtype: torch.dtype
    ) -> Tensor:
        """The bias of the scores. Hashed attention has no cache, so tokens are in the order of their positions."""
        # In multiples of SELF: one for the token of the query, more for later tokens, zero for the others.
        q_XRNC1 = q_XRNC.unsqueeze(-1).to(torch.promote_types(dtype, torch.float32)) * -SELF
        k_XRN1K = k_XRNK.unsqueeze(-2).to(q_XRNC1.dtype) * -SELF
        bias_XRNCK = (q_XRNC1 + SELF) - k_XRN1K if mask.causal else (q_XRNC1 - k_XRN1K).abs_().add_(SELF)
        bias_XRNCK.clamp_(max=0)
        (rows, _, padded), length = order.sorted_XRP.shape, mask.k_pos_BS.shape[-1]
        if mask.keep_BS is not None or length < padded:
            keep_BT = torch.ones_like(mask.k_pos_BS, dtype=torch.bool) if mask.keep_BS is None else mask.keep_BS
            masked_BP = F.pad(~keep_BT, (0, padded - length), value=True)
            masked_XP = masked_BP.expand(rows // self.heads, -1).repeat_interleave(self.heads, dim=0)
            bias_XRNCK.add_(_take(masked_XP.unsqueeze(-1).to(q_XRNC1.dtype), k_XRNK).transpose(-1, -2), alpha=MASKED)
        if self.lsh.once:
            self._mask_repeated(bias_XRNCK, q_XRNC, k_XRNK, order)
        return bias_XRNCK

    def _mask_repeated(self, bias_XRNCK: Tensor, q_XRNC: Tensor, k_XRNK: Tensor, order: SortOrder) -> None:
        """Mask in each round the keys that a query has seen in an earlier round."""
        chunks = q_XRNC.shape[2]
        chunk_XRP1 = (order.sorted_XRP // self.lsh.chunk).unsqueeze(-1)
        for later in range(1, self.lsh.hashes):
            for earlier in range(later):
                q_XNC1, k_XNK1 = (_take(chunk_XRP1[:, earlier], x[:, later]) for x in (q_XRNC, k_XRNK))
                ahead_XNCK = (q_XNC1 - k_XNK1.transpose(-1, -2) + self.lsh.after) % chunks
                bias_XRNCK[:, later].masked_fill_(ahead_XNCK <= self.lsh.before + self.lsh.after, MASKED)


def _take(x_XTE: Tensor, index_X: Tensor) -> Tensor:
    """Rows of `x` by index; `index` has the same leading dimensions as `x`.

    An embedding lookup has the fastest gradient of all ways to gather rows.
    """
    *lead, length, width = x_XTE.shape
    start = torch.arange(math.prod(lead), device=x_XTE.device).mul_(length)
    start = start.view(*lead, *[1] * (index_X.ndim - len(lead)))
    return F.embedding(index_X.clamp(max=length - 1) + start, x_XTE.reshape(-1, width))


def _dense(weights_XRNCK: Tensor, q_XRNC: Tensor, k_XRNK: Tensor, length: int) -> Tensor:
    """The weights of compared pairs as a matrix of all pairs, (X, P, P)."""
    pair_XRNCK = q_XRNC.unsqueeze(-1) * length + k_XRNK.unsqueeze(-2)
    table = weights_XRNCK.new_zeros(len(weights_XRNCK), length * length)
    table = table.scatter_add(1, pair_XRNCK.flatten(1), weights_XRNCK.flatten(1))
    return table.view(-1, length, length)
