"""The Transformer (Vaswani et al. 2017, "Attention Is All You Need"): an encoder and a decoder.

Read from top to bottom: attention, the layers made of it, the model made of those. Only torch is needed.
Shapes: B sentences, S source tokens, T target tokens, D width, H heads, E = D / H width of a head, V vocabulary.
regard's preset: transformer-base
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention: in every head, each query gets a weighted sum of the values of its visible keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """Queries of x (B, T, D), keys and values of context (B, S, D); mask (B, 1, S) or (T, S), True = may attend."""
        q = self.split(self.query(x))  # (B, H, T, E)
        k = self.split(self.key(context))  # (B, H, S, E)
        v = self.split(self.value(context))
        # The dot product of two vectors of E random numbers has variance E. Without the division, one score would
        # be far above the others from the start, and the softmax would pass hardly any gradient to them.
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, T, S)
        scores = scores.masked_fill(~mask.unsqueeze(-3), -math.inf)
        mixed = scores.softmax(dim=-1) @ v  # (B, H, T, E)
        return self.out(mixed.transpose(1, 2).flatten(2))  # heads side by side again: (B, T, D)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """The same small network for every token by itself; only attention combines tokens."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class EncoderLayer(nn.Module):
    """Self-attention over the source, then feed-forward; each is added to its input and normalised (post-norm)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(width, heads), nn.LayerNorm(width)
        self.feed_forward, self.feed_forward_norm = FeedForward(width, hidden), nn.LayerNorm(width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, x, keep))
        return self.feed_forward_norm(x + self.feed_forward(x))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the source, feed-forward."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(width, heads), nn.LayerNorm(width)
        self.cross, self.cross_norm = Attention(width, heads), nn.LayerNorm(width)
        self.feed_forward, self.feed_forward_norm = FeedForward(width, hidden), nn.LayerNorm(width)

    def forward(self, x: Tensor, causal: Tensor, source: Tensor, keep: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, x, causal))
        x = self.cross_norm(x + self.cross(x, source, keep))
        return self.feed_forward_norm(x + self.feed_forward(x))


class Transformer(nn.Module):
    """Source ids and target ids in, logits of the token after each target token out."""

    def __init__(self, vocab: int, width: int = 512, heads: int = 8, hidden: int = 2048, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)  # one table for source, target and, transposed, the LM head
        self.encoder = nn.ModuleList(EncoderLayer(width, heads, hidden) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(width, heads, hidden) for _ in range(layers))

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        """Ids (B, S), which of them are not padding (B, S), ids (B, T) -> logits (B, T, V)."""
        keep = keep.unsqueeze(1)  # (B, 1, S): the same for every query
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()  # (T, T)
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, keep)
        y = self.embed(target)
        for layer in self.decoder:
            y = layer(y, causal, x, keep)
        return y @ self.embedding.weight.T

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings and sinusoid positions (attention ignores order). Wavelengths are 2 pi to 10000 * 2 pi."""
        width = self.embedding.embedding_dim
        rate = 10000 ** (-torch.arange(0, width, 2) / width)
        angle = torch.arange(ids.shape[1]).unsqueeze(-1) * rate  # (T, D / 2)
        sinusoid = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)  # sine, cosine, sine, ...: (T, D)
        return self.embedding(ids) * math.sqrt(width) + sinusoid


NAMES = {  # regard's name: name in this file
    "source_embedding": "embedding",
    ".blocks": "",
    "_residual.norm": "_norm",
}


def load(model: Transformer, weights: dict[str, Tensor]) -> None:
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
