"""A tokenizer that came with a model from elsewhere, used as it is, with its own ids for what is not text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from regard.config import SpecialIds
from regard.errors import UserError
from regard.text.learn import byte_letters
from regard.text.tokenizer import UNKNOWN, Tokenizer, read_text

# Names that begin with this are never found in text, which has no such characters: those of special tokens, so that
# nothing a user types is one, and in a file those of tokens that are of another text with the same vocabulary.
HIDDEN = "\U0010fffe\U0010ffff"
BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}  # how some vocabularies name single bytes


class ForeignTokenizer(Tokenizer):
    """Any tokenizer of the `tokenizers` library: cutting, numbering and joining are the library's.

    Text becomes ids without marks around it, and tokens that are marked as special are never found in it. Tokens that
    are merely added to the vocabulary are. `size` is the number of ids that the model has; pieces numbered higher take
    part in the cutting and count as unknown.
    """

    def __init__(self, text: str, ids: SpecialIds, size: int | None = None) -> None:
        state: dict[str, Any] = json.loads(text)
        self._text = text
        self._kind = self.scheme = "foreign"
        self.ids = ids
        added = {token["id"]: token["content"] for token in state["added_tokens"] if token["special"]}
        self.special = frozenset({*added, *ids.model_dump(exclude_none=True).values()})
        names = {**_numbered(state["model"]), **{token["id"]: token["content"] for token in state["added_tokens"]}}
        self.size = 1 + max(names) if size is None else size
        if max(ids.model_dump(exclude_none=True).values()) >= self.size:
            raise UserError(f"it has {self.size} tokens, too few for {ids}")
        self._symbols = [names.get(index, "").removeprefix(HIDDEN) for index in range(self.size)]
        self._aside = {self._symbols[i]: i for i, name in names.items() if i < self.size and name.startswith(HIDDEN)}
        self._more = max(names) >= self.size
        self._library = Library.from_str(json.dumps(_hide(state, self.special)))
        self._library.encode_special_tokens = True
        self._decoder = self._library.decoder
        self._steps = _steps(state["decoder"])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Turn each text into ids, without the marks around it."""
        found = self._encodings([self._clean(text) for text in texts], fast=not self._aside)
        rows = [self._numbers(encoding) for encoding in found]
        if self._more:
            unk = self.ids.unk
            instead = [unk] if self._is_unknown(unk) else []
            rows = [[i for index in row for i in ([index] if index < self.size else instead)] for row in rows]
        return rows

    def _clean(self, text: str) -> str:
        return super()._clean(text.replace(HIDDEN, "\N{REPLACEMENT CHARACTER}"))

    def _numbers(self, encoding: Any) -> list[int]:
        """SpecialIds; what is unknown as a whole may be a token of the other text."""
        ids, unk, aside = list(encoding.ids), self.ids.unk, self._aside
        if not aside:
            return ids
        return [aside.get(symbol, i) if i == unk else i for i, symbol in zip(ids, encoding.tokens, strict=True)]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text; what is special is skipped wherever it stands, an unknown token is `⁇`."""
        shown = ((index, self._is_unknown(index)) for index in ids)
        symbols = [UNKNOWN if new else self._symbols[i] for i, new in shown if new or i not in self.special]
        return str(self._decoder.decode(symbols)) if self._decoder else " ".join(symbols)

    def _is_unknown(self, index: int) -> bool:
        """Whether an id says that a token is unknown; where another mark stands in for that, none does."""
        ids = self.ids
        return (index == ids.unk and index not in (ids.pad, ids.sos, ids.eos, ids.mask)) or index >= self.size

    def _piece(self, index: int) -> str:
        if index in self.special:
            return UNKNOWN if self._is_unknown(index) else self._symbols[index]
        if "WordPiece" in self._steps:
            return self._symbols[index]
        return self._spelling(index).decode("utf-8", "backslashreplace")

    def spellings(self) -> list[bytes]:
        """The bytes that each token stands for in a text, with the space before a word; none for what is not text."""
        return [b"" if index in self.special else self._spelling(index) for index in range(self.size)]

    def _spelling(self, index: int) -> bytes:
        symbol, steps = self._symbols[index], self._steps
        if "ByteLevel" in steps and all(letter in _BYTE_OF for letter in symbol):
            return bytes(map(_BYTE_OF.__getitem__, symbol))
        if "ByteFallback" in steps and symbol in BYTES:
            return BYTES[symbol]
        if "WordPiece" in steps:
            prefix = steps["WordPiece"]["prefix"]
            return (symbol.removeprefix(prefix) if symbol.startswith(prefix) else f" {symbol}").encode()
        if "BPEDecoder" in steps:
            return symbol.replace(steps["BPEDecoder"]["suffix"], " ").encode()
        return symbol.replace("▁", " ").encode() if {"Metaspace", "Replace"} & steps.keys() else symbol.encode()

    def to_json(self) -> str:
        """The file as it came."""
        return self._text

    @classmethod
    def read(cls, path: str | Path, ids: SpecialIds, size: int | None = None) -> ForeignTokenizer:
        """Read a tokenizer of the library; nothing in the file can run code."""
        text = read_text(path)
        try:
            return cls(text, ids, size)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except Exception as error:  # the library raises plain Exceptions
            raise UserError(f"{path}: not a readable tokenizer: {error}") from None


_BYTE_OF = {letter: byte for byte, letter in enumerate(byte_letters())}


def _numbered(model: dict[str, Any]) -> dict[int, str]:
    vocab = model["vocab"]
    if isinstance(vocab, list):
        return {index: entry[0] for index, entry in enumerate(vocab)}
    return {index: symbol for symbol, index in vocab.items()}


def _hide(state: dict[str, Any], special: frozenset[int]) -> dict[str, Any]:
    """The same tokenizer with special tokens that cannot be written, and without cutting short or filling up."""
    model = dict(state["model"])
    vocab = model["vocab"]
    names = {symbol for index, symbol in _numbered(model).items() if index in special}
    names |= {token["content"] for token in state["added_tokens"] if token["id"] in special}

    def hidden(symbol: str) -> str:
        return HIDDEN + symbol if symbol in names else symbol

    if isinstance(vocab, list):
        model["vocab"] = [[hidden(symbol), score] for symbol, score in vocab]
    else:
        model["vocab"] = {hidden(symbol): index for symbol, index in vocab.items()}
    if model.get("unk_token") is not None:
        model["unk_token"] = hidden(model["unk_token"])
    if "merges" in model:  # either form of the file: two strings, or one with a space between them
        pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names]
    added = [{**token, "content": hidden(token["content"])} for token in state["added_tokens"]]
    removed = {"truncation": None, "padding": None, "post_processor": None}
    return {**state, **removed, "model": model, "added_tokens": added}


def _steps(decoder: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The steps that join tokens to text, by name."""
    if decoder is None:
        return {}
    return {step["type"]: step for step in decoder.get("decoders", [decoder])}
