"""Generation: requests in, one list of hypotheses per request out, by an engine.

`Engine` is what every way to execute a model implements: the torch engine here, CTranslate2 in `regard.engines`, and
the worker pool, which shares the work of an engine among processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from regard.batch import in_parts, windows
from regard.decode.constraints import SearchInput
from regard.decode.ensemble import Scorer, top_tokens
from regard.decode.hypothesis import (
    DecodedIds,
    Hypothesis,
    TopTokens,
    attention_flags,
    empty_hypothesis,
    flag_segmentation,
    make_hypotheses,
    output_text,
    top_tokens_json,
)
from regard.decode.request import Input, Options, check_engine, check_streaming
from regard.decode.search import make_choice, make_rules, search, steps
from regard.decode.search_inputs import Preparer, out_of_memory
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
        check_engine("torch", self.options)
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
        from regard.decode.forced import force_top  # few outputs are shown so

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


@dataclass(frozen=True)
class Piece:
    """One decoded token, and the text that became certain with it; the texts join to the whole output."""

    text: str
    token: str
    id: int
    score: float  # its natural-log probability
    top_tokens: TopTokens = ()  # the most probable ones in its place, if the options ask for them

    def as_dict(self) -> dict[str, object]:
        """The JSON shape."""
        out: dict[str, object] = {"text": self.text, "token": self.token, "score": self.score}
        if self.top_tokens:
            out["top_tokens"] = top_tokens_json(self.top_tokens)
        return out


class TokenStream(Iterator[Piece]):
    """The pieces of one output; afterwards `hypothesis` is the whole, the same as without streaming.

    Decoding goes on when the next piece is asked for, and `close` ends it. With stop strings, tokens that may belong to
    one are held back, and the last of the others. Where required phrases ask for a beam, all pieces come when it has
    decided.
    """

    def __init__(self, engine: TorchEngine, item: SearchInput) -> None:
        check_streaming(engine.options)
        self.hypothesis: Hypothesis | None = None
        self._engine, self._item, self._codec = engine, item, engine.runs[0].codec
        self._sent = ""
        beam = item.stages > 0 and not engine.options.samples
        self._pieces = self._decode_first() if item.flags or beam else self._decode()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __repr__(self) -> str:
        return f"TokenStream({self._sent!r}, {'open' if self.hypothesis is None else 'ended'})"

    def close(self) -> None:
        """Decode no further; there are no more pieces."""
        self._pieces.close()

    def _decode_first(self) -> Generator[Piece, None, None]:
        """The pieces of an output that is decided before the first of them."""
        self.hypothesis = self._engine.decode([self._item])[0][0]
        yield from self._pieces_until_end(0)

    def _decode(self) -> Generator[Piece, None, None]:
        engine, item, scorer = self._engine, self._item, self._engine.scorer
        rules = make_rules(scorer, [item], engine.options, one_path=True)
        loop = steps(scorer, [item], rules, make_choice(scorer, [item], engine.options, 1))
        ids: list[int] = []
        scores: list[float] = []
        tops: list[TopTokens] = []
        shown = 0
        while True:
            with torch.inference_mode():  # not around the caller's code between two steps
                step = next(loop)
            index, score = int(step.tokens_N[0]), float(step.scores_N[0])
            if score == -torch.inf:  # nothing is left that the rules allow
                self._finish([])
                return
            ids.append(index)
            scores.append(score)
            tops.append(engine.named_tokens(top_tokens(step.logp_NV, engine.options.top_tokens)[0]))
            stopped = bool(item.stop) and item.phrases is not None and item.phrases.find_stop(ids) is not None
            ended = index == scorer.eos
            if stopped or ended or (item.open_end and len(ids) == item.limit):
                limited = len(ids) - ended == item.limit
                self._finish([DecodedIds(tuple(ids), tuple(scores), sum(scores), limited)])
                yield from self._pieces_until_end(shown)
                return
            certain = len(ids)
            if item.stop and item.phrases is not None:
                certain = item.phrases.tokens_certain(ids) - 1  # one is left for the text that is not certain yet
            for n in range(shown, certain):
                yield self._piece(self._text(ids[: n + 1]), ids[n], scores[n], tops[n])
            shown = max(shown, certain)

    def _pieces_until_end(self, shown: int) -> Generator[Piece, None, None]:
        """The pieces of the finished output that were not shown yet."""
        assert self.hypothesis is not None
        whole = self.hypothesis
        tops = whole.top_tokens or ((),) * len(whole.ids)
        for n in range(shown, len(whole.ids)):
            text = whole.text if n == len(whole.ids) - 1 else self._text(whole.ids[: n + 1])
            yield self._piece(text, whole.ids[n], whole.token_scores[n], tops[n])

    def _piece(self, text: str, index: int, score: float, top: TopTokens) -> Piece:
        new = text[len(self._sent) :]
        self._sent += new
        return Piece(new, self._codec.target_pieces([index])[0], index, score, top)

    def _text(self, ids: Sequence[int]) -> str:
        """The text of the first tokens, as far as no later one can change it."""
        combining, certain = self._engine.preparer.combining, len(ids)
        if combining:  # a later token may change the last character
            certain = max((position for position, token in enumerate(ids) if token not in combining), default=0)
        # the bytes of a character may come one by one; until then they are shown as unreadable
        return output_text(self._codec, self._item, ids[:certain]).rstrip("\N{REPLACEMENT CHARACTER}")

    def _finish(self, outputs: list[DecodedIds]) -> None:
        self.hypothesis = self._engine.finish([self._item], [outputs])[0][0]


def stream(runs: Run | Sequence[Run], item: Input, options: Options | None = None) -> TokenStream:
    """The output for one input, token by token, the end token last; nothing for an empty or overlong source.

    A continuation may end at its limit, or before a stop string, without an end token. Only greedy search and sampling
    can stream.
    """
    engine = TorchEngine(runs, options)
    (prepared,) = engine.prepare([item])
    for name in ("error", "unsatisfied"):
        if name in prepared.flags:
            raise UserError(f"stream: {prepared.flags[name]}")
    return TokenStream(engine, prepared)
