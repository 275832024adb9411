"""Where heads look, summed over examples: how sharply, how far, and at what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.batch import Batch
from regard.inspect.distance import between_squares, square_distance
from regard.inspect.places import attentions, place
from regard.inspect.record import record
from regard.inspect.says import entropy_bits
from regard.model import Model

FARTHEST = 8  # offsets told apart
MAINLY = 0.5  # of the weight: enough to say what a head does

SIDES = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("target", "source")}


@dataclass
class Sums:
    """What one attention's heads did, summed over queries that had a choice."""

    confidence_H: Tensor
    entropy_H: Tensor
    distance_H: Tensor
    choice: float = 0.0  # bits of an even look, summed
    queries: int = 0
    # Weight on a place, and queries for which there is that place.
    places: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    def add(self, what: str, weight_H: Tensor, count: int) -> None:
        old, before = self.places.get(what, (torch.zeros_like(weight_H), 0))
        self.places[what] = (old + weight_H, before + count)

    def describe(self, head: int) -> tuple[str, float]:
        """What a head mainly does, and how much of its weight does so."""
        shares = {
            what: float(weight_H[head] / count)
            for what, (weight_H, count) in self.places.items()
            if count >= max(1, self.queries // 4)
        }
        best = max(shares, key=lambda what: shares[what], default="")
        if best and shares[best] >= MAINLY:
            return best, shares[best]
        evenness = float(self.entropy_H[head]) / self.choice if self.choice else 0.0
        return ("everything evenly", evenness) if evenness >= 0.9 else ("mixed", shares.get(best, 0.0))


@torch.no_grad()
def look(model: Model, batches: Sequence[Batch]) -> dict[str, Sums]:
    """Follow where every head looks over batches of examples."""
    found = attentions(model)
    device = next(model.parameters()).device
    zeros = {name: torch.zeros(3, attention.heads, device=device) for name, attention in found.items()}
    sums = {name: Sums(x_3H[0], x_3H[1], x_3H[2]) for name, x_3H in zeros.items()}
    for batch in batches:
        batch = batch.to(device)
        with record(model, "*.weights") as maps:
            model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT)
        rows = {"source": (batch.source_BS, batch.source_keep_BS), "target": (batch.input_BT, batch.keep_BT)}
        for name in found:
            kind, _ = place(name)
            asks, asked = SIDES[kind]
            _add(sums[name], maps[f"{name}.weights"], kind, rows[asks], rows[asked])
    return sums


def _add(
    sums: Sums, weights_BHTS: Tensor, kind: str, asks: tuple[Tensor, Tensor | None], asked: tuple[Tensor, Tensor | None]
) -> None:
    (query_BT, query_keep), (key_BS, key_keep) = asks, asked
    query_keep_BT = torch.ones_like(query_BT, dtype=torch.bool) if query_keep is None else query_keep
    key_keep_BS = torch.ones_like(key_BS, dtype=torch.bool) if key_keep is None else key_keep
    t_T1 = torch.arange(query_BT.shape[1], device=query_BT.device).unsqueeze(1)
    s_S = torch.arange(key_BS.shape[1], device=query_BT.device)
    seen_BTS = query_keep_BT.unsqueeze(2) & key_keep_BS.unsqueeze(1)
    if kind == "decoder":
        seen_BTS = seen_BTS & (s_S <= t_T1)
    choice_BT = seen_BTS.sum(2)
    seen_BTS = seen_BTS & (choice_BT > 1).unsqueeze(2)  # who sees one thing only has nothing to tell
    asks_BT = choice_BT > 1
    weights_BHTS = weights_BHTS.float() * seen_BTS.unsqueeze(1)
    sums.queries += int(asks_BT.sum())
    sums.choice += float(choice_BT[asks_BT].float().log2().sum())
    sums.confidence_H += weights_BHTS.amax(3).sum((0, 2))
    sums.entropy_H += entropy_bits(weights_BHTS).sum((0, 2))
    offset_BTS = (s_S - t_T1).unsqueeze(0).expand_as(seen_BTS)
    steps_BTS = offset_BTS.float()
    if kind == "cross":  # places of two texts are compared by how far along they are
        stretch_B11 = (key_keep_BS.sum(1) / query_keep_BT.sum(1)).view(-1, 1, 1)
        steps_BTS = s_S - t_T1 * stretch_B11
    sums.distance_H += (weights_BHTS * steps_BTS.abs().unsqueeze(1)).sum((0, 2, 3))

    def place_(what: str, at_BTS: Tensor) -> None:
        at_BTS = at_BTS & seen_BTS
        sums.add(what, (weights_BHTS * at_BTS.unsqueeze(1)).sum((0, 2, 3)), int(at_BTS.any(2).sum()))

    names = {-1: "previous token", 0: "own token", 1: "next token"} if kind != "cross" else {}
    for offset in range(-FARTHEST, FARTHEST + 1):
        place_(names.get(offset, f"position, offset {offset:+d}".replace("-", "−")), offset_BTS == offset)
    place_("first token", (s_S == 0).expand_as(seen_BTS))
    last_B11 = (key_keep_BS.sum(1) - 1).view(-1, 1, 1)
    if kind != "decoder":
        place_("last token", (s_S == last_B11).expand_as(seen_BTS))
    if kind != "cross":
        same_BTS = query_BT.unsqueeze(2) == key_BS.unsqueeze(1)
        place_("same token elsewhere", same_BTS & (offset_BTS != 0))


@torch.no_grad()
def look_squares(model: Model, batches: Sequence[Batch]) -> dict[str, Sums]:
    """Follow where the squares of images look; distances are in pixels."""
    patches = model.config.patches
    assert patches is not None
    device = next(model.parameters()).device
    rows, columns = patches.height // patches.size, patches.width // patches.size
    far_SS = between_squares(rows, columns, patches.size).to(device)
    row_S, column_S = (torch.arange(patches.count, device=device) // columns, torch.arange(patches.count) % columns)
    own_SS = torch.eye(patches.count, dtype=torch.bool, device=device)
    places = {
        "own square": own_SS,
        "same row": (row_S[:, None] == row_S) & ~own_SS,
        "same column": (column_S[:, None] == column_S).to(device) & ~own_SS,
    }
    zeros = {name: torch.zeros(3, a.heads, device=device) for name, a in attentions(model).items()}
    sums = {name: Sums(x_3H[0], x_3H[1], x_3H[2]) for name, x_3H in zeros.items()}
    for batch in batches:
        with record(model, *(f"{name}.weights" for name in sums)) as maps:
            model.hidden(batch.source_BS.to(device), None)
        for name, seen in sums.items():
            weights_BHTS = maps[f"{name}.weights"][:, :, 1:].float()
            queries = weights_BHTS.shape[0] * patches.count
            seen.queries += queries
            seen.choice += queries * math.log2(patches.count + 1)
            seen.confidence_H += weights_BHTS.amax(3).sum((0, 2))
            seen.entropy_H += entropy_bits(weights_BHTS).sum((0, 2))
            seen.distance_H += square_distance(maps[f"{name}.weights"].float(), far_SS).sum((0, 2))
            seen.add("whole image", weights_BHTS[..., 0].sum((0, 2)), queries)
            for what, at_SS in places.items():
                seen.add(what, (weights_BHTS[..., 1:] * at_SS).sum((0, 2, 3)), queries)
    return sums
