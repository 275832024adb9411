"""Attention scores: functions that compare a query with a key.

    dot         q . k
    scaled_dot  q . k / sqrt(E)
    general     q . W k
    cosine      t (q . k) / (|q| |k|)
    additive    v . tanh(W q + U k)
    concat      v . tanh(W [q ; k])
    location    (W q)[s]: depends on the query and the position of the key

A score transforms the query and the key (once, when the key is computed) and compares them. Scores that compare by a
dot product can use the fused kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.config import ScoreName


class Score(nn.Module):
    """q . k, the base class of all scores."""

    is_dot = True
    scale = 1.0

    def query(self, q_BHTE: Tensor) -> Tensor:
        return q_BHTE

    def key(self, k_BGSE: Tensor) -> Tensor:
        return k_BGSE

    def compare(self, q_BHTE: Tensor, k_BHSE: Tensor, k_pos_BS: Tensor) -> Tensor:
        return q_BHTE @ k_BHSE.transpose(-1, -2) * self.scale


class ScaledDot(Score):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = 1 / math.sqrt(width)


class General(Score):
    """q . W k, computed as (W' q) . k."""

    def __init__(self, heads: int, query_width: int, key_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_glorot(heads, query_width, key_width))

    def query(self, q_BHTE: Tensor) -> Tensor:
        return q_BHTE @ self.weight


class Cosine(Score):
    """Cosine similarity times a trained temperature exp(log_t), which starts at 10."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))

    def query(self, q_BHTE: Tensor) -> Tensor:
        return F.normalize(q_BHTE, dim=-1) * self.log_temperature.exp()

    def key(self, k_BGSE: Tensor) -> Tensor:
        return F.normalize(k_BGSE, dim=-1)


class Additive(Score):
    """v . tanh(W q + U k); U k is computed once per key."""

    is_dot = False

    def __init__(self, heads: int, kv_heads: int, query_width: int, key_width: int) -> None:
        super().__init__()
        self.query_weight = nn.Parameter(_glorot(heads, query_width, key_width))
        self.key_weight = nn.Parameter(_glorot(kv_heads, key_width, key_width))
        self.bias = nn.Parameter(torch.zeros(heads, 1, key_width))
        self.v = nn.Parameter(_glorot(heads, 1, key_width))

    def query(self, q_BHTE: Tensor) -> Tensor:
        return q_BHTE @ self.query_weight + self.bias

    def key(self, k_BGSE: Tensor) -> Tensor:
        return k_BGSE @ self.key_weight

    def compare(self, q_BHTE: Tensor, k_BHSE: Tensor, k_pos_BS: Tensor) -> Tensor:
        joined_BHTSE = torch.tanh(q_BHTE.unsqueeze(-2) + k_BHSE.unsqueeze(-3))
        return (joined_BHTSE * self.v.unsqueeze(-2)).sum(-1)


class Concat(Additive):
    """v . tanh(W [q ; k]); the two halves of W are applied separately, which is equivalent."""

    def __init__(self, heads: int, kv_heads: int, query_width: int, key_width: int) -> None:
        nn.Module.__init__(self)
        self.query_width = query_width
        self.weight = nn.Parameter(_glorot(heads, query_width + key_width, key_width))
        self.v = nn.Parameter(_glorot(heads, 1, key_width))

    def query(self, q_BHTE: Tensor) -> Tensor:
        return q_BHTE @ self.weight[:, : self.query_width]

    def key(self, k_BGSE: Tensor) -> Tensor:
        return k_BGSE @ self.weight[:, self.query_width :]


class Location(Score):
    """(W q)[s]: a score per key position, independent of the key. Positions beyond the table are masked."""

    is_dot = False

    def __init__(self, heads: int, query_width: int, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_glorot(heads, query_width, length))

    def query(self, q_BHTE: Tensor) -> Tensor:
        return q_BHTE @ self.weight

    def compare(self, q_BHTE: Tensor, k_BHSE: Tensor, k_pos_BS: Tensor) -> Tensor:
        length = q_BHTE.shape[-1]
        pos_B11S = k_pos_BS.clamp(max=length - 1)[:, None, None, :]
        scores = q_BHTE.gather(-1, pos_B11S.expand(*q_BHTE.shape[:-1], k_pos_BS.shape[-1]))
        return scores.masked_fill((k_pos_BS >= length)[:, None, None, :], -math.inf)


def make_score(name: ScoreName, heads: int, kv_heads: int, query_width: int, key_width: int, max_length: int) -> Score:
    """The score with this name for queries and keys of these widths."""
    match name:
        case "scaled_dot":
            return ScaledDot(key_width)
        case "general":
            return General(heads, query_width, key_width)
        case "cosine":
            return Cosine(heads)
        case "additive":
            return Additive(heads, kv_heads, query_width, key_width)
        case "concat":
            return Concat(heads, kv_heads, query_width, key_width)
        case "location":
            return Location(heads, query_width, max_length)
    return Score()


def _glorot(heads: int, rows: int, columns: int) -> Tensor:
    bound = math.sqrt(6 / (rows + columns))
    return torch.empty(heads, rows, columns).uniform_(-bound, bound)
