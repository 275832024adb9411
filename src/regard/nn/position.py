"""Where position enters: added to the input, turned into queries and keys, or added to the scores.

Positions are data, integer tensors of shape (batch or 1, length): caches, offsets and padding need no special case.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.config import Stack
from regard.errors import UserError


class Position(nn.Module):
    """No position at all; the others override one method each."""

    def embed(self, pos_BT: Tensor) -> Tensor | None:
        """What to add to the input."""
        return None

    def rotate(self, x_BHTE: Tensor, pos_BT: Tensor) -> Tensor:
        """Turn position into queries and keys."""
        return x_BHTE

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor | None:
        """What to add to the scores, (batch or 1, heads, T, S); asked once per pass, not per layer."""
        return None


def sinusoid(pos_BT: Tensor, width: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/width)), PE(pos, 2i+1) = cos of the same, for any position."""
    rate = torch.exp(torch.arange(0, width, 2, device=pos_BT.device) * (-math.log(10000.0) / width))
    angle_BTE = pos_BT.unsqueeze(-1) * rate
    pairs = torch.stack((angle_BTE.sin(), angle_BTE.cos()), dim=-1)
    return pairs.flatten(-2)[..., :width]


class Sinusoid(Position):
    """Sines and cosines, interleaved, computed for whatever positions come."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def embed(self, pos_BT: Tensor) -> Tensor:
        return sinusoid(pos_BT, self.width)


class Learned(Position):
    """A table with one trained row per position."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.table = nn.Embedding(length, width)

    def embed(self, pos_BT: Tensor) -> Tensor:
        limit = self.table.num_embeddings
        if pos_BT.numel() and int(pos_BT.max()) >= limit:
            raise UserError(
                f"an input of {int(pos_BT.max()) + 1} symbols is longer than the {limit} learned positions of this"
                " model (max_length); shorten it, or train with position=sinusoid, rotary, alibi or bucket"
            )
        out: Tensor = self.table(pos_BT)
        return out


class Rotary(Position):
    """Rotate pairs (i, i + E/2) of every query and key by an angle proportional to position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def rotate(self, x_BHTE: Tensor, pos_BT: Tensor) -> Tensor:
        rate = 10000.0 ** (-torch.arange(0, self.width, 2, device=pos_BT.device) / self.width)
        angle_B1TE = (pos_BT.unsqueeze(-1) * rate).unsqueeze(1)
        cos, sin = angle_B1TE.cos().to(x_BHTE.dtype), angle_B1TE.sin().to(x_BHTE.dtype)
        a, b = x_BHTE.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Alibi(Position):
    """Subtract from each score the distance times a slope that is fixed per head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        distance_B1TS = (q_pos_BT.unsqueeze(-1) - k_pos_BS.unsqueeze(-2)).abs().unsqueeze(1)
        return -alibi_slopes(self.heads).to(distance_B1TS.device).view(-1, 1, 1) * distance_B1TS


def alibi_slopes(heads: int) -> Tensor:
    """2^(-8/n), 2^(-16/n), ... for n heads; when n is no power of two, the rest interleaves the series of 2n."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes)


class Bucket(Position):
    """A trained number per head and bucket of distance: exact when near, logarithmic when far."""

    def __init__(self, heads: int, both_ways: bool, buckets: int = 32, far: int = 128) -> None:
        super().__init__()
        self.both_ways = both_ways
        self.buckets = buckets
        self.far = far
        self.table = nn.Embedding(buckets, heads)

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        bucket_BTS = self.bucket(k_pos_BS.unsqueeze(-2) - q_pos_BT.unsqueeze(-1))
        out: Tensor = self.table(bucket_BTS).permute(0, 3, 1, 2)
        return out

    def bucket(self, offset: Tensor) -> Tensor:
        count = self.buckets // 2 if self.both_ways else self.buckets
        base = (offset > 0).long() * count if self.both_ways else torch.zeros_like(offset)
        distance = offset.abs() if self.both_ways else (-offset).clamp(min=0)
        exact = count // 2
        scale = (count - exact) / math.log(self.far / exact)
        # clamp first: log(0) never decides, but would be computed
        far = exact + (torch.log(distance.clamp(min=1) / exact) * scale).long()
        return base + torch.where(distance < exact, distance, far.clamp(max=count - 1))


def make_position(stack: Stack, causal: bool) -> Position:
    """The position encoding a stack asks for."""
    match stack.position:
        case "sinusoid":
            return Sinusoid(stack.width)
        case "learned":
            return Learned(stack.width, stack.max_length)
        case "rotary":
            return Rotary(stack.head)
        case "alibi":
            return Alibi(stack.heads)
        case "bucket":
            return Bucket(stack.heads, both_ways=not causal)
    return Position()
