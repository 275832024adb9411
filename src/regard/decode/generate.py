"""Text in, outputs out: one list of hypotheses per line, in order, with bounded memory for any number of lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from regard.decode.alignment import align, load_heads
from regard.decode.greedy import Step, steps
from regard.decode.hypothesis import (
    Candidate,
    DecodedIds,
    Hypothesis,
    collapsed,
    degenerate,
    expected,
    normalize,
    shares,
)
from regard.decode.options import Options
from regard.decode.request import Input, Preparer, Request
from regard.decode.rules import banks
from regard.decode.scorer import SearchInput, by_length, windows
from regard.decode.search import make_rules, sampler, search
from regard.errors import UserError
from regard.run import Run

__all__ = ["Decoder", "Input", "Request", "generate"]


def generate(
    runs: Run | Sequence[Run], inputs: Iterable[Input], options: Options | None = None
) -> Iterator[list[Hypothesis]]:
    """The best outputs for every input, in order; several runs make an ensemble.

    Lines are read `window` ahead. An empty line gives an empty output without asking the model, and so does one that is
    too long or has a wish that cannot be met; all are flagged. What the options ask for in vain is an error.
    """
    decoder = Decoder(runs, options)
    for window in windows(inputs, decoder.options.window):
        yield from decoder(window)


class Decoder:
    """Runs ready to answer: checked to fit together, with everything made that does not depend on the input."""

    def __init__(self, runs: Run | Sequence[Run], options: Options | None = None) -> None:
        self.options = options or Options()
        self.runs = [runs] if isinstance(runs, Run) else list(runs)
        self.prepare = Preparer(self.runs, self.options)
        self.scorer, self.codec = self.prepare.scorer, self.prepare.codec

    def __call__(self, inputs: Sequence[Input]) -> list[list[Hypothesis]]:
        """The outputs for some inputs."""
        prepared = self.prepare(inputs)
        results = [[] if isinstance(item, SearchInput) else [nothing(item)] for item in prepared]
        tasks = {i: item for i, item in enumerate(prepared) if isinstance(item, SearchInput)}
        for chosen in self._batches(tasks):
            found = search(self.scorer, [tasks[i] for i in chosen], self.options)
            for i, outputs in zip(chosen, found, strict=True):
                results[i] = self._hypotheses(tasks[i], outputs)
        if self.options.alignment:
            self._align(tasks, results)
        self._name_other_cuts(results)
        return results

    def batches(self, inputs: Sequence[Input]) -> list[list[int]]:
        """The places of inputs that are worked on together; those that need no work come last."""
        prepared = self.prepare(inputs)
        tasks = {i: item for i, item in enumerate(prepared) if isinstance(item, SearchInput)}
        rest = [i for i in range(len(inputs)) if i not in tasks]
        return [*self._batches(tasks), *([rest] if rest else [])]

    def _batches(self, tasks: dict[int, SearchInput]) -> Iterator[list[int]]:
        places = list(tasks)
        for batch in by_length([self._size(task) for task in tasks.values()], self.options.batch_tokens):
            yield [places[j] for j in batch]

    def _size(self, task: SearchInput) -> int:
        """What a task counts in a batch: its tokens, or if that is more its share of the table of all next tokens."""
        share = self.scorer.vocab // (4096 if task.phrases is None else 1024)
        symbols = max(map(len, task.sources)) + (task.limit if self.scorer.continues else 0)
        return (self.options.rows + banks(task)) * max(share, symbols)

    def _hypotheses(self, task: SearchInput, outputs: Sequence[DecodedIds]) -> list[Hypothesis]:
        if not outputs:
            return [nothing({"unsatisfied": "no output was found that meets what was asked for"})]
        hypotheses = [self._hypothesis(task, output) for output in outputs]
        return self._least_risk(hypotheses) if self.options.mbr else hypotheses

    def _hypothesis(self, task: SearchInput, found: DecodedIds) -> Hypothesis:
        symbols = found.ids[:-1] if found.ids[-1:] == (self.scorer.eos,) else found.ids
        source = 0 if self.scorer.continues else len(task.sources[0]) - 1  # a continuation may be of any length
        flags = degenerate(symbols, source, found.token_scores)
        if found.limited:
            flags["max_length"] = f"ended at the limit of {task.limit} tokens"
        return Hypothesis(
            self.prepare.text(task, found.ids),
            found.score,
            tuple(self.codec.target_pieces(found.ids)),
            found.token_scores,
            normalize(found.score, len(found.ids), self.options.length_penalty),
            found.ids,
            flags=flags,
        )

    def _least_risk(self, hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
        """The different candidates by expected utility: samples count alike, the n-best of a beam by their share."""
        count = len(hypotheses)
        weights = [1 / count] * count if self.options.samples else shares([h.score for h in hypotheses])
        spaced = self.codec.target.scheme == "space"
        utilities = expected([h.text for h in hypotheses], weights, self.options.utility, spaced)
        different = {h.text: replace(h, utility=u) for h, u in reversed(list(zip(hypotheses, utilities, strict=True)))}
        ranked = sorted(different.values(), key=lambda h: (-(h.utility or 0.0), -h.score, h.text))
        candidates = tuple(Candidate(h.text, h.utility or 0.0, h.score) for h in ranked)
        return [replace(ranked[0], candidates=candidates), *ranked[1 : self.options.nbest]]

    def _align(self, tasks: dict[int, SearchInput], results: list[list[Hypothesis]]) -> None:
        places = [(i, rank) for i in tasks for rank, h in enumerate(results[i]) if h.ids]
        sources = [tasks[i].sources[0] for i, _ in places]
        outputs = [results[i][rank].ids for i, rank in places]
        heads = self.options.alignment_heads or load_heads(self.runs[0].path)
        alignments = align(self.runs[0], sources, outputs, heads, self.options.batch_tokens)
        for (i, rank), alignment in zip(places, alignments, strict=True):
            old = results[i][rank]
            results[i][rank] = replace(old, alignment=alignment, flags={**old.flags, **collapsed(alignment)})

    def _name_other_cuts(self, results: list[list[Hypothesis]]) -> None:
        """Flag what `score` would cut into other tokens: the score here is of these tokens."""
        places = [(i, rank) for i, row in enumerate(results) for rank, h in enumerate(row) if h.ids]
        cuts = self.codec.encode_target([results[i][rank].text for i, rank in places])
        for (i, rank), ids in zip(places, cuts, strict=True):
            old = results[i][rank]
            if tuple(ids)[: len(old.ids)] != old.ids:
                reason = "the text is usually cut into other tokens, so forced decoding scores it differently"
                results[i][rank] = replace(old, flags={**old.flags, "segmentation": reason})


def nothing(flags: dict[str, str]) -> Hypothesis:
    """The output where there is none, with the reason."""
    return Hypothesis("", 0.0, (), (), 0.0, flags=flags)


@dataclass(frozen=True)
class Piece:
    """One decided token, and the text that is certain since the last one: they join to the whole output."""

    text: str
    token: str
    id: int
    score: float  # its natural-log probability


def stream(runs: Run | Sequence[Run], item: Input, options: Options | None = None) -> Iterator[Piece]:
    """The output for one input, token by token, the end token last; nothing for an empty or overlong source.

    A language model may stop at the limit without an end.

    Only greedy search and sampling decide as they go.
    """
    options = options or Options()
    if options.beam > 1 or options.mbr or options.alternatives or options.nbest > 1:
        raise UserError("stream: beam, nbest, mbr and alternatives decide only at the end; use greedy search or sample")
    prepare = Preparer([runs] if isinstance(runs, Run) else list(runs), options)
    (task,) = prepare([item])
    if not isinstance(task, SearchInput):
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
    """What no later token changes: where tokens may join the character before them, all before the last character."""
    if not joining:
        return ids
    begun = [place for place, index in enumerate(ids) if index not in joining]
    return ids[: begun[-1]] if begun else []


@torch.inference_mode()
def _next(walk: Iterator[Step]) -> Step | None:
    """One step; the mode must not reach what the caller does between two steps."""
    return next(walk, None)
