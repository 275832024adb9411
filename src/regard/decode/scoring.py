"""Scores of given targets, by the forced pass of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.batch import TokenIds, windows
from regard.decode.hypothesis import unknown_flags
from regard.decode.request import Options
from regard.decode.search_inputs import check_ensemble, encode, out_of_memory, position_limits, too_long
from regard.errors import UserError, plural
from regard.notebook import result_cells, token_table
from regard.run import Run
from regard.text.codec import Example

Pair = tuple[str, str] | Example
# Sources (per run) and targets -> the log-probability of each token of every target; None for lack of memory.
Force = Callable[[Sequence[Sequence[TokenIds]], Sequence[TokenIds]], list[tuple[float, ...] | None]]


@dataclass(frozen=True)
class Scored:
    """The natural-log probability of a target, in total and per token, including the end token."""

    score: float  # NaN if the pair was not scored
    tokens: tuple[str, ...]
    token_scores: tuple[float, ...]
    flags: dict[str, str] = field(default_factory=dict)  # problems: name -> reason

    def __repr__(self) -> str:
        return f"Scored({self.score:.3f}, {plural(len(self.tokens), 'token')})"

    def cells(self) -> dict[str, object]:
        """The row of a table in a notebook."""
        return result_cells({"score": self.score}, self.tokens, self.token_scores, self.flags)

    def _repr_html_(self) -> str:
        return token_table(self.tokens, self.token_scores, f"score {self.score:.3f}")

    def as_dict(self) -> dict[str, Any]:
        """The JSON shape; flags only if present; the score is null if the pair was not scored."""
        score = None if math.isnan(self.score) else self.score
        out: dict[str, Any] = {"score": score, "tokens": list(self.tokens), "token_scores": list(self.token_scores)}
        return {**out, "flags": dict(self.flags)} if self.flags else out


def score_pairs(runs: Sequence[Run], pairs: Iterable[Pair], options: Options, force: Force) -> Iterator[Scored]:
    """Score pairs, in order; several runs form an ensemble, whose log-probabilities `force` returns.

    A pair that cannot be scored has a flag. An empty target for an empty source scores 0, as in `generate`. For a
    language model, the source is a prompt and the target is its continuation, scored with an end token.
    """
    check_ensemble(runs)
    codec = runs[0].codec
    for window in windows(pairs, options.window):
        examples = [pair if isinstance(pair, Example) else Example(*pair) for pair in window]
        sources, targets, flags = _encode(runs, examples, options)
        fit = [i for i, flag in enumerate(flags) if not flag]
        scores = force([sources[i] for i in fit], [targets[i] for i in fit])
        scores_by_index = dict(zip(fit, scores, strict=True))
        for i, (example, target) in enumerate(zip(examples, targets, strict=True)):
            token_scores = scores_by_index.get(i)
            if token_scores is None:
                unfit = out_of_memory("pair", max(map(len, sources[i])) + len(target))
                yield Scored(math.nan, (), (), flags[i] or unfit)
            elif not example.source.strip() and len(target) == 1 and runs[0].task.seq2seq:
                yield Scored(0.0, (), ())
            else:
                unknown = unknown_flags(codec.unknown_tokens(example, sources[i][0], target))
                yield Scored(sum(token_scores), tuple(codec.target_pieces(target)), token_scores, unknown)


def overlong(run: Run, examples: Sequence[Example], options: Options) -> list[str]:
    """The reason why each pair is too long for a run, or an empty text."""
    pairs = [example._replace(target=example.target or "") for example in examples]
    return [flag.get("too_long", "") for flag in _encode([run], pairs, options)[2]]


def _encode(
    runs: Sequence[Run], examples: Sequence[Example], options: Options
) -> tuple[list[tuple[list[int], ...]], list[list[int]], list[dict[str, str]]]:
    """Tokenise pairs -> ids of the sources (per run), ids of the targets, flags of pairs that cannot be scored."""
    for example in examples:
        if example.target is None:
            raise UserError(f"score: no target for the source {example.source[:40]!r}")
    sources = list(zip(*(encode(run, examples) for run in runs), strict=True))
    targets = runs[0].codec.encode_target([example.target or "" for example in examples])
    longest_source, longest_target = position_limits(runs)
    most = options.max_source
    shared = not runs[0].task.seq2seq  # in a language model, source and target share the positions
    flags = []
    for example, ids, target in zip(examples, sources, targets, strict=True):
        first = max(map(len, ids)) - (not shared)
        second = len(target) - 1
        if problem := runs[0].codec.features_problem(example):
            flags.append({"error": problem})
        elif shared and first + second > longest_target:
            flags.append(too_long("text", first + second, longest_target, first + second))
        else:
            source = too_long("source", first, longest_target if shared else longest_source, most)
            flags.append(source or too_long("target", second, longest_target, most))
    return sources, targets, flags
