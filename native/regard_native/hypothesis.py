"""Outputs as text with scores, alignment and flags, in the JSON shapes of regard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Thresholds of flags
MIN_MEAN_SCORE = -2.5  # log-probability per token
MAX_ATTENTION_SHARE = 0.9  # of a single source token
MAX_ATTENTION_ENTROPY = 0.95  # as a share of the entropy of uniform attention
MIN_ALIGNED_TOKENS = 6  # of source and output; fewer give no flag
MIN_COMPARED = 10  # minimum tokens of an output that is too long, or of the source of one that is too short
MIN_TURNS = 4  # repetitions in a row that make a loop
MAX_UNKNOWN = 8  # tokens named in a flag

TopTokens = tuple[tuple[str, float], ...]  # tokens with their natural-log probabilities, most probable first


@dataclass(frozen=True)
class Alignment:
    """The alignment of an output: weights of source tokens for each output token except the end."""

    soft: np.ndarray  # (output tokens, source tokens), rows sum to 1; the last source token is the end token
    source: tuple[str, ...]  # display forms of the tokens
    output: tuple[str, ...]

    @property
    def hard(self) -> list[tuple[int, int]]:
        """The strongest link (source position, output position) of each output token, never to the source's end."""
        return [(int(s), t) for t, s in enumerate(self.soft[:, :-1].argmax(1))] if self.soft.size else []


@dataclass(frozen=True)
class Hypothesis:
    """One output for one source."""

    text: str
    score: float  # natural-log probability: the sum of token_scores
    tokens: tuple[str, ...]  # display forms, with the end token
    token_scores: tuple[float, ...]
    normalized: float = 0.0  # score / length ** length_penalty
    ids: tuple[int, ...] = ()
    alignment: Alignment | None = None
    flags: dict[str, str] = field(default_factory=dict)  # problems: name -> reason
    top_tokens: tuple[TopTokens, ...] = ()  # the most probable tokens at each position

    def as_dict(self) -> dict[str, Any]:
        """The JSON shape of `regard generate --json`."""
        out: dict[str, Any] = {"text": self.text, "score": self.score, "tokens": list(self.tokens)}
        out |= {"token_scores": list(self.token_scores), "normalized": self.normalized}
        if self.alignment is not None:
            soft = [[round(float(weight), 4) for weight in row] for row in self.alignment.soft]
            out["alignment"] = {"source": list(self.alignment.source), "hard": self.alignment.hard, "soft": soft}
        if self.top_tokens:
            out["top_tokens"] = [
                [{"token": token, "score": score, "probability": math.exp(score)} for token, score in row]
                for row in self.top_tokens
            ]
        if self.flags:
            out["flags"] = dict(self.flags)
        return out


@dataclass(frozen=True)
class Scored:
    """The natural-log probability of a target, in total and per token, including the end token."""

    score: float  # NaN if the pair was not scored
    tokens: tuple[str, ...]
    token_scores: tuple[float, ...]
    flags: dict[str, str] = field(default_factory=dict)  # problems: name -> reason

    def as_dict(self) -> dict[str, Any]:
        """The JSON shape of `regard score --json`, without source and target."""
        score = None if math.isnan(self.score) else self.score
        out: dict[str, Any] = {"score": score, "tokens": list(self.tokens), "token_scores": list(self.token_scores)}
        return {**out, "flags": dict(self.flags)} if self.flags else out


@dataclass(frozen=True)
class OutputLimits:
    """Limits of normal outputs, from training pairs; the defaults apply to runs without statistics."""

    max_ratio: float = 4.0  # output tokens per source token
    min_ratio: float = 0.2
    loop: int = 7  # tokens that a loop may cover

    @classmethod
    def of(cls, limits: Mapping[str, Any]) -> OutputLimits:
        return cls(float(limits["max_ratio"]), float(limits["min_ratio"]), int(limits["loop"]))


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def too_long(side: str, length: int, positions: int, most: int) -> dict[str, str]:
    """A flag if the length exceeds the positions of a model, or `most` (max_source)."""
    if length <= min(positions, most):
        return {}
    learned = f"the {positions} that fit the model's learned positions"
    bound = learned if positions < most else f"{most} (max_source)"
    return {"too_long": f"the {side} has {length} tokens, more than {bound}"}


def unknown_flags(tokens: Sequence[str]) -> dict[str, str]:
    """A flag for tokens or features outside the vocabulary."""
    if not tokens:
        return {}
    names = ", ".join(map(shown_token, dict.fromkeys(tokens[:MAX_UNKNOWN])))
    rest = f" and {len(tokens) - MAX_UNKNOWN} more" if len(tokens) > MAX_UNKNOWN else ""
    return {"unknown": f"not in the vocabulary: {names}{rest}"}


def shown_token(token: str) -> str:
    """A token in quotes; a single non-ASCII character with its code point."""
    short = token if len(token) <= 24 else token[:23] + "…"
    if len(token) == 1 and not token.isascii():
        return f"{short!r} (U+{ord(token):04X})"
    return repr(short)


def output_flags(
    ids: Sequence[int], source: int, token_scores: Sequence[float], limits: OutputLimits
) -> dict[str, str]:
    """Flags of an output (ids without end token) for a source of this length; 0: its length is not compared."""
    flags = {}
    length = len(ids)
    # A loop of at least MIN_TURNS repeats most of the tokens that it covers.
    if (length - len(set(ids))) * MIN_TURNS > limits.loop * (MIN_TURNS - 1):
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


def longest_loop(ids: Sequence[int]) -> tuple[int, int] | None:
    """The loop that covers the most tokens, as (length of the repeated unit, repetitions); or None."""
    row = np.asarray(ids)
    longest: tuple[int, int] | None = None
    for size in range(1, len(row) // MIN_TURNS + 1):
        same = np.concatenate(([False], row[size:] == row[:-size], [False])).astype(np.int8)
        edges = np.flatnonzero(np.diff(same))
        covered = int((edges[1::2] - edges[::2]).max(initial=0)) + size  # tokens
        turns = covered // size
        if turns >= MIN_TURNS and (not longest or turns * size > longest[0] * longest[1]):
            longest = size, turns
    return longest


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
