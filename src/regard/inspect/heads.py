"""Head statistics: importance, confidence, entropy, attention distance, and the kind of key a head attends to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.batch import Batch
from regard.config import PatchConfig
from regard.data.objectives import text_ids
from regard.decode.alignment import Links, best_heads
from regard.decode.cross_attention import alignment_merits
from regard.errors import UserError, plural, require_type
from regard.inspect.inputs import TaskData, encode_pairs, task_batches
from regard.inspect.logit_lens import entropy_bits
from regard.inspect.prune import HeadKey, ablation_importance, gradient_importance
from regard.model import Model, kind_and_layer
from regard.nn.hooks import record
from regard.run import Run

MAIN_SHARE = 0.5  # minimum share of the weight for a head's main kind of key
PART_SHARE = 0.1  # minimum share of the weight for a part of a mixed head
MAX_PARTS = 3  # of a mixed head
EVEN_SHARE = 0.9  # minimum share of the maximum entropy for even attention
INDUCTION_TOKENS = 24  # in the repeated sequence
INDUCTION_ROWS = 8
NAMES = {  # descriptions of heads by the keys that they attend to
    "first": "first token", "last": "last token", "same": "same token elsewhere",
    "class": "class token", "patch": "own patch", "row": "same row", "column": "same column",
    "even": "everything evenly", "mixed": "mixed", "alignment": "alignment",
}  # fmt: skip
OFFSET_NAMES = {  # of keys by their offset from the query
    "self": {"-1": "previous token", "0": "own token", "1": "next token",
             "back": "token {} back", "ahead": "token {} ahead"},
    "cross": {"0": "same position", "back": "position {} back", "ahead": "position {} ahead"},
}  # fmt: skip
TOKEN_SIDES = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("target", "source")}
MaskedIds = tuple[Tensor, Tensor]  # token ids (B, T), and which of them are not padding


@dataclass(frozen=True)
class HeadStatistics:
    """One head of one attention."""

    name: str  # of its attention in the model
    kind: str  # encoder, decoder or cross
    layer: int  # from 0
    head: int  # number from 0, unchanged by pruning
    index: int  # among the remaining heads
    gradient: float  # expected |dL/dgate| per token
    ablation: float | None  # rise of the loss per token without the head
    confidence: float  # mean of the largest weights
    entropy: float  # bits
    distance: float  # weighted mean between query and key, in tokens (images: pixels)
    what: str  # main kind of key, in words
    share: float  # of the weight on that kind
    parts: tuple[tuple[str, float], ...] = ()  # kinds with the most weight; they may overlap
    alignment: float | None = None  # cross-attention: agreement with reference links, or sharpness times coverage
    induction: float | None = None  # language models: weight on the successor of an earlier copy

    def to_json(self) -> dict[str, Any]:
        values = {key: value for key, value in vars(self).items() if value is not None}
        rounded = {key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()}
        return {**rounded, "parts": {what: round(share, 6) for what, share in self.parts}}

    @property
    def description(self) -> str:
        """The main kind of key, or the parts of a mixed head."""
        if self.what != NAMES["mixed"] or not self.parts:
            return self.what
        return f"{self.what}: " + ", ".join(f"{share:.0%} {what}" for what, share in self.parts)


def measure_heads(
    run: Run, data: TaskData, *, ablation: bool = True, links: Sequence[Links] | None = None
) -> list[HeadStatistics]:
    """The statistics of every head on data of the run's task; `links` are reference alignments, one per pair."""
    model = run.model
    task = run.task
    if links is not None and not task.seq2seq:
        raise UserError("links need a model with a source and an output")
    if links is not None and len(links) != len(data):
        raise UserError(f"{plural(len(links), 'line')} of links for {len(data):,} pairs; each pair needs one")
    batches = task_batches(run, data)
    gradient = gradient_importance(model, batches)
    losses = ablation_importance(model, batches) if ablation else {}
    sums = sum_patch_attention(model, batches) if task.reads == "images" else sum_attention(model, batches)
    merits: dict[HeadKey, float] = {}
    if task.seq2seq:
        pairs = encode_pairs(run, data)  # type: ignore[arg-type]
        if links is not None and len(pairs) != len(data):
            raise UserError("every pair with links needs a target")
        merits = alignment_merits(model, pairs, links)
    text = torch.from_numpy(text_ids(run.codec.target.size, run.codec.target.special))
    induction = induction_scores(model, text) if task.name == "lm" else {}
    heads = []
    for name, attention in model.attentions().items():
        for index, number in enumerate(attention.head_numbers):
            key = name, index
            location = name, *kind_and_layer(name), number, index
            importance = gradient[key], losses.get(key)
            what, share = sums[name].describe(index)
            parts = sums[name].parts(index)
            roles = merits.get(key), induction.get(key)
            means = sums[name].means(index)
            heads.append(HeadStatistics(*location, *importance, *means, what, share, parts, *roles))
    alignment_heads = best_alignment_heads(heads)
    successor_heads = induction_heads(heads)
    heads = [replace(h, what=NAMES["alignment"], share=h.alignment or 0) if h in alignment_heads else h for h in heads]
    return [replace(h, what="induction", share=h.induction or 0.0) if h in successor_heads else h for h in heads]


def induction_heads(heads: Sequence[HeadStatistics]) -> list[HeadStatistics]:
    """The heads that mainly attend to the successor of an earlier copy of their token, the strongest first."""
    return sorted((h for h in heads if (h.induction or 0.0) >= MAIN_SHARE), key=lambda h: -(h.induction or 0.0))


def best_alignment_heads(heads: Sequence[HeadStatistics]) -> list[HeadStatistics]:
    """The best alignment head and heads that are nearly as good, in model order."""
    return best_heads({h: h.alignment for h in heads if h.alignment is not None})


def grids(heads: Sequence[HeadStatistics], value: Callable[[HeadStatistics], float | None]) -> dict[str, np.ndarray]:
    """A number per head as a matrix (layers, heads) for each kind of attention; NaN for missing heads."""
    out: dict[str, np.ndarray] = {}
    for kind in dict.fromkeys(h.kind for h in heads):
        same_kind = [h for h in heads if h.kind == kind]
        out[kind] = np.full((max(h.layer for h in same_kind) + 1, max(h.head for h in same_kind) + 1), math.nan)
        for h in same_kind:
            if (number := value(h)) is not None:
                out[kind][h.layer, h.head] = max(0.0, number)
    return out


class AttentionSums:
    """Sums per head over the queries of one attention that can attend to more than one key."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.sums_3H = torch.zeros(3, heads, device=device)  # confidence, entropy and distance
        self.max_entropy = 0.0  # of even attention, in bits
        self.queries = 0
        # Kind of key -> the weight on it, and the number of queries that have such a key.
        self.targets: dict[str, tuple[Tensor, int]] = {}

    def add(self, weights_BHTS: Tensor, queries: int, max_entropy: float, distance_H: Tensor) -> None:
        self.queries += queries
        self.max_entropy += max_entropy
        confidence_H = weights_BHTS.amax(3).sum((0, 2))
        entropy_H = entropy_bits(weights_BHTS).sum((0, 2))
        self.sums_3H += torch.stack((confidence_H, entropy_H, distance_H))

    def add_target(self, what: str, weight_H: Tensor, queries: int) -> None:
        total_H, count = self.targets.get(what, (torch.zeros_like(weight_H), 0))
        self.targets[what] = (total_H + weight_H, count + queries)

    def means(self, head: int) -> tuple[float, float, float]:
        """Mean confidence, entropy and distance of a head."""
        confidence, entropy, distance = (self.sums_3H[:, head] / self.queries).tolist()
        return confidence, entropy, distance

    def describe(self, head: int) -> tuple[str, float]:
        """The main kind of key of a head, and its share of the weight."""
        common = {what: sums for what, sums in self.targets.items() if sums[1] >= max(1, self.queries // 4)}
        shares = {what: float(weight_H[head] / count) for what, (weight_H, count) in common.items()}
        best = max(shares, key=lambda what: shares[what], default="")
        if best and shares[best] >= MAIN_SHARE:
            return best, shares[best]
        evenness = float(self.sums_3H[1, head]) / self.max_entropy if self.max_entropy else 0.0
        return (NAMES["even"], evenness) if evenness >= EVEN_SHARE else (NAMES["mixed"], shares.get(best, 0.0))

    def parts(self, head: int) -> tuple[tuple[str, float], ...]:
        """The kinds of key with the most weight of a head, with their shares, the largest first."""
        shares = {what: float(weight_H[head]) / max(1, self.queries) for what, (weight_H, _) in self.targets.items()}
        largest = sorted(shares.items(), key=lambda item: -item[1])[:MAX_PARTS]
        return tuple((what, share) for what, share in largest if share >= PART_SHARE)


def offset_name(kind: str, offset: int) -> str:
    """The name of a key `offset` positions after the query."""
    names = OFFSET_NAMES["cross" if kind == "cross" else "self"]
    return names.get(str(offset)) or names["back" if offset < 0 else "ahead"].format(abs(offset))


@torch.no_grad()
def sum_attention(model: Model, batches: Sequence[Batch]) -> dict[str, AttentionSums]:
    """The sums of every attention over batches of tokens."""
    sums = {name: AttentionSums(attention.heads, model.device) for name, attention in model.attentions().items()}
    for batch in batches:
        batch = batch.to(model.device)
        with record(model, "*.weights") as maps:
            model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT)
        sides = {"source": (batch.source_BS, batch.source_keep_BS), "target": (batch.input_BT, batch.keep_BT)}
        masked = {side: (x, torch.ones_like(x).bool() if keep is None else keep) for side, (x, keep) in sides.items()}
        for name, attention_sums in sums.items():
            kind, _ = kind_and_layer(name)
            queries, keys = (masked[side] for side in TOKEN_SIDES[kind])
            _add_tokens(attention_sums, maps[f"{name}.weights"], kind, queries, keys)
    return sums


def _add_tokens(sums: AttentionSums, weights_BHTS: Tensor, kind: str, queries: MaskedIds, keys: MaskedIds) -> None:
    query_BT, query_keep_BT = queries
    key_BS, key_keep_BS = keys
    t_T1 = torch.arange(query_BT.shape[1], device=query_BT.device).unsqueeze(1)
    s_S = torch.arange(key_BS.shape[1], device=query_BT.device)
    mask_BTS = query_keep_BT.unsqueeze(2) & key_keep_BS.unsqueeze(1)
    if kind == "decoder":
        mask_BTS = mask_BTS & (s_S <= t_T1)
    keys_BT = mask_BTS.sum(2)
    counted_BT = keys_BT > 1  # a query with a single key is not informative
    mask_BTS = mask_BTS & counted_BT.unsqueeze(2)
    weights_BHTS = weights_BHTS.float() * mask_BTS.unsqueeze(1)
    distance_BTS = (s_S - t_T1).float().unsqueeze(0)
    if kind == "cross":  # positions in two texts are compared relative to their lengths
        ratio_B11 = (key_keep_BS.sum(1) / query_keep_BT.sum(1)).view(-1, 1, 1)
        distance_BTS = s_S - t_T1 * ratio_B11
    distance_H = (weights_BHTS * distance_BTS.abs().unsqueeze(1)).sum((0, 2, 3))
    sums.add(weights_BHTS, int(counted_BT.sum()), float(keys_BT[counted_BT].float().log2().sum()), distance_H)

    def add_target(what: str, target: Tensor) -> None:
        target_BTS = target & mask_BTS
        weight_H = (weights_BHTS * target_BTS.unsqueeze(1)).sum((0, 2, 3))
        sums.add_target(what, weight_H, int(target_BTS.any(2).sum()))

    # All offsets at once: sums over the diagonals of the weights, and the number of queries with a key there.
    last_query = len(t_T1) - 1
    diagonal_N = (s_S - t_T1 + last_query).flatten()
    weight_HO = weights_BHTS.new_zeros(weights_BHTS.shape[1], last_query + len(s_S))
    weight_HO.index_add_(1, diagonal_N, weights_BHTS.sum(0).flatten(1))
    count_O = diagonal_N.new_zeros(last_query + len(s_S)).index_add_(0, diagonal_N, mask_BTS.sum(0).flatten())
    for index, count in enumerate(count_O.tolist()):
        if count:
            sums.add_target(offset_name(kind, index - last_query), weight_HO[:, index], count)
    add_target(NAMES["first"], s_S == 0)
    if kind != "decoder":
        last_B11 = (key_keep_BS.sum(1) - 1).view(-1, 1, 1)
        add_target(NAMES["last"], s_S == last_B11)
    if kind != "cross":
        add_target(NAMES["same"], (query_BT.unsqueeze(2) == key_BS.unsqueeze(1)) & (s_S != t_T1))


@torch.no_grad()
def sum_patch_attention(model: Model, batches: Sequence[Batch]) -> dict[str, AttentionSums]:
    """The sums of every attention over the patches of images; distances are in pixels."""
    patches = model.config.image_patches
    device = model.device
    distance_SS = patch_distances(patches).to(device)
    row_S, column_S = patch_grid(patches).to(device).unbind(1)
    own_SS = torch.eye(patches.count, dtype=torch.bool, device=device)
    targets = {
        NAMES["patch"]: own_SS,
        NAMES["row"]: (row_S[:, None] == row_S) & ~own_SS,
        NAMES["column"]: (column_S[:, None] == column_S) & ~own_SS,
    }
    sums = {name: AttentionSums(attention.heads, device) for name, attention in model.attentions().items()}
    for batch in batches:
        with record(model, "*.weights") as maps:
            model.hidden(batch.source_BS.to(device), None)
        for name, attention_sums in sums.items():
            all_BHTS = maps[f"{name}.weights"].float()
            weights_BHTS = all_BHTS[:, :, 1:]  # without the class token as a query
            queries = weights_BHTS.shape[0] * patches.count
            distance_H = mean_distance(all_BHTS, distance_SS).sum((0, 2))
            attention_sums.add(weights_BHTS, queries, queries * math.log2(patches.count + 1), distance_H)
            attention_sums.add_target(NAMES["class"], weights_BHTS[..., 0].sum((0, 2)), queries)
            for what, target_SS in targets.items():
                attention_sums.add_target(what, (weights_BHTS[..., 1:] * target_SS).sum((0, 2, 3)), queries)
    return sums


def patch_grid(patches: PatchConfig) -> Tensor:
    """The row and the column of every patch, (patches, 2)."""
    index_S = torch.arange(patches.count)
    columns = patches.width // patches.size
    return torch.stack((index_S // columns, index_S % columns), dim=1)


def patch_distances(patches: PatchConfig) -> Tensor:
    """Pixels between the centres of patches, (patches, patches)."""
    position_S2 = patch_grid(patches).float() * patches.size
    return torch.cdist(position_S2, position_S2)


def mean_distance(weights_BHTS: Tensor, distance_SS: Tensor) -> Tensor:
    """The mean attention distance of every patch, (B, H, patches), ignoring the class token."""
    patches_BHSS = weights_BHTS[..., 1:, 1:]
    return (patches_BHSS * distance_SS).sum(-1) / patches_BHSS.sum(-1).clamp(min=1e-9)


@torch.no_grad()
def induction_scores(model: Model, tokens: Tensor | None = None, seed: int = 0) -> dict[HeadKey, float]:
    """The weight of every head of a language model from a token to the successor of its previous copy.

    The input is a random sequence of `tokens` (by default all but the special ones), repeated twice.
    """
    require_type(model, Model, "induction_scores: takes a model, such as run.model")
    config = model.config
    if not model.decoder_only:
        raise UserError("induction exists in language models (only a decoder)")
    if tokens is None:
        special = torch.tensor(sorted({x for x in config.ids.model_dump().values() if x is not None}))
        tokens = torch.arange(config.target_vocab)
        tokens = tokens[~torch.isin(tokens, special)]
    limit = config.top.max_positions or 2 * INDUCTION_TOKENS + 1
    length = max(1, min(INDUCTION_TOKENS, len(tokens), (limit - 1) // 2))
    draws = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(len(tokens), generator=draws) for _ in range(INDUCTION_ROWS))
    once_NT = torch.stack([tokens[order[:length]] for order in orders])
    start_N1 = torch.full((INDUCTION_ROWS, 1), config.start_id)
    with record(model, "*.weights") as maps:
        model.hidden(torch.cat((start_N1, once_NT, once_NT), dim=1).to(model.device), None)
    t = torch.arange(length + 1, 2 * length + 1)  # the second copy; the successor is `length` - 1 positions before
    scores: dict[HeadKey, float] = {}
    for name in model.attentions():
        weight_H = maps[f"{name}.weights"][:, :, t, t - length + 1].float().mean((0, 2))
        scores |= {(name, head): float(weight) for head, weight in enumerate(weight_H)}
    return scores
