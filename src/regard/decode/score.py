"""Forced decoding: the log-probability a model gives to a target that is already there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.batch import TokenIds, collate, pad
from regard.decode.options import Options
from regard.decode.request import check_vocabulary, encode, position_limits, too_long
from regard.decode.scorer import Scorer, by_length, windows
from regard.errors import UserError
from regard.model import Model
from regard.nn.matmul import use_matmuls
from regard.run import Run
from regard.text.codec import Example

Pair = tuple[str, str] | Example
LOGITS = 1 << 22  # how many to hold at once


@dataclass(frozen=True)
class Scored:
    """A target's natural-log probability, in total and per token, the end included."""

    score: float  # nan if there is none
    tokens: tuple[str, ...]
    token_scores: tuple[float, ...]
    flags: dict[str, str] = field(default_factory=dict)  # why there is none: name -> reason

    def as_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on; flags only where there are any, and then no score."""
        score = None if math.isnan(self.score) else self.score
        out: dict[str, Any] = {"score": score, "tokens": list(self.tokens), "token_scores": list(self.token_scores)}
        return {**out, "flags": dict(self.flags)} if self.flags else out


def score(runs: Run | Sequence[Run], pairs: Iterable[Pair], options: Options | None = None) -> Iterator[Scored]:
    """The score of every pair, in order; several runs make an ensemble. Of the options weights and batching matter.

    An empty target for an empty source scores 0, as `generate` has it; what is too long has no score, and a flag. For a
    language model the source is a prompt and the target how it goes on; there too the end counts.
    """
    runs = [runs] if isinstance(runs, Run) else list(runs)
    options = options or Options()
    check_vocabulary(runs)
    scorer = Scorer([run.model for run in runs], options.weights)
    for window in windows(pairs, options.window):
        examples = [pair if isinstance(pair, Example) else Example(*pair) for pair in window]
        sources, targets = _encode(runs, examples)
        flags = _flags(runs, sources, targets, options)
        fit = [i for i, flag in enumerate(flags) if not flag]
        found = force(scorer, [sources[i] for i in fit], [targets[i] for i in fit], options.batch_tokens)
        totals = dict(zip(fit, found, strict=True))
        for i, (example, target) in enumerate(zip(examples, targets, strict=True)):
            if flags[i]:
                yield Scored(math.nan, (), (), flags[i])
            elif not example.source.strip() and len(target) == 1 and not scorer.continues:
                yield Scored(0.0, (), ())
            else:
                yield Scored(sum(totals[i]), tuple(runs[0].codec.target_pieces(target)), totals[i])


def overlong(run: Run, examples: Sequence[Example], options: Options) -> list[str]:
    """Why each pair is too long to be used with a run; empty if it is not."""
    pairs = [example._replace(target=example.target or "") for example in examples]
    return [flag.get("too_long", "") for flag in _flags([run], *_encode([run], pairs), options)]


@torch.inference_mode()
def force(
    scorer: Scorer, sources: Sequence[Sequence[TokenIds]], targets: Sequence[TokenIds], batch_tokens: int = 8192
) -> list[tuple[float, ...]]:
    """The log-probability of each token of every target (with its end token); `sources` holds ids per model."""
    results: list[tuple[float, ...]] = [()] * len(targets)
    join = sum if scorer.continues else max
    lengths = [join((len(target), max(map(len, ids)))) for ids, target in zip(sources, targets, strict=True)]
    for batch in by_length(lengths, batch_tokens):
        labels = [targets[i] for i in batch]
        hidden = []
        for m, model in enumerate(scorer.models):
            with use_matmuls(scorer.matmuls):
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


def _hidden(model: Model, sources: Sequence[TokenIds], targets: Sequence[TokenIds]) -> Tensor:
    """The vectors from which the tokens of the targets are predicted, one after the other."""
    device = model.device
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


def _encode(runs: Sequence[Run], examples: Sequence[Example]) -> tuple[list[tuple[list[int], ...]], list[list[int]]]:
    """The ids of the sources, per run, and of the targets."""
    sources = list(zip(*(encode(run, examples) for run in runs), strict=True))
    return sources, runs[0].codec.encode_target([_target(example) for example in examples])


def _flags(
    runs: Sequence[Run], sources: Sequence[tuple[list[int], ...]], targets: Sequence[list[int]], options: Options
) -> list[dict[str, str]]:
    """What keeps each pair from being scored. The two sides of a language model share its positions."""
    (longest_source, longest_target), most = position_limits([run.model for run in runs]), options.max_source
    shared = runs[0].config.encoder is None
    flags = []
    for ids, target in zip(sources, targets, strict=True):
        first, second = max(map(len, ids)) - (not shared), len(target) - 1
        if shared and first + second > longest_target:
            flags.append(too_long("text", first + second, longest_target, first + second))
        else:
            source = too_long("source", first, longest_target if shared else longest_source, most)
            flags.append(source or too_long("target", second, longest_target, most))
    return flags
