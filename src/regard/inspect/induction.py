"""Induction: having seen A B before, a head at the second A looks at B, which the model can then say."""

from __future__ import annotations

import torch

from regard.inspect.importance import Spot
from regard.inspect.places import attentions
from regard.inspect.record import record
from regard.model import Model

ROWS = 8
LONGEST = 24  # symbols that are then repeated


@torch.no_grad()
def induction_scores(model: Model, symbols: torch.Tensor | None = None, seed: int = 0) -> dict[Spot, float]:
    """The weight of every head of a language model from a symbol to what followed it the last time.

    It reads random symbols twice over, so that nothing but the repetition helps. `symbols` are the ids to draw from;
    without them all that are no marks.
    """
    config = model.config
    assert config.decoder is not None and config.encoder is None
    if symbols is None:
        marks = torch.tensor(sorted({x for x in config.ids.model_dump().values() if x is not None}))
        symbols = torch.arange(config.target_vocab)
        symbols = symbols[~torch.isin(symbols, marks)]
    limit = config.decoder.max_length if config.decoder.position == "learned" else 2 * LONGEST + 1
    length = max(1, min(LONGEST, len(symbols), (limit - 1) // 2))
    draws = torch.Generator().manual_seed(seed)
    once_NT = torch.stack([symbols[torch.randperm(len(symbols), generator=draws)[:length]] for _ in range(ROWS)])
    start_N1 = torch.full((ROWS, 1), config.start_id)
    device = next(model.parameters()).device
    names = list(attentions(model))
    with record(model, *(f"{name}.weights" for name in names)) as maps:
        model.hidden(torch.cat((start_N1, once_NT, once_NT), dim=1).to(device), None)
    t = torch.arange(length + 1, 2 * length + 1)  # in the second round; what followed stands `length` - 1 before
    out: dict[Spot, float] = {}
    for name in names:
        weight_H = maps[f"{name}.weights"][:, :, t, t - length + 1].float().mean((0, 2))
        out |= {(name, head): float(weight) for head, weight in enumerate(weight_H)}
    return out
