"""A tokenizer: text to ids and back, by one of a handful of schemes."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from regard.config import SpecialIds
from regard.errors import UserError
from regard.files import replace_file
from regard.text.learn import IDS, PATTERNS, SMALLEST, SPECIALS, byte_letters, learn, parse_scheme, single, threads

UNKNOWN = "⁇"  # how an unknown token is shown: U+2047
SHOWN = ("<pad>", UNKNOWN, "<sos>", "<eos>", "<mask>")


class Tokenizer:
    """Text <-> ids. `special` ids are never text; `ids` says which of them are padding, unknown, start, end and mask.

    They come first, 0 to 3 (4 with a mask), in what we learn ourselves:

    char    every code point; exact
    nfd     every code point after canonical decomposition: letters and marks apart, Hangul as jamo; exact for NFC text
    space   what stands between spaces (U+0020 only); exact but for doubled, leading and trailing spaces
    word    words, digits and signs, each with the one space before it; exact
    byte    the 256 bytes of UTF-8; exact, nothing is unknown
    bpe:N, unigram:N   learned pieces over bytes; exact, nothing is unknown

    Exact means that `decode(encode([text])[0]) == text` when no token is unknown; an unknown one comes back as `⁇`.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._kind = _kind(library)
        self.size: int = library.get_vocab_size(with_added_tokens=True)
        symbols = [library.id_to_token(index) or "" for index in range(self.size)]
        self.ids = SpecialIds(mask=4) if tuple(symbols[: len(SPECIALS)]) == SPECIALS else IDS
        first = len(SPECIALS) if self.ids.mask else len(SPECIALS) - 1  # the first id that is text
        if tuple(symbols[:first]) != SPECIALS[:first] or "" in symbols or library.get_added_tokens_decoder():
            raise UserError("its tokens are not numbered as in a tokenizer of a run")
        self.special = frozenset(range(first))
        self.scheme: str = f"{self._kind}:{self.size}" if self._kind in ("bpe", "unigram") else self._kind
        self._symbols: list[str] = symbols
        self._ids = {symbol: index for index, symbol in enumerate(symbols) if index >= first}
        self._bytes: list[bytes] | None = None  # of each token, in the byte-level schemes
        if self._kind in ("byte", "bpe", "unigram"):
            byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
            text = (bytes(map(byte_of.__getitem__, symbol)) for symbol in symbols[first:])
            self._bytes = [*(b"" for _ in range(first)), *text]
            self._bytes[self.ids.unk] = UNKNOWN.encode()

    @classmethod
    def train(cls, scheme: str, texts: Iterable[str], min_count: int = 1, mask: bool = False) -> Tokenizer:
        """Learn a tokenizer from a stream of texts, with a token for what is hidden if `mask` is set.

        Tokens rarer than `min_count` are unknown (char, space, word).
        bpe:N and unigram:N end up with fewer than N tokens when the text does not have so many; `scheme` then says so.
        """
        parsed = parse_scheme(scheme)
        if parsed.kind == "auto":
            raise ValueError("auto is resolved by regard.text.learn.choose, before training")
        if parsed.size is not None and parsed.size < SMALLEST + mask:
            raise UserError(
                f"tokens: {scheme!r} has no room for the mask beside 256 bytes; ask for {SMALLEST + 1} or more"
            )
        with threads():
            return cls(learn(parsed, texts, min_count, mask))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Turn each text into ids, without start and end."""
        texts = list(texts)
        if self._kind in ("char", "nfd", "space"):  # the same, and many times faster, than asking the library
            ids, unk = self._ids, self.ids.unk
            return [[ids.get(symbol, unk) for symbol in single(self._kind, text)] for text in texts]
        return [self._numbers(encoding) for encoding in self._encodings(texts)]

    def _encodings(self, texts: list[str], fast: bool = True) -> list[Any]:
        """What the library makes of the texts; the fast way gives ids and nothing else."""
        encode = self._library.encode_batch_fast if fast else self._library.encode_batch
        try:
            found: list[Any] = encode(texts, add_special_tokens=False)
        except TypeError:  # half of a surrogate pair is no text; files cannot hold one, but Python strings can
            found = encode([self._clean(text) for text in texts], add_special_tokens=False)
        return found

    def _clean(self, text: str) -> str:
        return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)

    def _numbers(self, encoding: Any) -> list[int]:
        return list(encoding.ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text; padding, start and end are skipped wherever they stand."""
        unk = self.ids.unk
        kept = [index for index in ids if index not in self.special or index == unk]
        if self._bytes is not None:
            return b"".join([self._bytes[index] for index in kept]).decode("utf-8", "replace")
        shown = [UNKNOWN if index == unk else self._symbols[index] for index in kept]
        if self._kind == "word":  # most words bring their space along; an unknown one has lost it
            shown = [f" {s}" if kept[i] == unk and i else s for i, s in enumerate(shown)]
        text = (" " if self._kind == "space" else "").join(shown)
        return unicodedata.normalize("NFC", text) if self._kind == "nfd" else text

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """One string to show per id; bytes that are not a whole character are written as `\\xe4`."""
        return [self._piece(index) for index in ids]

    def _piece(self, index: int) -> str:
        if index in self.special:
            return SHOWN[index]
        return self._symbols[index] if self._bytes is None else self._bytes[index].decode("utf-8", "backslashreplace")

    def unknown(self, ids: Iterable[int]) -> int:
        """How many of the ids are the unknown token."""
        return sum(map(self._is_unknown, ids))

    def _is_unknown(self, index: int) -> bool:
        return index == self.ids.unk

    def unknown_symbols(self, text: str) -> list[str]:
        """The tokens of `text` that this tokenizer does not know, in order, with repetitions."""
        text = self._clean(text)
        [encoding] = self._encodings([text], fast=False)
        found = zip(self._numbers(encoding), encoding.offsets, strict=True)
        return [text[a:b] for index, (a, b) in found if self._is_unknown(index)]

    def spellings(self) -> list[bytes]:
        """The bytes that each token stands for in a text; none for what is not text."""
        spelled = self._bytes or [symbol.encode("utf-8", "replace") for symbol in self._symbols]
        return [b"" if index in self.special else letters for index, letters in enumerate(spelled)]

    def to_json(self) -> str:
        """The tokenizer in the library's own format, which other tools read too."""
        return str(self._library.to_str(pretty=False))

    def save(self, path: str | Path) -> None:
        replace_file(Path(path), lambda temporary: temporary.write_text(self.to_json(), encoding="utf-8") and None)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a saved tokenizer; nothing in the file can run code."""
        text = read_text(path)
        try:
            return cls(Library.from_str(text))
        except UserError as error:
            raise UserError(f"{path}: not a tokenizer of ours: {error}") from None
        except Exception as error:  # the library raises plain Exceptions
            raise UserError(f"{path}: not a readable tokenizer: {error}") from None


def read_text(path: str | Path) -> str:
    """The text of a tokenizer's file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such tokenizer") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable tokenizer: {error}") from None


def _kind(library: Library) -> str:
    """Recognise the scheme by what the library was told to do."""
    state: dict[str, Any] = json.loads(library.to_str())
    cut, model = state["pre_tokenizer"] or {}, state["model"]["type"]
    pattern = cut.get("pattern", {})
    if cut.get("type") == "ByteLevel" and model in ("BPE", "Unigram") and not cut["add_prefix_space"]:
        if model == "Unigram":
            return "unigram"
        return "bpe" if cut["use_regex"] else "byte"
    if cut.get("type") == "Split" and model == "WordLevel":
        if pattern == {"String": " "}:
            return "space"
        if (state["normalizer"] or {}).get("type") == "NFD" and pattern == {"Regex": PATTERNS["nfd"]}:
            return "nfd"
        for kind, regex in PATTERNS.items():
            if pattern == {"Regex": regex}:
                return kind
    raise UserError("it cuts text in a way that is not known here")
