"""Input and output layers of an encoder alone: image patches as embeddings, the transform before the LM head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import PatchConfig, Stack
from regard.nn.block import ACTIVATIONS, make_norm
from regard.nn.matmul import Linear


class ImageEmbedding(nn.Module):
    """Patch embeddings of an image, after a trained class token."""

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
