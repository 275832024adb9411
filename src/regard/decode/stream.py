"""Streaming: the output of one input, token by token as it is decided."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from regard.decode.generate import TorchEngine
from regard.decode.hypothesis import DecodedIds, Hypothesis, TopTokens, output_text, top_tokens_json
from regard.decode.options import Options
from regard.decode.request import Input, SearchInput
from regard.decode.scorer import top_tokens
from regard.decode.search import make_choice, make_rules, steps
from regard.errors import UserError
from regard.run import Run


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


def check_streaming(options: Options) -> None:
    """Refuse strategies that have nothing to show before they have decided."""
    if options.beam > 1 or options.mbr or options.alternatives or options.nbest > 1:
        raise UserError("stream: beam, nbest, mbr and alternatives decide only at the end; use greedy search or sample")


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
