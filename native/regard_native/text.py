"""Text to token ids and back, for the tokenizers that regard learns."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
from tokenizers import Tokenizer as Library

from regard_native.core import NativeError

UNKNOWN = "⁇"  # U+2047, the text of an unknown token
PAD, UNK, SOS, EOS, MASK = range(5)
NAMES = ("<pad>", UNKNOWN, "<sos>", "<eos>", "<mask>")  # printable forms of the special tokens
STORED_NAMES = tuple(f"< {name} >" for name in ("pad", "unk", "sos", "eos", "mask"))
MAX_FILE_BYTES = 64 * 2**20


class Tokenizer:
    """Text <-> ids. Special tokens never occur in text."""

    def __init__(self, text: str, scheme: str) -> None:
        self.kind = scheme.partition(":")[0]
        library = Library.from_str(text)
        self.size = library.get_vocab_size()
        self.tokens = [library.id_to_token(index) or "" for index in range(self.size)]
        self.special = 5 if tuple(self.tokens[:5]) == STORED_NAMES else 4
        if tuple(self.tokens[:4]) != STORED_NAMES[:4]:
            raise NativeError("the ids of its special tokens are not those of a learned vocabulary")
        self._library = library
        self._ids = {token: index for index, token in enumerate(self.tokens) if index >= self.special}
        self._bytes: list[bytes] | None = None
        if self.kind in ("byte", "bpe", "unigram"):
            byte_of = {letter: byte for byte, letter in enumerate(_byte_letters())}
            text_bytes = [bytes(byte_of[letter] for letter in token) for token in self.tokens[self.special :]]
            self._bytes = [b""] * self.special + text_bytes
            self._bytes[UNK] = UNKNOWN.encode()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        match self.kind:
            case "char" | "nfd":
                parts: Iterable[str] = unicodedata.normalize("NFD", text) if self.kind == "nfd" else text
            case "space":
                parts = (part for part in text.split(" ") if part)
            case _:
                return list(self._library.encode(text, add_special_tokens=False).ids)
        return [self._ids.get(part, UNK) for part in parts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens are skipped, an unknown token is `⁇`."""
        kept = [index for index in ids if index >= self.special or index == UNK]
        if self._bytes is not None:
            return b"".join(self._bytes[index] for index in kept).decode("utf-8", "replace")
        parts = [UNKNOWN if index == UNK else self.tokens[index] for index in kept]
        if self.kind == "word":  # words include the space before them, except the text of unknown words
            parts = [f" {part}" if kept[i] == UNK and i else part for i, part in enumerate(parts)]
        text = (" " if self.kind == "space" else "").join(parts)
        return unicodedata.normalize("NFC", text) if self.kind == "nfd" else text

    def piece(self, index: int) -> str:
        """A printable string for an id."""
        if index < self.special:
            return NAMES[index]
        return self.tokens[index] if self._bytes is None else self._bytes[index].decode("utf-8", "backslashreplace")


def _byte_letters() -> list[str]:
    """The letter of each of the 256 bytes in byte-level tokens: a visible character stands for itself."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    invisible = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + invisible.index(byte)) for byte in range(256)]


class Codec:
    """The tokenizers and features of a run."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        if config["ids"] is not None:
            raise NativeError(
                f"{directory}: its tokenizer is that of an imported model, which only regard reads; "
                "use: regard generate --engine native"
            )
        shared = bool(config["shared"])
        names = ("tokenizer.json",) * 2 if shared else ("source.tokenizer.json", "target.tokenizer.json")
        schemes = (config["source_tokens"], config["target_tokens"])
        self.source, self.target = (
            _read(directory / name, scheme) for name, scheme in zip(names, schemes, strict=True)
        )
        self.features: Sequence[str] = config["features"]
        self.takes_features = "features" in config["columns"]
        self.separator: str = config["feature_separator"]
        self.before = [SOS] * (config["frame"] in ("both", "start"))
        self.after = [EOS] * (config["frame"] in ("both", "end"))
        self._feature_ids = {name: self.source.size + index for index, name in enumerate(self.features)}

    def encode_source(self, text: str, features: str | None) -> list[int]:
        """The ids of features and text, framed by special tokens."""
        names = [name for part in (features or "").split(self.separator) if (name := part.strip())]
        ids = [self._feature_ids.get(name, UNK) for name in names]
        return [*self.before, *ids, *self.source.encode(text), *self.after]


def _read(path: Path, scheme: str) -> Tokenizer:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise NativeError(f"{path}: has more than {MAX_FILE_BYTES // 2**20} MB, too many for a tokenizer")
        return Tokenizer(path.read_text(encoding="utf-8"), scheme)
    except FileNotFoundError:
        raise NativeError(f"{path}: no such file") from None
    except NativeError as error:
        raise NativeError(f"{path}: {error}") from None
    except BaseException as error:  # the library raises its own exceptions, and panics
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise NativeError(f"{path}: not a tokenizer of a run: {error!r:.300}") from None
