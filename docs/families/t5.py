"""T5 (Raffel et al. 2020): an encoder and a decoder, and every task is a text that becomes another text.

What differs from the first Transformer: only distances are known, and no sub-layer has a bias.
Read from top to bottom. Only torch is needed.
Shapes: B texts, S source tokens, T target tokens, D width, H heads, E width of a head, V vocabulary.
regard's preset: t5-small
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Norm(nn.Module):
    """Divide by the root of the mean square; no mean is subtracted, no bias added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * self.weight


class Distances(nn.Module):
    """A trained number per head for each of 32 ranges of distance, added to the scores of every layer of a tower.

    Near distances have a range of their own, farther ones share ever wider ranges, and beyond 128 all are alike.
    """

    def __init__(self, heads: int, both_ways: bool) -> None:
        super().__init__()
        self.both_ways = both_ways
        self.table = nn.Embedding(32, heads)

    def forward(self, length: int) -> Tensor:
        """(H, T, T)."""
        place = torch.arange(length)
        offset = place[None, :] - place[:, None]  # of the key from the query: negative if it comes before
        return self.table(self.range_of(offset)).permute(2, 0, 1)

    def range_of(self, offset: Tensor) -> Tensor:
        count = 16 if self.both_ways else 32  # the encoder needs half of the ranges for what comes after
        distance = offset.abs() if self.both_ways else (-offset).clamp(min=0)
        near = count // 2
        far = near + ((distance.clamp(min=1) / near).log() / math.log(128 / near) * (count - near)).long()
        index = torch.where(distance < near, distance, far.clamp(max=count - 1))
        return index + count * (offset > 0) if self.both_ways else index


class Attention(nn.Module):
    """Each query looks at the keys; `bias`, (H, T, S) or (B, 1, 1, S), is added to its scores, -inf where it must not.

    Scores are not divided by sqrt(E). The weights are drawn smaller at the start instead, which comes to the same.
    """

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, heads * head_width, bias=False)
        self.key = nn.Linear(width, heads * head_width, bias=False)
        self.value = nn.Linear(width, heads * head_width, bias=False)
        self.out = nn.Linear(heads * head_width, width, bias=False)

    def forward(self, x: Tensor, context: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (
            layer(each).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, each in ((self.query, x), (self.key, context), (self.value, context))
        )  # (B, H, T or S, E)
        weights = (q @ k.transpose(-1, -2) + bias).softmax(dim=-1)  # (B, H, T, S)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Look at one's own text, in the decoder at the source too, then think; normalised before and added after."""

    def __init__(self, width: int, heads: int, head_width: int, hidden: int, decodes: bool) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(width, heads, head_width), Norm(width)
        if decodes:
            self.cross, self.cross_norm = Attention(width, heads, head_width), Norm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.feed_forward_norm = Norm(width)

    def forward(self, x: Tensor, bias: Tensor, source: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, bias)
        if source is not None:
            x = x + self.cross(self.cross_norm(x), source, padding)
        return x + self.down(self.up(self.feed_forward_norm(x)).relu())


class Tower(nn.Module):
    """Layers that share one table of distances, and a last norm."""

    def __init__(self, width: int, heads: int, head_width: int, hidden: int, layers: int, decodes: bool) -> None:
        super().__init__()
        self.distances = Distances(heads, both_ways=not decodes)
        self.layers = nn.ModuleList(Layer(width, heads, head_width, hidden, decodes) for _ in range(layers))
        self.norm = Norm(width)

    def forward(self, x: Tensor, unseen: Tensor, source: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        bias = self.distances(x.shape[1]) + unseen  # asked once, used by every layer
        for layer in self.layers:
            x = layer(x, bias, source, padding)
        return self.norm(x)


class T5(nn.Module):
    """Source tokens and the target so far in, scores over each next target token out."""

    def __init__(
        self,
        vocab: int = 32128,
        width: int = 512,
        heads: int = 8,
        head_width: int = 64,
        hidden: int = 2048,
        layers: int = 6,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)  # one table for source, target and, transposed, the prediction
        self.encoder, self.decoder = (
            Tower(width, heads, head_width, hidden, layers, decodes) for decodes in (False, True)
        )

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        """Ids (B, S), which of them are not padding (B, S), ids (B, T) -> scores (B, T, V)."""
        padding = torch.zeros(keep.shape).masked_fill(~keep, -math.inf)[:, None, None, :]  # (B, 1, 1, S)
        future = torch.full((target.shape[1], target.shape[1]), -math.inf).triu(1)  # (T, T)
        x = self.encoder(self.embedding(source), padding)
        y = self.decoder(self.embedding(target), future, x, padding)
        # The release multiplies y by D ** -0.5 here; regard has that number in the weights of the last norm.
        return y @ self.embedding.weight.T


NAMES = {  # regard's: this file's
    "source_embedding": "embedding",
    "position.table": "distances.table",
    ".blocks": ".layers",
    "feed_forward.": "",
    "_residual.norm": "_norm",
}


def load(model: T5, weights: dict[str, Tensor]) -> None:
    """Fill in the weights of regard's preset; every name must find its place."""
    renamed = {}
    for name, x in weights.items():
        if name in ("target_embedding.weight", "output.weight"):  # other names of the one table
            continue
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if "key_value" in name:  # one matrix there: keys above, values below
            renamed[name.replace("key_value", "key")], renamed[name.replace("key_value", "value")] = x.chunk(2)
        else:
            renamed[name] = x
    model.load_state_dict(renamed)
