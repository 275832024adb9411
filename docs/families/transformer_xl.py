"""Transformer-XL (Dai et al. 2019): a language model that remembers the segment before the one it reads.

A text is cut into segments. What every layer saw of the last one is kept, and looked at while reading the next. That
takes positions that are distances: "the fifth token" would mean two places at once, "five tokens back" means one.
Read from top to bottom. Only torch is needed.
Shapes: B texts, T tokens of a segment, M remembered tokens, S = M + T, D width, H heads, E = D / H, V vocabulary.
regard's preset: transformer-xl
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def waves(distances: Tensor, width: int) -> Tensor:
    """A vector per distance (S, D): sines of D / 2 wavelengths, then their cosines."""
    rate = 10000 ** (-torch.arange(0, width, 2) / width)
    angle = distances.unsqueeze(-1) * rate
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


class Attention(nn.Module):
    """Each token looks at those before it and at memory, and scores what it finds and how far away it is.

        score(i, j) = q_i . k_j  +  q_i . r_(i-j)  +  u . k_j  +  v . r_(i-j)          all over sqrt(E)

    What I look for in it; what I look for at that distance; how much anyone likes it, and that distance, anyway.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.distance = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.u = nn.Parameter(torch.zeros(heads, width // heads))
        self.v = nn.Parameter(torch.zeros(heads, width // heads))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """x (B, T, D), memory (B, M, D) -> (B, T, D)."""
        seen = torch.cat((memory, x), dim=1)  # (B, S, D)
        T, S = x.shape[1], seen.shape[1]
        q = self.split(self.query(x))  # (B, H, T, E)
        k, v = self.split(self.key(seen)), self.split(self.value(seen))  # (B, H, S, E)
        r = self.split(self.distance(waves(torch.arange(S), x.shape[2])))  # (H, S, E): one for each distance 0 .. S - 1
        by_content = (q + self.u.unsqueeze(1)) @ k.transpose(-1, -2)  # (B, H, T, S), for each key
        by_distance = (q + self.v.unsqueeze(1)) @ r.transpose(-1, -2)  # (B, H, T, S), for each distance
        # Token i of the segment is number M + i of what is seen, so key j lies M + i - j behind it.
        far = torch.arange(S - T, S).unsqueeze(1) - torch.arange(S)  # (T, S)
        by_distance = by_distance.gather(-1, far.clamp(min=0).expand_as(by_distance))  # now for each key as well
        scores = (by_content + by_distance) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(far < 0, -math.inf).softmax(dim=-1)  # what lies ahead is not seen
        return self.out((weights @ v).transpose(-2, -3).flatten(-2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)


class Layer(nn.Module):
    """Look back, then think; each result is added to its input and normalised after it."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(width, heads), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.feed_forward_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, memory))
        return self.feed_forward_norm(x + self.down(self.up(x).relu()))


class TransformerXL(nn.Module):
    """A segment and what is remembered in; scores over each next token, and what to remember, out."""

    def __init__(
        self, vocab: int, width: int = 512, heads: int = 8, hidden: int = 2048, layers: int = 12, memory: int = 512
    ) -> None:
        super().__init__()
        self.memory = memory
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))

    def forward(self, ids: Tensor, memories: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """(B, T) and a (B, M, D) per layer, none at the beginning of a text -> (B, T, V) and the next memories.

        With each layer the reach grows by a memory's length, since what is remembered had a memory itself.
        """
        x = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        memories = memories or [x[:, :0]] * len(self.layers)
        kept = []
        for layer, memory in zip(self.layers, memories, strict=True):
            # What went in here, not what came out: the next segment makes its own keys of it, with the weights of then.
            # It takes no gradient, or training would go back to the beginning of the text.
            kept.append(torch.cat((memory, x), dim=1)[:, -self.memory :].detach())
            x = layer(x, memory)
        return x @ self.embedding.weight.T, kept


NAMES = {  # regard's: this file's
    "target_embedding": "embedding",
    "decoder.blocks": "layers",
    "relative.content": "u",
    "relative.place": "v",
    "relative.project": "distance",
    "feed_forward.": "",
    "_residual.norm": "_norm",
}


def load(model: TransformerXL, weights: dict[str, Tensor]) -> None:
    """Fill in the weights of regard's preset; every name must find its place."""
    renamed = {}
    for name, x in weights.items():
        if name == "output.weight":  # another name of the table
            continue
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if "key_value" in name:  # one matrix there: keys above, values below
            renamed[name.replace("key_value", "key")], renamed[name.replace("key_value", "value")] = x.chunk(2)
        else:
            renamed[name] = x
    model.load_state_dict(renamed)
