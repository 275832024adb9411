"""Llama 2 and 3 (Touvron et al. 2023; Dubey et al. 2024): a decoder with the improvements since GPT-2.

Rotary positions, RMS norm, gated feed-forward, no biases, and grouped-query attention.
Read from top to bottom. Only torch is needed.
Shapes: B texts, T tokens, D width, H heads, G heads of keys and values, E = D / H width of a head, V vocabulary.
regard's presets: llama-2-7b, llama-2-70b, llama-3-8b
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Divide by the root of the mean square. Layer norm also subtracts the mean, which makes no difference."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotate each pair of dimensions of queries or keys (B, H, T, E) by an angle proportional to position.

    The score of a query at position i and a key at position j then depends on i and j only by their distance i - j.
    Pairs have different frequencies: high ones distinguish near positions, low ones far ones.
    """
    half = x.shape[-1] // 2
    rate = base ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[2]).unsqueeze(-1) * rate  # (T, E / 2)
    a, b = x[..., :half], x[..., half:]  # dimension i makes a pair with dimension i + E / 2
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


class Attention(nn.Module):
    """Causal self-attention in which neighbouring query heads share one head of keys and values (grouped-query).

    Decoding reads the keys and values of all earlier tokens (the KV cache) for every new one. With G = H / 8 the cache
    is an eighth as large, and the model is hardly worse for it.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, base: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.base = heads, kv_heads, base
        shared = width // heads * kv_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared, bias=False)
        self.value = nn.Linear(width, shared, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q = rotate(self.split(self.query(x), self.heads), self.base)  # (B, H, T, E)
        k = rotate(self.split(self.key(x), self.kv_heads), self.base)  # (B, G, T, E)
        v = self.split(self.value(x), self.kv_heads)
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, dim=1) for each in (k, v))  # (B, H, T, E)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """Gated: the output of `up` is multiplied by the activated output of `gate` (SwiGLU)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # silu(x) = x * sigmoid(x)


class Layer(nn.Module):
    """Self-attention, then feed-forward, each on normalised input (pre-norm) and added to x."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, base: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(width), Attention(width, heads, kv_heads, base)
        self.feed_forward_norm, self.feed_forward = RMSNorm(width), FeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Token ids in, logits of the token after each of them out."""

    def __init__(
        self,
        vocab: int = 32000,
        width: int = 4096,
        heads: int = 32,
        kv_heads: int = 32,
        hidden: int = 11008,
        layers: int = 32,
        base: float = 10000.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads, hidden, base) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.output = nn.Linear(width, vocab, bias=False)  # LM head, not tied to the embedding

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, V). No position is added here: queries and keys are turned in every layer."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


NAMES = {  # regard's name: name in this file
    "target_embedding": "embedding",
    "decoder.norm": "norm",
    "decoder.blocks": "layers",
    "_residual.norm": "_norm",
}


def load(model: Llama, weights: dict[str, Tensor]) -> None:
    """Load the weights of regard's preset; every name must have a counterpart."""
    renamed = {}
    for name, x in weights.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if "key_value" in name:  # one matrix in regard: keys first, then values
            renamed[name.replace("key_value", "key")], renamed[name.replace("key_value", "value")] = x.chunk(2)
        else:
            renamed[name] = x
    model.load_state_dict(renamed)
