"""Attention: what may be seen, how much of it, and what comes back.

B batch   T queries   S keys   D width   H heads   G key/value heads   E head width   F feed-forward   V vocabulary
N rows that are hypotheses (a multiple of the sentences B they belong to)
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.config import Stack
from regard.nn.cache import KV as KV
from regard.nn.dropout import Dropout
from regard.nn.hooks import Tap
from regard.nn.position import Position, sinusoid
from regard.nn.score import make_score


class AttentionMask:
    """What the queries of a pass may see: one boolean mask (True = may look) and one bias that is added to the scores.

    Made once per pass and shared by all layers of a stack.
    """

    def __init__(
        self,
        q_pos_BT: Tensor,
        k_pos_BS: Tensor,
        mask_B1TS: Tensor | None,
        bias_BHTS: Tensor | None,
        keep_BS: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
    ) -> None:
        self.q_pos_BT = q_pos_BT
        self.k_pos_BS = k_pos_BS
        self.bias_BHTS = bias_BHTS
        self.keep_BS = keep_BS
        self.causal = causal
        self.window = window
        self._given_B1TS = mask_B1TS
        self._fused: Tensor | None = None

    @classmethod
    def of(
        cls,
        q_pos_BT: Tensor,
        k_pos_BS: Tensor,
        keep_BS: Tensor | None,
        causal: bool = False,
        window: int | None = None,
        bias_BHTS: Tensor | None = None,
    ) -> AttentionMask:
        """What positions allow: no special case for caches, offsets or padding."""
        return cls(q_pos_BT, k_pos_BS, None, bias_BHTS, keep_BS, causal, window)

    @cached_property
    def mask_B1TS(self) -> Tensor | None:
        """Derived when first asked for: whoever looks at a few keys only needs no place for all pairs."""
        mask = self._given_B1TS
        if self.keep_BS is not None:
            kept = self.keep_BS[:, None, None, :]
            mask = kept if mask is None else mask & kept
        causal = self.causal and self.q_pos_BT.shape[1] > 1  # a single query comes after everything it is shown
        if causal or self.window is not None:
            offset_B1TS = (self.k_pos_BS.unsqueeze(-2) - self.q_pos_BT.unsqueeze(-1)).unsqueeze(1)
            near = offset_B1TS <= 0 if causal else offset_B1TS <= (self.window or 0)
            if self.window is not None:
                near = near & (offset_B1TS >= -self.window)
            mask = near if mask is None else mask & near
        return mask

    @cached_property
    def plain(self) -> bool:
        """Whether each query sees just itself and all before it: the fused kernel knows this case without a mask."""
        ruled = self.causal and self.window is None and not self.q_pos_BT.is_meta
        free = self._given_B1TS is None and self.bias_BHTS is None and self.keep_BS is None
        if not (ruled and free and torch.equal(self.q_pos_BT, self.k_pos_BS)):
            return False
        return bool((self.k_pos_BS.diff(dim=1) > 0).all())

    def additive(self, dtype: torch.dtype) -> Tensor | None:
        """Mask and bias as the one tensor that the fused kernel adds to the scores."""
        if self._fused is None or self._fused.dtype != dtype:
            if self.mask_B1TS is None:
                self._fused = None if self.bias_BHTS is None else self.bias_BHTS.to(dtype)
            elif self.bias_BHTS is None:
                zero = torch.zeros((), dtype=dtype, device=self.mask_B1TS.device)
                self._fused = zero.where(self.mask_B1TS, -math.inf)
            else:
                self._fused = self.bias_BHTS.to(dtype).masked_fill(~self.mask_B1TS, -math.inf)
        return self._fused


def softmax_seen(scores_BHTS: Tensor) -> Tensor:
    """Softmax in which a query with nothing to see gets weights of zero, and gradients of zero, instead of NaN."""
    top = scores_BHTS.detach().amax(-1, keepdim=True)
    blind = top == -math.inf
    weights = torch.softmax(scores_BHTS.masked_fill(blind, 0.0), dim=-1)
    return weights.masked_fill(blind, 0.0)


class Attention(nn.Module):
    """Multi-head attention over keys and values that the caller owns.

    With `project=False` queries, keys and values are the states themselves, one head, as recurrent decoders attend.
    """

    def __init__(
        self,
        stack: Stack,
        context_width: int,
        *,
        project: bool = True,
        center_predicted: int | None = None,
        relative: bool = False,
        kept: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        bias = stack.bias == "all"
        self.kept = list(kept) if kept is not None and len(kept) < stack.heads else None
        groups = [head * stack.kv // stack.heads for head in kept or range(stack.heads)] if project else [0]
        self.heads = len(groups)
        self.kv_heads = len(set(groups))
        # Which key/value head each query head reads; None when they take turns evenly, as the fused kernel knows them.
        self.groups = None if _even(groups) else [sorted(set(groups)).index(group) for group in groups]
        self.head_width = stack.head if project else stack.width
        key_width = self.head_width if project else context_width
        self.query: nn.Module = nn.Identity()
        self.key_value: nn.Linear | None = None
        self.out: nn.Module = nn.Identity()
        if project:
            self.query = nn.Linear(stack.width, self.heads * self.head_width, bias=bias)
            self.key_value = nn.Linear(context_width, self.kv_heads * (self.head_width + stack.value), bias=bias)
            self.out = nn.Linear(self.heads * stack.value, stack.width, bias=bias)
        self.score = make_score(stack.score, self.heads, self.kv_heads, self.head_width, key_width, stack.max_length)
        self.center = Center(self.heads, self.head_width, center_predicted) if center_predicted else None
        self.relative = Relative(self.heads, self.head_width, stack.width, stack.reach) if relative else None
        self.dropout = Dropout(stack.attention_dropout)
        self.weights = Tap()  # (B, H, T, S) after the softmax
        self.mixed = Tap()  # (B, H, T, E): what each head brings back

    def keys(self, context_BSD: Tensor, pos_BS: Tensor, position: Position) -> KV:
        """Keys and values of a context, ready for any number of queries."""
        if self.key_value is None:
            return KV(self.score.key(context_BSD.unsqueeze(1)), context_BSD.unsqueeze(1))
        keys = self.kv_heads * self.head_width
        k_BSD, v_BSD = self.key_value(context_BSD).tensor_split((keys,), dim=-1)
        k_BGSE, v_BGSE = self._split(k_BSD, self.kv_heads), self._split(v_BSD, self.kv_heads)
        return KV(self.score.key(position.rotate(k_BGSE, pos_BS)), v_BGSE)

    def forward(self, x_BTD: Tensor, kv: KV, sight: AttentionMask, position: Position) -> Tensor:
        """What each query gets. Rows that are several hypotheses per sentence of `kv` become queries of one pass."""
        rows, length, _ = x_BTD.shape
        sentences = kv.k_BGSE.shape[0]
        if rows != sentences:
            x_BTD = x_BTD.reshape(sentences, -1, x_BTD.shape[-1])
        q_BHTE = position.rotate(self._split(self.query(x_BTD), self.heads), sight.q_pos_BT)
        if self.relative is not None:
            q_BHTE, sight = self.relative(q_BHTE, sight, self.score.scale)
        attend = self._eager if self._needs_weights() else self._fused
        z_BHTE = self.mixed(attend(q_BHTE, kv, sight))
        out: Tensor = self.out(z_BHTE.transpose(1, 2).flatten(2))
        return out.reshape(rows, length, -1)

    def _needs_weights(self) -> bool:
        dropping = self.training and self.dropout.rate > 0
        return not self.score.is_dot or self.center is not None or self.weights.watched or dropping

    def _fused(self, q_BHTE: Tensor, kv: KV, sight: AttentionMask) -> Tensor:
        k_BGSE, v_BGSE = kv if self.groups is None else (x[:, self.groups] for x in kv)
        return F.scaled_dot_product_attention(
            self.score.query(q_BHTE),
            k_BGSE,
            v_BGSE,
            attn_mask=None if sight.plain else self._of_kept(sight.additive(q_BHTE.dtype)),
            is_causal=sight.plain,
            scale=self.score.scale,
            enable_gqa=self.heads != k_BGSE.shape[1],
        )

    def _eager(self, q_BHTE: Tensor, kv: KV, sight: AttentionMask) -> Tensor:
        if self.groups is None:
            k_BHSE, v_BHSE = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in kv)
        else:
            k_BHSE, v_BHSE = (x[:, self.groups] for x in kv)
        scores_BHTS = self.score.compare(self.score.query(q_BHTE), k_BHSE, sight.k_pos_BS)
        bias_BHTS = self._of_kept(sight.bias_BHTS)
        if bias_BHTS is not None:
            scores_BHTS = scores_BHTS + bias_BHTS
        if sight.mask_B1TS is not None:
            scores_BHTS = scores_BHTS.masked_fill(~sight.mask_B1TS, -math.inf)
        if self.center is None:
            weights_BHTS = softmax_seen(scores_BHTS)
        else:
            near_BHTS, nearness_BHTS = self.center(q_BHTE, sight)
            weights_BHTS = softmax_seen(scores_BHTS.masked_fill(~near_BHTS, -math.inf)) * nearness_BHTS
        z_BHTE: Tensor = self.dropout(self.weights(weights_BHTS)) @ v_BHSE
        return z_BHTE

    def _of_kept(self, bias_BHTS: Tensor | None) -> Tensor | None:
        """The part of a bias that belongs to the heads this attention still has; one of its own has no other."""
        if self.kept is None or self.relative is not None or bias_BHTS is None or bias_BHTS.shape[1] == 1:
            return bias_BHTS
        return bias_BHTS[:, self.kept]

    def _split(self, x_BTD: Tensor, heads: int) -> Tensor:
        x_BTHE: Tensor = x_BTD.unflatten(-1, (heads, -1))
        return x_BTHE.transpose(1, 2)


def _even(groups: list[int]) -> bool:
    """Does every key/value head serve equally many query heads?"""
    return len(set(Counter(groups).values())) == 1


class Relative(nn.Module):
    """Scores by distance: (q + u) . k + (q + v) . W r(i - j), r being sinusoids; u, v and W are trained per layer.

    What is farther away than `reach` counts as just so far.
    """

    def __init__(self, heads: int, head_width: int, width: int, reach: int | None = None) -> None:
        super().__init__()
        self.reach = reach
        self.content = nn.Parameter(torch.zeros(heads, head_width))
        self.place = nn.Parameter(torch.zeros(heads, head_width))
        self.project = nn.Linear(width, heads * head_width, bias=False)

    def forward(self, q_BHTE: Tensor, sight: AttentionMask, scale: float) -> tuple[Tensor, AttentionMask]:
        """-> queries that meet keys, and the same sight with the distances' part of the scores as its bias."""
        keys = sight.k_pos_BS.shape[-1]
        # What comes later is masked anyway, and nothing is farther away than there are keys.
        farthest = keys - 1 if self.reach is None else min(keys - 1, self.reach)
        far_R = torch.arange(farthest + 1, device=q_BHTE.device)
        r_RD = sinusoid(far_R, self.project.in_features, halves=True).to(q_BHTE.dtype)
        r_HRE = self.project(r_RD).unflatten(-1, (len(self.place), -1)).transpose(0, 1)
        by_distance_BHTR = ((q_BHTE + self.place.unsqueeze(1)) @ r_HRE.transpose(-1, -2)) * scale
        distance_BTS = (sight.q_pos_BT.unsqueeze(-1) - sight.k_pos_BS.unsqueeze(-2)).clamp(0, farthest)
        bias_BHTS = by_distance_BHTR.gather(-1, distance_BTS.unsqueeze(1).expand(*q_BHTE.shape[:-1], keys))
        seen = AttentionMask(sight.q_pos_BT, sight.k_pos_BS, sight.mask_B1TS, bias_BHTS)
        return q_BHTE + self.content.unsqueeze(1), seen


class Center(nn.Module):
    """A window around a predicted place: p = S sigmoid(v . tanh(W q)), weights fade as a Gaussian of deviation D/2."""

    def __init__(self, heads: int, width: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.hidden = nn.Parameter(torch.empty(heads, width, width).normal_(std=width**-0.5))
        self.v = nn.Parameter(torch.empty(heads, width, 1).normal_(std=width**-0.5))

    def forward(self, q_BHTE: Tensor, sight: AttentionMask) -> tuple[Tensor, Tensor]:
        """-> what lies within the window, and how near it is to the centre, both (B, H, T, S)."""
        place_BS, mask = sight.k_pos_BS, sight.mask_B1TS
        if mask is None:
            length_B1T1 = torch.full((1, 1, 1, 1), float(place_BS.shape[-1]), device=place_BS.device)
        else:
            length_B1T1 = mask.sum(-1, keepdim=True).to(q_BHTE.dtype)
        center_BHT1 = length_B1T1 * torch.sigmoid(torch.tanh(q_BHTE @ self.hidden) @ self.v)
        offset_BHTS = place_BS[:, None, None, :] - center_BHT1
        return offset_BHTS.abs() <= self.window, torch.exp(-(offset_BHTS**2) / (self.window**2 / 2))


def key_heads(attention: Attention) -> list[int]:
    """The key/value head that each query head reads."""
    each = attention.heads // attention.kv_heads
    return attention.groups or [head // each for head in range(attention.heads)]
