"""Statistics of the data of a run: limits of normal outputs, frequent characters, and examples of validation data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from regard.config import Count, Value
from regard.tasks import Task
from regard.text.codec import Codec, Example

if TYPE_CHECKING:
    from regard.data.plain_text import Stream
    from regard.data.prepare import Prepared
    from regard.data.store import Corpus

STATISTICS = "statistics.json"
MIN_TURNS = 4  # repetitions in a row that make a loop
MIN_COMPARED = 10  # minimum tokens of an output that is too long, or of the source of one that is too short
MEASURED_LENGTHS = 100_000  # training pairs
MEASURED_TEXTS = 2_000  # texts of each side whose loops and characters are counted
MEASURED_TOKENS = 1 << 16  # of plain text, from its beginning
RARE = 0.001  # share of training pairs that may exceed a limit before the margin: mistakes in the data
MARGIN = 1.5  # factor between the training pairs and a limit
MAX_CHARACTERS = 500  # counted characters of each side
MAX_EXAMPLES = 3
MAX_EXAMPLE_LENGTH = 500  # characters

Counts = Annotated[dict[str, Count], Field(max_length=MAX_CHARACTERS)]


class OutputLimits(Value):
    """Limits of normal outputs, from training pairs; the defaults apply to runs without statistics."""

    max_ratio: float = Field(4.0, ge=0)  # output tokens per source token
    min_ratio: float = Field(0.2, ge=0)
    loop: Count = 7  # tokens that a loop may cover


class Statistics(Value):
    """The contents of statistics.json."""

    format: Literal[1] = 1
    examples: tuple[Example, ...] = Field((), max_length=MAX_EXAMPLES)  # of validation data
    limits: OutputLimits = OutputLimits()
    source_characters: Counts = Field(default_factory=dict)  # with their counts in a sample, most frequent first
    target_characters: Counts = Field(default_factory=dict)


def measure(task: Task, prepared: Prepared[Any]) -> Statistics | None:
    """The statistics of prepared data; None for images."""
    if task.reads == "images":
        return None
    codec = prepared.codec
    if task.reads == "text":
        lines = [line.strip() for line in _beginning(codec, prepared.valid).split("\n")]
        lines = lines[1:-1] or lines  # the first and the last may be cut
        if task.name == "lm":  # prompts
            lines = [line[: len(line) // 2 + 4].rsplit(" ", 1)[0] for line in lines]
        characters = _characters([_beginning(codec, prepared.train)])
        return Statistics(examples=_typical([Example(line) for line in lines]), source_characters=characters)
    train: Corpus = prepared.train
    rows = _sample(len(train), MEASURED_TEXTS).tolist()
    sources = ([i for i in train.source(row).tolist() if i < codec.source.size] for row in rows)  # without features
    targets = [] if task.labels else [train.target(row).tolist() for row in rows]
    return Statistics(
        examples=_typical(prepared.valid_examples),
        limits=OutputLimits() if task.labels else _output_limits(train, targets),
        source_characters=_characters(map(codec.source.decode, sources)),
        target_characters=_characters(map(codec.decode_target, targets)),
    )


def _sample(count: int, most: int) -> NDArray[np.int64]:
    """Indices of about `most` of `count` examples, drawn at random because every n-th could follow a pattern."""
    return np.arange(count) if count <= most else np.unique(np.random.default_rng(0).integers(count, size=most))


def _beginning(codec: Codec, stream: Stream) -> str:
    return codec.source.decode(stream.windows(np.zeros(1, np.int64), min(len(stream), MEASURED_TOKENS))[0].tolist())


def _output_limits(train: Corpus, targets: Sequence[Sequence[int]]) -> OutputLimits:
    """The limits that a share of RARE of the training pairs exceeds, with a margin."""
    default = OutputLimits()
    rows = _sample(len(train), MEASURED_LENGTHS)
    sources = np.maximum(train.source_lengths[rows] - 1, 1)  # without the end token
    lengths = np.maximum(train.target_lengths[rows] - 1, 1)
    ratios = lengths / sources
    high = _quantile(ratios[lengths > MIN_COMPARED], 1 - RARE, "higher")
    low = _quantile(ratios[sources >= MIN_COMPARED], RARE, "lower")
    loops = [longest_loop(ids[:-1]) or (0, 0) for ids in targets]
    covered = _quantile(np.asarray([size * turns for size, turns in loops]), 1 - RARE, "higher") or 0
    return OutputLimits(
        max_ratio=default.max_ratio if high is None else MARGIN * high,
        min_ratio=default.min_ratio if low is None else low / MARGIN,
        loop=max(default.loop, math.ceil(MARGIN * covered)),
    )


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


def _quantile(values: NDArray[np.float64], share: float, method: Literal["lower", "higher"]) -> float | None:
    return float(np.quantile(values, share, method=method)) if len(values) else None


def _characters(texts: Iterable[str]) -> dict[str, int]:
    """The most frequent characters with their counts; of equally frequent ones, those with lower code points."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_CHARACTERS])


def _typical(examples: Sequence[Example]) -> tuple[Example, ...]:
    """Examples of about the median lengths, with different targets."""
    short = [e for e in examples if e.source.strip() and max(map(len, filter(None, e))) <= MAX_EXAMPLE_LENGTH]
    lengths = np.asarray([(len(example.source), len(example.target or "")) for example in short]).reshape(-1, 2)
    distance = np.abs(lengths - np.median(lengths, axis=0)).sum(1) if short else np.empty(0)
    chosen: dict[str, Example] = {}
    for index in np.argsort(distance, kind="stable").tolist():
        chosen.setdefault(short[index].target or short[index].source, short[index])
    return tuple(chosen.values())[:MAX_EXAMPLES]
