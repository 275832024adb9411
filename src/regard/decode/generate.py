"""Generation: requests in, one list of hypotheses per request out, by an engine.

`Engine` is what every way to execute a model implements: the torch engine here, CTranslate2 in `regard.engines`, and
the worker pool, which shares the work of an engine among processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Self

from regard.batch import in_parts, windows
from regard.decode.hypothesis import (
    DecodedIds,
    Hypothesis,
    TopTokens,
    attention_flags,
    empty_hypothesis,
    flag_segmentation,
    make_hypotheses,
)
from regard.decode.options import Options
from regard.decode.preparer import Preparer, out_of_memory
from regard.decode.request import Input, SearchInput
from regard.decode.scorer import Scorer
from regard.decode.search import search
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
        results = [[empty_hypothesis(item.flags)] if item.flags else [] for item in inputs]
        for batch in self.preparer.batches(dict(enumerate(inputs))):
            items = [inputs[i] for i in batch]
            for rows, decoded in in_parts(lambda rows: self._decode_batch(items[rows]), len(items)):  # noqa: B023
                for i, row in zip(batch[rows], decoded or [_no_memory(items[rows.start])], strict=True):
                    results[i] = row
        return results

    def _decode_batch(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        return self.finish(inputs, search(self.scorer, inputs, self.options))

    def finish(self, inputs: Sequence[SearchInput], decoded: Sequence[list[DecodedIds]]) -> list[list[Hypothesis]]:
        """The outputs of searches as hypotheses, with what the options ask to be shown."""
        codec = self.runs[0].codec
        results = [
            [empty_hypothesis(item.flags)] if item.flags else make_hypotheses(codec, self.options, item, outputs)
            for item, outputs in zip(inputs, decoded, strict=True)
        ]
        if self.options.alignment:
            self._align(inputs, results)
        if self.options.top_tokens:
            self._add_top_tokens(inputs, results)
        flag_segmentation(codec, results)
        return results

    def _add_top_tokens(self, inputs: Sequence[SearchInput], results: list[list[Hypothesis]]) -> None:
        from regard.decode.scoring import force_top  # few outputs are shown so

        entries = [(i, rank) for i, row in enumerate(results) for rank, h in enumerate(row) if h.ids]
        sources, targets = [inputs[i].sources for i, _ in entries], [results[i][rank].ids for i, rank in entries]
        tops = force_top(self.scorer, sources, targets, self.options.top_tokens, self.options.batch_tokens)
        for (i, rank), rows in zip(entries, tops, strict=True):
            named = tuple(self.named_tokens(row) for row in rows)
            results[i][rank] = replace(results[i][rank], top_tokens=named)

    def named_tokens(self, row: Sequence[tuple[int, float]]) -> TopTokens:
        """Token ids with their scores as tokens with their scores."""
        pieces = self.runs[0].codec.target_pieces([index for index, _ in row])
        return tuple((piece, score) for piece, (_, score) in zip(pieces, row, strict=True))

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


def _no_memory(item: SearchInput) -> list[Hypothesis]:
    """The answer to an input that does not fit into memory even alone."""
    return [empty_hypothesis(out_of_memory("source", max(map(len, item.sources))))]


def generate(
    runs: Run | Sequence[Run], inputs: Iterable[Input], options: Options | None = None
) -> Iterator[list[Hypothesis]]:
    """The best outputs for every input, in order; several runs make an ensemble.

    `window` inputs are read ahead. An empty line gives an empty output without asking the model, and so does one that
    is too long, whose constraints cannot be met, or for which memory does not suffice; all are flagged. Options that no
    line can meet are an error.
    """
    engine = TorchEngine(runs, options)
    for window in windows(inputs, engine.options.window):
        yield from engine(window)
