"""How phrases and symbols are spelled, so that a phrase is found in an output however it is cut into symbols."""

from __future__ import annotations

import json
from collections.abc import Sequence

from regard.decode.phrases import Letters, Spelling
from regard.text.library import FIRST, byte_letters
from regard.text.tokenizer import Tokenizer


class Speller:
    """Letters are the bytes of the text; in a vocabulary of symbols set apart by spaces, the symbols themselves."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, blocked: Sequence[int], eos: int) -> None:
        self.tokenizer = tokenizer
        self.spaced = tokenizer.scheme == "space"
        size = tokenizer.size
        if self.spaced:
            letters: list[Sequence[int]] = [[index] for index in range(size)]
        elif tokenizer.scheme in ("char", "word"):
            letters = [piece.encode("utf-8", "replace") for piece in tokenizer.pieces(range(size))]
        else:
            letters = _bytes(tokenizer)
        letters = [[] if index < FIRST else letters[index] for index in range(size)]
        unusable = {*blocked, eos}
        usable = [index not in unusable for index in range(vocab)]
        self.spelling = Spelling.of([*letters, *([] for _ in range(vocab - size))], usable)

    def spell(self, phrase: str) -> Letters:
        """The letters of a phrase."""
        if self.spaced:
            return tuple(self.tokenizer.encode([phrase.strip(" ")])[0])
        return tuple(phrase.encode("utf-8", "replace"))


def _bytes(tokenizer: Tokenizer) -> list[Sequence[int]]:
    """The bytes of every symbol of a byte-level vocabulary, from its saved form, which writes a byte as a letter."""
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    vocab = json.loads(tokenizer.to_json())["model"]["vocab"]
    symbols = [entry[0] for entry in vocab] if isinstance(vocab, list) else sorted(vocab, key=vocab.__getitem__)
    return [[byte_of[letter] for letter in symbol] if i >= FIRST else [] for i, symbol in enumerate(symbols)]
