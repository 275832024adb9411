"""T5 (Raffel et al. 2020): an encoder and a decoder; every task is text to text, pre-training is span corruption.

What differs from the first Transformer: relative position biases, RMS norm before each sub-layer, and no biases.
Read from top to bottom. Only torch is needed.
Shapes: B texts, S source tokens, T target tokens, D width, H heads, E width of a head, V vocabulary.
regard's preset: t5-small
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Divide by the root of the mean square; no mean is subtracted, no bias added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * self.weight


class RelativeBias(nn.Module):
    """A trained bias per head and bucket of distance, added to the scores of every layer of a stack.

    Near distances have a bucket each, farther ones share ever wider buckets, and from 128 on all share one.
    """

    def __init__(self, heads: int, bidirectional: bool) -> None:
        super().__init__()
        self.bidirectional = bidirectional
        self.table = nn.Embedding(32, heads)

    def forward(self, length: int) -> Tensor:
        """(H, T, T)."""
        position = torch.arange(length)
        offset = position[None, :] - position[:, None]  # of the key from the query: negative if it comes before
        return self.table(self.bucket(offset)).permute(2, 0, 1)

    def bucket(self, offset: Tensor) -> Tensor:
        count = 16 if self.bidirectional else 32  # the encoder needs half of the buckets for keys after the query
        distance = offset.abs() if self.bidirectional else (-offset).clamp(min=0)
        near = count // 2
        far = near + ((distance.clamp(min=1) / near).log() / math.log(128 / near) * (count - near)).long()
        index = torch.where(distance < near, distance, far.clamp(max=count - 1))
        return index + count * (offset > 0) if self.bidirectional else index


class Attention(nn.Module):
    """Attention of x to context; `bias`, (H, T, S) or (B, 1, 1, S), is added to the scores, -inf where masked.

    Scores are not divided by sqrt(E). The weights are initialised smaller instead, which has the same effect.
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
    """Self-attention, in the decoder cross-attention too, then feed-forward; pre-norm, each added to x."""

    def __init__(self, width: int, heads: int, head_width: int, hidden: int, decodes: bool) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(width, heads, head_width), RMSNorm(width)
        if decodes:
            self.cross, self.cross_norm = Attention(width, heads, head_width), RMSNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.feed_forward_norm = RMSNorm(width)

    def forward(self, x: Tensor, bias: Tensor, source: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, bias)
        if source is not None:
            x = x + self.cross(self.cross_norm(x), source, padding)
        return x + self.down(self.up(self.feed_forward_norm(x)).relu())


class Stack(nn.Module):
    """Layers that share one table of position biases, and a final norm."""

    def __init__(self, width: int, heads: int, head_width: int, hidden: int, layers: int, decodes: bool) -> None:
        super().__init__()
        self.position = RelativeBias(heads, bidirectional=not decodes)
        self.layers = nn.ModuleList(Layer(width, heads, head_width, hidden, decodes) for _ in range(layers))
        self.norm = RMSNorm(width)

    def forward(self, x: Tensor, mask: Tensor, source: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        bias = self.position(x.shape[1]) + mask  # computed once, used by every layer
        for layer in self.layers:
            x = layer(x, bias, source, padding)
        return self.norm(x)


class T5(nn.Module):
    """Source ids and target ids in, logits of the token after each target token out."""

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
        self.embedding = nn.Embedding(vocab, width)  # one table for source, target and, transposed, the LM head
        self.encoder, self.decoder = (
            Stack(width, heads, head_width, hidden, layers, decodes) for decodes in (False, True)
        )

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        """Ids (B, S), which of them are not padding (B, S), ids (B, T) -> logits (B, T, V)."""
        padding = torch.zeros(keep.shape).masked_fill(~keep, -math.inf)[:, None, None, :]  # (B, 1, 1, S)
        future = torch.full((target.shape[1], target.shape[1]), -math.inf).triu(1)  # (T, T)
        x = self.encoder(self.embedding(source), padding)
        y = self.decoder(self.embedding(target), future, x, padding)
        # The release multiplies y by D ** -0.5 here; regard has that factor in the weights of the final norm.
        return y @ self.embedding.weight.T


NAMES = {  # regard's name: name in this file
    "source_embedding": "embedding",
    ".blocks": ".layers",
    "feed_forward.": "",
    "_residual.norm": "_norm",
}


def load(model: T5, weights: dict[str, Tensor]) -> None:
    """Load the weights of regard's preset; every name must have a counterpart."""
    renamed = {}
    for name, x in weights.items():
        if name in ("target_embedding.weight", "output.weight"):  # tied to the one embedding
            continue
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if "key_value" in name:  # one matrix in regard: keys first, then values
            renamed[name.replace("key_value", "key")], renamed[name.replace("key_value", "value")] = x.chunk(2)
        else:
            renamed[name] = x
    model.load_state_dict(renamed)
