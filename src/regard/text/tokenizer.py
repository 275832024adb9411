"""Tokenizers: conversion between text and ids, by one of our schemes or by the tokenizer of an imported model."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tokenizers import Regex, Tokenizer as Library, models, normalizers, pre_tokenizers, trainers

from regard.config import MAX_TOKENS, SpecialIds
from regard.errors import UserError, plural
from regard.files import open_file, replace_file
from regard.suggest import closest

SIMPLE = ("char", "nfd", "space", "word", "byte")  # the text is split by a rule
LEARNED = ("bpe", "unigram")  # a vocabulary of the requested size is learned
ALLOWED = "char, nfd, space, word, byte, bpe:N, unigram:N (N tokens, for example bpe:8000) or auto"
MIN_VOCABULARY = 260  # four special tokens and 256 bytes
MAX_VOCABULARY = 1_000_000

IDS = SpecialIds()  # of learned vocabularies; imported ones may differ
SPECIALS = tuple(f"< {name} >" for name in ("pad", "unk", "sos", "eos", "mask"))  # mask is optional
UNLIMITED = 2**40  # tokens in a vocabulary

_INSIDE = r"\p{L}\p{M}\p{N}_\x{200C}\x{200D}"  # letters, marks, digits, joiners
PATTERNS = {"char": r"[\s\S]", "nfd": r"[\s\S]", "word": rf" ?[{_INSIDE}]+| ?[^\s{_INSIDE}]|[\s\S]"}

# By default, the library starts threads at its first call, and a process forked later would warn or hang.
PARALLELISM_VARIABLE = "TOKENIZERS_PARALLELISM"
_SET_BY_USER = PARALLELISM_VARIABLE in os.environ
os.environ.setdefault(PARALLELISM_VARIABLE, "false")


@contextmanager
def threads() -> Iterator[None]:
    """Let the library use all cores inside the context, unless the user has set the environment variable."""
    if _SET_BY_USER:
        yield
        return
    os.environ[PARALLELISM_VARIABLE] = "true"
    try:
        yield
    finally:
        os.environ[PARALLELISM_VARIABLE] = "false"


class Scheme(NamedTuple):
    """A way to split text into tokens, with the size of the vocabulary if it is learned."""

    kind: str
    size: int | None = None


def parse_scheme(request: str, where: str = "tokens") -> Scheme:
    """Parse `char`, `bpe:8000` etc.; `auto` is allowed."""
    kind, colon, number = request.partition(":")
    if kind in ("auto", *SIMPLE):
        if colon:
            raise UserError(f"{where}: {kind} takes no number; write {kind!r}, not {request!r}")
        return Scheme(kind)
    if kind in LEARNED:
        if not re.fullmatch(r"[0-9]{1,9}", number):
            raise UserError(f"{where}: {request!r} lacks its number of tokens; write it as {kind}:8000")
        if not MIN_VOCABULARY <= int(number) <= MAX_VOCABULARY:
            raise UserError(
                f"{where}: {request!r} is out of range; N counts all tokens, including 256 bytes and 4 special tokens, "
                f"and must be from {MIN_VOCABULARY} to {MAX_VOCABULARY}"
            )
        return Scheme(kind, int(number))
    near = closest(kind, ("auto", *SIMPLE, *LEARNED))
    raise UserError(f"{where}: {request!r:.100} is not a tokenization scheme{near}\n  allowed: {ALLOWED}")


def pre_tokenizer(kind: str) -> Any:
    """The library's pre-tokenizer of a scheme."""
    if kind == "space":
        return pre_tokenizers.Split(" ", "removed")
    if kind in PATTERNS:
        return pre_tokenizers.Split(Regex(PATTERNS[kind]), "isolated")
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "byte")


def split_simple(kind: str, text: str) -> Sequence[str]:
    """The tokens of char, nfd and space without the library: characters, or words between spaces."""
    if kind == "space":
        return [token for token in text.split(" ") if token]
    return unicodedata.normalize("NFD", text) if kind == "nfd" else text


def byte_letters() -> list[str]:
    """The letter of each of the 256 bytes in byte-level tokens: a visible character stands for itself."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    invisible = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + invisible.index(byte)) for byte in range(256)]


SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair, which a Python string can contain
BYTE_OF = {letter: byte for byte, letter in enumerate(byte_letters())}


def learn(scheme: Scheme, texts: Iterable[str], min_count: int = 1, mask: bool = False) -> Library:
    """Learn a vocabulary from texts: special tokens, then text tokens, the most frequent first."""
    specials = SPECIALS if mask else SPECIALS[:-1]
    model: Any
    if scheme.kind == "byte":
        model = models.BPE(_number_tokens(specials, byte_letters()), [])
    elif scheme.size is not None and scheme.kind == "bpe":
        state = _train_library("bpe", texts, trainers.BpeTrainer, scheme.size - len(specials))
        tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
        model = models.BPE(_number_tokens(specials, tokens), [tuple(pair) for pair in state["merges"]])
    elif scheme.size is not None:
        model = _unigram(specials, texts, scheme.size - len(specials))
    else:
        tokens = _count_tokens(scheme.kind, texts, min_count)
        model = models.WordLevel(_number_tokens(specials, tokens), unk_token=SPECIALS[IDS.unk])
    library = Library(model)
    library.pre_tokenizer = pre_tokenizer(scheme.kind)
    if scheme.kind == "nfd":
        library.normalizer = normalizers.NFD()
    return library


def _number_tokens(specials: Sequence[str], tokens: Iterable[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate((*specials, *tokens))}


def _count_tokens(kind: str, texts: Iterable[str], min_count: int) -> list[str]:
    """The tokens of a simple scheme, most frequent first. The library is faster for words, a Counter for the others."""
    if kind == "word":
        learner = Library(models.WordLevel({}, unk_token=SPECIALS[IDS.unk]))
        learner.pre_tokenizer = pre_tokenizer(kind)
        trainer = trainers.WordLevelTrainer(vocab_size=UNLIMITED, min_frequency=min_count, show_progress=False)
        learner.train_from_iterator(texts, trainer)
        vocab = learner.get_vocab()
        return sorted(vocab, key=vocab.__getitem__)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split_simple(kind, text))
    return sorted((s for s, count in counts.items() if count >= min_count), key=lambda s: (-counts[s], s))


def _train_library(kind: str, texts: Iterable[str], trainer: Any, size: int) -> dict[str, Any]:
    """Train a learner of the library -> its model in the format of the tokenizer file."""
    learner = Library(models.BPE() if kind == "bpe" else models.Unigram())
    learner.pre_tokenizer = pre_tokenizer(kind)
    alphabet = sorted(byte_letters())
    learner.train_from_iterator(texts, trainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    state: dict[str, Any] = json.loads(learner.to_str())["model"]
    return state


def _unigram(specials: Sequence[str], texts: Iterable[str], size: int) -> Any:
    """Learn at most `size` pieces, including every byte, reproducibly.

    The library gives missing bytes scores close to the lowest, in random order; here they get the lowest score.
    """
    state = _train_library("unigram", texts, trainers.UnigramTrainer, size)
    letters = byte_letters()
    scores = {piece: round(score, 4) for piece, score in state["vocab"]}
    floor = min(scores.values())
    steps = floor + len(letters) * 0.0001 + 0.00005
    single = [(-score if (score := scores.get(letter, floor)) > steps else -floor, letter) for letter in letters]
    longer = sorted((-score, piece) for piece, score in scores.items() if len(piece) > 1)  # best first
    pieces = [(piece, -cost) for cost, piece in sorted((*longer[: size - len(letters)], *single))]
    return models.Unigram([*((name, 0.0) for name in specials), *pieces], unk_id=IDS.unk, byte_fallback=False)


T = TypeVar("T")
UNKNOWN = "⁇"  # U+2047, the text of an unknown token
SHOWN = ("<pad>", UNKNOWN, "<sos>", "<eos>", "<mask>")  # printable forms of the special tokens

# Prefix of tokens that must not match text (noncharacters): special tokens and, in a tokenizer file, the tokens of the
# other side of a shared vocabulary.
HIDDEN = "\U0010fffe\U0010ffff"
BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}  # names of single bytes in some vocabularies


class Tokenizer:
    """Text <-> ids. `special` ids never occur in text; `ids` names the padding, unknown, start, end and mask tokens.

    In learned vocabularies, these are 0 to 3, and 4 for the mask.

    char    code points; exact
    nfd     code points after canonical decomposition: letters, marks and jamo separately; exact for NFC text
    space   words between spaces (U+0020 only); exact except for doubled, leading and trailing spaces
    word    words, digits and signs, each with the space before it; exact
    byte    the 256 bytes of UTF-8; exact, nothing is unknown
    bpe:N, unigram:N   learned pieces over bytes; exact, nothing is unknown

    Exact means that `decode(encode([text])[0]) == text` if no token is unknown; an unknown token is decoded as `⁇`.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._kind = _recognise(library)
        self.size: int = library.get_vocab_size(with_added_tokens=True)
        tokens = [library.id_to_token(index) or "" for index in range(self.size)]
        self.ids = SpecialIds(mask=4) if tuple(tokens[: len(SPECIALS)]) == SPECIALS else IDS
        first = len(SPECIALS) if self.ids.mask else len(SPECIALS) - 1  # id of the first text token
        if tuple(tokens[:first]) != SPECIALS[:first] or "" in tokens or library.get_added_tokens_decoder():
            raise UserError("its ids are not those of a tokenizer of a run")
        self.special = frozenset(range(first))
        self.scheme: str = f"{self._kind}:{self.size}" if self._kind in ("bpe", "unigram") else self._kind
        self._tokens: list[str] = tokens
        self._ids = {token: index for index, token in enumerate(tokens) if index >= first}
        self._bytes: list[bytes] | None = None  # of each token, in the byte-level schemes
        if self._kind in ("byte", "bpe", "unigram"):
            text = (bytes(map(BYTE_OF.__getitem__, token)) for token in tokens[first:])
            self._bytes = [*(b"" for _ in range(first)), *text]
            self._bytes[self.ids.unk] = UNKNOWN.encode()

    @classmethod
    def train(cls, scheme: str, texts: Iterable[str], min_count: int = 1, mask: bool = False) -> Tokenizer:
        """Learn a tokenizer from a stream of texts. From little text, bpe:N and unigram:N learn fewer than N tokens."""
        parsed = parse_scheme(scheme)
        if parsed.kind == "auto":
            raise ValueError("auto is resolved by regard.text.learn.choose, before training")
        if parsed.size is not None and parsed.size < MIN_VOCABULARY + mask:
            least = MIN_VOCABULARY + 1
            raise UserError(f"tokens: {scheme!r} has no room for the mask and 256 bytes; use {least} or more")
        with threads():
            return cls(learn(parsed, texts, min_count, mask))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""
        texts = list(texts)
        if self._kind in ("char", "nfd", "space"):  # much faster than the library, with equal results
            ids = self._ids
            unk = self.ids.unk
            return [[ids.get(token, unk) for token in split_simple(self._kind, text)] for text in texts]
        return [self._numbers(encoding) for encoding in self._encodings(texts)]

    def encode_prompt(self, pieces: Iterable[str | int]) -> list[int]:
        """The ids of texts and special tokens, given by id."""
        raise UserError("prompt: only the tokenizers of converted models have a chat template")

    def _encodings(self, texts: list[str], fast: bool = True) -> list[Any]:
        """Encode with the library; with `fast`, the encodings have only ids."""
        encode = self._library.encode_batch_fast if fast else self._library.encode_batch
        with library_errors("the tokenizer cannot split this text"):
            try:
                encodings: list[Any] = encode(texts, add_special_tokens=False)
            except TypeError:  # half of a surrogate pair
                encodings = encode([self._clean(text) for text in texts], add_special_tokens=False)
        return encodings

    def _clean(self, text: str) -> str:
        return SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)

    def _numbers(self, encoding: Any) -> list[int]:
        return list(encoding.ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens are skipped, an unknown token is `⁇`."""
        unk = self.ids.unk
        text_ids = [index for index in ids if index not in self.special or index == unk]
        if self._bytes is not None:
            return b"".join([self._bytes[index] for index in text_ids]).decode("utf-8", "replace")
        tokens = [UNKNOWN if index == unk else self._tokens[index] for index in text_ids]
        if self._kind == "word":  # words include the space before them, except the text of unknown words
            tokens = [f" {token}" if text_ids[i] == unk and i else token for i, token in enumerate(tokens)]
        text = (" " if self._kind == "space" else "").join(tokens)
        return unicodedata.normalize("NFC", text) if self._kind == "nfd" else text

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """A printable string for each id; bytes of incomplete characters are written as `\\xe4`."""
        return [self._piece(index) for index in ids]

    def _piece(self, index: int) -> str:
        if index in self.special:
            return SHOWN[index]
        return self._tokens[index] if self._bytes is None else self._bytes[index].decode("utf-8", "backslashreplace")

    def unknown(self, ids: Iterable[int]) -> int:
        """The number of unknown tokens among the ids."""
        return sum(map(self._is_unknown, ids))

    def _is_unknown(self, index: int) -> bool:
        return index == self.ids.unk

    def unknown_tokens(self, text: str) -> list[str]:
        """The unknown tokens of a text, in order, with repetitions."""
        text = self._clean(text)
        [encoding] = self._encodings([text], fast=False)
        spans = zip(self._numbers(encoding), encoding.offsets, strict=True)
        return [text[start:end] for index, (start, end) in spans if self._is_unknown(index)]

    def spellings(self) -> list[bytes]:
        """The bytes of each token in a text, with the space before a word; empty for special tokens."""
        return [b"" if index in self.special else self._spelling(index) for index in range(self.size)]

    def _spelling(self, index: int) -> bytes:
        return self._tokens[index].encode("utf-8", "replace") if self._bytes is None else self._bytes[index]

    def to_json(self) -> str:
        """The tokenizer in the format of the library."""
        return str(self._library.to_str(pretty=False))

    def save(self, path: str | Path) -> None:
        replace_file(Path(path), lambda temporary: temporary.write_text(self.to_json(), encoding="utf-8"))

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a saved tokenizer; the format cannot contain code."""
        return _parsed(path, cls._of_text, "not a tokenizer of ours: ")

    @classmethod
    def _of_text(cls, text: str) -> Tokenizer:
        state = checked_state(text)
        if any(state.get(key) for key in ("truncation", "padding", "post_processor", "added_tokens")):
            raise UserError("it has truncation, padding, added tokens or a post-processor")
        return cls(Library.from_str(text))


class ForeignTokenizer(Tokenizer):
    """The tokenizer of an imported model, applied by the library.

    Special tokens are not added to a text and never matched in it; other added tokens are matched. `size` is the number
    of ids of the model; tokens with higher ids count as unknown.
    """

    def __init__(self, text: str, ids: SpecialIds, size: int | None = None) -> None:
        state = checked_state(text)
        self._text = text
        self._kind = self.scheme = "foreign"
        self.ids = ids
        added = {token["id"]: token["content"] for token in state["added_tokens"] if token["special"]}
        self.special = frozenset({*added, *ids.model_dump(exclude_none=True).values()})
        names = {**_token_names(state["model"]), **{token["id"]: token["content"] for token in state["added_tokens"]}}
        self.size = 1 + max(names) if size is None else size
        if max(ids.model_dump(exclude_none=True).values()) >= self.size:
            raise UserError(f"it has {plural(self.size, 'token')}, too few for {ids}")
        self._tokens = [names.get(index, "").removeprefix(HIDDEN) for index in range(self.size)]
        self._aside = {self._tokens[i]: i for i, name in names.items() if i < self.size and name.startswith(HIDDEN)}
        self._more = max(names) >= self.size
        self._library = Library.from_str(json.dumps(_hide(state, self.special)))
        self._decoder = self._library.decoder
        decoder = state["decoder"] or {"decoders": []}  # has one step or several
        self._steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""
        return self._encode_clean([self._clean(text) for text in texts])

    def encode_prompt(self, pieces: Iterable[str | int]) -> list[int]:
        """The ids of texts and special tokens, encoded together: a special token may affect the text next to it."""
        joined = ""
        for is_text, group in groupby(pieces, key=lambda piece: isinstance(piece, str)):
            if is_text:
                joined += self._clean("".join(map(str, group)))
                continue
            for index in map(int, group):
                if index not in self.special or index >= self.size:
                    raise UserError(f"prompt: {index} is not the id of a special token")
                joined += HIDDEN + self._tokens[index]
        return self._encode_clean([joined])[0]

    def _encode_clean(self, texts: list[str]) -> list[list[int]]:
        encodings = self._encodings(texts, fast=not self._aside)
        rows = [self._numbers(encoding) for encoding in encodings]
        if self._more:
            unk = self.ids.unk
            instead = [unk] if self._is_unknown(unk) else []
            rows = [[i for index in row for i in ([index] if index < self.size else instead)] for row in rows]
        return rows

    def _clean(self, text: str) -> str:
        return super()._clean(text.replace(HIDDEN, "\N{REPLACEMENT CHARACTER}"))

    def _numbers(self, encoding: Any) -> list[int]:
        """The ids; a token that is unknown on this side may be a token of the other side."""
        if not self._aside:
            return list(encoding.ids)
        pairs = zip(encoding.ids, encoding.tokens, strict=True)
        return [self._aside.get(token, i) if i == self.ids.unk else i for i, token in pairs]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens are skipped, an unknown token is `⁇`."""
        flagged = ((index, self._is_unknown(index)) for index in ids)
        tokens = [UNKNOWN if new else self._tokens[i] for i, new in flagged if new or i not in self.special]
        if not self._decoder:
            return " ".join(tokens)
        with library_errors("the tokenizer cannot join these tokens"):
            return str(self._decoder.decode(tokens))

    def _is_unknown(self, index: int) -> bool:
        """Whether an id is the unknown token, unless another special token has the same id."""
        ids = self.ids
        return (index == ids.unk and index not in (ids.pad, ids.sos, ids.eos, ids.mask)) or index >= self.size

    def _piece(self, index: int) -> str:
        if index in self.special:
            return UNKNOWN if self._is_unknown(index) else self._tokens[index]
        if "WordPiece" in self._steps:
            return self._tokens[index]
        return self._spelling(index).decode("utf-8", "backslashreplace")

    def _spelling(self, index: int) -> bytes:
        token = self._tokens[index]
        steps = self._steps
        if "ByteLevel" in steps and all(letter in BYTE_OF for letter in token):
            return bytes(map(BYTE_OF.__getitem__, token))
        if "ByteFallback" in steps and token in BYTES:
            return BYTES[token]
        if "WordPiece" in steps:
            prefix = steps["WordPiece"]["prefix"]
            return (token.removeprefix(prefix) if token.startswith(prefix) else f" {token}").encode()
        if "BPEDecoder" in steps:
            return token.replace(steps["BPEDecoder"]["suffix"], " ").encode()
        return token.replace("▁", " ").encode() if {"Metaspace", "Replace"} & steps.keys() else token.encode()

    def to_json(self) -> str:
        """The text of the imported file."""
        return self._text

    @classmethod
    def read(cls, path: str | Path, ids: SpecialIds, size: int | None = None) -> ForeignTokenizer:
        """Read a tokenizer file of the library; the format cannot contain code."""
        return _parsed(path, lambda text: cls(text, ids, size))


def read_text(path: str | Path) -> str:
    try:
        with TextIOWrapper(open_file(Path(path)), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        raise UserError(f"{path}: no such tokenizer") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable tokenizer: {error}") from None


def _parsed(path: str | Path, parse: Callable[[str], T], mistake: str = "") -> T:
    """Read and parse a tokenizer file; errors name it."""
    text = read_text(path)
    try:
        with library_errors():
            return parse(text)
    except UserError as error:
        raise UserError(f"{path}: {mistake}{error}") from None


@contextmanager
def library_errors(what: str = "not a readable tokenizer") -> Iterator[None]:
    """Turn errors of the library into UserErrors: exceptions, and panics, which are BaseExceptions."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {error!r:.500}") from None


def checked_state(text: str) -> dict[str, Any]:
    """Parse the format of the library and check the ids, because the library allocates tables up to the largest id."""
    state = json.loads(text)
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UserError("not a readable tokenizer: it has no table model")
    vocab = state["model"].get("vocab")
    added = state.get("added_tokens", [])
    if not isinstance(vocab, dict | list) or not isinstance(added, list):
        raise UserError("not a readable tokenizer: model.vocab and added_tokens must be lists of tokens")
    if not all(isinstance(token, dict) for token in added):
        raise UserError("not a readable tokenizer: added_tokens must be a list of tables")
    ids = [*(vocab.values() if isinstance(vocab, dict) else ()), *(token.get("id") for token in added)]
    require_ids(ids, len(vocab))
    return state


def require_ids(ids: Iterable[Any], count: int = 0) -> None:
    """Raise UserError for invalid ids, or for too many tokens."""
    wrong = next((index for index in ids if type(index) is not int or not 0 <= index < MAX_TOKENS), None)
    if wrong is not None:
        raise UserError(f"a token has the id {wrong!r:.40}; allowed are 0 to {MAX_TOKENS - 1}")
    if count > MAX_TOKENS:
        raise UserError(f"it has {count:,} tokens, more than {MAX_TOKENS:,}")


def _recognise(library: Library) -> str:
    """The scheme that the settings of the library implement."""
    state: dict[str, Any] = json.loads(library.to_str())
    cut = state["pre_tokenizer"] or {}
    model = state["model"]["type"]
    pattern = cut.get("pattern", {})
    if cut.get("type") == "ByteLevel" and model in ("BPE", "Unigram") and not cut["add_prefix_space"]:
        if model == "Unigram":
            return "unigram"
        return "bpe" if cut["use_regex"] else "byte"
    if model == "WordLevel" and state["model"]["unk_token"] != SPECIALS[IDS.unk]:
        raise UserError(f"its unknown token is {state['model']['unk_token']!r:.40}, not {SPECIALS[IDS.unk]!r}")
    if cut.get("type") == "Split" and model == "WordLevel":
        if pattern == {"String": " "}:
            return "space"
        if (state["normalizer"] or {}).get("type") == "NFD" and pattern == {"Regex": PATTERNS["nfd"]}:
            return "nfd"
        for kind, regex in PATTERNS.items():
            if pattern == {"Regex": regex}:
                return kind
    raise UserError("it splits text in an unknown way")


def _token_names(model: dict[str, Any]) -> dict[int, str]:
    """The tokens of a model in the library's format, by id."""
    vocab = model["vocab"]
    if isinstance(vocab, list):
        return {index: entry[0] for index, entry in enumerate(vocab)}
    return {index: token for token, index in vocab.items()}


def _hide(state: dict[str, Any], special: frozenset[int]) -> dict[str, Any]:
    """Rename the special tokens so that they never match text, and remove truncation and padding."""
    model = dict(state["model"])
    vocab = model["vocab"]
    names = {token for index, token in _token_names(model).items() if index in special}
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
