"""Vocabulary files of Hugging Face directories, SentencePiece models among them, as tokenizers of one library."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from regard.config import MAX_TOKENS
from regard.convert.family import Fields, Json
from regard.errors import UserError
from regard.text.tokenizer import HIDDEN, checked_state, library_errors, read_text, require_ids

JSON, SETTINGS, SPECIALS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
ADDED = "added_tokens.json"
TARGET = "target"  # the directory beside tokenizer.json in which we put the tokenizer of the target
ADDING = ("add_bos_token", "add_eos_token")  # flags, which are named like tokens
MODELS = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")


class OpenedVocabulary(NamedTuple):
    """One tokenizer for both sides, or two; the vocabulary size of each; and whether it adds special tokens itself."""

    libraries: list[Tokenizer]
    sizes: list[int]
    framed: bool


def read_settings(directory: Path, roles: Collection[str]) -> Json:
    """The settings beside a vocabulary, with the names of tokens, of the roles among others, as plain strings."""
    settings: Json = {}
    for file in (Fields.load(directory / name) for name in (SPECIALS, SETTINGS)):
        for key, value in file.data.items():
            if value is None:
                continue
            if key in ADDING:
                value = file.flag(key, False)
            elif key.endswith("_token") and isinstance(value, dict):
                value = value.get("content")
            if key in roles and not isinstance(value, str):
                raise UserError(f"{file.where}: {key} must be the name of a token, not {file.get(key)!r:.100}")
            settings[key] = value
    return settings


def open_vocabulary(directory: Path, model_type: str, settings: Json) -> OpenedVocabulary:
    """Find the vocabulary of a directory; where there are several forms, the most complete one."""

    def has(*names: str) -> bool:
        return all((directory / name).is_file() for name in names)

    if has("source.spm", "target.spm", "vocab.json"):
        return _source_and_target(directory)
    if has(JSON):
        names = [JSON, f"{TARGET}/{JSON}"] if has(f"{TARGET}/{JSON}") else [JSON]
        return _opened([_read_json(directory / name) for name in names], framed=True)
    model = next((name for name in MODELS if has(name)), None)
    if model is not None:
        library = build(read_sentencepiece(directory / model))
        if model_type == "t5":
            count = settings.get("extra_ids", 100)
            if type(count) is not int or not 0 <= count < MAX_TOKENS:
                raise ValueError(f"extra_ids {count!r:.40}")
            library.add_special_tokens([f"<extra_id_{index}>" for index in reversed(range(count))])
    elif has("vocab.txt"):
        library = _word_piece(directory / "vocab.txt", settings)
    elif has("vocab.json", "merges.txt"):
        library = _byte_level(directory / "vocab.json", directory / "merges.txt", settings)
    else:
        there = ", ".join(sorted(path.name for path in directory.iterdir())) or "nothing"
        raise UserError(
            f"{directory}: no tokenizer that can be read\n"
            f"  wanted: {JSON}, vocab.txt, vocab.json with merges.txt, or a SentencePiece model: {', '.join(MODELS)}, "
            f"or source.spm and target.spm with vocab.json\n  found: {there}"
        )
    _add_tokens(library, directory, settings)
    return _opened([library], framed=False)


def _opened(libraries: list[Tokenizer], framed: bool) -> OpenedVocabulary:
    return OpenedVocabulary(libraries, [1 + max(library.get_vocab().values()) for library in libraries], framed)


def _read_json(path: Path) -> Tokenizer:
    text = read_text(path)
    try:
        with library_errors():
            checked_state(text)
            return Tokenizer.from_str(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _source_and_target(directory: Path) -> OpenedVocabulary:
    """Two SentencePiece models, whose ids are in a file for both or in one for each."""
    libraries, sizes = [], []
    for side, table in (("source", "vocab.json"), ("target", "target_vocab.json")):
        path = directory / table if (directory / table).is_file() else directory / "vocab.json"
        ids = _read_ids(path)
        special = ["</s>", "<pad>"]
        missing = [name for name in ("<unk>", *special) if name not in ids]
        if missing:
            raise UserError(f"{path}: has no number for {', '.join(missing)}")
        languages = [name for name in ids if name.startswith(">>") and name.endswith("<<")]
        library = build(read_sentencepiece(directory / f"{side}.spm"), ids, [*special, *languages])
        library.add_special_tokens(special)
        library.add_tokens([AddedToken(name, normalized=False) for name in languages])
        libraries.append(library)
        sizes.append(1 + max(ids.values()))
    return OpenedVocabulary(libraries, sizes, framed=False)


def _word_piece(path: Path, settings: Json) -> Tokenizer:
    """The WordPiece tokenizer of a vocab.txt, one token to a line."""
    vocab = {token: index for index, token in enumerate(read_text(path).removesuffix("\n").split("\n"))}
    unknown = settings.get("unk_token", "[UNK]")
    if unknown not in vocab:
        raise UserError(f"{path}: has no token {unknown}, which stands for unknown words")
    library = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    library.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.add_special_tokens([name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name in vocab])
    return library


def _byte_level(vocab: Path, merges: Path, settings: Json) -> Tokenizer:
    """The byte-level BPE tokenizer of a vocab.json and a merges.txt."""
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(read_text(merges).split("\n"), 1):
        if line and not line.startswith("#version"):
            left, _, right = line.partition(" ")
            if not right or " " in right:
                raise UserError(f"{merges}:{number}: {line!r} is not a pair of pieces")
            pairs.append((left, right))
    try:
        library = Tokenizer(models.BPE(_read_ids(vocab), pairs))
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"{merges}: does not fit {vocab.name}: {error}") from None
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([name for name in ("<|endoftext|>",) if library.token_to_id(name) is not None])
    return library


def _add_tokens(library: Tokenizer, directory: Path, settings: Json) -> None:
    """Add the tokens that were added to the vocabulary, under the ids that they had, and the special ones of it."""
    table = settings.get("added_tokens_decoder", {})
    added = {int(index): (token["content"], bool(token.get("special"))) for index, token in table.items()}
    if (directory / ADDED).is_file():
        for name, index in _read_ids(directory / ADDED).items():
            added.setdefault(index, (name, False))
    for index, (name, special) in sorted(added.items()):
        token = AddedToken(name, normalized=False, special=special)
        (library.add_special_tokens if special else library.add_tokens)([token])
        if library.token_to_id(name) != index:
            raise UserError(f"{directory}: its added token {name!r} cannot have the number {index}")
    named = [value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str)]
    library.add_special_tokens([name for name in named if library.token_to_id(name) is not None])


def _read_ids(path: Path) -> dict[str, int]:
    ids = Fields.load(path).data
    if not ids:
        raise UserError(f"{path}: must hold the number of every token")
    try:
        require_ids(ids.values(), len(ids))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return ids


# SentencePiece models: kinds of pieces and algorithms, as its format numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
SPACE = "▁"


class SentencePiece(NamedTuple):
    """A token of a SentencePiece model."""

    text: str
    score: float
    kind: int


class SentencePieceModel(NamedTuple):
    """A SentencePiece model."""

    pieces: list[SentencePiece]
    algorithm: int
    charsmap: bytes  # the normalisation of characters, in a form that the tokenizers library reads
    composed: bool  # it composes letters and combining characters
    prefix: bool  # a space is put before the text
    squeeze: bool  # spaces at the ends are removed, and all but one of several

    def named(self, *kinds: int) -> list[str]:
        """The tokens of some kinds."""
        return [piece.text for piece in self.pieces if piece.kind in kinds]


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a SentencePiece model."""
    try:
        fields = _message(path.read_bytes())
        pieces = [_piece(data) for data in fields.get(1, [])]
        trainer, normalizer = _message(b"".join(fields.get(2, []))), _message(b"".join(fields.get(3, [])))
        algorithm, suffixes = trainer.get(3, [UNIGRAM])[-1], trainer.get(24, [0])[-1]
        charsmap, composed = bytes(normalizer.get(2, [b""])[-1]), b"nfkc" in normalizer.get(1, [b""])[-1]
        prefix, squeeze, escape = (bool(normalizer.get(number, [1])[-1]) for number in (3, 4, 5))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, struct.error) as error:
        raise UserError(f"{path}: not a SentencePiece model: {error}") from None
    if not pieces or algorithm not in (UNIGRAM, BPE) or suffixes or not escape:
        raise UserError(f"{path}: only unigram and bpe models that write a space as {SPACE} before a word can be read")
    if sum(piece.kind == UNKNOWN for piece in pieces) != 1:
        raise UserError(f"{path}: not a SentencePiece model: it has no unknown token")
    return SentencePieceModel(pieces, algorithm, charsmap, composed, prefix, squeeze)


def _message(data: bytes) -> dict[int, list[Any]]:
    """The fields of a protocol buffer message by number: whole numbers, or bytes."""
    fields: dict[int, list[Any]] = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            if position >= len(data) or shift > 63:
                raise ValueError("it breaks off in the middle of a number")
            byte = data[position]
            position, value, shift = position + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while position < len(data):
        key = varint()
        wire_type = key & 7
        if wire_type == 0:
            fields.setdefault(key >> 3, []).append(varint())
            continue
        if wire_type not in (1, 2, 5):
            raise ValueError(f"field type {wire_type} is not known")
        size = {1: 8, 5: 4}.get(wire_type) or varint()
        if position + size > len(data):
            raise ValueError("it breaks off in the middle of a field")
        fields.setdefault(key >> 3, []).append(data[position : position + size])
        position += size
    return fields


def _piece(data: bytes) -> SentencePiece:
    fields = _message(data)
    score = struct.unpack("<f", fields.get(2, [bytes(4)])[-1])[0]
    return SentencePiece(fields[1][-1].decode("utf-8"), score, fields.get(3, [NORMAL])[-1])


def build(model: SentencePieceModel, ids: Mapping[str, int] | None = None, special: Collection[str] = ()) -> Tokenizer:
    """A SentencePiece model as a tokenizer of the library.

    `ids` are given where they are not the order of the pieces. They may hold other tokens: `special` ones, which keep
    their names, and tokens of the other side, which are never found in texts of this one. Pieces without an id come
    after all that have one.
    """
    names = _names(model, ids, special)
    library = Tokenizer(_library_model(model, names))
    library.normalizer = normalizers.Sequence(list(_normalizers(model)))
    words = model.named(NORMAL, USER_DEFINED)
    if SPACE in words and not any(SPACE in word[1:] for word in words):  # then words are cut one by one: faster
        library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=True)
    steps: list[Any] = [decoders.Replace(HIDDEN, ""), decoders.Replace(SPACE, " ")]
    steps += [decoders.ByteFallback()] if model.named(BYTE) else []
    steps += [decoders.Fuse(), decoders.Strip(" ", 1, 0)] if model.prefix else [decoders.Fuse()]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens([name for name in model.named(UNKNOWN, CONTROL) if name in names])
    if model.algorithm == BPE:
        library.add_tokens([AddedToken(name, normalized=False) for name in model.named(USER_DEFINED)])
    return library


def _names(model: SentencePieceModel, ids: Mapping[str, int] | None, special: Collection[str]) -> list[str]:
    """The name of each id."""
    if ids is None:
        return [HIDDEN + text if kind == UNUSED else text for text, _, kind in model.pieces]
    own = {*model.named(NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE), *special}
    names = [f"{HIDDEN}{index}" for index in range(1 + max(ids.values()))]
    for text, index in ids.items():
        names[index] = text if text in own else HIDDEN + text
    return names + [text for text in model.named(NORMAL, UNKNOWN, USER_DEFINED, BYTE) if text not in ids]


def _normalizers(model: SentencePieceModel) -> Iterator[Any]:
    if model.charsmap:
        if model.composed:  # the library looks at too few characters at a time for two accents or a Hangul syllable
            yield normalizers.NFC()
        yield normalizers.Precompiled(model.charsmap)
    if model.squeeze:
        yield normalizers.Replace(Regex(" {2,}"), " ")
        yield normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), "")
    if model.prefix:
        yield normalizers.Prepend(SPACE)
    yield normalizers.Replace(" ", SPACE)


def _library_model(model: SentencePieceModel, names: list[str]) -> Any:
    """The unigram or BPE model of the library over the names of all ids."""
    scores = {text: score for text, score, kind in model.pieces if kind == NORMAL}
    [unknown], byte_fallback = model.named(UNKNOWN), bool(model.named(BYTE))
    if model.algorithm == UNIGRAM:
        lowest, highest = min(scores.values(), default=0.0), max(scores.values(), default=0.0)
        # A user-defined piece scores above any way of cutting it, as in SentencePiece. The name of a byte is no text,
        # but the library must find it in the vocabulary: below any way of cutting it.
        scores |= {text: len(text.encode()) * highest - 0.1 for text in model.named(USER_DEFINED)}
        scores |= dict.fromkeys(model.named(BYTE), lowest - 100)
        return models.Unigram([(name, scores.get(name, 0.0)) for name in names], names.index(unknown), byte_fallback)
    vocab = {name: index for index, name in enumerate(names)}
    merges: list[tuple[str, str]] = []
    for text in sorted(scores, key=lambda text: -scores[text]):  # merges go by the score of what they give, best first
        cuts = ((text[:i], text[i:]) for i in range(1, len(text)))
        pairs = [(a, b) for a, b in cuts if a in scores and b in scores]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
