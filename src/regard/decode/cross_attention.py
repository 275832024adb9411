"""The cross-attention of a model with torch: recorded in forced passes, for alignments, their heads and coverage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.batch import TokenIds, by_length, collate
from regard.decode.alignment import Links, alignment_quality, best_heads, check_heads
from regard.decode.request import HeadIndex, Options
from regard.errors import UserError
from regard.model import Model, kind_and_layer
from regard.nn.hooks import Recording, record
from regard.run import Run
from regard.text.codec import Example

MAX_EXAMPLES = 200  # pairs on which heads are chosen
BATCH_PAIRS = 32
MIN_COVERAGE = 1e-3  # lower bound for the attention of a source token, so that one token cannot dominate the penalty


def cross_attentions(model: Model) -> dict[int, str]:
    """The name of the cross-attention of every decoder layer."""
    kinds = {name: kind_and_layer(name) for name in model.attentions()}
    return {layer: name for name, (kind, layer) in kinds.items() if kind == "cross"}


def weight_taps(model: Model, layers: Iterable[int]) -> dict[int, str]:
    """The name of the tap of the cross-attention weights (B, H, T, S) of each of these layers."""
    names = cross_attentions(model)
    return {layer: f"{names[layer]}.weights" for layer in layers}


@torch.inference_mode()
def forced_attention(
    model: Model, sources: Sequence[TokenIds], outputs: Sequence[TokenIds], layers: Iterable[int]
) -> dict[int, Tensor]:
    """The cross-attention weights (B, H, T, S) of these layers in a forced pass over the outputs."""
    batch = collate(sources, outputs, model.config).to(model.device)
    taps = weight_taps(model, layers)
    with record(model, *taps.values()) as recording:
        model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT)
    return {layer: recording[tap] for layer, tap in taps.items()}


def mean_heads(weights: Mapping[int, Tensor], heads: Sequence[HeadIndex]) -> Tensor:
    """The mean weights (B, T, S) of heads, from the weights (B, H, T, S) of their layers."""
    return torch.stack([weights[layer][:, head] for layer, head in heads]).mean(0)


def align_weights(
    model: Model,
    sources: Sequence[TokenIds],
    outputs: Sequence[TokenIds],
    heads: Sequence[HeadIndex],
    batch_tokens: int = 8192,
) -> list[NDArray[np.floating]]:
    """The mean weights (T, S) of the heads in a forced pass over each output (ids with end tokens)."""
    results: list[NDArray[np.floating]] = [np.zeros((0, 0))] * len(outputs)
    lengths = [max(len(source), len(output)) for source, output in zip(sources, outputs, strict=True)]
    for batch in by_length(lengths, batch_tokens):
        part = [sources[i] for i in batch], [outputs[i] for i in batch]
        weights = forced_attention(model, *part, (layer for layer, _ in heads))
        for i, weights_TS in zip(batch, mean_heads(weights, heads).numpy(force=True), strict=True):
            results[i] = weights_TS[: len(outputs[i]), : len(sources[i])]
    return results


class Coverage:
    """The coverage penalty of hypotheses, p * sum log min(1, attention) over the attention to each source token."""

    def __init__(self, model: Model, sources: Sequence[TokenIds], options: Options) -> None:
        self.model = model
        self.penalty = options.coverage_penalty
        self.heads = check_heads(model.config, options.alignment_heads)
        self.taps = weight_taps(model, (layer for layer, _ in self.heads))
        self.recording = Recording()
        device = model.device
        lengths_B = torch.tensor([len(source) for source in sources], device=device)
        position_S = torch.arange(int(lengths_B.max()), device=device)
        self.real_BS = position_S < lengths_B.unsqueeze(1) - 1  # the end token needs no attention
        self.sum_NS = torch.zeros_like(self.real_BS, dtype=torch.float32)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the attention of the search that runs while the context is open."""
        with record(self.model, *self.taps.values()) as self.recording:
            yield

    def add(self) -> None:
        """Add the attention of the last step."""
        weights = {layer: self.recording[tap] for layer, tap in self.taps.items()}
        self.sum_NS = self.sum_NS + mean_heads(weights, self.heads).flatten(0, 1)
        self.recording.clear()

    def value(self, alive_B: Tensor) -> Tensor:
        """The penalty of each row if it ends now; zero if every source token has received enough attention."""
        covered_BKS = self.sum_NS.clamp(MIN_COVERAGE, 1.0).log().view(len(alive_B), -1, self.sum_NS.shape[1])
        return self.penalty * (covered_BKS * self.real_BS[alive_B].unsqueeze(1)).sum(-1)

    def select(self, rows_N: Tensor) -> None:
        self.sum_NS = self.sum_NS[rows_N]


def choose_heads(run: Run, pairs: Iterable[Example]) -> tuple[HeadIndex, ...]:
    """The decoder heads (layer, head) that align best on the first usable pairs."""
    examples = [pair for pair in islice(pairs, MAX_EXAMPLES) if pair.source.strip() and pair.target]
    if not examples:
        raise UserError("choosing alignment heads needs pairs with a source and a target")
    sources = run.codec.encode_source(examples)
    targets = run.codec.encode_target([example.target or "" for example in examples])
    merits = alignment_merits(run.model, list(zip(sources, targets, strict=True)))
    return tuple(best_heads({(kind_and_layer(name)[1], head): merit for (name, head), merit in merits.items()}))


def alignment_merits(
    model: Model, pairs: Sequence[tuple[TokenIds, TokenIds]], links: Sequence[Links] | None = None
) -> dict[tuple[str, int], float]:
    """The merit of each cross-attention head (name, head): its agreement with `links`, or else its quality."""
    names = cross_attentions(model)
    total: dict[tuple[str, int], float] = {}
    count = 0.0
    for start in range(0, len(pairs), BATCH_PAIRS):
        part = pairs[start : start + BATCH_PAIRS]
        weights = forced_attention(model, [source for source, _ in part], [target for _, target in part], names)
        for row, (source, target) in enumerate(part):
            length = max(1, len(target) - 1)
            linked = None if links is None else {(s, t) for s, t in links[start + row] if t < length}
            count += 1.0 if linked is None else len({t for _, t in linked})
            for layer, name in names.items():
                weights_HTS = weights[layer][row, :, :length, : len(source)].float().numpy(force=True)
                merit_H = alignment_quality(weights_HTS) if linked is None else _agreement(weights_HTS, linked)
                for head, merit in enumerate(merit_H.tolist()):
                    total[name, head] = total.get((name, head), 0.0) + merit
    if links is not None and not count:
        raise UserError("no link lies within its pair of texts; links are written source-output, counted from 0")
    return {head: merit / count for head, merit in total.items()}


def _agreement(weights_HTS: NDArray[np.floating], links: set[tuple[int, int]]) -> NDArray[np.floating]:
    """The number of output tokens whose highest weight is on a linked source token."""
    best_HT = weights_HTS[..., : max(1, weights_HTS.shape[-1] - 1)].argmax(-1)
    return np.array([float(sum((int(s), t) in links for t, s in enumerate(best_T))) for best_T in best_HT])
