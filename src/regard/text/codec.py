"""Both sides of a task: examples to ids, ids to text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from regard.config import Count, Frame, SpecialIds, Value
from regard.errors import UserError
from regard.recipe import Column
from regard.text.foreign import ForeignTokenizer
from regard.text.tokenizer import Tokenizer

SOURCE, TARGET, SHARED = "source.tokenizer.json", "target.tokenizer.json", "tokenizer.json"


class TextConfig(Value):
    """How a model's text becomes ids, as kept in its configuration."""

    source_tokens: str
    target_tokens: str
    shared: bool = False
    features: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ("source", "target")
    feature_separator: str = ";"
    frame: Frame = "end"  # the marks around a source text: x eos, sos x eos, sos x, or none
    ids: SpecialIds | None = None  # of foreign vocabularies; what we learn is always numbered in the same way
    sizes: tuple[Count, Count] | None = None  # of foreign vocabularies: how many ids each side has


class Codec:
    """Two tokenizers (or one, shared) and the features, which are source tokens numbered after the text.

    Where there is one side only, for a language model or an encoder, its tokenizer is the only argument.
    """

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
            raise UserError(f"source and target number their marks differently: {source.ids} and {self.target.ids}")
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
        """The ids of what is not text, the same on both sides."""
        return self.source.ids

    @property
    def source_vocab(self) -> int:
        return self.source.size + len(self.features)

    @property
    def target_vocab(self) -> int:
        """The target's ids; a shared vocabulary counts the features here too, so that one table serves both sides."""
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
        """The same text becomes the same ids."""
        if not isinstance(other, Codec):
            return NotImplemented
        return self.config == other.config and all(
            a.to_json() == b.to_json() for a, b in ((self.source, other.source), (self.target, other.target))
        )

    __hash__ = None  # type: ignore[assignment]

    def encode_source(self, examples: Sequence[Example]) -> list[list[int]]:
        """SpecialIds of the features and of the source text, with the marks around them."""
        rows = self.source.encode([example.source for example in examples])
        before, after = self._marks
        for row, example in zip(rows, examples, strict=True):
            if example.features:
                names = split_features(example.features, self.feature_separator)
                row[:0] = [self._feature_ids.get(name, self.ids.unk) for name in names]
            row[:] = [*before, *row, *after]
        return rows

    @property
    def _marks(self) -> tuple[list[int], list[int]]:
        """What stands before and after a source text."""
        before = [self.ids.sos] if self.frame in ("both", "start") else []
        return before, [self.ids.eos] if self.frame in ("both", "end") else []

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """SpecialIds of the target text, and the end."""
        rows = self.target.encode(texts)
        for row in rows:
            row.append(self.ids.eos)
        return rows

    def decode_target(self, ids: Iterable[int]) -> str:
        """The text of target ids; what is not text is skipped."""
        return self.target.decode(index for index in ids if index < self.target.size)

    def source_pieces(self, ids: Iterable[int]) -> list[str]:
        """One string to show per source id; a feature is shown by its name."""
        return [self._piece(self.source, index) for index in ids]

    def target_pieces(self, ids: Iterable[int]) -> list[str]:
        """One string to show per target id."""
        return [self._piece(self.target, index) for index in ids]

    def _piece(self, tokenizer: Tokenizer, index: int) -> str:
        if index < tokenizer.size:
            return tokenizer.pieces([index])[0]
        beyond = index - tokenizer.size
        return self.features[beyond] if beyond < len(self.features) else f"<{index}>"  # models may have rows to spare

    def note_unknown(self, examples: Sequence[Example], rows: Sequence[Sequence[int]], unknown: UnknownTokens) -> None:
        """Enter what is unknown in the sources, text and features, into a report; `rows` are their ids."""
        for example, row in zip(examples, rows, strict=True):
            if self.source.unknown(row):
                names = split_features(example.features or "", self.feature_separator)
                strange = [name for name in names if name not in self._feature_ids]
                unknown.count(self.source.unknown_symbols(example.source) + strange, example.source)

    def save(self, directory: str | Path) -> None:
        """Write the tokenizers; `config` is the caller's to keep."""
        directory = Path(directory)
        if self.shared:
            self.source.save(directory / SHARED)
        else:
            self.source.save(directory / SOURCE)
            self.target.save(directory / TARGET)

    @classmethod
    def load(cls, directory: str | Path, config: TextConfig) -> Codec:
        """Read what `save` wrote."""
        directory = Path(directory)
        names = (SHARED,) if config.shared else (SOURCE, TARGET)
        if config.ids is None:
            sides = [Tokenizer.load(directory / name) for name in names]
        else:
            sizes = config.sizes or (None, None)
            sides = [
                ForeignTokenizer.read(directory / name, config.ids, size)
                for name, size in zip(names, sizes, strict=False)
            ]
        return cls(sides[0], sides[-1], config.features, config.columns, config.feature_separator, config.frame)


def split_features(features: str, separator: str) -> list[str]:
    """The tokens of a features column: between separators, without the white space around them, never empty."""
    return [name for part in features.split(separator) if (name := part.strip())]


class Example(NamedTuple):
    """A source text, its target if there is one, and the features as written in their column."""

    source: str
    target: str | None = None
    features: str | None = None


DISTINCT = 10_000  # beyond so many different tokens only their number is kept


class UnknownTokens:
    """A count of unknown tokens, filled line by line, told in one sentence."""

    def __init__(self) -> None:
        self.symbols: Counter[str] = Counter()  # how often each
        self.first: dict[str, str] = {}  # a text in which each was seen
        self.total = 0
        self.texts = 0  # texts with at least one

    def add(self, tokenizer: Tokenizer, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        """Count what is unknown in `texts`, of which `ids` are the tokens."""
        for text, row in zip(texts, ids, strict=True):
            if tokenizer.unknown(row):
                self.count(tokenizer.unknown_symbols(text), text)

    def count(self, symbols: Sequence[str], text: str) -> None:
        """Count unknown `tokens`, seen in `text`."""
        self.total += len(symbols)
        self.texts += bool(symbols)
        for symbol in symbols:
            if symbol in self.symbols or len(self.symbols) < DISTINCT:
                self.symbols[symbol] += 1
                self.first.setdefault(symbol, text)

    def __bool__(self) -> bool:
        return self.total > 0

    def summary(self, most: int = 8, what: str = "token") -> str:
        """Say what was unknown, most frequent first; empty if nothing was."""
        if not self:
            return ""
        named = sorted(self.symbols.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{_shown(symbol)} {count:,}x" for symbol, count in named[:most])
        rest = f" and {len(named) - most:,} more" if len(named) > most else ""
        times = f"{self.total:,} unknown {what}{'s' * (self.total > 1)}"
        return f"{times} in {self.texts:,} line{'s' * (self.texts > 1)}: {shown}{rest}"


def _shown(symbol: str) -> str:
    """A token in quotes, with its code point where the eye may not tell."""
    short = symbol if len(symbol) <= 24 else symbol[:23] + "…"
    if len(symbol) == 1 and not symbol.isascii():
        return f"{short!r} (U+{ord(symbol):04X})"
    return repr(short)


class Base(NamedTuple):
    """What a run that training starts from says about text and labels."""

    codec: Codec
    labels: tuple[str, ...] = ()
