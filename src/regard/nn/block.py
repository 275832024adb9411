"""A Transformer layer: self-attention, cross-attention to a source, feed-forward, each with residual and norm.

Also layers of encoder-only models: the patch embedding of images, and the transform before the LM head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.config import Activation, PatchConfig, Stack
from regard.nn.attention import Attention, AttentionMask
from regard.nn.cache import KV
from regard.nn.hooks import Tap
from regard.nn.lsh import LSHAttention
from regard.nn.position import NO_POSITION, Position
from regard.nn.primitives import Dropout, Linear

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": lambda x: x.tanh(),
}


def make_norm(stack: Stack, width: int | None = None) -> nn.Module:
    """The normalisation layer of a stack; `width` overrides the width of the stack."""
    norm = nn.RMSNorm if stack.norm == "rms" else nn.LayerNorm
    return norm(width or stack.width, eps=stack.norm_eps)


class FeedForward(nn.Module):
    """Down(act(Up x)), or Down(act(Gate x) * Up x)."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        bias = stack.bias != "none"
        self.up = Linear(stack.width, stack.ff, bias=bias)
        self.gate = Linear(stack.width, stack.ff, bias=bias) if stack.gated else None
        self.down = Linear(stack.ff, stack.width, bias=bias)
        for linear in (self.up, self.gate):
            if linear is not None:
                linear.bf16_result = torch.bfloat16  # only elementwise functions precede the next product
        self.act = ACTIVATIONS[stack.activation]
        self.dropout = Dropout(stack.ff_dropout)
        self.neurons = Tap()

    def forward(self, x_BTD: Tensor) -> Tensor:
        up_BTF = self.up(x_BTD)
        hidden_BTF = self.act(up_BTF) if self.gate is None else self.act(self.gate(x_BTD)) * up_BTF
        out: Tensor = self.down(self.dropout(self.neurons(hidden_BTF)))
        return out


class Residual(nn.Module):
    """Add & norm around a sub-layer: norm(x + f(x)) (post), or x + f(norm(x)) (pre)."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.norm = make_norm(stack)
        self.dropout = Dropout(stack.dropout)
        self.pre = stack.norm_at == "pre"

    def forward(self, x_BTD: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre:
            out: Tensor = x_BTD + self.dropout(sublayer(self.norm(x_BTD)))
        else:
            out = self.norm(x_BTD + self.dropout(sublayer(x_BTD)))
        return out


class Block(nn.Module):
    """One layer of a Transformer."""

    def __init__(self, stack: Stack, source_width: int | None, index: int = 0) -> None:
        super().__init__()
        kept = None if stack.kept_heads is None else stack.kept_heads[index]
        self.attention: Attention | LSHAttention
        if stack.mixer == "lsh":
            self.attention = LSHAttention(stack, index)
        else:
            self.attention = Attention(stack, stack.width, kept=kept, relative=stack.position == "relative")
        self.attention_residual = Residual(stack)
        self.cross: Attention | None = None
        if source_width is not None:
            kept = None if stack.kept_cross_heads is None else stack.kept_cross_heads[index]
            self.cross = Attention(stack, source_width, cross=True, kept=kept)
            self.cross_residual = Residual(stack)
        self.feed_forward = FeedForward(stack)
        self.feed_forward_residual = Residual(stack)
        self.output = Tap()

    def forward(
        self,
        x_BTD: Tensor,
        pos_BT: Tensor,
        mask: AttentionMask,
        position: Position,
        past: KV | None = None,
        source: tuple[KV, AttentionMask] | None = None,
    ) -> tuple[Tensor, KV]:
        """`past`: KV of earlier tokens, `source`: KV of the encoder output -> x, and KV of past and new tokens."""
        kv = past

        def attend(x_BTD: Tensor) -> Tensor:
            nonlocal kv
            new = self.attention.project_kv(x_BTD, pos_BT, position)
            kv = new if kv is None else kv.extend(new)
            out: Tensor = self.attention(x_BTD, kv, mask, position)
            return out

        x_BTD = self.attention_residual(x_BTD, attend)
        if self.cross is not None and source is not None:
            cross, (source_kv, source_mask) = self.cross, source
            # Positions of source and target are not comparable, so nothing is rotated.
            x_BTD = self.cross_residual(x_BTD, lambda x: cross(x, source_kv, source_mask, NO_POSITION))
        x_BTD = self.feed_forward_residual(x_BTD, self.feed_forward)
        assert kv is not None
        return self.output(x_BTD), kv

    def project_source(self, x_BSD: Tensor, pos_BS: Tensor) -> KV:
        """KV of the encoder output, for cross-attention."""
        assert self.cross is not None
        return self.cross.project_kv(x_BSD, pos_BS, NO_POSITION)

    def project_memory(self, x_BPD: Tensor, pos_BP: Tensor, position: Position) -> KV:
        """KV of earlier inputs of this layer."""
        residual = self.attention_residual
        return self.attention.project_kv(residual.norm(x_BPD) if residual.pre else x_BPD, pos_BP, position)


class ImageEmbedding(nn.Module):
    """A trained class token, followed by the patch embeddings of an image."""

    def __init__(self, patches: PatchConfig, width: int) -> None:
        super().__init__()
        self.patches = patches
        self.project = Linear(patches.channels * patches.size**2, width)
        self.first = nn.Parameter(torch.zeros(width))  # the class token

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """-> (B, 1 + patches, width), patches row by row."""
        size = self.patches.size
        patches_BCYXyx = image_BCHW.unfold(2, size, size).unfold(3, size, size)
        patches_BSP = patches_BCYXyx.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        x_BSD: Tensor = self.project(patches_BSP)
        return torch.cat((self.first.expand(len(x_BSD), 1, -1), x_BSD), dim=1)


class LmHeadTransform(nn.Module):
    """The layer before the LM head of a masked language model: norm(act(W x))."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.dense = Linear(stack.out_width, stack.out_width)
        self.act = ACTIVATIONS[stack.activation]
        self.norm = make_norm(stack, stack.out_width)

    def forward(self, x_D: Tensor) -> Tensor:
        out: Tensor = self.norm(self.act(self.dense(x_D)))
        return out
