"""Multi-head attention: mask and bias, weights, relative positions, local attention.

B batch   T queries   S keys   D width   H heads   G key/value heads   E head width   F feed-forward   V vocabulary
N rows that are hypotheses (a multiple of the sentences B they belong to)
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.config import Stack
from regard.nn.cache import KV, CrossCache
from regard.nn.hooks import Tap
from regard.nn.position import Position, sinusoid
from regard.nn.primitives import Dropout, Linear
from regard.nn.score import make_score


@dataclass(eq=False)
class AttentionMask:
    """The keys that each query may attend to: a boolean mask (True = may attend) and a bias added to the scores.

    Both are functions of integer positions, so caches, offsets and padding are not special cases. `allowed_B1TS`
    restricts the mask further. Computed once per pass and shared by all layers of a stack.
    """

    q_pos_BT: Tensor
    k_pos_BS: Tensor
    keep_BS: Tensor | None = None
    causal: bool = False
    window: int | None = None
    bias_BHTS: Tensor | None = None
    allowed_B1TS: Tensor | None = None
    _additive: Tensor | None = field(default=None, init=False)

    @cached_property
    def mask_B1TS(self) -> Tensor | None:
        """The mask, computed on first use: LSH attention never needs it for all pairs."""
        mask = self.allowed_B1TS
        if self.keep_BS is not None:
            keep_B11S = self.keep_BS[:, None, None, :]
            mask = keep_B11S if mask is None else mask & keep_B11S
        causal = self.causal and self.q_pos_BT.shape[1] > 1  # a single query comes after all of its keys
        if causal or self.window is not None:
            offset_B1TS = (self.k_pos_BS.unsqueeze(-2) - self.q_pos_BT.unsqueeze(-1)).unsqueeze(1)
            near = offset_B1TS <= 0 if causal else offset_B1TS <= (self.window or 0)
            if self.window is not None:
                near = near & (offset_B1TS >= -self.window)
            mask = near if mask is None else mask & near
        return mask

    @cached_property
    def only_causal(self) -> bool:
        """Whether each query attends to itself and all earlier keys; the fused kernel has a flag for this case."""
        triangular = self.causal and self.window is None and not self.q_pos_BT.is_meta
        unrestricted = self.allowed_B1TS is None and self.bias_BHTS is None and self.keep_BS is None
        if not (triangular and unrestricted and torch.equal(self.q_pos_BT, self.k_pos_BS)):
            return False
        return bool((self.k_pos_BS.diff(dim=1) > 0).all())

    def additive(self, dtype: torch.dtype) -> Tensor | None:
        """Mask and bias as one tensor, which the fused kernel adds to the scores."""
        if self._additive is None or self._additive.dtype != dtype:
            if self.mask_B1TS is None:
                self._additive = None if self.bias_BHTS is None else self.bias_BHTS.to(dtype)
            elif self.bias_BHTS is None:
                zero = torch.zeros((), dtype=dtype, device=self.mask_B1TS.device)
                self._additive = zero.where(self.mask_B1TS, -math.inf)
            else:
                self._additive = self.bias_BHTS.to(dtype).masked_fill(~self.mask_B1TS, -math.inf)
        return self._additive


def source_mask(source: CrossCache, pos_BT: Tensor, rows: int, window: int | None) -> AttentionMask:
    """The cross-attention mask for `rows` hypotheses; hypotheses of one sentence share a row, as in `Attention`."""
    sentences = source.layers[0].k_BGSE.shape[0]
    q_pos_BT = pos_BT.reshape(sentences, -1) if pos_BT.shape[0] > 1 else pos_BT.repeat(1, rows // sentences)
    return AttentionMask(q_pos_BT, source.pos_BS, source.keep_BS, window=window)


def masked_softmax(scores_BHTS: Tensor) -> Tensor:
    """Softmax with zero weights and zero gradients, instead of NaN, for a query without visible keys."""
    top = scores_BHTS.detach().amax(-1, keepdim=True)
    keyless = top == -math.inf
    weights = torch.softmax(scores_BHTS.masked_fill(keyless, 0.0), dim=-1)
    return weights.masked_fill(keyless, 0.0)


class Attention(nn.Module):
    """Multi-head attention over keys and values that the caller owns.

    With `project=False`, one head attends with the unprojected states, as in recurrent decoders. `cross`: attention to
    a source.
    """

    def __init__(
        self,
        stack: Stack,
        context_width: int,
        *,
        project: bool = True,
        cross: bool = False,
        relative: bool = False,
        kept: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        bias = stack.bias == "all"
        self.kept = list(kept) if kept is not None and len(kept) < stack.heads else None
        groups = [head * stack.kv // stack.heads for head in kept or range(stack.heads)] if project else [0]
        self.heads = len(groups)
        self.head_numbers = tuple(kept or range(self.heads))  # the numbers of the heads before pruning
        self.kv_heads = len(set(groups))
        # The key/value head of each query head; None if all have the same number of query heads (fused kernel).
        even = len(set(Counter(groups).values())) == 1
        self._groups = None if even else [sorted(set(groups)).index(group) for group in groups]
        self.head_width, self.value_width = (stack.head, stack.value) if project else (stack.width, context_width)
        key_width = self.head_width if project else context_width
        self.query: nn.Module = nn.Identity()
        self.key_value: Linear | None = None
        self.out: nn.Module = nn.Identity()
        if project:
            self.query = Linear(stack.width, self.heads * self.head_width, bias=bias)
            self.key_value = Linear(context_width, self.kv_heads * (self.head_width + self.value_width), bias=bias)
            self.out = Linear(self.heads * self.value_width, stack.width, bias=bias)
        self.score = make_score(stack.score, self.heads, self.kv_heads, self.head_width, key_width, stack.max_length)
        window = stack.cross_window if cross and stack.cross_center == "predicted" else None
        self.center = Center(self.heads, self.head_width, window) if window else None
        self.relative = Relative(self.heads, self.head_width, stack.width, stack.reach) if relative else None
        self.dropout = Dropout(stack.attention_dropout)
        self.weights = Tap()  # (B, H, T, S) after the softmax
        self.mixed = Tap()  # (B, H, T, E): the output of each head

    @property
    def kv_indices(self) -> list[int]:
        """The key/value head of each query head."""
        return self._groups or [head * self.kv_heads // self.heads for head in range(self.heads)]

    def project_kv(self, context_BSD: Tensor, pos_BS: Tensor, position: Position) -> KV:
        """Keys and values of a context, for any number of queries."""
        if self.key_value is None:
            return KV(self.score.key(context_BSD.unsqueeze(1)), context_BSD.unsqueeze(1))
        keys = self.kv_heads * self.head_width
        k_BSD, v_BSD = self.key_value(context_BSD).tensor_split((keys,), dim=-1)
        k_BGSE = self._split(k_BSD, self.kv_heads)
        v_BGSE = self._split(v_BSD, self.kv_heads)
        return KV(self.score.key(position.rotate(k_BGSE, pos_BS)), v_BGSE)

    def forward(self, x_BTD: Tensor, kv: KV, mask: AttentionMask, position: Position) -> Tensor:
        """The output for each query, (B, T, D). Hypotheses that share a row of `kv` become queries of that row."""
        rows, length, _ = x_BTD.shape
        sentences = kv.k_BGSE.shape[0]
        if rows != sentences:
            x_BTD = x_BTD.reshape(sentences, -1, x_BTD.shape[-1])
        q_BHTE = position.rotate(self._split(self.query(x_BTD), self.heads), mask.q_pos_BT)
        if self.relative is not None:
            q_BHTE, mask = self.relative(q_BHTE, mask, self.score.scale)
        dropping = self.training and self.dropout.rate > 0
        eager = not self.score.is_dot or self.center is not None or self.weights.watched or dropping
        z_BHTE = self.mixed((self._eager if eager else self._fused)(q_BHTE, kv, mask))
        out: Tensor = self.out(z_BHTE.transpose(1, 2).flatten(2))
        return out.reshape(rows, length, -1)

    def _fused(self, q_BHTE: Tensor, kv: KV, mask: AttentionMask) -> Tensor:
        k_BGSE, v_BGSE = kv if self._groups is None else (x[:, self._groups] for x in kv)
        return F.scaled_dot_product_attention(
            self.score.query(q_BHTE),
            k_BGSE,
            v_BGSE,
            attn_mask=None if mask.only_causal else self.own_bias(mask.additive(q_BHTE.dtype)),
            is_causal=mask.only_causal,
            scale=self.score.scale,
            enable_gqa=self.heads != k_BGSE.shape[1],
        )

    def _eager(self, q_BHTE: Tensor, kv: KV, mask: AttentionMask) -> Tensor:
        if self._groups is None:
            k_BHSE, v_BHSE = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in kv)
        else:
            k_BHSE, v_BHSE = (x[:, self._groups] for x in kv)
        scores_BHTS = self.score.compare(self.score.query(q_BHTE), k_BHSE, mask.k_pos_BS)
        bias_BHTS = self.own_bias(mask.bias_BHTS)
        if bias_BHTS is not None:
            scores_BHTS = scores_BHTS + bias_BHTS
        if mask.mask_B1TS is not None:
            scores_BHTS = scores_BHTS.masked_fill(~mask.mask_B1TS, -math.inf)
        if self.center is None:
            weights_BHTS = masked_softmax(scores_BHTS)
        else:
            near_BHTS, gaussian_BHTS = self.center(q_BHTE, mask)
            weights_BHTS = masked_softmax(scores_BHTS.masked_fill(~near_BHTS, -math.inf)) * gaussian_BHTS
        z_BHTE: Tensor = self.dropout(self.weights(weights_BHTS)) @ v_BHSE
        return z_BHTE

    def own_bias(self, bias_BHTS: Tensor | None) -> Tensor | None:
        """The bias of the unpruned heads; relative attention computes a bias for its own heads only."""
        if self.kept is None or self.relative is not None or bias_BHTS is None or bias_BHTS.shape[1] == 1:
            return bias_BHTS
        return bias_BHTS[:, self.kept]

    def _split(self, x_BTD: Tensor, heads: int) -> Tensor:
        x_BTHE: Tensor = x_BTD.unflatten(-1, (heads, -1))
        return x_BTHE.transpose(1, 2)


class Relative(nn.Module):
    """Relative positions: (q + u) . k + (q + v) . W r(i - j) with sinusoids r and trained u (content), v (place), W.

    Larger distances than `reach` count as `reach`.
    """

    def __init__(self, heads: int, head_width: int, width: int, reach: int | None = None) -> None:
        super().__init__()
        self.reach = reach
        self.content = nn.Parameter(torch.zeros(heads, head_width))
        self.place = nn.Parameter(torch.zeros(heads, head_width))
        self.project = Linear(width, heads * head_width, bias=False)

    def forward(self, q_BHTE: Tensor, mask: AttentionMask, scale: float) -> tuple[Tensor, AttentionMask]:
        """-> q + u, and the mask with the second term of the scores as its bias."""
        keys = mask.k_pos_BS.shape[-1]
        # Later keys are masked, and no distance is as large as the number of keys.
        farthest = keys - 1 if self.reach is None else min(keys - 1, self.reach)
        distance_R = torch.arange(farthest + 1, device=q_BHTE.device)
        r_RD = sinusoid(distance_R, self.project.in_features, halves=True).to(q_BHTE.dtype)
        r_HRE = self.project(r_RD).unflatten(-1, (len(self.place), -1)).transpose(0, 1)
        by_distance_BHTR = ((q_BHTE + self.place.unsqueeze(1)) @ r_HRE.transpose(-1, -2)) * scale
        distance_BTS = (mask.q_pos_BT.unsqueeze(-1) - mask.k_pos_BS.unsqueeze(-2)).clamp(0, farthest)
        bias_BHTS = by_distance_BHTR.gather(-1, distance_BTS.unsqueeze(1).expand(*q_BHTE.shape[:-1], keys))
        mask = AttentionMask(mask.q_pos_BT, mask.k_pos_BS, bias_BHTS=bias_BHTS, allowed_B1TS=mask.mask_B1TS)
        return q_BHTE + self.content.unsqueeze(1), mask


class Center(nn.Module):
    """Local-p attention: a window D around p = S sigmoid(v . tanh(W q)), weighted by a Gaussian of deviation D/2."""

    def __init__(self, heads: int, width: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.hidden = nn.Parameter(torch.empty(heads, width, width).normal_(std=width**-0.5))
        self.v = nn.Parameter(torch.empty(heads, width, 1).normal_(std=width**-0.5))

    def forward(self, q_BHTE: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """-> whether a key is inside the window, and its Gaussian weight, both (B, H, T, S)."""
        pos_BS = mask.k_pos_BS
        mask_B1TS = mask.mask_B1TS
        if mask_B1TS is None:
            length_B1T1 = torch.full((1, 1, 1, 1), float(pos_BS.shape[-1]), device=pos_BS.device)
        else:
            length_B1T1 = mask_B1TS.sum(-1, keepdim=True).to(q_BHTE.dtype)
        center_BHT1 = length_B1T1 * torch.sigmoid(torch.tanh(q_BHTE @ self.hidden) @ self.v)
        offset_BHTS = pos_BS[:, None, None, :] - center_BHT1
        return offset_BHTS.abs() <= self.window, torch.exp(-(offset_BHTS**2) / (self.window**2 / 2))
