"""SentencePiece models, read without their library, as tokenizers of the library we use.

Such a file is a protocol buffer. What counts in it: the pieces with their scores and kinds, how they were learned, and
how text is prepared.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from regard.errors import UserError
from regard.text.foreign import HIDDEN

NORMAL, UNKNOWN, CONTROL, CHOSEN, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
SPACE = "▁"


class Piece(NamedTuple):
    """A symbol."""

    text: str
    score: float
    kind: int


class Pieces(NamedTuple):
    """A SentencePiece model."""

    pieces: list[Piece]
    algorithm: int
    charsmap: bytes  # how characters are rewritten, in a form that the tokenizers library knows
    composed: bool  # letters and marks are put together by that
    prefix: bool  # a space is put before the text
    squeeze: bool  # spaces at the ends are dropped, and all but one of several

    def named(self, *kinds: int) -> list[str]:
        """The symbols of some kinds."""
        return [piece.text for piece in self.pieces if piece.kind in kinds]


def read_pieces(path: Path) -> Pieces:
    """Read a SentencePiece model."""
    try:
        found = _fields(path.read_bytes())
        pieces = [_piece(data) for data in found.get(1, [])]
        learned, prepared = _fields(b"".join(found.get(2, []))), _fields(b"".join(found.get(3, [])))
        algorithm, suffixes = learned.get(3, [UNIGRAM])[-1], learned.get(24, [0])[-1]
        charsmap, composed = bytes(prepared.get(2, [b""])[-1]), b"nfkc" in prepared.get(1, [b""])[-1]
        prefix, squeeze, escape = (bool(prepared.get(number, [1])[-1]) for number in (3, 4, 5))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, struct.error) as error:
        raise UserError(f"{path}: not a SentencePiece model: {error}") from None
    if not pieces or algorithm not in (UNIGRAM, BPE) or suffixes or not escape:
        raise UserError(f"{path}: only unigram and bpe models that write a space as {SPACE} before a word can be read")
    if sum(piece.kind == UNKNOWN for piece in pieces) != 1:
        raise UserError(f"{path}: not a SentencePiece model: it has no unknown symbol")
    return Pieces(pieces, algorithm, charsmap, composed, prefix, squeeze)


def _fields(data: bytes) -> dict[int, list[Any]]:
    """The fields of a protocol buffer message by number: whole numbers, or bytes."""
    found: dict[int, list[Any]] = {}
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            if place >= len(data) or shift > 63:
                raise ValueError("it breaks off in the middle of a number")
            byte = data[place]
            place, value, shift = place + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while place < len(data):
        key = number()
        wire = key & 7
        if wire == 0:
            found.setdefault(key >> 3, []).append(number())
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"field type {wire} is not known")
        size = {1: 8, 5: 4}.get(wire) or number()
        if place + size > len(data):
            raise ValueError("it breaks off in the middle of a field")
        found.setdefault(key >> 3, []).append(data[place : place + size])
        place += size
    return found


def _piece(data: bytes) -> Piece:
    fields = _fields(data)
    score = struct.unpack("<f", fields.get(2, [bytes(4)])[-1])[0]
    return Piece(fields[1][-1].decode("utf-8"), score, fields.get(3, [NORMAL])[-1])


def build(model: Pieces, numbers: Mapping[str, int] | None = None, marks: Collection[str] = ()) -> Tokenizer:
    """The same tokenizer as the library has it.

    `numbers` are the ids of its symbols where they are not counted through. Among them may be others: `marks`, which
    keep their names, and symbols of another text, which are never found in this one. Symbols without a number come
    after all that have one.
    """
    names = _names(model, numbers, marks)
    library = Tokenizer(_unigram(model, names) if model.algorithm == UNIGRAM else _bpe(model, names))
    library.normalizer = normalizers.Sequence(list(_preparation(model)))
    words = model.named(NORMAL, CHOSEN)
    if SPACE in words and not any(SPACE in word[1:] for word in words):  # then words are cut one by one: faster
        library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=True)
    library.decoder = decoders.Sequence(list(_joining(model)))
    library.add_special_tokens([name for name in model.named(UNKNOWN, CONTROL) if name in names])
    if model.algorithm == BPE:
        library.add_tokens([AddedToken(name, normalized=False) for name in model.named(CHOSEN)])
    return library


def _names(model: Pieces, numbers: Mapping[str, int] | None, marks: Collection[str]) -> list[str]:
    """The name of each id."""
    if numbers is None:
        return [HIDDEN + text if kind == UNUSED else text for text, _, kind in model.pieces]
    own = {*model.named(NORMAL, UNKNOWN, CONTROL, CHOSEN, BYTE), *marks}
    names = [f"{HIDDEN}{index}" for index in range(1 + max(numbers.values()))]
    for text, index in numbers.items():
        names[index] = text if text in own else HIDDEN + text
    return names + [text for text in model.named(NORMAL, UNKNOWN, CHOSEN, BYTE) if text not in numbers]


def _preparation(model: Pieces) -> Iterator[Any]:
    if model.charsmap:
        if model.composed:  # the library looks at few characters at a time, too few for two marks or a Hangul syllable
            yield normalizers.NFC()
        yield normalizers.Precompiled(model.charsmap)
    if model.squeeze:
        yield normalizers.Replace(Regex(" {2,}"), " ")
        yield normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), "")
    if model.prefix:
        yield normalizers.Prepend(SPACE)
    yield normalizers.Replace(" ", SPACE)


def _joining(model: Pieces) -> Iterator[Any]:
    yield decoders.Replace(HIDDEN, "")
    yield decoders.Replace(SPACE, " ")
    if model.named(BYTE):
        yield decoders.ByteFallback()
    yield decoders.Fuse()
    if model.prefix:
        yield decoders.Strip(" ", 1, 0)


def _unigram(model: Pieces, names: list[str]) -> Any:
    scores = {text: score for text, score, kind in model.pieces if kind == NORMAL}
    lowest, highest = min(scores.values(), default=0.0), max(scores.values(), default=0.0)
    # What somebody chose as a symbol is better than any way of cutting it. The name of a byte is no text, but the
    # library must find it: worse than any way of cutting it.
    scores.update((text, len(text.encode()) * highest - 0.1) for text in model.named(CHOSEN))
    scores.update((text, lowest - 100) for text in model.named(BYTE))
    [unknown] = model.named(UNKNOWN)
    vocab = [(name, scores.get(name, 0.0)) for name in names]
    return models.Unigram(vocab, names.index(unknown), bool(model.named(BYTE)))


def _bpe(model: Pieces, names: list[str]) -> Any:
    """Pairs are joined in the order of what they give, best first."""
    vocab = {name: index for index, name in enumerate(names)}
    scores = {text: score for text, score, kind in model.pieces if kind == NORMAL}
    merges: list[tuple[str, str]] = []
    for text in sorted(scores, key=lambda text: -scores[text]):
        cuts = ((text[:i], text[i:]) for i in range(1, len(text)))
        pairs = [(a, b) for a, b in cuts if a in scores and b in scores]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    [unknown] = model.named(UNKNOWN)
    return models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bool(model.named(BYTE)))
