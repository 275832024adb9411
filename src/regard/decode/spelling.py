"""How phrases and symbols are spelled, so that a phrase is found in an output however it is cut into symbols."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from regard.decode.phrases import Letters, Spelling
from regard.text.tokenizer import Tokenizer

APART = 0x110000  # a letter of its own, beyond all characters: here the character before is complete


class Speller:
    """Letters are the bytes of the text; in a vocabulary of symbols set apart by spaces, the symbols themselves.

    Where symbols are parts of characters, which join when the text is put together, letters are those parts, with
    `APART` before each that begins a character and at the end: so `e` is not found in `é`, nor in any marked `e`.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, blocked: Sequence[int], eos: int) -> None:
        self.tokenizer = tokenizer
        self.spaced = tokenizer.scheme == "space"
        self.joined = tokenizer.scheme == "nfd"
        letters: list[Sequence[int]] = [*tokenizer.spellings()]
        if self.spaced:
            letters = [[index] for index in range(tokenizer.size)]
        elif self.joined:
            letters = [_parts(piece) for piece in tokenizer.pieces(range(tokenizer.size))]
        letters = [[] if index in tokenizer.special else one for index, one in enumerate(letters)]
        letters += [[] for _ in range(vocab - tokenizer.size)]
        letters[eos] = [APART] if self.joined else []
        unusable = {*blocked, eos}
        self.spelling = Spelling.of(letters, [index not in unusable for index in range(vocab)], eos)

    def spell(self, phrase: str) -> Letters:
        """The letters of a phrase."""
        if self.spaced:
            return tuple(self.tokenizer.encode([phrase.strip(" ")])[0])
        if self.joined:
            return (*_parts(unicodedata.normalize("NFD", phrase)), APART) if phrase else ()
        return tuple(phrase.encode("utf-8", "replace"))


def joins(part: str) -> bool:
    """Whether a part may join the character before it: a mark, or the middle or end of a Hangul syllable."""
    return unicodedata.category(part).startswith("M") or "\u1161" <= part <= "\u1175" or "\u11a8" <= part <= "\u11c2"


def joining(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The symbols that may change the character before them."""
    if tokenizer.scheme != "nfd":
        return ()
    pieces = tokenizer.pieces(range(tokenizer.size))
    return tuple(index for index, piece in enumerate(pieces) if index not in tokenizer.special and joins(piece))


def composed(text: str) -> str:
    """Text with the parts of its characters joined."""
    return unicodedata.normalize("NFC", text)


def _parts(text: str) -> list[int]:
    return [letter for part in text for letter in ((ord(part),) if joins(part) else (APART, ord(part)))]
