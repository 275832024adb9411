"""Hypotheses: outputs as text with scores, alignment and flags; minimum Bayes risk decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from regard.data.statistics import MIN_COMPARED, OutputLimits, longest_loop
from regard.decode.request import Options, Utility
from regard.decode.search_inputs import SearchInput
from regard.errors import plural
from regard.notebook import heat_table, result_cells, token_table
from regard.text.codec import Codec, shown_token

# Thresholds of flags
MIN_MEAN_SCORE = -2.5  # log-probability per token
MAX_ATTENTION_SHARE = 0.9  # of a single source token
MAX_ATTENTION_ENTROPY = 0.95  # as a share of the entropy of uniform attention
MIN_ALIGNED_TOKENS = 6  # of source and output; fewer give no flag
MAX_UNKNOWN = 8  # tokens named in a flag
DEGENERATE = ("repetition", "length_ratio")  # flags that are rare for a trained model
MANY_DEGENERATE = 0.2  # share of outputs with such flags that causes a warning

TopTokens = tuple[tuple[str, float], ...]  # tokens with their natural-log probabilities, most probable first


class DecodedIds(NamedTuple):
    """An output of the search, in token ids."""

    ids: tuple[int, ...]  # with the end token, unless a continuation stopped at its limit
    token_scores: tuple[float, ...]  # natural-log probabilities of the ids; empty if only their sum is known
    value: float  # by which the search ranked it; their sum if there are no token scores
    limited: bool = False  # ended at the limit

    @property
    def score(self) -> float:
        return sum(self.token_scores) if self.token_scores else self.value


@dataclass(frozen=True)
class Alignment:
    """The alignment of an output: weights of source tokens for each output token except the end."""

    soft: np.ndarray  # (output tokens, source tokens), rows sum to 1; the last source token is the end token
    source: tuple[str, ...]  # display forms of the tokens
    output: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Alignment({plural(len(self.output), 'output token')}, {plural(len(self.source), 'source token')})"

    def _repr_html_(self) -> str:
        return heat_table(self.soft, self.output, self.source)

    @property
    def hard(self) -> list[tuple[int, int]]:
        """The strongest link (source position, output position) of each output token, never to the source's end."""
        return [(int(s), t) for t, s in enumerate(self.soft[:, :-1].argmax(1))] if self.soft.size else []


@dataclass(frozen=True)
class Hypothesis:
    """One output for one source."""

    text: str
    score: float  # the sum of token_scores
    tokens: tuple[str, ...]  # display forms, including the end token if present
    token_scores: tuple[float, ...]
    normalized: float  # score / length ** length_penalty
    ids: tuple[int, ...] = ()
    alignment: Alignment | None = None
    utility: float | None = None  # expected utility (minimum Bayes risk)
    flags: dict[str, str] = field(default_factory=dict)  # problems: name -> reason
    candidates: tuple[Hypothesis, ...] = ()  # all candidates of minimum Bayes risk, best first, on the best output
    top_tokens: tuple[TopTokens, ...] = ()  # the most probable tokens at each position

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
        """The JSON shape. Utility, alignment, top tokens and flags only if present; never the candidates."""
        out: dict[str, Any] = {"text": self.text, "score": self.score, "tokens": list(self.tokens)}
        out |= {"token_scores": list(self.token_scores), "normalized": self.normalized}
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
    """The JSON shape of the most probable tokens at one position."""
    return [{"token": token, "score": score, "probability": math.exp(score)} for token, score in row]


def empty_hypothesis(flags: dict[str, str]) -> Hypothesis:
    """The empty output of an input that was not decoded or has no output, with the reason."""
    return Hypothesis("", 0.0, (), (), 0.0, flags=flags)


def make_hypotheses(
    codec: Codec, limits: OutputLimits, options: Options, item: SearchInput, outputs: Sequence[DecodedIds]
) -> list[Hypothesis]:
    """The outputs of a search as text with flags, ranked by expected utility with the option `mbr`."""
    if not outputs:
        return [empty_hypothesis({"unsatisfied": "the search found no output that satisfies the constraints"})]
    hypotheses = [_hypothesis(codec, limits, options, item, output) for output in outputs]
    if item.texts.stop and not options.samples:  # the same output may have ended before different stop strings
        first: dict[object, Hypothesis] = {}
        for h in hypotheses:
            first.setdefault((h.ids, h.text), h)
        hypotheses = list(first.values())
    return _minimum_risk(codec, options, hypotheses) if options.mbr else hypotheses


def _hypothesis(
    codec: Codec, limits: OutputLimits, options: Options, item: SearchInput, output: DecodedIds
) -> Hypothesis:
    flags = unknown_flags(item.unknown)
    stop = None
    if item.phrases is not None and item.texts.stop:  # the end token completes the last character
        stop = item.phrases.find_stop((*output.ids, codec.ids.eos))
    if stop is None:
        text = output_text(codec, item, output.ids)
    else:
        end, length = stop
        text = stopped_text(codec, item, output.ids[:end], length)
        flags["stopped"] = f"ended before a stop string ({', '.join(map(repr, item.texts.stop))})"
        output = DecodedIds(output.ids[:length], output.token_scores[:length], value=0.0)
    ids = output.ids[:-1] if output.ids[-1:] == (codec.ids.eos,) else output.ids
    source = 0 if item.open_end or stop else len(item.sources[0]) - 1  # 0: no expectation about the length
    flags |= output_flags(ids, source, output.token_scores, limits)
    if output.limited:
        flags["max_length"] = f"ended at the limit of {plural(item.limit, 'token')}"
    pieces = tuple(codec.target_pieces(output.ids))
    normalized = output.score / max(1, len(output.ids)) ** options.length_penalty
    return Hypothesis(text, output.score, pieces, output.token_scores, normalized, output.ids, flags=flags)


def stopped_text(codec: Codec, item: SearchInput, ids: Sequence[int], length: int) -> str:
    """The text before the stop string that the last of `ids` completes; the first `length` ids begin before it."""
    before = output_text(codec, item, ids[:length])
    if codec.target.scheme in ("space", "nfd"):  # no string begins or ends within a token
        return before
    text = output_text(codec, item, ids)
    ends = [(at + len(string), at) for string in item.texts.stop if (at := text.find(string)) >= 0]
    return text[: min(ends)[1]] if ends else before  # the string that ends first; of several, the longest


def output_text(codec: Codec, item: SearchInput, ids: Sequence[int]) -> str:
    """The text of an output. The text of a continuation includes the space between prompt and continuation."""
    if not item.open_end:
        return codec.decode_target(ids)
    prompt, text = (codec.decode_target([*item.sources[0], *more]) for more in ((), ids))
    return text.removeprefix(prompt) if text.startswith(prompt) else codec.decode_target(ids)


def flag_segmentation(codec: Codec, rows: list[list[Hypothesis]]) -> None:
    """Flag outputs whose text is tokenised differently, so that `score` gives another score."""
    entries = [(i, rank) for i, row in enumerate(rows) for rank, h in enumerate(row) if h.ids]
    for (i, rank), ids in zip(entries, codec.encode_target([rows[i][rank].text for i, rank in entries]), strict=True):
        hypothesis = rows[i][rank]
        if tuple(ids)[: len(hypothesis.ids)] != hypothesis.ids:
            reason = "the text is tokenised differently, so forced decoding gives another score"
            rows[i][rank] = replace(hypothesis, flags={**hypothesis.flags, "segmentation": reason})


def unknown_flags(tokens: Sequence[str]) -> dict[str, str]:
    """A flag for tokens or features outside the vocabulary."""
    names = ", ".join(map(shown_token, dict.fromkeys(tokens[:MAX_UNKNOWN])))
    rest = f" and {len(tokens) - MAX_UNKNOWN} more" if len(tokens) > MAX_UNKNOWN else ""
    return {"unknown": f"not in the vocabulary: {names}{rest}"} if tokens else {}


def output_flags(
    ids: Sequence[int], source: int, token_scores: Sequence[float], limits: OutputLimits
) -> dict[str, str]:
    """Flags of an output (ids without end token) for a source of this length; 0: its length is not compared."""
    flags = {}
    length = len(ids)
    size, turns = longest_loop(ids) or (0, 0)
    if size * turns > limits.loop:
        flags["repetition"] = f"{size} token{'s' * (size > 1)} repeated {turns} times in a row"
    if source and length > limits.max_ratio * source and length > MIN_COMPARED:
        flags["length_ratio"] = f"{length:,} tokens for a source of {source:,}"
    elif length < limits.min_ratio * source and (source >= MIN_COMPARED or not length):
        flags["length_ratio"] = f"only {plural(length, 'token')} for a source of {source:,}"
    mean = sum(token_scores) / max(1, len(token_scores))
    if mean < MIN_MEAN_SCORE:
        flags["low_score"] = f"{mean:.2f} per token on average, below {MIN_MEAN_SCORE}"
    return flags


def attention_flags(alignment: Alignment) -> dict[str, str]:
    """Flags of attention that is concentrated on one source token, or uniform."""
    soft = alignment.soft
    if min(soft.shape) < MIN_ALIGNED_TOKENS:
        return {}
    share = soft.mean(0)
    top = int(share.argmax())
    if share[top] > MAX_ATTENTION_SHARE:
        return {"attention": f"{100 * share[top]:.0f}% of it on source token {top} ({alignment.source[top]!r})"}
    entropy = -(soft * np.log(np.maximum(soft, 1e-12))).sum(1).mean() / np.log(soft.shape[1])
    return {"attention": "spread evenly over the source"} if entropy > MAX_ATTENTION_ENTROPY else {}


def _minimum_risk(codec: Codec, options: Options, hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Rank distinct texts by expected utility. Samples have equal weights, an n-best list its probabilities."""
    count = len(hypotheses)
    weights = [1 / count] * count if options.samples else probability_shares([h.score for h in hypotheses])
    spaced = codec.target.scheme == "space"
    utilities = expected_utility([h.text for h in hypotheses], weights, options.utility, spaced)
    distinct = {h.text: replace(h, utility=u) for h, u in reversed(list(zip(hypotheses, utilities, strict=True)))}
    ranked = sorted(distinct.values(), key=lambda h: (-(h.utility or 0.0), -h.score, h.text))
    return [replace(ranked[0], candidates=tuple(ranked)), *ranked[1 : options.nbest]]


def probability_shares(scores: Sequence[float]) -> list[float]:
    """Log-probabilities as probabilities, normalised to sum to one."""
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def expected_utility(
    texts: Sequence[str], weights: Sequence[float], utility: Utility, spaced: bool = False
) -> list[float]:
    """The expected utility (0 to 1) of every text; `weights` are their probabilities of being the reference."""
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
    """A measure of similarity; edit distance counts characters or, if `spaced`, tokens separated by spaces."""
    if name == "exact":
        return lambda text, other: 0.0  # the utility of equal texts is 1 by every measure
    if name == "edit":
        from rapidfuzz.distance import Levenshtein  # rarely needed

        split: Callable[[str], Sequence[str]] = (lambda text: text.split(" ")) if spaced else (lambda text: text)
        return lambda text, other: float(Levenshtein.normalized_similarity(split(text), split(other)))
    from sacrebleu.metrics.bleu import BLEU  # rarely needed
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF() if name == "chrf" else BLEU(effective_order=True)
    return lambda text, other: float(metric.sentence_score(text, [other]).score) / 100
