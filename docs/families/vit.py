"""ViT, the Vision Transformer (Dosovitskiy et al. 2021): the patches of an image are the tokens of an encoder.

Read from top to bottom: attention, the layer, the model. Only torch is needed.
Shapes: B images, C channels, P side of a patch in pixels, S patches and the class token, D width, H heads, E = D / H.
regard's preset: vit-base
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-12  # epsilon of every norm


class Attention(nn.Module):
    """Each patch attends to all patches, near and far. The model must learn that near ones matter more."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # (B, H, S, E) each
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(dim=-1)  # (B, H, S, S)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, then feed-forward, each on normalised input (pre-norm) and added to x."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=EPS)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width, eps=EPS)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class ViT(nn.Module):
    """Images in, logits of classes out."""

    def __init__(
        self,
        classes: int = 1000,
        size: int = 16,
        patches: int = 14 * 14,
        channels: int = 3,
        width: int = 768,
        heads: int = 12,
        hidden: int = 3072,
        layers: int = 12,
    ) -> None:
        super().__init__()
        # The same matrix for the pixels of every patch: a convolution with a stride of its own size.
        self.patch = nn.Conv2d(channels, width, kernel_size=size, stride=size)
        self.class_token = nn.Parameter(torch.zeros(width))  # its output vector represents the whole image
        self.position = nn.Embedding(1 + patches, width)  # has no rows and columns; the model must learn them
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.output = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, height, width) -> (B, classes)."""
        patches = self.patch(images)  # (B, D, height / P, width / P)
        x = patches.flatten(2).transpose(1, 2)  # row by row: (B, S - 1, D)
        x = torch.cat((self.class_token.expand(len(x), 1, -1), x), dim=1)  # (B, S, D)
        x = x + self.position(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x)[:, 0])


NAMES = {  # regard's name: name in this file
    "image.project": "patch",
    "image.first": "class_token",
    "encoder.position.table": "position",
    "encoder.norm": "norm",
    "encoder.blocks": "layers",
    "feed_forward.": "",
    "_residual.norm": "_norm",
}


def load(model: ViT, weights: dict[str, Tensor]) -> None:
    """Load the weights of regard's preset; every name must have a counterpart."""
    renamed = {}
    for name, x in weights.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if "key_value" in name:  # one matrix in regard: keys first, then values
            renamed[name.replace("key_value", "key")], renamed[name.replace("key_value", "value")] = x.chunk(2)
        else:
            renamed[name] = x
    renamed["patch.weight"] = renamed["patch.weight"].view_as(model.patch.weight)
    model.load_state_dict(renamed)
