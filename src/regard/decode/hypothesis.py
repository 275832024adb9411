"""Hypotheses: decoded ids as text with scores, alignment and flags, and their choice by minimum Bayes risk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from regard.decode.constraints import SearchInput
from regard.decode.request import Options, Utility
from regard.errors import plural
from regard.notebook import heat_table, result_cells, token_table
from regard.text.codec import Codec, shown_token

LOOP_TURNS, LOOP_TOKENS = 4, 8  # a unit that often in a row, over that many tokens, is a loop
LONG, SHORT, MIN_LENGTH = 4.0, 0.2, 10  # output tokens per source token; short only counts for longer sources
LOW_SCORE = -2.5  # mean log-probability per token
PARKED, MIN_ALIGNED = 0.9, 6  # share of all attention on one source token, over so many output tokens
UNIFORM = 0.95  # of the entropy of uniform attention
MAX_UNKNOWN = 8  # tokens that a flag names
DEGENERATE = ("repetition", "length_ratio")  # flags of outputs that a trained model seldom gives
MANY_DEGENERATE = 0.2  # of all outputs: more are worth a warning


TopTokens = tuple[tuple[str, float], ...]  # tokens with their natural-log probabilities, most probable first


class DecodedIds(NamedTuple):
    """An output of the search, in token ids."""

    ids: tuple[int, ...]  # with the end token, unless a continuation stopped at its limit
    token_scores: tuple[float, ...]  # natural-log probabilities, one per id; none where only their sum is known
    value: float  # the search ranked by it; the sum if that is all that is known
    limited: bool = False  # it ended at the limit

    @property
    def score(self) -> float:
        return sum(self.token_scores) if self.token_scores else self.value


@dataclass(frozen=True)
class Alignment:
    """The source tokens that an output is aligned with: a row of weights per output token, the end not counted."""

    soft: np.ndarray  # (output tokens, source tokens), rows sum to 1; the last source token is its end
    source: tuple[str, ...]  # the tokens as shown
    output: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Alignment({plural(len(self.output), 'output token')}, {plural(len(self.source), 'source token')})"

    def _repr_html_(self) -> str:
        return heat_table(self.soft, self.output, self.source)

    @property
    def hard(self) -> list[tuple[int, int]]:
        """(source position, output position) of the strongest link of each output token, never to the source's end."""
        return [(int(s), t) for t, s in enumerate(self.soft[:, :-1].argmax(1))] if self.soft.size else []


@dataclass(frozen=True)
class Hypothesis:
    """One output for one source."""

    text: str
    score: float  # the sum of token_scores
    tokens: tuple[str, ...]  # as shown, with the end token if there is one
    token_scores: tuple[float, ...]
    normalized: float  # score / length ** length_penalty
    ids: tuple[int, ...] = ()
    alignment: Alignment | None = None
    utility: float | None = None  # expected, of minimum Bayes risk
    flags: dict[str, str] = field(default_factory=dict)  # problems: name -> reason
    candidates: tuple[Hypothesis, ...] = ()  # of minimum Bayes risk, on its best output: all, best first
    top_tokens: tuple[TopTokens, ...] = ()  # per token: the most probable ones in its place

    def __repr__(self) -> str:
        flags = f", flags: {', '.join(self.flags)}" if self.flags else ""
        return f"Hypothesis({self.text!r}, score {self.score:.3f}, {plural(len(self.tokens), 'token')}{flags})"

    def cells(self) -> dict[str, object]:
        """The row of a table in a notebook."""
        return result_cells({"output": self.text, "score": self.score}, self.tokens, self.token_scores, self.flags)

    def _repr_html_(self) -> str:
        flags = "".join(f"; {name}: {reason}" for name, reason in self.flags.items())
        tokens = token_table(self.tokens, self.token_scores, f"{self.text} (score {self.score:.3f}{flags})")
        return tokens if self.alignment is None else tokens + self.alignment._repr_html_()

    def as_dict(self) -> dict[str, Any]:
        """The JSON shape; alignment, utility, top tokens and flags only where there are any, the candidates never."""
        out: dict[str, Any] = {
            "text": self.text,
            "score": self.score,
            "tokens": list(self.tokens),
            "token_scores": list(self.token_scores),
            "normalized": self.normalized,
        }
        if self.utility is not None:
            out["utility"] = self.utility
        if self.alignment is not None:
            soft = [[round(float(weight), 4) for weight in row] for row in self.alignment.soft]
            out["alignment"] = {"source": list(self.alignment.source), "hard": self.alignment.hard, "soft": soft}
        if self.top_tokens:
            out["top_tokens"] = [top_tokens_json(row) for row in self.top_tokens]
        if self.flags:
            out["flags"] = dict(self.flags)
        return out


def top_tokens_json(row: TopTokens) -> list[dict[str, object]]:
    """The JSON shape of the most probable tokens in one place."""
    return [{"token": token, "score": score, "probability": math.exp(score)} for token, score in row]


def empty_hypothesis(flags: dict[str, str]) -> Hypothesis:
    """The output of an input that was not decoded, or has none, with the reason."""
    return Hypothesis("", 0.0, (), (), 0.0, flags=flags)


def make_hypotheses(
    codec: Codec, options: Options, item: SearchInput, outputs: Sequence[DecodedIds]
) -> list[Hypothesis]:
    """The outputs of a search as text with flags, chosen by minimum Bayes risk if the options ask for it."""
    if not outputs:
        return [empty_hypothesis({"unsatisfied": "no output was found that meets what was asked for"})]
    hypotheses = [_hypothesis(codec, options, item, output) for output in outputs]
    if item.stop and not options.samples:  # different stop strings may have ended the same output
        hypotheses = list({(h.ids, h.text): h for h in reversed(hypotheses)}.values())[::-1]
    return _minimum_risk(codec, options, hypotheses) if options.mbr else hypotheses


def _hypothesis(codec: Codec, options: Options, item: SearchInput, output: DecodedIds) -> Hypothesis:
    all_ids, text, flags = output.ids, None, unknown_flags(item.unknown)
    # with an end token in any case: the last character is complete there
    found = item.phrases.find_stop((*all_ids, codec.ids.eos)) if item.phrases is not None and item.stop else None
    if found is not None:
        text = stopped_text(codec, item, all_ids[: found[0]], found[1])
        flags["stopped"] = f"ended before a stop string ({', '.join(map(repr, item.stop))})"
        output = output._replace(
            ids=all_ids[: found[1]], token_scores=output.token_scores[: found[1]], value=0.0, limited=False
        )
    ids = output.ids[:-1] if output.ids[-1:] == (codec.ids.eos,) else output.ids
    source = 0 if item.open_end or found else len(item.sources[0]) - 1  # else it may have any length
    flags |= output_flags(ids, source, output.token_scores)
    if output.limited:
        flags["max_length"] = f"ended at the limit of {plural(item.limit, 'token')}"
    return Hypothesis(
        output_text(codec, item, output.ids) if text is None else text,
        output.score,
        tuple(codec.target_pieces(output.ids)),
        output.token_scores,
        output.score / max(1, len(output.ids)) ** options.length_penalty,
        output.ids,
        flags=flags,
    )


def stopped_text(codec: Codec, item: SearchInput, ids: Sequence[int], kept: int) -> str:
    """The text before the stop string that is completed by the last of `ids`, of which `kept` begin before it."""
    before = output_text(codec, item, ids[:kept])
    if not splits_tokens(codec):
        return before
    text = output_text(codec, item, ids)
    ends = [(at + len(string), at) for string in item.stop if (at := text.find(string)) >= 0]
    return text[: min(ends)[1]] if ends else before  # the first that is complete, and of several the longest


def splits_tokens(codec: Codec) -> bool:
    """Whether a string in the text may begin or end within a token."""
    return codec.target.scheme not in ("space", "nfd")


def output_text(codec: Codec, item: SearchInput, ids: Sequence[int]) -> str:
    """The text of an output; a continuation is what it adds to its prompt, the space between included."""
    if not item.open_end:
        return codec.decode_target(ids)
    prompt, text = (codec.decode_target([*item.sources[0], *more]) for more in ((), ids))
    return text.removeprefix(prompt) if text.startswith(prompt) else codec.decode_target(ids)


def flag_segmentation(codec: Codec, rows: list[list[Hypothesis]]) -> None:
    """Flag outputs whose text `score` would tokenise differently: the score here is that of the decoded tokens."""
    entries = [(i, rank) for i, row in enumerate(rows) for rank, h in enumerate(row) if h.ids]
    for (i, rank), ids in zip(entries, codec.encode_target([rows[i][rank].text for i, rank in entries]), strict=True):
        hypothesis = rows[i][rank]
        if tuple(ids)[: len(hypothesis.ids)] != hypothesis.ids:
            reason = "the text is usually cut into other tokens, so forced decoding scores it differently"
            rows[i][rank] = replace(hypothesis, flags={**hypothesis.flags, "segmentation": reason})


def unknown_flags(tokens: Sequence[str]) -> dict[str, str]:
    """A flag for a source with tokens outside the vocabulary, or features that the run does not know."""
    named = ", ".join(map(shown_token, dict.fromkeys(tokens[:MAX_UNKNOWN])))
    rest = f" and {len(tokens) - MAX_UNKNOWN} more" if len(tokens) > MAX_UNKNOWN else ""
    return {"unknown": f"not in the vocabulary: {named}{rest}"} if tokens else {}


def output_flags(ids: Sequence[int], source: int, token_scores: Sequence[float]) -> dict[str, str]:
    """Flags of an output (ids without the end token) for a source of so many tokens; 0: any length is right."""
    flags = {}
    length = len(ids)
    if loop := longest_loop(ids):
        size, turns = loop
        flags["repetition"] = f"{plural(size, 'token')} repeated {turns} times in a row"
    if source and length / source > LONG and length > MIN_LENGTH:
        flags["length_ratio"] = f"{plural(length, 'token')} for a source of {source:,}"
    elif source >= MIN_LENGTH and length / source < SHORT:
        flags["length_ratio"] = f"only {plural(length, 'token')} for a source of {source:,}"
    mean = sum(token_scores) / max(1, len(token_scores))
    if mean < LOW_SCORE:
        flags["low_score"] = f"{mean:.2f} per token on average, below {LOW_SCORE}"
    return flags


def longest_loop(ids: Sequence[int]) -> tuple[int, int] | None:
    """(size, turns) of the unit that is repeated in a row over the most tokens, if that is a loop."""
    row = np.asarray(ids)
    longest: tuple[int, int] | None = None
    for size in range(1, len(row) // LOOP_TURNS + 1):
        same = np.concatenate(([False], row[size:] == row[:-size], [False])).astype(np.int8)
        edges = np.flatnonzero(np.diff(same))
        if not len(edges):
            continue
        covered = int((edges[1::2] - edges[::2]).max()) + size  # tokens
        turns = covered // size
        if turns >= LOOP_TURNS and covered >= LOOP_TOKENS and (not longest or turns * size > longest[0] * longest[1]):
            longest = size, turns
    return longest


def attention_flags(alignment: Alignment) -> dict[str, str]:
    """Flags of an alignment that is parked on one source token, or uniform."""
    soft = alignment.soft
    if len(soft) < MIN_ALIGNED or soft.shape[1] < MIN_ALIGNED:
        return {}
    share = soft.mean(0)
    top = int(share.argmax())
    if share[top] > PARKED:
        return {"attention": f"{100 * share[top]:.0f}% of it on source token {top} ({alignment.source[top]!r})"}
    entropy = -(soft * np.log(np.maximum(soft, 1e-12))).sum(1).mean() / np.log(soft.shape[1])
    return {"attention": "spread evenly over the source"} if entropy > UNIFORM else {}


def _minimum_risk(codec: Codec, options: Options, hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The distinct texts by expected utility: samples weigh the same, the n-best of a beam their probability."""
    count = len(hypotheses)
    weights = [1 / count] * count if options.samples else probability_shares([h.score for h in hypotheses])
    spaced = codec.target.scheme == "space"
    utilities = expected_utility([h.text for h in hypotheses], weights, options.utility, spaced)
    distinct = {h.text: replace(h, utility=u) for h, u in reversed(list(zip(hypotheses, utilities, strict=True)))}
    ranked = sorted(distinct.values(), key=lambda h: (-(h.utility or 0.0), -h.score, h.text))
    return [replace(ranked[0], candidates=tuple(ranked)), *ranked[1 : options.nbest]]


def probability_shares(scores: Sequence[float]) -> list[float]:
    """Log-probabilities of distinct outputs as shares that sum to one."""
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def expected_utility(
    texts: Sequence[str], weights: Sequence[float], utility: Utility, spaced: bool = False
) -> list[float]:
    """The expected utility, 0 to 1, of every text if each is the reference with its weight (they sum to one).

    Edit distance counts characters, or tokens where the texts are `spaced` tokens.
    """
    compare = _utility(utility, spaced)
    mass: dict[str, float] = {}
    for text, weight in zip(texts, weights, strict=True):
        mass[text] = mass.get(text, 0.0) + weight
    totals = {
        text: math.fsum(weight * (1.0 if text == other else compare(text, other)) for other, weight in mass.items())
        for text in mass
    }
    return [totals[text] for text in texts]


def _utility(name: Utility, spaced: bool) -> Callable[[str, str], float]:
    if name == "exact":
        return lambda text, other: 0.0  # a text has utility 1 for itself by every measure
    # imported here, since few searches compare texts
    if name == "edit":
        from rapidfuzz.distance import Levenshtein

        split: Callable[[str], Sequence[str]] = (lambda text: text.split(" ")) if spaced else (lambda text: text)
        return lambda text, other: float(Levenshtein.normalized_similarity(split(text), split(other)))
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF() if name == "chrf" else BLEU(effective_order=True)
    return lambda text, other: float(metric.sentence_score(text, [other]).score) / 100
