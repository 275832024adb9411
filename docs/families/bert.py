"""BERT (Devlin et al. 2019): an encoder, trained by masked language modelling.

Read from top to bottom: attention, the layer, the model with its LM head and its pooler. Only torch is needed.
Shapes: B texts, S tokens, D width, H heads, E = D / H width of a head, V vocabulary.
regard's preset: bert-base (pooler=true adds the pooler)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-12  # epsilon of every norm


class Attention(nn.Module):
    """Bidirectional self-attention: each token attends to all others. Only padding is masked."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """x (B, S, D), keep (B, S) False at padding -> (B, S, D)."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # (B, H, S, E) each
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, S, S)
        weights = scores.masked_fill(~keep[:, None, None, :], -math.inf).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, then feed-forward; each is added to its input and normalised afterwards (post-norm)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width, eps=EPS)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.feed_forward_norm = nn.LayerNorm(width, eps=EPS)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, keep))
        return self.feed_forward_norm(x + self.down(F.gelu(self.up(x))))


class BERT(nn.Module):
    """Token ids in, one vector per token out, from which masked tokens or a property of the text are predicted."""

    def __init__(
        self,
        vocab: int = 30522,
        length: int = 512,
        types: int = 2,
        width: int = 768,
        heads: int = 12,
        hidden: int = 3072,
        layers: int = 12,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.position = nn.Embedding(length, width)
        self.token_type = nn.Embedding(types, width)  # which of two sentences a token belongs to
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.dense = nn.Linear(width, width)  # of the LM head
        self.dense_norm = nn.LayerNorm(width, eps=EPS)
        self.bias = nn.Parameter(torch.zeros(vocab))  # learns the frequency of each token
        self.pooler = nn.Linear(width, width)

    def encode(self, ids: Tensor, keep: Tensor, types: Tensor) -> Tensor:
        """(B, S) each -> (B, S, D)."""
        x = self.norm(self.embedding(ids) + self.position(torch.arange(ids.shape[1])) + self.token_type(types))
        for layer in self.layers:
            x = layer(x, keep)
        return x

    def forward(self, ids: Tensor, keep: Tensor, types: Tensor) -> Tensor:
        """Logits of the original token at every position, (B, S, V).

        In training, 15% of the tokens are predicted. Of these, 80% were replaced by [MASK], 10% by a random token and
        10% not at all: the model cannot know which, so it needs a good vector for every token.
        """
        x = self.dense_norm(F.gelu(self.dense(self.encode(ids, keep, types))))
        return x @ self.embedding.weight.T + self.bias

    def pool(self, ids: Tensor, keep: Tensor, types: Tensor) -> Tensor:
        """One vector for a text, (B, D): that of its first token, the special token [CLS]."""
        return self.pooler(self.encode(ids, keep, types)[:, 0]).tanh()


NAMES = {  # regard's name: name in this file
    "source_embedding": "embedding",
    "token_type_embedding": "token_type",
    "encoder.position.table": "position",
    "encoder.embed_norm": "norm",
    "encoder.blocks": "layers",
    "feed_forward.": "",
    "_residual.norm": "_norm",
    "transform.dense": "dense",
    "transform.norm": "dense_norm",
    "output.bias": "bias",
}


def load(model: BERT, weights: dict[str, Tensor]) -> None:
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
