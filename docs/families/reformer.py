"""Reformer (Kitaev et al. 2020): a language model for very long texts.

Two ideas. Attention looks only at tokens that hash alike, since a softmax forgets the others anyway. And layers can be
run backwards, so that training recomputes what passed between them instead of storing it.
For the sake of reading, this file computes all T x T scores and then hides those of pairs that hashing keeps apart. The
library never computes these, which is the whole point. Read from top to bottom. Only torch is needed.
Shapes: B texts, T tokens, D width, H heads, E = D / H width of a head, R rounds of hashing, V vocabulary.
regard's preset: reformer
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

EPS = 1e-12  # of every norm


class HashedAttention(nn.Module):
    """Each token looks back at those that ended up near it when all were sorted by hash, in any of R rounds."""

    def __init__(self, width: int, heads: int, rounds: int, chunk: int, seed: int) -> None:
        super().__init__()
        self.heads, self.rounds, self.chunk, self.seed = heads, rounds, chunk, seed
        # Queries are their own keys: only then does "hashes alike" mean "scores high".
        self.query_key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query_key, self.value))
        k = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)  # a key's length must not count: (B, H, T, E)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        scores = scores + self.times_met(q).log()  # met twice counts twice, never met is log 0: hidden
        # Being its own key, a token would like itself best. It may look at itself only if there is nothing else.
        itself = torch.eye(x.shape[1], dtype=torch.bool)
        future = torch.ones_like(itself).triu(1)
        weights = scores.masked_fill(itself, -1e4).masked_fill(future, -math.inf).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def times_met(self, q: Tensor) -> Tensor:
        """How often each pair meets, (B, H, T, T). Short texts are not hashed: everything meets once."""
        length = q.shape[2]
        if length <= 2 * self.chunk * self.rounds:
            return torch.ones(length, length)
        # Turn space at random and ask which axis, or its opposite, is nearest: close vectors get the same answer.
        buckets = 1 << (2 * length // self.chunk).bit_length() - 1
        draws = torch.Generator().manual_seed(self.seed)  # the same hashes in every pass
        turn = torch.randn(self.heads, q.shape[-1], self.rounds, buckets // 2, generator=draws)
        turned = torch.einsum("bhte,hera->bhrta", q, turn)
        bucket = torch.cat((turned, -turned), dim=-1).argmax(dim=-1)  # (B, H, R, T)
        # Sort by bucket and cut into chunks of one size, as buckets are not. A token meets its own chunk and the one
        # before, in case its bucket began there. All rounds make one long row of chunks, whose ends are joined.
        place = bucket.argsort(dim=-1, stable=True).argsort(dim=-1)  # where each token stands: (B, H, R, T)
        chunks = length // self.chunk
        chunk = place // self.chunk + torch.arange(self.rounds).unsqueeze(-1) * chunks
        ahead = chunk[:, :, :, None, :, None] - chunk[:, :, None, :, None, :]  # (B, H, R, R, T, T)
        return (ahead % (chunks * self.rounds) <= 1).sum(dim=(2, 3))


class Layer(nn.Module):
    """Two streams take turns: what is said about one is added to the other, so each step can be taken back."""

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
        """What went in, from what came out. Training goes through the layers this way and stores nothing."""
        two = two - self.feed_forward(one)
        one = one - self.attention(self.attention_norm(two))
        return one, two

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.feed_forward_norm(x)).relu())


class Reformer(nn.Module):
    """Tokens in, scores over the token after each of them out."""

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
        # A table of 65536 positions would be larger than the model. Rows and columns, side by side, make as many.
        self.rows, self.columns = nn.Embedding(rows, row_width), nn.Embedding(columns, width - row_width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden, rounds, chunk, seed) for seed in range(layers))
        self.norm = nn.LayerNorm(2 * width, eps=EPS)
        self.output = nn.Linear(2 * width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, V); a long text must be a number of whole chunks."""
        place = torch.arange(ids.shape[1])
        row, column = place // self.columns.num_embeddings, place % self.columns.num_embeddings
        x = self.embedding(ids) + torch.cat((self.rows(row), self.columns(column)), dim=-1)
        one, two = x, x
        for layer in self.layers:
            one, two = layer(one, two)
        return self.output(self.norm(torch.cat((one, two), dim=-1)))


NAMES = {  # regard's: this file's
    "target_embedding": "embedding",
    "decoder.position.": "",
    "decoder.norm": "norm",
    "decoder.blocks": "layers",
    "feed_forward.": "",
    "_residual.norm": "_norm",
}


def load(model: Reformer, weights: dict[str, Tensor]) -> None:
    """Fill in the weights of regard's preset; every name must find its place."""
    renamed = {}
    for name, x in weights.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = x
    model.load_state_dict(renamed)
