"""Conversion between examples and ids by the tokenizers and features of a run, and counts of unknown tokens."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple
from unicodedata import bidirectional

from regard.config import Frame, SpecialIds, Tokens, Value
from regard.errors import UserError, plural
from regard.recipe import Column
from regard.text.tokenizer import ForeignTokenizer, Tokenizer

Direction = Literal["ltr", "rtl"]
STRONG: dict[str, Direction] = {"L": "ltr", "R": "rtl", "AL": "rtl"}  # by Unicode bidi class; others are not strong
TOKENIZERS = SOURCE, TARGET, SHARED = "source.tokenizer.json", "target.tokenizer.json", "tokenizer.json"


class Example(NamedTuple):
    """A source text, its target, if known, and the text of the features column."""

    source: str
    target: str | None = None
    features: str | None = None


class TextConfig(Value):
    """How text becomes ids, as stored in the configuration of a run."""

    source_tokens: str
    target_tokens: str
    shared: bool = False
    features: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ("source", "target")
    feature_separator: str = ";"
    frame: Frame = "end"  # special tokens around a source text: x eos, sos x eos, sos x, or none
    ids: SpecialIds | None = None  # of foreign vocabularies; all learned vocabularies have the same ids
    sizes: tuple[Tokens, Tokens] | None = None  # of foreign vocabularies: number of ids on each side


class Codec:
    """Two tokenizers, or one shared tokenizer, and the features, whose ids follow the ids of the source tokens."""

    def __init__(
        self,
        source: Tokenizer,
        target: Tokenizer | None = None,
        features: Sequence[str] = (),
        columns: Sequence[Column] = ("source", "target"),
        feature_separator: str = ";",
        frame: Frame = "end",
    ) -> None:
        self.source = source
        self.target = source if target is None else target
        if (type(self.source), self.source.ids) != (type(self.target), self.target.ids):
            raise UserError(
                f"source and target number their special tokens differently: {source.ids} and {self.target.ids}"
            )
        self.features = tuple(features)
        self.columns = tuple(columns)
        self.feature_separator = feature_separator
        self.frame: Frame = frame
        self._feature_ids = {name: source.size + index for index, name in enumerate(self.features)}

    @property
    def shared(self) -> bool:
        return self.source is self.target

    @property
    def ids(self) -> SpecialIds:
        """The ids of the special tokens, equal on both sides."""
        return self.source.ids

    @property
    def source_vocab(self) -> int:
        return self.source.size + len(self.features)

    @property
    def target_vocab(self) -> int:
        """The number of target ids; includes the features if both sides share a vocabulary and an embedding."""
        return self.source_vocab if self.shared else self.target.size

    @property
    def config(self) -> TextConfig:
        foreign = isinstance(self.source, ForeignTokenizer)
        return TextConfig(
            source_tokens=self.source.scheme,
            target_tokens=self.target.scheme,
            shared=self.shared,
            features=self.features,
            columns=self.columns,
            feature_separator=self.feature_separator,
            frame=self.frame,
            ids=self.ids if foreign else None,
            sizes=(self.source.size, self.target.size) if foreign else None,
        )

    def __eq__(self, other: object) -> bool:
        """Whether the same text becomes the same ids."""
        if not isinstance(other, Codec):
            return NotImplemented
        ours, theirs = ([each.source.to_json(), each.target.to_json()] for each in (self, other))
        return self.config == other.config and ours == theirs

    __hash__ = None  # type: ignore[assignment]

    def encode_source(self, examples: Sequence[Example]) -> list[list[int]]:
        """The ids of features and source texts, framed by special tokens."""
        rows = self.source.encode([example.source for example in examples])
        before, after = self.ids.around(self.frame)
        for row, example in zip(rows, examples, strict=True):
            row[:] = [*before, *self.feature_ids(example.features or ""), *row, *after]
        return rows

    def feature_ids(self, features: str) -> list[int]:
        """The ids of the text of a features column."""
        unk = self.ids.unk
        return [self._feature_ids.get(name, unk) for name in split_features(features, self.feature_separator)]

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of target texts, each with the end token."""
        rows = self.target.encode(texts)
        for row in rows:
            row.append(self.ids.eos)
        return rows

    def decode_target(self, ids: Iterable[int]) -> str:
        """The text of target ids, without special tokens."""
        return self.target.decode(index for index in ids if index < self.target.size)

    def source_pieces(self, ids: Iterable[int]) -> list[str]:
        """A printable string for each source id: a token or the name of a feature."""
        return [self._piece(self.source, index) for index in ids]

    def target_pieces(self, ids: Iterable[int]) -> list[str]:
        """A printable string for each target id."""
        return [self._piece(self.target, index) for index in ids]

    def _piece(self, tokenizer: Tokenizer, index: int) -> str:
        if index < tokenizer.size:
            return tokenizer.pieces([index])[0]
        beyond = index - tokenizer.size
        return self.features[beyond] if beyond < len(self.features) else f"<{index}>"  # a model may have unused rows

    def unknown_tokens(self, example: Example, source: Sequence[int], target: Sequence[int] = ()) -> list[str]:
        """The unknown tokens and features of an example with these ids."""
        unknown: list[str] = []
        if self.source.unknown(source):
            names = split_features(example.features or "", self.feature_separator)
            unknown += self.source.unknown_tokens(example.source)
            unknown += [name for name in names if name not in self._feature_ids]
        return unknown + (self.target.unknown_tokens(example.target or "") if self.target.unknown(target) else [])

    def note_unknown(
        self, examples: Sequence[Example], sources: UnknownTokens, targets: UnknownTokens | None = None
    ) -> None:
        """Count the unknown tokens and features of the sources, and the unknown tokens of the targets."""
        for example, row in zip(examples, self.encode_source(examples), strict=True):
            sources.count(self.unknown_tokens(example, row))
        if targets is not None:
            texts = [example.target or "" for example in examples]
            targets.add(self.target, texts, self.target.encode(texts))

    def features_problem(self, example: Example) -> str:
        """The error if an example has features and the run has none, or vice versa; otherwise empty."""
        if "features" not in self.columns:
            return "features: not for this run, which was trained without features" if example.features else ""
        return "features: is required, since the run was trained with features" if example.features is None else ""

    @property
    def one_vocabulary(self) -> bool:
        """Whether equal tokens have equal ids on both sides, even if the tokenizers split text differently."""
        if self.shared:
            return True
        ids = range(self.source.size)
        return self.source_vocab == self.target.size and self.source.pieces(ids) == self.target.pieces(ids)

    def save(self, directory: str | Path) -> None:
        """Write the tokenizers; the caller stores `config`."""
        sides = {SHARED: self.source} if self.shared else {SOURCE: self.source, TARGET: self.target}
        for name, tokenizer in sides.items():
            tokenizer.save(Path(directory) / name)

    @classmethod
    def load(cls, directory: str | Path, config: TextConfig) -> Codec:
        paths = [Path(directory) / name for name in ((SHARED,) if config.shared else (SOURCE, TARGET))]
        if config.ids is None:
            sides = [Tokenizer.load(path) for path in paths]
        else:
            sizes = config.sizes or (None, None)
            sides = [ForeignTokenizer.read(path, config.ids, size) for path, size in zip(paths, sizes, strict=False)]
        return cls(sides[0], sides[-1], config.features, config.columns, config.feature_separator, config.frame)


def split_features(features: str, separator: str) -> list[str]:
    """The features in the text of a features column."""
    return [name for part in features.split(separator) if (name := part.strip())]


def direction(text: str) -> Direction:
    """The direction of the first strong character; left to right without one."""
    return next((STRONG[kind] for kind in map(bidirectional, text) if kind in STRONG), "ltr")


@cache
def strong_ranges() -> dict[Direction, list[int]]:
    """The ranges of strong characters of each direction, as [start, end, start, end, ...] in ascending order."""
    ranges: dict[Direction, list[int]] = {"ltr": [], "rtl": []}
    end = 0
    for kind, run in groupby(STRONG.get(bidirectional(chr(code))) for code in range(sys.maxunicode + 1)):
        start = end
        end += len(list(run))
        if kind is not None:
            ranges[kind] += (start, end)
    return ranges


MAX_DISTINCT = 10_000  # unknown tokens that are counted separately


@dataclass
class UnknownTokens:
    """Counts unknown tokens by line and summarises them in one sentence."""

    counts: Counter[str] = field(default_factory=Counter)
    total: int = 0
    texts: int = 0  # with unknown tokens

    def add(self, tokenizer: Tokenizer, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        """Count the unknown tokens of texts with these ids."""
        for text, row in zip(texts, ids, strict=True):
            if tokenizer.unknown(row):
                self.count(tokenizer.unknown_tokens(text))

    def count(self, tokens: Sequence[str]) -> None:
        """Count the unknown tokens of one text."""
        self.total += len(tokens)
        self.texts += bool(tokens)
        for token in tokens:
            if token in self.counts or len(self.counts) < MAX_DISTINCT:
                self.counts[token] += 1

    def __bool__(self) -> bool:
        return self.total > 0

    def summary(self, limit: int = 8, noun: str = "token") -> str:
        """The unknown tokens, most frequent first; empty if there are none."""
        if not self:
            return ""
        named = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{shown_token(token)} {count:,}x" for token, count in named[:limit])
        rest = f" and {len(named) - limit:,} more" if len(named) > limit else ""
        at_least = "at least " * (len(named) == MAX_DISTINCT)
        times = f", {self.total:,} times" if self.total > len(named) else ""
        return (
            f"{at_least}{plural(len(named), f'unknown {noun}')}{times} in {plural(self.texts, 'line')}: {shown}{rest}"
        )


def shown_token(token: str) -> str:
    """A token in quotes; a single non-ASCII character with its code point."""
    short = token if len(token) <= 24 else token[:23] + "…"
    if len(token) == 1 and not token.isascii():
        return f"{short!r} (U+{ord(token):04X})"
    return repr(short)
