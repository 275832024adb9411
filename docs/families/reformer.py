"""Reformer (Kitaev et al. 2020): a language model for very long texts.

Two ideas. Attention is restricted to tokens with the same hash (LSH), because a softmax gives the others almost no
weight. And layers are reversible, so training recomputes the activations between them instead of storing them.
To be readable, this file computes all T x T scores and masks the pairs with different hashes. The library never
computes these scores, which is the purpose of hashing. Read from top to bottom. Only torch is needed.
Shapes: B texts, T tokens, D width, H heads, E = D / H width of a head, R rounds of hashing, V vocabulary.
regard's preset: reformer
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

EPS = 1e-12  # epsilon of every norm


class HashedAttention(nn.Module):
    """Causal attention to the tokens that are near when all are sorted by hash, in any of R rounds."""

    def __init__(self, width: int, heads: int, rounds: int, chunk: int, seed: int) -> None:
        super().__init__()
        self.heads, self.rounds, self.chunk, self.seed = heads, rounds, chunk, seed
        # Queries and keys are the same vectors: only then does "same hash" mean "high score".
        self.query_key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query_key, self.value))
        k = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)  # without the key's length: (B, H, T, E)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        scores = scores + self.times_met(q).log()  # two meetings count twice; no meeting is log 0 = -inf: masked
        # A token is its own key, with the highest score. It may attend to itself only if no other key is left.
        itself = torch.eye(x.shape[1], dtype=torch.bool)
        future = torch.ones_like(itself).triu(1)
        weights = scores.masked_fill(itself, -1e4).masked_fill(future, -math.inf).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def times_met(self, q: Tensor) -> Tensor:
        """How often each pair meets, (B, H, T, T). Short texts are not hashed: everything meets once."""
        length = q.shape[2]
        if length <= 2 * self.chunk * self.rounds:
            return torch.ones(length, length)
        # Rotate at random; the hash is the nearest axis, or its opposite. Close vectors get the same one.
        buckets = 1 << (2 * length // self.chunk).bit_length() - 1
        random = torch.Generator().manual_seed(self.seed)  # the same hashes in every pass
        rotation = torch.randn(self.heads, q.shape[-1], self.rounds, buckets // 2, generator=random)
        rotated = torch.einsum("bhte,hera->bhrta", q, rotation)
        bucket = torch.cat((rotated, -rotated), dim=-1).argmax(dim=-1)  # (B, H, R, T)
        # Buckets have different sizes, so sort by bucket and cut into chunks of equal size. A token meets its own chunk
        # and the one before, where its bucket may have begun. The chunks of all rounds form one ring.
        rank = bucket.argsort(dim=-1, stable=True).argsort(dim=-1)  # index in the sorted order: (B, H, R, T)
        chunks = length // self.chunk
        chunk = rank // self.chunk + torch.arange(self.rounds).unsqueeze(-1) * chunks
        ahead = chunk[:, :, :, None, :, None] - chunk[:, :, None, :, None, :]  # (B, H, R, R, T, T)
        return (ahead % (chunks * self.rounds) <= 1).sum(dim=(2, 3))


class Layer(nn.Module):
    """Reversible: a function of one stream is added to the other, so each addition can be undone."""

    def __init__(self, width: int, heads: int, hidden: int, rounds: int, chunk: int, seed: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=EPS)
        self.attention = HashedAttention(width, heads, rounds, chunk, seed)
        self.feed_forward_norm = nn.LayerNorm(width, eps=EPS)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        one = one + self.attention(self.attention_norm(two))
        two = two + self.feed_forward(one)
        return one, two

    def backwards(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the layer from its outputs. The backward pass uses this instead of stored activations."""
        two = two - self.feed_forward(one)
        one = one - self.attention(self.attention_norm(two))
        return one, two

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.feed_forward_norm(x)).relu())


class Reformer(nn.Module):
    """Token ids in, logits of the token after each of them out."""

    def __init__(
        self,
        vocab: int = 258,
        rows: int = 128,
        columns: int = 512,
        row_width: int = 256,
        width: int = 1024,
        heads: int = 8,
        hidden: int = 4096,
        layers: int = 12,
        rounds: int = 4,
        chunk: int = 64,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        # A table of 65536 positions would have 67 million parameters. Axial: a vector for the row, one for the column.
        self.rows, self.columns = nn.Embedding(rows, row_width), nn.Embedding(columns, width - row_width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden, rounds, chunk, seed) for seed in range(layers))
        self.norm = nn.LayerNorm(2 * width, eps=EPS)
        self.output = nn.Linear(2 * width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, V); the length of a long text must be a multiple of the chunk."""
        position = torch.arange(ids.shape[1])
        row, column = position // self.columns.num_embeddings, position % self.columns.num_embeddings
        x = self.embedding(ids) + torch.cat((self.rows(row), self.columns(column)), dim=-1)
        one, two = x, x
        for layer in self.layers:
            one, two = layer(one, two)
        return self.output(self.norm(torch.cat((one, two), dim=-1)))


NAMES = {  # regard's name: name in this file
    "target_embedding": "embedding",
    "decoder.position.": "",
    "decoder.norm": "norm",
    "decoder.blocks": "layers",
    "feed_forward.": "",
    "_residual.norm": "_norm",
}


def load(model: Reformer, weights: dict[str, Tensor]) -> None:
    """Load the weights of regard's preset; every name must have a counterpart."""
    renamed = {}
    for name, x in weights.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = x
    model.load_state_dict(renamed)
