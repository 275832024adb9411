"""What every head of a model does: how much it is needed, how sharp it looks, how far, and at what."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.batch import Batch, Ids
from regard.errors import UserError
from regard.inspect.importance import Spot, ablation_importance, encode_pairs, gradient_importance, make_batches
from regard.inspect.places import attentions, head_numbers, place
from regard.inspect.record import record
from regard.inspect.trace import alignment_quality, entropy_bits
from regard.model import Model
from regard.run import Run
from regard.text.example import Example

FARTHEST = 8  # offsets told apart
MAINLY = 0.5  # of the weight: enough to say what a head does
NEARLY_BEST = 0.9  # of the best head's merit: enough to align along with it
MOST_ALIGNMENT_HEADS = 4

SIDES = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("target", "source")}

Links = list[tuple[int, int]]  # (source place, output place) from 0


@dataclass(frozen=True)
class Head:
    """One head of one attention."""

    name: str  # of its attention in the model
    kind: str  # encoder, decoder or cross
    layer: int  # from 0
    head: int  # its number from 0, as before any pruning
    index: int  # its place among the heads that are left
    gradient: float  # expected |dL/dgate| per symbol
    ablation: float | None  # rise of the loss per symbol without it
    confidence: float  # mean of the largest weights
    entropy: float  # bits
    distance: float  # symbols between who looks and what is looked at, by weight
    what: str  # what it mainly looks at, in words
    share: float  # of its weight that goes there
    alignment: float | None  # cross-attention: agreement with given links, or sharpness times coverage

    def to_json(self) -> dict[str, Any]:
        out = {key: value for key, value in vars(self).items() if value is not None}
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in out.items()}


def measure_heads(
    run: Run,
    examples: Sequence[Example],
    *,
    ablation: bool = True,
    links: Sequence[Links] | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> list[Head]:
    """Judge every head on pairs. `links` are a given alignment for each; `tick` is told about the slow part."""
    if links is not None and len(links) != len(examples):
        raise UserError(f"{len(links):,} lines of links for {len(examples):,} pairs; there must be one for each")
    model = run.model
    pairs = encode_pairs(run, examples)
    if links is not None and len(pairs) != len(examples):
        raise UserError("pairs with links need a target each")
    batches = make_batches(pairs, run.config)
    gradient = gradient_importance(model, batches)
    ablated = ablation_importance(model, batches, tick) if ablation else {}
    sums = look(model, batches)
    merits = alignment_merits(model, pairs, links)
    out = []
    for name in attentions(model):
        kind, layer = place(name)
        for index, number in enumerate(head_numbers(model, name)):
            seen, merit = sums[name], merits.get((name, index))
            what, share = seen.describe(index)
            out.append(
                Head(
                    name,
                    kind,
                    layer,
                    number,
                    index,
                    gradient[name, index],
                    ablated.get((name, index)),
                    float(seen.confidence_H[index] / seen.queries),
                    float(seen.entropy_H[index] / seen.queries),
                    float(seen.distance_H[index] / seen.queries),
                    what,
                    share,
                    merit,
                )
            )
    aligning = best_alignment_heads(out)
    return [replace(h, what="alignment", share=h.alignment or 0.0) if h in aligning else h for h in out]


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


# Alignment


def alignment_merits(
    model: Model, pairs: Sequence[tuple[Ids, Ids]], links: Sequence[Links] | None = None
) -> dict[Spot, float]:
    """How well each head of the cross-attention aligns: agreement with links, or sharpness times coverage without any.

    Agreement is the share of linked output symbols whose heaviest weight is on a symbol they are linked with.
    """
    names = [name for name in attentions(model) if place(name)[0] == "cross"]
    total: dict[Spot, float] = {}
    count = 0.0
    for start in range(0, len(pairs), 32):
        part = list(pairs[start : start + 32])
        (batch,) = make_batches(part, model.config, tokens=1 << 40)
        order = sorted(range(len(part)), key=lambda i: (len(part[i][0]), len(part[i][1])))
        device = next(model.parameters()).device
        with torch.no_grad(), record(model, *(f"{name}.weights" for name in names)) as maps:
            batch = batch.to(device)
            model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT)
        for row, i in enumerate(order):
            source, target = part[i]
            given = None if links is None else links[start + i]
            rows = max(1, len(target) - 1)
            wanted = None if given is None else _by_output(given, rows)
            count += 1.0 if wanted is None else len(wanted)
            for name in names:
                for head, all_TS in enumerate(maps[f"{name}.weights"][row].float().cpu().numpy()):
                    seen_TS = all_TS[:rows, : len(source)]
                    merit = alignment_quality(seen_TS, len(source)) if wanted is None else _agreeing(seen_TS, wanted)
                    total[name, head] = total.get((name, head), 0.0) + merit
    if links is not None and not count:
        raise UserError("not one of the links is within its pair of texts; they are written source-output, from 0")
    return {spot: value / count for spot, value in total.items()}


def _by_output(links: Links, rows: int) -> dict[int, set[int]]:
    wanted: dict[int, set[int]] = {}
    for source, output in links:
        if output < rows:
            wanted.setdefault(output, set()).add(source)
    return wanted


def _agreeing(weights_TS: np.ndarray, wanted: dict[int, set[int]]) -> float:
    best = weights_TS[:, : max(1, weights_TS.shape[1] - 1)].argmax(1)
    return float(sum(int(best[output]) in sources for output, sources in wanted.items()))


def best_alignment_heads(heads: Sequence[Head]) -> list[Head]:
    """The head that aligns best and those that nearly do, in the order of the model."""
    able = sorted((h for h in heads if h.alignment is not None), key=lambda h: -(h.alignment or 0.0))
    if not able:
        return []
    enough = NEARLY_BEST * (able[0].alignment or 0.0)
    chosen = [h for h in able[:MOST_ALIGNMENT_HEADS] if (h.alignment or 0.0) >= enough]
    return sorted(chosen, key=lambda h: (h.layer, h.index))


def read_links(path: str | Path) -> list[Links]:
    """An alignment file: per line, pairs like `0-0 1-2`, source first, from 0."""
    out = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable: {error}") from None
    for number, line in enumerate(text.split("\n")[: text.count("\n") or 1], start=1):
        links = []
        for word in line.split():
            if not re.fullmatch(r"[0-9]{1,6}-[0-9]{1,6}", word):
                raise UserError(f"{path}:{number}: {word!r} is not a link; write source-output from 0, like 0-0 1-2")
            source, _, output = word.partition("-")
            links.append((int(source), int(output)))
        out.append(links)
    return out


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
