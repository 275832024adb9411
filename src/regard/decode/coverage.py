"""The coverage penalty: outputs that left source symbols unattended rank lower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from regard.batch import Ids
from regard.decode.attention import heads_of, mean_heads, watching
from regard.decode.options import Options
from regard.model import Model

LEAST = 1e-3  # attention counted for a symbol that got less: one symbol alone must not decide everything


class Coverage:
    """Sums up the attention that source symbols get from a hypothesis, which ranks by p * sum log min(1, attention)."""

    def __init__(self, model: Model, sources: Sequence[Ids], options: Options) -> None:
        self.model, self.penalty = model, options.coverage_penalty
        self.heads = heads_of(model, options.alignment_heads)
        self.seen: dict[int, list[Tensor]] = {}
        device = next(model.parameters()).device
        lengths_B = torch.tensor([len(source) for source in sources], device=device)
        place_S = torch.arange(int(lengths_B.max()), device=device)
        self.real_BS = place_S < lengths_B.unsqueeze(1) - 1  # the end symbol needs no attention
        self.sum_NS = torch.zeros_like(self.real_BS, dtype=torch.float32)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """While open, the model's attention is collected."""
        with watching(self.model, sorted({layer for layer, _ in self.heads})) as self.seen:
            yield

    def add(self) -> None:
        """Count the attention of the last step."""
        weights_BKS = mean_heads(self.seen, self.heads)
        self.sum_NS = self.sum_NS + weights_BKS.flatten(0, 1)
        for passes in self.seen.values():
            passes.clear()

    def value(self, alive_B: Tensor) -> Tensor:
        """What to add to the rank of a hypothesis that ends now, per row: zero when all was attended to."""
        covered_BKS = self.sum_NS.clamp(LEAST, 1.0).log().view(len(alive_B), -1, self.sum_NS.shape[1])
        return self.penalty * (covered_BKS * self.real_BS[alive_B].unsqueeze(1)).sum(-1)

    def select(self, rows_N: Tensor) -> None:
        """Carry on these rows."""
        self.sum_NS = self.sum_NS[rows_N]
