"""Choosing how to cut text, from the text itself, with the reason in a sentence."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

# (lines up to, symbols): few lines cannot teach the embedding of many symbols
SIZES = ((1_000, 1_000), (5_000, 2_000), (20_000, 4_000), (200_000, 8_000), (2_000_000, 16_000))
LARGE = 32_000


class Choice(NamedTuple):
    """A scheme and why."""

    scheme: str
    reason: str

    def __str__(self) -> str:
        return f"{self.scheme}: {self.reason}"


def choose(sample: Sequence[str], lines: int | None = None) -> Choice:
    """Choose a scheme for text like `sample`, of which there are `lines` lines in all.

    Symbols separated by spaces are recognised by their number: few different ones that come again and again, or very
    short ones. Short lines and unbroken strings over a small alphabet go by character, all else by learned pieces.
    """
    lines = len(sample) if lines is None else lines
    symbols = Counter(symbol for text in sample for symbol in text.split(" ") if symbol)
    letters = Counter("".join(sample))
    total = symbols.total()
    words = total / max(1, len(sample))
    size = sum(len(symbol) * count for symbol, count in symbols.items()) / max(1, total)
    length = letters.total() / max(1, len(sample))

    spaced = sum(" " in text.strip(" ") for text in sample) >= len(sample) / 2
    again = total / max(1, len(symbols))
    closed = len(symbols) <= 500 and again >= 20
    short = size <= 1.5 or (size <= 2.5 and len(symbols) <= 1_000 and again >= 3)
    if spaced and (closed or short):
        return Choice("space", f"{len(symbols):,} distinct symbols separated by spaces, {size:.1f} characters each")
    parts = set(unicodedata.normalize("NFD", "".join(letters)))
    ideographs = len(parts) > 500  # one of them says as much as several letters
    if (words < 1.5 and len(parts) <= 100) or length <= (10 if ideographs else 30 if words < 3 else 12):
        composed = all(unicodedata.is_normalized("NFC", text) for text in sample)
        if composed and len(parts) <= 0.75 * len(letters):
            return Choice("nfd", f"short lines of {len(letters):,} distinct characters, made of {len(parts)} parts")
        return Choice("char", f"short lines (mean {words:.1f} words, {length:.1f} characters, {len(letters)} distinct)")
    number = next((number for most, number in SIZES if lines <= most), LARGE)
    return Choice(f"bpe:{number}", f"sentences (mean {words:.1f} words, {length:.0f} characters), {lines:,} lines")
