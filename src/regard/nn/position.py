"""Position encodings: added to the input, rotating queries and keys, or added to the scores.

Positions are integer tensors of shape (batch or 1, length), so caches, offsets and padding are not special cases.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.config import AxialConfig, RotaryConfig, Stack
from regard.errors import UserError


class Position(nn.Module):
    """No position encoding. A subclass overrides one of the methods `embed`, `rotate` and `bias`."""

    def embed(self, pos_BT: Tensor) -> Tensor | None:
        """A vector per position to add to the input, (batch or 1, T, D)."""
        return None

    def rotate(self, x_BHTE: Tensor, pos_BT: Tensor) -> Tensor:
        """Rotate queries or keys."""
        return x_BHTE

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor | None:
        """A bias to add to the scores, (batch or 1, heads, T, S); computed once per pass, not per layer."""
        return None

    def at(self, pos_BT: Tensor) -> Position:
        """This encoding for a pass over these positions; `rotate` computes its angles once for all layers."""
        return self


NO_POSITION = Position()


def sinusoid(pos_BT: Tensor, width: int, halves: bool = False) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/width)), PE(pos, 2i+1) = cos of the same, for any position.

    With `halves`, all sines precede all cosines.
    """
    rate = torch.exp(torch.arange(0, width, 2, device=pos_BT.device) * (-math.log(10000.0) / width))
    angle_BTE = pos_BT.unsqueeze(-1) * rate
    sin_BTE = angle_BTE.sin()
    cos_BTE = angle_BTE.cos()
    if halves:
        return torch.cat((sin_BTE, cos_BTE[..., : width // 2]), dim=-1)
    return torch.stack((sin_BTE, cos_BTE), dim=-1).flatten(-2)[..., :width]


class Sinusoid(Position):
    """Sines and cosines of any position."""

    def __init__(self, width: int, halves: bool = False) -> None:
        super().__init__()
        self.width = width
        self.halves = halves

    def embed(self, pos_BT: Tensor) -> Tensor:
        return sinusoid(pos_BT, self.width, self.halves)


class Learned(Position):
    """A table with one trained row per position."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.table = nn.Embedding(length, width)

    def embed(self, pos_BT: Tensor) -> Tensor:
        _require_within(pos_BT, self.table.num_embeddings)
        out: Tensor = self.table(pos_BT)
        return out


class Axial(Position):
    """Two short tables, for the row and the column of a position; their vectors are concatenated."""

    def __init__(self, width: int, axial: AxialConfig) -> None:
        super().__init__()
        self.rows = nn.Embedding(axial.rows, axial.row_width)
        self.columns = nn.Embedding(axial.columns, width - axial.row_width)

    def embed(self, pos_BT: Tensor) -> Tensor:
        columns = self.columns.num_embeddings
        _require_within(pos_BT, self.rows.num_embeddings * columns)
        return torch.cat((self.rows(pos_BT // columns), self.columns(pos_BT % columns)), dim=-1)


def _require_within(pos_BT: Tensor, limit: int) -> None:
    if pos_BT.is_meta or not pos_BT.numel() or (longest := int(pos_BT.max()) + 1) <= limit:
        return
    raise UserError(
        f"an input of {longest} tokens is longer than the {limit} learned positions of this"
        " model (max_length); shorten it, or train with position=sinusoid, rotary, alibi or bucket"
    )


class Rotary(Position):
    """Rotate pairs (i, i + E/2) of every query and key by an angle proportional to position."""

    def __init__(self, width: int, config: RotaryConfig | None = None) -> None:
        super().__init__()
        self.width = width
        self.config = config or RotaryConfig()

    def rates(self, device: torch.device) -> Tensor:
        """The angle per position of every pair; `factor` slows the slow pairs to extend the context."""
        config = self.config
        rate = config.base ** (-torch.arange(0, self.width, 2, device=device) / self.width)
        if config.factor == 1:
            return rate
        turns = config.original * rate / (2 * math.pi)
        weight = ((turns - config.low) / (config.high - config.low)).clamp(0, 1)
        return rate * (weight + (1 - weight) / config.factor)

    def cos_sin(self, pos_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines for both elements of each pair, and the sines, negative for the first element."""
        angle_B1TE = (pos_BT.unsqueeze(-1) * self.rates(pos_BT.device)).unsqueeze(1)
        cos = angle_B1TE.cos()
        sin = angle_B1TE.sin()
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def rotate(self, x_BHTE: Tensor, pos_BT: Tensor) -> Tensor:
        return _rotate(x_BHTE, *self.cos_sin(pos_BT))

    def at(self, pos_BT: Tensor) -> Position:
        return RotaryAt(self, pos_BT)


class RotaryAt(Position):
    """The rotation at fixed positions, computed once."""

    def __init__(self, rotary: Rotary, pos_BT: Tensor) -> None:
        super().__init__()
        self.rotary = rotary
        self.pos_BT = pos_BT
        self.cos_sin = rotary.cos_sin(pos_BT)

    def rotate(self, x_BHTE: Tensor, pos_BT: Tensor) -> Tensor:
        return _rotate(x_BHTE, *self.cos_sin) if pos_BT is self.pos_BT else self.rotary.rotate(x_BHTE, pos_BT)


def _rotate(x_BHTE: Tensor, cos_B1TE: Tensor, sin_B1TE: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for the two halves of every vector."""
    cos = cos_B1TE.to(x_BHTE.dtype)
    sin = sin_B1TE.to(x_BHTE.dtype)
    return torch.addcmul(x_BHTE * cos, x_BHTE.roll(x_BHTE.shape[-1] // 2, dims=-1), sin)


class Alibi(Position):
    """Subtract the distance times a fixed slope per head from each score."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        distance_B1TS = (q_pos_BT.unsqueeze(-1) - k_pos_BS.unsqueeze(-2)).abs().unsqueeze(1)
        return -alibi_slopes(self.heads).to(distance_B1TS.device).view(-1, 1, 1) * distance_B1TS


def alibi_slopes(heads: int) -> Tensor:
    """2^(-8/n), 2^(-16/n), ... for n heads, a power of two; other counts add every second slope of the next power."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes)


class Bucket(Position):
    """A trained number per head and bucket of distance; buckets are exact for near, logarithmic for far distances."""

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
        # Clamp first: log(0) would be computed even though `where` discards it. Always in single precision, because
        # others put a distance on a border, such as 64, into another bucket.
        far = exact + (torch.log(distance.clamp(min=1).float() / exact) * scale).long()
        return base + torch.where(distance < exact, distance, far.clamp(max=count - 1))


def make_position(stack: Stack, causal: bool) -> Position:
    """The position encoding of a stack."""
    match stack.position:
        case "sinusoid" | "sinusoid_halves":
            return Sinusoid(stack.width, halves=stack.position == "sinusoid_halves")
        case "learned":
            return Learned(stack.width, stack.max_length)
        case "axial":
            assert stack.axial is not None
            return Axial(stack.width, stack.axial)
        case "rotary":
            return Rotary(stack.head, stack.rotary)
        case "alibi":
            return Alibi(stack.heads)
        case "bucket":
            return Bucket(stack.heads, both_ways=not causal)
    return Position()  # "relative" is part of the attention, whose queries it needs
