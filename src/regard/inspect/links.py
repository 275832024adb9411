"""Heads of the cross-attention that align: by their own look, or by agreement with links that are given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from regard.batch import Ids
from regard.errors import UserError
from regard.inspect.importance import Spot
from regard.inspect.maps import alignment_quality
from regard.inspect.material import make_batches
from regard.inspect.places import attentions, place
from regard.inspect.record import record
from regard.model import Model

Links = list[tuple[int, int]]  # (source place, output place) from 0


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
