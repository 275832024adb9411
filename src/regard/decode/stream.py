"""Symbols as they are decided, for servers and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from regard.decode.follow import Step, steps
from regard.decode.options import Options
from regard.decode.prepare import Input, Preparer
from regard.decode.scorer import Task
from regard.decode.search import make_rules, sampler
from regard.errors import UserError
from regard.run import Run


@dataclass(frozen=True)
class Piece:
    """One decided symbol, and the text that is certain since the last one: they join to the whole output."""

    text: str
    token: str
    id: int
    score: float  # its natural-log probability


def stream(runs: Run | Sequence[Run], item: Input, options: Options | None = None) -> Iterator[Piece]:
    """The output for one input, symbol by symbol, the end symbol last; nothing for an empty or overlong source.

    A language model may stop at the limit without an end.

    Only greedy search and sampling decide as they go.
    """
    options = options or Options()
    if options.beam > 1 or options.mbr or options.alternatives or options.nbest > 1:
        raise UserError("stream: beam, nbest, mbr and alternatives decide only at the end; use greedy search or sample")
    prepare = Preparer([runs] if isinstance(runs, Run) else list(runs), options)
    (task,) = prepare([item])
    if not isinstance(task, Task):
        if "unsatisfied" in task:
            raise UserError(f"stream: {task['unsatisfied']}")
        return
    scorer, codec = prepare.scorer, prepare.codec
    rules = make_rules(scorer, [task], options, one_path=True)
    walk = steps(scorer, [task], rules, sampler(scorer, [task], options, 1))
    ids: list[int] = []
    told = ""
    while (step := _next(walk)) is not None:
        index, score = int(step.tokens_N[0]), float(step.scores_N[0])
        if score == -torch.inf:
            raise UserError("stream: nothing is left that the options allow to come next")
        ids.append(index)
        last = index == scorer.eos or (task.open_end and len(ids) == task.limit)
        sure = prepare.text(task, ids if last else _whole(ids, prepare.joining))
        if not last:  # bytes may come one by one, and stand for an unreadable character until it is whole
            sure = sure.rstrip("\N{REPLACEMENT CHARACTER}")
        yield Piece(sure[len(told) :], codec.target_pieces([index])[0], index, score)
        if last:
            return
        told = sure if len(sure) > len(told) else told


def _whole(ids: list[int], joining: Sequence[int]) -> list[int]:
    """What no later symbol changes: where symbols may join the character before them, all before the last character."""
    if not joining:
        return ids
    begun = [place for place, index in enumerate(ids) if index not in joining]
    return ids[: begun[-1]] if begun else []


@torch.inference_mode()
def _next(walk: Iterator[Step]) -> Step | None:
    """One step; the mode must not reach what the caller does between two steps."""
    return next(walk, None)
