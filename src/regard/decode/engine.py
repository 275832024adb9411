"""Engines decode requests into hypotheses; a stream shows one output token by token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from regard.batch import TokenIds
from regard.decode.alignment import check_heads, load_heads, make_alignment
from regard.decode.hypothesis import (
    DecodedIds,
    Hypothesis,
    TopTokens,
    attention_flags,
    flag_segmentation,
    make_hypotheses,
    output_text,
    top_tokens_json,
)
from regard.decode.request import EngineName, HeadIndex, Input, Options, check_streaming
from regard.decode.search_inputs import Preparer, SearchInput
from regard.run import Run

Scores = Literal["tokens", "totals", "none"]  # of outputs, as far as they are needed
TopIds = list[tuple[int, float]]  # the most probable tokens at a position, with their log-probabilities


class Engine(AbstractContextManager["Engine"]):
    """Decodes with loaded runs. The outputs do not depend on how inputs are grouped."""

    runs: Sequence[Run]
    options: Options
    preparer: Preparer
    name: EngineName = "torch"

    @property
    def streams(self) -> bool:
        """Whether `steps` decodes token by token."""
        return False

    def prepare(self, inputs: Sequence[Input]) -> list[SearchInput]:
        """One search input per request; an input with `flags` is not decoded."""
        return self.preparer(inputs)

    @abstractmethod
    def decode(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        """The best outputs of every input, or one empty hypothesis with a flag if it has no output."""

    def finish(self, inputs: Sequence[SearchInput], decoded: Sequence[list[DecodedIds]]) -> list[list[Hypothesis]]:
        """The outputs of a search as hypotheses, with alignments and top tokens if the options request them."""
        codec = self.runs[0].codec
        limits = self.runs[0].statistics.limits
        options = self.options
        pairs = zip(inputs, decoded, strict=True)
        results = [make_hypotheses(codec, limits, options, item, outputs) for item, outputs in pairs]
        entries = [(i, rank) for i, row in enumerate(results) for rank, h in enumerate(row) if h.ids]
        ids = [results[i][rank].ids for i, rank in entries]
        if options.alignment:
            heads = check_heads(self.runs[0].config, options.alignment_heads or load_heads(self.runs[0].path))
            sources = [inputs[i].sources[0] for i, _ in entries]
            weights = self.force_attention(sources, ids, heads)
            for (i, rank), source, output, weights_TS in zip(entries, sources, ids, weights, strict=True):
                alignment = make_alignment(codec, source, output, weights_TS)
                flags = {**results[i][rank].flags, **attention_flags(alignment)}
                results[i][rank] = replace(results[i][rank], alignment=alignment, flags=flags)
        if options.top_tokens:
            of_models = [inputs[i].sources for i, _ in entries]
            tops = self.force_top(of_models, ids)
            for (i, rank), rows in zip(entries, tops, strict=True):
                results[i][rank] = replace(results[i][rank], top_tokens=tuple(map(self.named_tokens, rows)))
        flag_segmentation(codec, results)
        return results

    def named_tokens(self, row: Sequence[tuple[int, float]]) -> TopTokens:
        """(Token id, score) pairs as (token, score) pairs."""
        pieces = self.runs[0].codec.target_pieces([index for index, _ in row])
        return tuple((piece, score) for piece, (_, score) in zip(pieces, row, strict=True))

    def force_attention(
        self, sources: Sequence[TokenIds], outputs: Sequence[TokenIds], heads: Sequence[HeadIndex]
    ) -> list[NDArray[np.floating]]:
        """The mean weights (T, S) of cross-attention heads for each output."""
        raise NotImplementedError

    def force_top(self, sources: Sequence[Sequence[TokenIds]], outputs: Sequence[TokenIds]) -> list[list[TopIds]]:
        """The most probable tokens at the position of each token of every output."""
        raise NotImplementedError

    def force(
        self, sources: Sequence[Sequence[TokenIds]], targets: Sequence[TokenIds]
    ) -> list[tuple[float, ...] | None]:
        """The log-probability of each token of every target (with end token); None for lack of memory."""
        raise NotImplementedError

    def steps(self, item: SearchInput) -> Iterator[tuple[int, float, TopIds]]:
        """Each token of one output as soon as it is decoded: its id, its log-probability, the most probable tokens.

        They end early if the rules allow no token.
        """
        raise NotImplementedError

    def texts(self, sources: Sequence[str]) -> list[list[str]]:
        """The output texts of plain sources, without what takes extra time."""
        return [[hypothesis.text for hypothesis in row] for row in self(sources)]

    def cancel_by(self, check: Callable[[], None] | None) -> None:
        """Call `check`, which may raise, before every input and every step of a search, if the engine has steps."""

    def close(self) -> None:
        """Release resources; the engine must not be used afterwards."""

    def __call__(self, inputs: Sequence[Input]) -> list[list[Hypothesis]]:
        return self.decode(self.prepare(inputs))

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Piece:
    """One decoded token and the text that it completes. The texts of all pieces, joined, are the output."""

    text: str
    token: str
    id: int
    score: float  # natural-log probability
    top_tokens: TopTokens = ()  # most probable tokens at its position, if requested

    def as_dict(self) -> dict[str, object]:
        """The JSON shape."""
        top = {"top_tokens": top_tokens_json(self.top_tokens)} if self.top_tokens else {}
        return {"text": self.text, "token": self.token, "score": self.score, **top}


class TokenStream(Iterator[Piece]):
    """The pieces of one output, decoded on demand; at the end `hypothesis` is the same as without streaming.

    An empty or overlong source has no pieces. The end token is included, except after a continuation that ends at its
    limit or before a stop string. Tokens that may be part of a stop string are held back, together with the token
    before them. If required phrases need a beam search, all pieces follow after the search.
    """

    def __init__(self, engine: Engine, item: SearchInput) -> None:
        check_streaming(engine.options)
        self.hypothesis: Hypothesis | None = None
        self._engine = engine
        self._item = item
        self._codec = engine.runs[0].codec
        self._sent = ""
        self._pieces = self._decode()

    @property
    def problem(self) -> str:
        """Why no output fits the request; empty if the request is sound."""
        return self._item.flags.get("error") or self._item.flags.get("unsatisfied", "")

    @property
    def unknown(self) -> tuple[str, ...]:
        return self._item.unknown

    @property
    def source_tokens(self) -> int:
        return len(self._item.sources[0]) if self._item.sources else 0

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __repr__(self) -> str:
        return f"TokenStream({self._sent!r}, {'open' if self.hypothesis is None else 'ended'})"

    def close(self) -> None:
        """Stop decoding; no more pieces follow."""
        self._pieces.close()

    def _decode(self) -> Generator[Piece, None, None]:
        engine = self._engine
        item = self._item
        if item.flags or (item.stages > 0 and not engine.options.samples):  # no search, or a beam search
            self.hypothesis = engine.decode([item])[0][0]
            yield from self._pieces_until_end(0)
            return
        eos = engine.runs[0].config.ids.eos
        ids: list[int] = []
        scores: list[float] = []
        tops: list[TopTokens] = []
        shown = 0
        for index, score, top in engine.steps(item):
            ids.append(index)
            scores.append(score)
            tops.append(engine.named_tokens(top))
            stopped = bool(item.texts.stop) and item.phrases is not None and item.phrases.find_stop(ids) is not None
            ended = index == eos
            if stopped or ended or (item.open_end and len(ids) == item.limit):
                limited = len(ids) - ended == item.limit
                output = DecodedIds(tuple(ids), tuple(scores), sum(scores), limited)
                self.hypothesis = engine.finish([item], [[output]])[0][0]
                yield from self._pieces_until_end(shown)
                return
            certain = len(ids)
            if item.texts.stop and item.phrases is not None:
                certain = item.phrases.tokens_certain(ids) - 1  # the text of the last one may still change
            for n in range(shown, certain):
                yield self._piece(self._text(ids[: n + 1]), ids[n], scores[n], tops[n])
            shown = max(shown, certain)
        self.hypothesis = engine.finish([item], [[]])[0][0]

    def _pieces_until_end(self, shown: int) -> Generator[Piece, None, None]:
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
        """The text of the first tokens, without final characters that a later token may change."""
        combining = self._engine.preparer.combining
        certain = len(ids)
        if combining:  # the next token may combine with the last character
            certain = max((position for position, token in enumerate(ids) if token not in combining), default=0)
        # A character whose bytes are incomplete decodes to replacement characters.
        return output_text(self._codec, self._item, ids[:certain]).rstrip("\N{REPLACEMENT CHARACTER}")
