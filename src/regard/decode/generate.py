"""Generation: requests in, one list of hypotheses per request out, by an engine.

`Engine` is what every way to execute a model implements: the torch engine here, CTranslate2 in `regard.engines`, and
the worker pool, which shares the work of an engine among processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from regard.batch import windows
from regard.decode.hypothesis import (
    Hypothesis,
    attention_flags,
    empty_hypothesis,
    flag_segmentation,
    make_hypotheses,
    output_text,
)
from regard.decode.options import Options
from regard.decode.request import Input, Preparer, SearchInput
from regard.decode.scorer import Scorer
from regard.decode.search import make_choice, make_rules, search, steps
from regard.errors import UserError
from regard.run import Run


class Engine(ABC):
    """Runs ready to decode.

    `prepare` tokenises requests once; `decode` takes what it made, any number at a time and in any grouping, with the
    same outputs. An engine is a context manager that closes itself.
    """

    options: Options
    preparer: Preparer

    def prepare(self, inputs: Sequence[Input]) -> list[SearchInput]:
        """An input of the search for every request; its `flags` say if it will not be decoded."""
        return self.preparer(inputs)

    @abstractmethod
    def decode(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        """The best outputs of every input, at least one each; it is empty where there is none, and flagged."""

    def close(self) -> None:  # noqa: B027  not every engine holds something
        """Release what the engine holds; it is not used afterwards."""

    def __call__(self, inputs: Sequence[Input]) -> list[list[Hypothesis]]:
        """Prepare and decode."""
        return self.decode(self.prepare(inputs))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close()


class TorchEngine(Engine):
    """One run or an ensemble, decoded by our own search with torch."""

    def __init__(self, runs: Run | Sequence[Run], options: Options | None = None) -> None:
        self.options = options or Options()
        self.runs = [runs] if isinstance(runs, Run) else list(runs)
        self.preparer = Preparer(self.runs, self.options)
        models, packed = [run.model for run in self.runs], [run.packed for run in self.runs]
        self.scorer = Scorer(models, self.options.weights, self.preparer.blocked, self.options.precision, packed)

    def decode(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        codec = self.runs[0].codec
        results = [[empty_hypothesis(item.flags)] if item.flags else [] for item in inputs]
        for batch in self.preparer.batches(dict(enumerate(inputs))):
            decoded = search(self.scorer, [inputs[i] for i in batch], self.options)
            for i, outputs in zip(batch, decoded, strict=True):
                results[i] = make_hypotheses(codec, self.options, inputs[i], outputs)
        if self.options.alignment:
            self._align(inputs, results)
        flag_segmentation(codec, results)
        return results

    def _align(self, inputs: Sequence[SearchInput], results: list[list[Hypothesis]]) -> None:
        from regard.decode.alignment import align, load_heads  # as in search: few outputs are aligned

        entries = [(i, rank) for i, row in enumerate(results) for rank, h in enumerate(row) if h.ids]
        sources = [inputs[i].sources[0] for i, _ in entries]
        outputs = [results[i][rank].ids for i, rank in entries]
        heads = self.options.alignment_heads or load_heads(self.runs[0].path)
        alignments = align(self.runs[0], sources, outputs, heads, self.options.batch_tokens)
        for (i, rank), alignment in zip(entries, alignments, strict=True):
            hypothesis = results[i][rank]
            flags = {**hypothesis.flags, **attention_flags(alignment)}
            results[i][rank] = replace(hypothesis, alignment=alignment, flags=flags)


def generate(
    runs: Run | Sequence[Run], inputs: Iterable[Input], options: Options | None = None
) -> Iterator[list[Hypothesis]]:
    """The best outputs for every input, in order; several runs make an ensemble.

    `window` inputs are read ahead. An empty line gives an empty output without asking the model, and so does one that
    is too long or whose constraints cannot be met; all are flagged. Options that no line can meet are an error.
    """
    engine = TorchEngine(runs, options)
    for window in windows(inputs, engine.options.window):
        yield from engine(window)


@dataclass(frozen=True)
class Piece:
    """One decoded token, and the text that became certain with it; the texts join to the whole output."""

    text: str
    token: str
    id: int
    score: float  # its natural-log probability


def stream(runs: Run | Sequence[Run], item: Input, options: Options | None = None) -> Iterator[Piece]:
    """The output for one input, token by token, the end token last; nothing for an empty or overlong source.

    A continuation may stop at its limit without an end token. Only greedy search and sampling can stream.
    """
    options = options or Options()
    if options.beam > 1 or options.mbr or options.alternatives or options.nbest > 1:
        raise UserError("stream: beam, nbest, mbr and alternatives decide only at the end; use greedy search or sample")
    engine = TorchEngine(runs, options)
    scorer, codec, combining = engine.scorer, engine.runs[0].codec, engine.preparer.combining
    (prepared,) = engine.prepare([item])
    if prepared.flags:
        if "unsatisfied" in prepared.flags:
            raise UserError(f"stream: {prepared.flags['unsatisfied']}")
        return
    rules = make_rules(scorer, [prepared], options, one_path=True)
    loop = steps(scorer, [prepared], rules, make_choice(scorer, [prepared], options, 1))
    ids: list[int] = []
    sent = ""
    while True:
        with torch.inference_mode():  # not around the caller's code between two steps
            step = next(loop)
        index, score = int(step.tokens_N[0]), float(step.scores_N[0])
        if score == -torch.inf:
            raise UserError("stream: nothing is left that the options allow to come next")
        ids.append(index)
        last = index == scorer.eos or (prepared.open_end and len(ids) == prepared.limit)
        certain = len(ids)
        if combining and not last:  # a later token may change the last character
            certain = max((position for position, token in enumerate(ids) if token not in combining), default=0)
        text = output_text(codec, prepared, ids[:certain])
        if not last:  # the bytes of a character may come one by one; until then they are shown as unreadable
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        yield Piece(text[len(sent) :], codec.target_pieces([index])[0], index, score)
        if last:
            return
        sent = text if len(text) > len(sent) else sent
