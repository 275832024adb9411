"""The ways of cutting text into symbols, and how a request for one is read."""

from __future__ import annotations

import re
from typing import NamedTuple

from regard.errors import UserError, closest

SIMPLE = ("char", "nfd", "space", "word", "byte")  # the symbols follow from the text
LEARNED = ("bpe", "unigram")  # the symbols are learned, as many as asked for
ALLOWED = "char, nfd, space, word, byte, bpe:N, unigram:N (N symbols, for example bpe:8000) or auto"
SMALLEST = 260  # four symbols that are not text and 256 bytes
LARGEST = 1_000_000


class Scheme(NamedTuple):
    """A way of cutting text, with the number of symbols where that is free."""

    kind: str
    size: int | None = None

    def __str__(self) -> str:
        return self.kind if self.size is None else f"{self.kind}:{self.size}"


def parse_scheme(request: str, where: str = "tokens") -> Scheme:
    """Read `char`, `bpe:8000` and the like; `auto` is kept as it is."""
    kind, colon, number = request.partition(":")
    if kind in ("auto", *SIMPLE):
        if colon:
            raise UserError(f"{where}: {kind} takes no number; write {kind!r}, not {request!r}")
        return Scheme(kind)
    if kind in LEARNED:
        if not re.fullmatch(r"[0-9]{1,9}", number):
            raise UserError(f"{where}: {request!r} lacks its number of symbols; write it as {kind}:8000")
        if not SMALLEST <= int(number) <= LARGEST:
            raise UserError(
                f"{where}: {request!r} is out of range; N counts every symbol, among them the 256 bytes and 4 that are "
                f"not text, and goes from {SMALLEST} to {LARGEST}"
            )
        return Scheme(kind, int(number))
    near = closest(kind, ("auto", *SIMPLE, *LEARNED))
    raise UserError(f"{where}: {request!r} is not a way of cutting text{near}\n  allowed: {ALLOWED}")
