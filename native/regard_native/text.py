"""Text to token ids and back: the tokenizers that regard learns, and those of imported models."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
from tokenizers import Tokenizer as Library

from regard_native.core import NativeError

UNKNOWN = "⁇"  # U+2047, the text of an unknown token
PAD, UNK, SOS, EOS, MASK = range(5)  # of a learned vocabulary
NAMES = ("<pad>", UNKNOWN, "<sos>", "<eos>", "<mask>")  # printable forms of the special tokens
KINDS = ("char", "nfd", "space", "word", "byte", "bpe", "unigram")
STORED_NAMES = tuple(f"< {name} >" for name in ("pad", "unk", "sos", "eos", "mask"))
MAX_FILE_BYTES = 64 * 2**20
MAX_TOKENS = 2**21  # in a vocabulary
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair, which a Python string can contain
# Prefix of tokens that must not match text (noncharacters): special tokens and, in a tokenizer file, the tokens of the
# other side of a shared vocabulary.
HIDDEN = "\U0010fffe\U0010ffff"
BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}  # names of single bytes in some vocabularies


def _byte_letters() -> list[str]:
    """The letter of each of the 256 bytes in byte-level tokens: a visible character stands for itself."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    invisible = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + invisible.index(byte)) for byte in range(256)]


class Tokenizer:
    """Text <-> ids, by a learned vocabulary. `special` ids never occur in text."""

    def __init__(self, text: str, scheme: str) -> None:
        self.kind = scheme.partition(":")[0]
        if self.kind not in KINDS:
            raise NativeError(f"its scheme is {scheme!r:.50}; allowed are {', '.join(KINDS)}")
        state = checked_state(text)
        if any(state.get(key) for key in ("truncation", "padding", "post_processor", "added_tokens")):
            raise NativeError("it has truncation, padding, added tokens or a post-processor")
        library = Library.from_str(text)
        self.size = library.get_vocab_size()
        self.tokens = [library.id_to_token(index) or "" for index in range(self.size)]
        first = 5 if tuple(self.tokens[:5]) == STORED_NAMES else 4
        if tuple(self.tokens[:4]) != STORED_NAMES[:4]:
            raise NativeError("the ids of its special tokens are not those of a learned vocabulary")
        self.unk = UNK
        self.special = frozenset(range(first))
        self._library = library
        self._ids = {token: index for index, token in enumerate(self.tokens) if index >= first}
        self._bytes: list[bytes] | None = None
        if self.kind in ("byte", "bpe", "unigram"):
            byte_of = {letter: byte for byte, letter in enumerate(_byte_letters())}
            text_bytes = [bytes(byte_of[letter] for letter in token) for token in self.tokens[first:]]
            self._bytes = [b""] * first + text_bytes
            self._bytes[UNK] = UNKNOWN.encode()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        match self.kind:
            case "char" | "nfd":
                parts: Iterable[str] = unicodedata.normalize("NFD", text) if self.kind == "nfd" else text
            case "space":
                parts = (part for part in text.split(" ") if part)
            case _:
                return list(self._split(text).ids)
        return [self._ids.get(part, UNK) for part in parts]

    def _split(self, text: str) -> Any:
        """The encoding of a text by the library."""
        with library_errors("the tokenizer cannot split this text"):
            return self._library.encode(self._clean(text), add_special_tokens=False)

    def _clean(self, text: str) -> str:
        return text if text.isascii() else SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)

    def unknown_tokens(self, text: str) -> list[str]:
        """The unknown tokens of a text, in order, with repetitions."""
        text = self._clean(text)
        encoding = self._split(text)
        spans = zip(self._numbers(encoding), encoding.offsets, strict=True)
        return [text[start:end] for index, (start, end) in spans if self.is_unknown(index)]

    def _numbers(self, encoding: Any) -> list[int]:
        return list(encoding.ids)

    def is_unknown(self, index: int) -> bool:
        return index == self.unk

    def has_unknown(self, ids: Sequence[int]) -> bool:
        return self.unk in ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens are skipped, an unknown token is `⁇`."""
        kept = [index for index in ids if index not in self.special or index == UNK]
        if self._bytes is not None:
            return b"".join([self._bytes[index] for index in kept]).decode("utf-8", "replace")
        parts = [UNKNOWN if index == UNK else self.tokens[index] for index in kept]
        if self.kind == "word":  # words include the space before them, except the text of unknown words
            parts = [f" {part}" if kept[i] == UNK and i else part for i, part in enumerate(parts)]
        text = (" " if self.kind == "space" else "").join(parts)
        return unicodedata.normalize("NFC", text) if self.kind == "nfd" else text

    def piece(self, index: int) -> str:
        """A printable string for an id."""
        if index in self.special:
            return NAMES[index]
        return self.tokens[index] if self._bytes is None else self._bytes[index].decode("utf-8", "backslashreplace")

    def texts(self) -> list[bytes]:
        """The text of every token for other programs: none of special tokens, `⁇` of the unknown one."""
        texts = self._bytes or [token.encode("utf-8", "replace") for token in self.tokens]
        named = {**dict.fromkeys(self.special, b""), self.unk: UNKNOWN.encode()}
        return [named.get(index, text) for index, text in enumerate(texts)]

    @cached_property
    def combining(self) -> tuple[int, ...]:
        """Tokens that can change the character before them: diacritics, and later parts of Hangul syllables."""
        if self.kind != "nfd":
            return ()
        return tuple(
            index
            for index, part in enumerate(self.tokens)
            if index not in self.special
            and (unicodedata.category(part)[0] == "M" or "\u1161" <= part <= "\u1175" or "\u11a8" <= part <= "\u11c2")
        )


class ForeignTokenizer(Tokenizer):
    """The tokenizer of an imported model, applied by the library.

    Special tokens are never matched in a text; other added tokens are. Ids from `size` on count as unknown.
    """

    combining = ()

    def __init__(self, text: str, ids: Mapping[str, int | None], size: int | None) -> None:
        state = checked_state(text)
        self.kind = "foreign"
        self._bytes = None
        self.unk = int(ids["unk"] or 0)
        self._named = {index for name, index in ids.items() if name != "unk"}
        own = {index for index in ids.values() if index is not None}
        self.special = frozenset(own | {token["id"] for token in state["added_tokens"] if token["special"]})
        vocab = state["model"]["vocab"]
        pairs = (
            enumerate(entry[0] for entry in vocab) if isinstance(vocab, list) else ((i, t) for t, i in vocab.items())
        )
        names = {**dict(pairs), **{token["id"]: token["content"] for token in state["added_tokens"]}}
        self.size = 1 + max(names) if size is None else size
        if not max(own) < self.size <= MAX_TOKENS:
            raise NativeError(f"it has {self.size} tokens; its special tokens are {sorted(own)}")
        self.tokens = [names.get(index, "").removeprefix(HIDDEN) for index in range(self.size)]
        self._aside = {self.tokens[i]: i for i, name in names.items() if i < self.size and name.startswith(HIDDEN)}
        self._more = max(names) >= self.size
        self._library = Library.from_str(json.dumps(_hide(state, self.special)))
        self._library.encode_special_tokens = True
        self._decoder = self._library.decoder
        decoder = state["decoder"] or {"decoders": []}  # has one step or several
        self._steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
        self._byte_of = {letter: byte for byte, letter in enumerate(_byte_letters())}

    def encode(self, text: str) -> list[int]:
        row = self._numbers(self._split(text))
        if not self._more:
            return row
        instead = [self.unk] if self.is_unknown(self.unk) else []
        return [i for index in row for i in ([index] if index < self.size else instead)]

    def _clean(self, text: str) -> str:
        return super()._clean(text.replace(HIDDEN, "\N{REPLACEMENT CHARACTER}"))

    def _numbers(self, encoding: Any) -> list[int]:
        """The ids; a token that is unknown on this side may be a token of the other side."""
        if not self._aside:
            return list(encoding.ids)
        pairs = zip(encoding.ids, encoding.tokens, strict=True)
        return [self._aside.get(token, i) if i == self.unk else i for i, token in pairs]

    def is_unknown(self, index: int) -> bool:
        """Whether an id is the unknown token, unless another special token has the same id."""
        return (index == self.unk and index not in self._named) or index >= self.size

    def has_unknown(self, ids: Sequence[int]) -> bool:
        return any(map(self.is_unknown, ids))

    def decode(self, ids: Iterable[int]) -> str:
        flagged = ((index, self.is_unknown(index)) for index in ids)
        tokens = [UNKNOWN if new else self.tokens[i] for i, new in flagged if new or i not in self.special]
        if not self._decoder:
            return " ".join(tokens)
        with library_errors("the tokenizer cannot join these tokens"):
            return str(self._decoder.decode(tokens))

    def piece(self, index: int) -> str:
        token = self.tokens[index]
        if index in self.special:
            return UNKNOWN if self.is_unknown(index) else token
        steps = self._steps
        if "WordPiece" in steps:
            return token
        if "ByteLevel" in steps and all(letter in self._byte_of for letter in token):
            return bytes(map(self._byte_of.__getitem__, token)).decode("utf-8", "backslashreplace")
        if "ByteFallback" in steps and token in BYTES:
            return BYTES[token].decode("utf-8", "backslashreplace")
        if "BPEDecoder" in steps:
            return token.replace(steps["BPEDecoder"]["suffix"], " ")
        return token.replace("▁", " ") if {"Metaspace", "Replace"} & steps.keys() else token


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn errors of the library into one sentence: exceptions, and panics, which are BaseExceptions."""
    try:
        yield
    except NativeError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise NativeError(f"{what}: {error!r:.300}") from None


def checked_state(text: str) -> dict[str, Any]:
    """Parse the format of the library and check the ids, because the library allocates tables up to the largest id."""
    state: dict[str, Any] = json.loads(text)
    vocab = state["model"]["vocab"]
    ids = [*(vocab.values() if isinstance(vocab, dict) else ()), *(token["id"] for token in state["added_tokens"])]
    if len(vocab) > MAX_TOKENS or not all(type(index) is int and 0 <= index < MAX_TOKENS for index in ids):
        raise NativeError(f"it has ids that are not numbers from 0 to {MAX_TOKENS - 1}")
    return state


def _hide(state: dict[str, Any], special: frozenset[int]) -> dict[str, Any]:
    """Rename the special tokens so that they never match text, and remove truncation and padding."""
    model = dict(state["model"])
    vocab = model["vocab"]
    named = enumerate(entry[0] for entry in vocab) if isinstance(vocab, list) else ((i, t) for t, i in vocab.items())
    names = {token for index, token in named if index in special}
    names |= {token["content"] for token in state["added_tokens"] if token["id"] in special}

    def hidden(token: str) -> str:
        return HIDDEN + token if token in names else token

    if isinstance(vocab, list):
        model["vocab"] = [[hidden(token), score] for token, score in vocab]
    else:
        model["vocab"] = {hidden(token): index for token, index in vocab.items()}
    if model.get("unk_token") is not None:
        model["unk_token"] = hidden(model["unk_token"])
    if "merges" in model:  # two formats: a pair of strings, or one string with a space between them
        pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names]
    added = [{**token, "content": hidden(token["content"])} for token in state["added_tokens"]]
    removed = {"truncation": None, "padding": None, "post_processor": None}
    return {**state, **removed, "model": model, "added_tokens": added}


class Codec:
    """The tokenizers and features of a run."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        shared = bool(config["shared"])
        names = ("tokenizer.json",) if shared else ("source.tokenizer.json", "target.tokenizer.json")
        sides = [_read(directory / name, config, side) for side, name in enumerate(names)]
        self.source = sides[0]
        self.target = sides[-1]
        self.features: Sequence[str] = config["features"]
        self.takes_features = "features" in config["columns"]
        self.columns: Sequence[str] = config["columns"]
        self.separator: str = config["feature_separator"]
        ids = config["ids"] or {"pad": PAD, "unk": UNK, "sos": SOS, "eos": EOS}
        self.eos = int(ids["eos"])
        self.before = [int(ids["sos"])] * (config["frame"] in ("both", "start"))
        self.after = [self.eos] * (config["frame"] in ("both", "end"))
        self._feature_ids = {name: self.source.size + index for index, name in enumerate(self.features)}
        self.target_piece = cache(partial(self._piece, self.target))  # every token of an output needs it

    def encode_source(self, text: str, features: str | None) -> list[int]:
        """The ids of features and text, framed by special tokens."""
        ids = [self._feature_ids.get(name, self.source.unk) for name in self._names(features)]
        return [*self.before, *ids, *self.source.encode(text), *self.after]

    def _names(self, features: str | None) -> list[str]:
        return [name for part in (features or "").split(self.separator) if (name := part.strip())]

    def decode_target(self, ids: Iterable[int]) -> str:
        """The text of target ids, without special tokens."""
        return self.target.decode(index for index in ids if index < self.target.size)

    def source_piece(self, index: int) -> str:
        """A printable string for a source id: a token or the name of a feature."""
        return self._piece(self.source, index)

    def _piece(self, tokenizer: Tokenizer, index: int) -> str:
        if index < tokenizer.size:
            return tokenizer.piece(index)
        beyond = index - tokenizer.size
        return self.features[beyond] if beyond < len(self.features) else f"<{index}>"  # a model may have unused rows

    def unknown_tokens(
        self, text: str, features: str | None, source: Sequence[int], target_text: str = "", target: Sequence[int] = ()
    ) -> list[str]:
        """The unknown tokens and features of a text with these ids, and of its target."""
        unknown: list[str] = []
        if self.source.has_unknown(source):
            unknown += self.source.unknown_tokens(text)
            unknown += [name for name in self._names(features) if name not in self._feature_ids]
        return unknown + (self.target.unknown_tokens(target_text) if self.target.has_unknown(target) else [])

    def features_problem(self, features: str | None) -> str:
        """The error if a text has features and the run has none, or vice versa; otherwise empty."""
        if not self.takes_features:
            return "features: not for this run, which was trained without features" if features else ""
        return "features: is required, since the run was trained with features" if features is None else ""


def _read(path: Path, config: Mapping[str, Any], side: int) -> Tokenizer:
    """The tokenizer of the source (side 0) or the target (side 1)."""
    try:
        text = read_text(path)
        with library_errors("not a tokenizer of a run"):
            if config["ids"] is None:
                return Tokenizer(text, config["target_tokens" if side else "source_tokens"])
            return ForeignTokenizer(text, config["ids"], (config.get("sizes") or (None, None))[side])
    except NativeError as error:
        raise NativeError(f"{path}: {error}") from None


def read_text(path: Path) -> str:
    """The text of a plain file of limited size."""
    try:
        if not path.is_file():  # reading a pipe could take forever
            raise NativeError("no such file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise NativeError(f"has more than {MAX_FILE_BYTES // 2**20} MB")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise NativeError(f"cannot be read: {error}") from None
