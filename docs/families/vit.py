"""ViT, the Vision Transformer (Dosovitskiy et al. 2021): patches of an image, read like the words of a sentence.

Read from top to bottom: attention, the layer, the model. Only torch is needed.
Shapes: B images, C colours, P pixels of a square's side, S patches and one more, D width, H heads, E = D / H.
regard's preset: vit-base
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-12  # of every norm


class Attention(nn.Module):
    """Each square looks at all patches, near and far alike. That near ones matter more has to be learned."""

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
    """Look around, then think; both are normalised before and added after."""

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
    """Images in, scores over classes out."""

    def __init__(
        self,
        classes: int = 1000,
        size: int = 16,
        squares: int = 14 * 14,
        colours: int = 3,
        width: int = 768,
        heads: int = 12,
        hidden: int = 3072,
        layers: int = 12,
    ) -> None:
        super().__init__()
        # The same matrix for the pixels of every square. A convolution that steps from square to square is just that.
        self.square = nn.Conv2d(colours, width, kernel_size=size, stride=size)
        self.first = nn.Parameter(torch.zeros(width))  # no square at all: the place where the image is summed up
        self.place = nn.Embedding(1 + squares, width)  # trained from nothing: rows and columns have to be discovered
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.output = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, height, width) -> (B, classes)."""
        squares = self.square(images)  # (B, D, height / P, width / P)
        x = squares.flatten(2).transpose(1, 2)  # row by row: (B, S - 1, D)
        x = torch.cat((self.first.expand(len(x), 1, -1), x), dim=1)  # (B, S, D)
        x = x + self.place(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x)[:, 0])  # the first has looked at everything


NAMES = {  # regard's: this file's
    "image.project": "square",
    "image.first": "first",
    "encoder.position.table": "place",
    "encoder.norm": "norm",
    "encoder.blocks": "layers",
    "feed_forward.": "",
    "_residual.norm": "_norm",
}


def load(model: ViT, weights: dict[str, Tensor]) -> None:
    """Fill in the weights of regard's preset; every name must find its place."""
    renamed = {}
    for name, x in weights.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if "key_value" in name:  # one matrix there: keys above, values below
            renamed[name.replace("key_value", "key")], renamed[name.replace("key_value", "value")] = x.chunk(2)
        else:
            renamed[name] = x
    renamed["square.weight"] = renamed["square.weight"].view_as(model.square.weight)
    model.load_state_dict(renamed)
