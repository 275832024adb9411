"""What was unknown: which symbols, how often, where first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from regard.text.tokenizer import Tokenizer

DISTINCT = 10_000  # beyond so many different symbols only their number is kept


class Unknown:
    """A count of unknown symbols, filled line by line, told in one sentence."""

    def __init__(self) -> None:
        self.symbols: Counter[str] = Counter()  # how often each
        self.first: dict[str, str] = {}  # a text in which each was seen
        self.total = 0
        self.texts = 0  # texts with at least one

    def add(self, tokenizer: Tokenizer, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        """Count what is unknown in `texts`, of which `ids` are the symbols."""
        for text, row in zip(texts, ids, strict=True):
            if tokenizer.unknown(row):
                self.count(tokenizer.unknown_symbols(text), text)

    def count(self, symbols: Sequence[str], text: str) -> None:
        """Count unknown `symbols`, seen in `text`."""
        self.total += len(symbols)
        self.texts += bool(symbols)
        for symbol in symbols:
            if symbol in self.symbols or len(self.symbols) < DISTINCT:
                self.symbols[symbol] += 1
                self.first.setdefault(symbol, text)

    def __bool__(self) -> bool:
        return self.total > 0

    def summary(self, most: int = 8, what: str = "symbol") -> str:
        """Say what was unknown, most frequent first; empty if nothing was."""
        if not self:
            return ""
        named = sorted(self.symbols.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{_shown(symbol)} {count:,}x" for symbol, count in named[:most])
        rest = f" and {len(named) - most:,} more" if len(named) > most else ""
        times = f"{self.total:,} unknown {what}{'s' * (self.total > 1)}"
        return f"{times} in {self.texts:,} line{'s' * (self.texts > 1)}: {shown}{rest}"


def _shown(symbol: str) -> str:
    """A symbol in quotes, with its code point where the eye may not tell."""
    short = symbol if len(symbol) <= 24 else symbol[:23] + "…"
    if len(symbol) == 1 and not symbol.isascii():
        return f"{short!r} (U+{ord(symbol):04X})"
    return repr(short)
