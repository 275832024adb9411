"""What every head of a model does: how much it is needed, how sharp it looks, how far, and at what."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.batch import Batch
from regard.data.images import Pictures
from regard.decode.alignment import Links, alignment_merits
from regard.errors import UserError
from regard.inspect.importance import ablation_importance, gradient_importance
from regard.inspect.inputs import Material, batches_of, encode_pairs
from regard.inspect.logit_lens import entropy_bits
from regard.inspect.neurons import induction_scores
from regard.inspect.trace import between_squares, square_distance
from regard.model import Model, kind_and_layer
from regard.nn.hooks import record
from regard.run import Run

NEARLY_BEST = 0.9  # of the best head's merit: enough to align along with it
MOST_ALIGNMENT_HEADS = 4


@dataclass(frozen=True)
class Head:
    """One head of one attention."""

    name: str  # of its attention in the model
    kind: str  # encoder, decoder or cross
    layer: int  # from 0
    head: int  # its number from 0, as before any pruning
    index: int  # its place among the heads that are left
    gradient: float  # expected |dL/dgate| per token
    ablation: float | None  # rise of the loss per token without it
    confidence: float  # mean of the largest weights
    entropy: float  # bits
    distance: float  # between who looks and what is looked at, by weight: tokens, in an image pixels
    what: str  # what it mainly looks at, in words
    share: float  # of its weight that goes there
    alignment: float | None = None  # cross-attention: agreement with given links, or sharpness times coverage
    induction: float | None = None  # language models: weight on what followed the same token before

    def to_json(self) -> dict[str, Any]:
        out = {key: value for key, value in vars(self).items() if value is not None}
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in out.items()}


def measure_heads(
    run: Run,
    material: Material,
    *,
    ablation: bool = True,
    links: Sequence[Links] | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> list[Head]:
    """Judge every head: by pairs, texts with labels, plain text, or images with labels, as the model has it.

    `links` are a given alignment for each pair; `tick` is told about the slow part.
    """
    model, config = run.model, run.config
    both = config.encoder is not None and config.decoder is not None
    if links is not None and not both:
        raise UserError("links are for models with a source and an output, which this is not")
    if links is not None and len(links) != len(material):
        raise UserError(f"{len(links):,} lines of links for {len(material):,} pairs; there must be one for each")
    batches = batches_of(run, material)
    gradient = gradient_importance(model, batches)
    ablated = ablation_importance(model, batches, tick) if ablation else {}
    sums = look_squares(model, batches) if config.patches is not None else look(model, batches)
    merits = {}
    if both and not isinstance(material, str | Pictures):
        pairs = encode_pairs(run, material)
        if links is not None and len(pairs) != len(material):
            raise UserError("pairs with links need a target each")
        merits = alignment_merits(model, pairs, links)
    text = torch.tensor([i for i in range(run.codec.target.size) if i not in run.codec.target.special])
    induced = induction_scores(model, text) if config.encoder is None else {}
    out = []
    for name in model.attentions():
        kind, layer = kind_and_layer(name)
        for index, number in enumerate(model.attentions()[name].head_numbers):
            seen, spot = sums[name], (name, index)
            what, share = seen.describe(index)
            out.append(
                Head(
                    name,
                    kind,
                    layer,
                    number,
                    index,
                    gradient[spot],
                    ablated.get(spot),
                    float(seen.confidence_H[index] / seen.queries),
                    float(seen.entropy_H[index] / seen.queries),
                    float(seen.distance_H[index] / seen.queries),
                    what,
                    share,
                    merits.get(spot),
                    induced.get(spot),
                )
            )
    aligning, inducing = best_alignment_heads(out), induction_heads(out)
    named = [replace(h, what="alignment", share=h.alignment or 0.0) if h in aligning else h for h in out]
    return [replace(h, what="induction", share=h.induction or 0.0) if h in inducing else h for h in named]


def induction_heads(heads: Sequence[Head]) -> list[Head]:
    """The heads that mainly look at what followed the same token before, the clearest first."""
    return sorted((h for h in heads if (h.induction or 0.0) >= MAINLY), key=lambda h: -(h.induction or 0.0))


def best_alignment_heads(heads: Sequence[Head]) -> list[Head]:
    """The head that aligns best and those that nearly do, in the order of the model."""
    able = sorted((h for h in heads if h.alignment is not None), key=lambda h: -(h.alignment or 0.0))
    if not able:
        return []
    enough = NEARLY_BEST * (able[0].alignment or 0.0)
    chosen = [h for h in able[:MOST_ALIGNMENT_HEADS] if (h.alignment or 0.0) >= enough]
    return sorted(chosen, key=lambda h: (h.layer, h.index))


def grids(heads: Sequence[Head], value: Callable[[Head], float | None]) -> dict[str, np.ndarray]:
    """A number per head as a matrix (layers, heads) for each kind of attention; NaN where there is none."""
    out: dict[str, np.ndarray] = {}
    for kind in dict.fromkeys(h.kind for h in heads):
        these = [h for h in heads if h.kind == kind]
        grid = np.full((max(h.layer for h in these) + 1, max(h.head for h in these) + 1), math.nan)
        for h in these:
            number = value(h)
            grid[h.layer, h.head] = math.nan if number is None else max(0.0, number)
        out[kind] = grid
    return out


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
    found = model.attentions()
    device = model.device
    zeros = {name: torch.zeros(3, attention.heads, device=device) for name, attention in found.items()}
    sums = {name: Sums(x_3H[0], x_3H[1], x_3H[2]) for name, x_3H in zeros.items()}
    for batch in batches:
        batch = batch.to(device)
        with record(model, "*.weights") as maps:
            model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT)
        rows = {"source": (batch.source_BS, batch.source_keep_BS), "target": (batch.input_BT, batch.keep_BT)}
        for name in found:
            kind, _ = kind_and_layer(name)
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
    """Follow where the patches of images look; distances are in pixels."""
    patches = model.config.patches
    assert patches is not None
    device = model.device
    rows, columns = patches.height // patches.size, patches.width // patches.size
    far_SS = between_squares(rows, columns, patches.size).to(device)
    row_S, column_S = (torch.arange(patches.count, device=device) // columns, torch.arange(patches.count) % columns)
    own_SS = torch.eye(patches.count, dtype=torch.bool, device=device)
    places = {
        "own square": own_SS,
        "same row": (row_S[:, None] == row_S) & ~own_SS,
        "same column": (column_S[:, None] == column_S).to(device) & ~own_SS,
    }
    zeros = {name: torch.zeros(3, a.heads, device=device) for name, a in model.attentions().items()}
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
