"""GPT-2 (Radford et al. 2019): a decoder without an encoder, a causal language model.

Read from top to bottom: attention, the layer, the model, greedy decoding. Only torch is needed.
Shapes: B texts, T tokens, D width, H heads, E = D / H width of a head, V vocabulary.
regard's preset: gpt2
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention: each token attends to itself and to earlier tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # (B, H, T, E) each
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        # Training predicts every next token of a text in one pass. This causal mask makes that possible: a token that
        # could attend to its successor would only have to copy it.
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, then feed-forward, each on normalised input (pre-norm) and added to x."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        # GELU is a ReLU with a soft corner. The release computes it with a tanh, and its weights need the same.
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Token ids in, logits of the token after each of them out."""

    def __init__(
        self,
        vocab: int = 50257,
        length: int = 1024,
        width: int = 768,
        heads: int = 12,
        hidden: int = 3072,
        layers: int = 12,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.position = nn.Embedding(length, width)  # trained, so positions beyond `length` do not exist
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)  # the residual stream has not been normalised yet

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, V)."""
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embedding.weight.T  # tied LM head: similar tokens get similar logits

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        """Continue texts (B, T) greedily by `count` tokens.

        Each step computes everything again. A KV cache gives the same text faster: because of the causal mask, keys and
        values of earlier tokens never change.
        """
        for _ in range(count):
            ids = torch.cat((ids, self(ids)[:, -1:].argmax(dim=-1)), dim=1)
        return ids


NAMES = {  # regard's name: name in this file
    "target_embedding": "embedding",
    "decoder.position.table": "position",
    "decoder.norm": "norm",
    "decoder.blocks": "layers",
    "feed_forward.": "",
    "_residual.norm": "_norm",
}


def load(model: GPT2, weights: dict[str, Tensor]) -> None:
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
