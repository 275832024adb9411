"""Transformer-XL (Dai et al. 2019): a language model with a memory of earlier segments.

A text is cut into segments. The input of every layer is kept as a memory, to which the next segment attends. This needs
relative positions: "the fifth token" would be ambiguous between segments, "five tokens back" is not.
Read from top to bottom. Only torch is needed.
Shapes: B texts, T tokens of a segment, M tokens of memory, S = M + T, D width, H heads, E = D / H, V vocabulary.
regard's preset: transformer-xl
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def sinusoid(distances: Tensor, width: int) -> Tensor:
    """A vector per distance (S, D): sines of D / 2 wavelengths, then their cosines."""
    rate = 10000 ** (-torch.arange(0, width, 2) / width)
    angle = distances.unsqueeze(-1) * rate
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


class Attention(nn.Module):
    """Causal attention to the segment and its memory, with scores by content and by distance.

        score(i, j) = q_i . k_j  +  q_i . r_(i-j)  +  u . k_j  +  v . r_(i-j)          all over sqrt(E)

    Query and content; query and distance; content only; distance only.
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
        context = torch.cat((memory, x), dim=1)  # (B, S, D)
        T, S = x.shape[1], context.shape[1]
        q = self.split(self.query(x))  # (B, H, T, E)
        k, v = self.split(self.key(context)), self.split(self.value(context))  # (B, H, S, E)
        r = self.split(self.distance(sinusoid(torch.arange(S), x.shape[2])))  # (H, S, E), for distances 0 .. S - 1
        by_content = (q + self.u.unsqueeze(1)) @ k.transpose(-1, -2)  # (B, H, T, S), for each key
        by_distance = (q + self.v.unsqueeze(1)) @ r.transpose(-1, -2)  # (B, H, T, S), for each distance
        # Token i of the segment is token M + i of the context, so key j is at distance M + i - j.
        distance = torch.arange(S - T, S).unsqueeze(1) - torch.arange(S)  # (T, S)
        by_distance = by_distance.gather(-1, distance.clamp(min=0).expand_as(by_distance))  # now for each key as well
        scores = (by_content + by_distance) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(distance < 0, -math.inf).softmax(dim=-1)  # the causal mask
        return self.out((weights @ v).transpose(-2, -3).flatten(-2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)


class Layer(nn.Module):
    """Self-attention, then feed-forward; each is added to its input and normalised afterwards (post-norm)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(width, heads), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.feed_forward_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, memory))
        return self.feed_forward_norm(x + self.down(self.up(x).relu()))


class TransformerXL(nn.Module):
    """A segment and the memory in; logits of each next token and the new memory out."""

    def __init__(
        self, vocab: int, width: int = 512, heads: int = 8, hidden: int = 2048, layers: int = 12, memory: int = 512
    ) -> None:
        super().__init__()
        self.memory = memory
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))

    def forward(self, ids: Tensor, memories: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """(B, T) and a (B, M, D) per layer, none at the beginning of a text -> (B, T, V) and the next memories.

        With each layer the context grows by the length of the memory, since the states in it had a memory themselves.
        """
        x = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        memories = memories or [x[:, :0]] * len(self.layers)
        new_memory = []
        for layer, memory in zip(self.layers, memories, strict=True):
            # The input of the layer is kept, and the next segment computes keys and values of it. Gradients stop here,
            # or training would go back to the beginning of the text.
            new_memory.append(torch.cat((memory, x), dim=1)[:, -self.memory :].detach())
            x = layer(x, memory)
        return x @ self.embedding.weight.T, new_memory


NAMES = {  # regard's name: name in this file
    "target_embedding": "embedding",
    "decoder.blocks": "layers",
    "relative.content": "u",
    "relative.place": "v",
    "relative.project": "distance",
    "feed_forward.": "",
    "_residual.norm": "_norm",
}


def load(model: TransformerXL, weights: dict[str, Tensor]) -> None:
    """Load the weights of regard's preset; every name must have a counterpart."""
    renamed = {}
    for name, x in weights.items():
        if name == "output.weight":  # tied to the embedding
            continue
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if "key_value" in name:  # one matrix in regard: keys first, then values
            renamed[name.replace("key_value", "key")], renamed[name.replace("key_value", "value")] = x.chunk(2)
        else:
            renamed[name] = x
    model.load_state_dict(renamed)
