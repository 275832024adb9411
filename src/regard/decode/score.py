"""Forced decoding: the log-probability a model gives to a target that is already there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.batch import Ids, collate, pad
from regard.decode.batches import by_length, windows
from regard.decode.options import Options
from regard.decode.prepare import check_vocabulary, encode, position_limits
from regard.decode.scorer import Scorer
from regard.errors import UserError
from regard.model import Model
from regard.run import Run
from regard.text.example import Example

Pair = tuple[str, str] | Example
LOGITS = 1 << 22  # how many to hold at once


@dataclass(frozen=True)
class Scored:
    """A target's natural-log probability, in total and per symbol, the end included."""

    score: float
    tokens: tuple[str, ...]
    token_scores: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"score": self.score, "tokens": list(self.tokens), "token_scores": list(self.token_scores)}


def score(runs: Run | Sequence[Run], pairs: Iterable[Pair], options: Options | None = None) -> Iterator[Scored]:
    """The score of every pair, in order; several runs make an ensemble. Of the options weights and batching matter.

    An empty target for an empty source scores 0, as `generate` has it. For a language model the source is a prompt and
    the target how it goes on; there too the end counts.
    """
    runs = [runs] if isinstance(runs, Run) else list(runs)
    options = options or Options()
    check_vocabulary(runs)
    scorer = Scorer([run.model for run in runs], options.weights)
    longest = position_limits(scorer.models)
    for window in windows(pairs, options.window):
        examples = [pair if isinstance(pair, Example) else Example(*pair) for pair in window]
        sources = list(zip(*(encode(run, examples) for run in runs), strict=True))
        targets = runs[0].codec.encode_target([_target(example) for example in examples])
        for example, ids, target in zip(examples, sources, targets, strict=True):
            _check(example, max(map(len, ids)), len(target), longest, scorer.continues)
        totals = force(scorer, sources, targets, options.batch_tokens)
        for example, target, token_scores in zip(examples, targets, totals, strict=True):
            if not example.source.strip() and len(target) == 1 and not scorer.continues:
                yield Scored(0.0, (), ())
            else:
                yield Scored(sum(token_scores), tuple(runs[0].codec.target_pieces(target)), token_scores)


@torch.inference_mode()
def force(
    scorer: Scorer, sources: Sequence[Sequence[Ids]], targets: Sequence[Ids], batch_tokens: int = 8192
) -> list[tuple[float, ...]]:
    """The log-probability of each symbol of every target (with its end symbol); `sources` holds ids per model."""
    results: list[tuple[float, ...]] = [()] * len(targets)
    join = sum if scorer.continues else max
    lengths = [join((len(target), max(map(len, ids)))) for ids, target in zip(sources, targets, strict=True)]
    for batch in by_length(lengths, batch_tokens):
        labels = [targets[i] for i in batch]
        hidden = []
        for m, model in enumerate(scorer.models):
            with scorer.packed.used():
                hidden.append(_hidden(model, [sources[i][m] for i in batch], labels))
        label_N = torch.from_numpy(np.concatenate([np.asarray(label, dtype=np.int64) for label in labels]))
        label_N = label_N.to(scorer.device)
        scores, rows = [], max(1, LOGITS // scorer.vocab)
        for start in range(0, len(label_N), rows):
            part = slice(start, start + rows)
            logits = [model.predict(x_ND[part]) for model, x_ND in zip(scorer.models, hidden, strict=True)]
            scores.append(scorer.join(logits).gather(1, label_N[part].unsqueeze(1)).squeeze(1))
        ends = np.cumsum([len(label) for label in labels])[:-1]
        for i, row in zip(batch, np.split(torch.cat(scores).double().numpy(force=True), ends), strict=True):
            results[i] = tuple(row.tolist())
    return results


def _hidden(model: Model, sources: Sequence[Ids], targets: Sequence[Ids]) -> Tensor:
    """The vectors from which the symbols of the targets are predicted, one after the other."""
    device = next(model.parameters()).device
    if model.encoder is not None:
        made = collate(sources, targets, model.config).to(device)
        x_BTD = model.hidden(made.source_BS, made.source_keep_BS, made.input_BT)
        return x_BTD.flatten(0, 1) if made.keep_BT is None else x_BTD[made.keep_BT]
    rows = [[*source, *target[:-1]] for source, target in zip(sources, targets, strict=True)]
    tokens_BT, keep_BT = pad(rows, model.config.ids.pad)
    x_BTD = model.hidden(tokens_BT.to(device), None if keep_BT is None else keep_BT.to(device))
    pairs = zip(x_BTD, sources, rows, strict=True)
    return torch.cat([x_TD[len(source) - 1 : len(row)] for x_TD, source, row in pairs])


def _target(example: Example) -> str:
    if example.target is None:
        raise UserError(f"score: no target for the source {example.source[:40]!r}")
    return example.target


def _check(example: Example, source: int, target: int, longest: tuple[int, int], continues: bool) -> None:
    if continues:  # both share the positions, and the end is not read
        if source + target - 1 > longest[1]:
            raise UserError(
                f"score: the text {example.source[:40]!r}... and how it goes on have {source + target - 1} symbols"
                f" together, more than the {longest[1]} learned positions of this model"
            )
        return
    for side, length, most in (("source", source, longest[0]), ("target", target, longest[1])):
        if length - 1 > most:
            raise UserError(
                f"score: the {side} {getattr(example, side)[:40]!r}... has {length - 1} symbols,"
                f" more than the {most} learned positions of this model"
            )
