"""Both sides of a task: examples to ids, ids to text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from regard.config import Value
from regard.settings import Column
from regard.text.example import Example
from regard.text.library import IDS
from regard.text.tokenizer import Tokenizer
from regard.text.unknown import Unknown

SOURCE, TARGET, SHARED = "source.tokenizer.json", "target.tokenizer.json", "tokenizer.json"


class TextConfig(Value):
    """How a model's text becomes ids, as kept in its configuration."""

    source_tokens: str
    target_tokens: str
    shared: bool = False
    features: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ("source", "target")
    feature_separator: str = ";"


class Codec:
    """Two tokenizers (or one, shared) and the features, which are source symbols numbered after the text."""

    def __init__(
        self,
        source: Tokenizer,
        target: Tokenizer,
        features: Sequence[str] = (),
        columns: Sequence[Column] = ("source", "target"),
        feature_separator: str = ";",
    ) -> None:
        self.source = source
        self.target = target
        self.features = tuple(features)
        self.columns = tuple(columns)
        self.feature_separator = feature_separator
        self._feature_ids = {name: source.size + index for index, name in enumerate(self.features)}

    @property
    def shared(self) -> bool:
        return self.source is self.target

    @property
    def source_vocab(self) -> int:
        return self.source.size + len(self.features)

    @property
    def target_vocab(self) -> int:
        """The target's ids; a shared vocabulary counts the features here too, so that one table serves both sides."""
        return self.source_vocab if self.shared else self.target.size

    @property
    def config(self) -> TextConfig:
        return TextConfig(
            source_tokens=self.source.scheme,
            target_tokens=self.target.scheme,
            shared=self.shared,
            features=self.features,
            columns=self.columns,
            feature_separator=self.feature_separator,
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
        """Ids of the features, of the source text, and the end."""
        rows = self.source.encode([example.source for example in examples])
        for row, example in zip(rows, examples, strict=True):
            row.append(IDS.eos)
            if example.features:
                names = split_features(example.features, self.feature_separator)
                row[:0] = [self._feature_ids.get(name, IDS.unk) for name in names]
        return rows

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of the target text, and the end."""
        rows = self.target.encode(texts)
        for row in rows:
            row.append(IDS.eos)
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
        return tokenizer.pieces([index])[0] if index < tokenizer.size else self.features[index - tokenizer.size]

    def note_unknown(self, examples: Sequence[Example], rows: Sequence[Sequence[int]], unknown: Unknown) -> None:
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
        source = Tokenizer.load(directory / (SHARED if config.shared else SOURCE))
        target = source if config.shared else Tokenizer.load(directory / TARGET)
        return cls(source, target, config.features, config.columns, config.feature_separator)


def split_features(features: str, separator: str) -> list[str]:
    """The symbols of a features column: between separators, without the white space around them, never empty."""
    return [name for part in features.split(separator) if (name := part.strip())]
