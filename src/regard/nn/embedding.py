"""The two ends of an encoder that stands alone: how it reads an image, and what it says about a token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import PatchConfig, Stack
from regard.nn.block import ACTIVATIONS, make_norm


class ImageEmbedding(nn.Module):
    """Squares of an image as vectors, after one trained vector in which the image as a whole is gathered."""

    def __init__(self, patches: PatchConfig, width: int) -> None:
        super().__init__()
        self.patches = patches
        self.project = nn.Linear(patches.channels * patches.size**2, width)
        self.first = nn.Parameter(torch.zeros(width))

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """-> (B, 1 + patches, width), row by row."""
        size = self.patches.size
        squares_BCYXyx = image_BCHW.unfold(2, size, size).unfold(3, size, size)
        squares_BSP = squares_BCYXyx.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        x_BSD: Tensor = self.project(squares_BSP)
        return torch.cat((self.first.expand(len(x_BSD), 1, -1), x_BSD), dim=1)


class LmHeadTransform(nn.Module):
    """A layer between the encoder and the prediction of a masked token: norm(act(W x))."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.dense = nn.Linear(stack.out_width, stack.out_width)
        self.act = ACTIVATIONS[stack.activation]
        self.norm = make_norm(stack, stack.out_width)

    def forward(self, x_D: Tensor) -> Tensor:
        out: Tensor = self.norm(self.act(self.dense(x_D)))
        return out
