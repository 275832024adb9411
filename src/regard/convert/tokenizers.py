"""Reads tokenizers of Hugging Face directories with their special tokens, and writes tokenizers for transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as Library,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from regard.config import MAX_TOKENS, Frame, SpecialIds
from regard.convert.chat_template import end_of_turn, tokens_of
from regard.convert.family import Fields, Json
from regard.errors import UserError, plural
from regard.files import write_json
from regard.text.chat import Chat
from regard.text.codec import Codec
from regard.text.tokenizer import (
    HIDDEN,
    SPECIALS,
    ForeignTokenizer,
    Tokenizer,
    checked_state,
    library_errors,
    read_text,
    require_ids,
)

JSON = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
ADDED = "added_tokens.json"
TARGET = "target"  # directory of the target tokenizer, next to tokenizer.json
TOKEN_FLAGS = ("add_bos_token", "add_eos_token")  # flags with names of tokens
SENTENCEPIECE_FILES = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
# Numbers of kinds of pieces and of algorithms in SentencePiece models.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
SPACE = "▁"
TOKENIZER_FILES = ("*tokenizer*", "*vocab*", "*.spm", "*.model", "merges.txt")
# The special tokens around a text, if no file defines them.
FRAMES: dict[str, Frame] = {"bert": "both", "t5": "end", "marian": "end", "llama": "start"}
# Usual names of special tokens; the settings of a tokenizer may define others.
NAMES = {
    "pad_token": ("<pad>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]", "<|endoftext|>"),
    "bos_token": ("<s>", "<|endoftext|>"),
    "eos_token": ("</s>", "<|endoftext|>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("[MASK]", "<mask>"),
}


class OpenedVocabulary(NamedTuple):
    """One tokenizer for both sides, or two, with vocabulary sizes; `framed` ones add special tokens themselves."""

    libraries: list[Library]
    sizes: list[int]
    framed: bool


def read_settings(directory: Path) -> Json:
    """The settings of a tokenizer, with the names of tokens as plain strings."""
    settings: Json = {}
    for file in (Fields.load(directory / name) for name in ("special_tokens_map.json", SETTINGS)):
        for key, value in file.data.items():
            if value is None:
                continue
            if key in TOKEN_FLAGS:
                value = file.flag(key, False)
            elif key.endswith("_token") and isinstance(value, dict):
                value = value.get("content")
            if key in NAMES and not isinstance(value, str):
                raise UserError(f"{file.where}: {key} must be the name of a token, not {file.get(key)!r:.100}")
            settings[key] = value
    return settings


def open_vocabulary(directory: Path, model_type: str, settings: Json) -> OpenedVocabulary:
    """Open the vocabulary of a directory, in the most complete of several forms."""

    def has(*names: str) -> bool:
        return all((directory / name).is_file() for name in names)

    if has("source.spm", "target.spm", "vocab.json"):
        return _source_and_target(directory)
    if has(JSON):
        names = [JSON, f"{TARGET}/{JSON}"] if has(f"{TARGET}/{JSON}") else [JSON]
        return _opened([_read_json(directory / name) for name in names], framed=True)
    model = next((name for name in SENTENCEPIECE_FILES if has(name)), None)
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
        files = ", ".join(sorted(path.name for path in directory.iterdir())) or "nothing"
        raise UserError(
            f"{directory}: no supported tokenizer\n"
            f"  supported: {JSON}, vocab.txt, vocab.json with merges.txt, or a SentencePiece model:"
            f" {', '.join(SENTENCEPIECE_FILES)}, or source.spm and target.spm with vocab.json\n  found: {files}"
        )
    _add_tokens(library, directory, settings)
    return _opened([library], framed=False)


def _opened(libraries: list[Library], framed: bool) -> OpenedVocabulary:
    return OpenedVocabulary(libraries, [1 + max(library.get_vocab().values()) for library in libraries], framed)


def _read_json(path: Path) -> Library:
    text = read_text(path)
    try:
        with library_errors():
            checked_state(text)
            return Library.from_str(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _source_and_target(directory: Path) -> OpenedVocabulary:
    """Two SentencePiece models, with ids in one shared file or one file each."""
    libraries = []
    sizes = []
    for side, table in (("source", "vocab.json"), ("target", "target_vocab.json")):
        path = directory / table if (directory / table).is_file() else directory / "vocab.json"
        ids = _read_ids(path)
        special = ["</s>", "<pad>"]
        missing = [name for name in ("<unk>", *special) if name not in ids]
        if missing:
            raise UserError(f"{path}: has no id for {', '.join(missing)}")
        languages = [name for name in ids if name.startswith(">>") and name.endswith("<<")]
        library = build(read_sentencepiece(directory / f"{side}.spm"), ids, [*special, *languages])
        library.add_special_tokens(special)
        library.add_tokens([AddedToken(name, normalized=False) for name in languages])
        libraries.append(library)
        sizes.append(1 + max(ids.values()))
    return OpenedVocabulary(libraries, sizes, framed=False)


def _word_piece(path: Path, settings: Json) -> Library:
    """The WordPiece tokenizer of a vocab.txt, with one token per line."""
    vocab = {token: index for index, token in enumerate(read_text(path).removesuffix("\n").split("\n"))}
    unknown = settings.get("unk_token", "[UNK]")
    if unknown not in vocab:
        raise UserError(f"{path}: the token {unknown} for unknown words is missing")
    library = Library(models.WordPiece(vocab, unk_token=unknown))
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


def _byte_level(vocab: Path, merges: Path, settings: Json) -> Library:
    """The byte-level BPE tokenizer of a vocab.json and a merges.txt."""
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(read_text(merges).split("\n"), 1):
        if line and not line.startswith("#version"):
            left, _, right = line.partition(" ")
            if not right or " " in right:
                raise UserError(f"{merges}:{number}: {line!r} is not a pair of pieces")
            pairs.append((left, right))
    try:
        library = Library(models.BPE(_read_ids(vocab), pairs))
    except Exception as error:  # the library raises only Exception
        raise UserError(f"{merges}: does not fit {vocab.name}: {error}") from None
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([name for name in ("<|endoftext|>",) if library.token_to_id(name) is not None])
    return library


def _add_tokens(library: Library, directory: Path, settings: Json) -> None:
    """Add the added tokens with their ids, and mark special tokens of the vocabulary."""
    table = settings.get("added_tokens_decoder", {})
    added = {int(index): (token["content"], bool(token.get("special"))) for index, token in table.items()}
    if (directory / ADDED).is_file():
        for name, index in _read_ids(directory / ADDED).items():
            added.setdefault(index, (name, False))
    for index, (name, special) in sorted(added.items()):
        token = AddedToken(name, normalized=False, special=special)
        (library.add_special_tokens if special else library.add_tokens)([token])
        if library.token_to_id(name) != index:
            raise UserError(f"{directory}: its added token {name!r} cannot have the id {index}")
    named = [value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str)]
    library.add_special_tokens([name for name in named if library.token_to_id(name) is not None])


def _read_ids(path: Path) -> dict[str, int]:
    ids = Fields.load(path).data
    if not ids:
        raise UserError(f"{path}: must contain the id of every token")
    try:
        require_ids(ids.values(), len(ids))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return ids


class SentencePiece(NamedTuple):
    text: str
    score: float
    kind: int


class SentencePieceModel(NamedTuple):
    pieces: list[SentencePiece]
    algorithm: int
    charsmap: bytes  # the normalisation of characters, in the form of the tokenizers library
    composed: bool  # the normalisation composes letters and combining characters
    prefix: bool  # add a space before the text
    squeeze: bool  # strip spaces at the ends, and collapse repeated spaces

    def named(self, *kinds: int) -> list[str]:
        return [piece.text for piece in self.pieces if piece.kind in kinds]


def read_sentencepiece(path: Path) -> SentencePieceModel:
    try:
        fields = _message(path.read_bytes())
        pieces = [_piece(data) for data in fields.get(1, [])]
        trainer = _message(b"".join(fields.get(2, [])))
        normalizer = _message(b"".join(fields.get(3, [])))
        algorithm = trainer.get(3, [UNIGRAM])[-1]
        suffixes = trainer.get(24, [0])[-1]
        charsmap = bytes(normalizer.get(2, [b""])[-1])
        composed = b"nfkc" in normalizer.get(1, [b""])[-1]
        prefix, squeeze, escape = (bool(normalizer.get(number, [1])[-1]) for number in (3, 4, 5))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, struct.error) as error:
        raise UserError(f"{path}: not a SentencePiece model: {error}") from None
    if not pieces or algorithm not in (UNIGRAM, BPE) or suffixes or not escape:
        raise UserError(f"{path}: only unigram and bpe models with {SPACE} for the space before a word are supported")
    if sum(piece.kind == UNKNOWN for piece in pieces) != 1:
        raise UserError(f"{path}: not a SentencePiece model: it must have one unknown token")
    return SentencePieceModel(pieces, algorithm, charsmap, composed, prefix, squeeze)


def _message(data: bytes) -> dict[int, list[Any]]:
    """The fields of a protocol buffer message by number: integers or bytes."""
    fields: dict[int, list[Any]] = {}
    stream = BytesIO(data)

    def varint() -> int:
        value = 0
        for shift in range(0, 70, 7):
            if not (byte := stream.read(1)):
                break
            value |= (byte[0] & 127) << shift
            if byte[0] < 128:
                return value
        raise ValueError("it ends in the middle of a number")

    while stream.tell() < len(data):
        key = varint()
        wire_type = key & 7
        values = fields.setdefault(key >> 3, [])
        if wire_type == 0:
            values.append(varint())
        elif wire_type in (1, 2, 5):
            size = {1: 8, 5: 4}.get(wire_type) or varint()
            if stream.tell() + size > len(data):
                raise ValueError("it ends in the middle of a field")
            values.append(stream.read(size))
        else:
            raise ValueError(f"unknown field type {wire_type}")
    return fields


def _piece(data: bytes) -> SentencePiece:
    fields = _message(data)
    score = struct.unpack("<f", fields.get(2, [bytes(4)])[-1])[0]
    return SentencePiece(fields[1][-1].decode("utf-8"), score, fields.get(3, [NORMAL])[-1])


def build(model: SentencePieceModel, ids: Mapping[str, int] | None = None, special: Collection[str] = ()) -> Library:
    """Convert a SentencePiece model to a tokenizer of the tokenizers library.

    Without `ids`, ids are positions of pieces. `ids` may contain other tokens: `special` ones, which keep their names,
    and tokens of the other language, which never match a text. Pieces without an id are appended.
    """
    names = _names(model, ids, special)
    library = Library(_library_model(model, names))
    library.normalizer = normalizers.Sequence(list(_normalizers(model)))
    words = model.named(NORMAL, USER_DEFINED)
    if SPACE in words and not any(SPACE in word[1:] for word in words):  # splitting into words first is faster
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
        if model.composed:  # the library sees too few characters at once to compose two accents or a Hangul syllable
            yield normalizers.NFC()
        yield normalizers.Precompiled(model.charsmap)
    if model.squeeze:
        yield normalizers.Replace(Regex(" {2,}"), " ")
        yield normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), "")
    if model.prefix:
        yield normalizers.Prepend(SPACE)
    yield normalizers.Replace(" ", SPACE)


def _library_model(model: SentencePieceModel, names: list[str]) -> Any:
    """The unigram or BPE model of the library, over the names of all ids."""
    scores = {text: score for text, score, kind in model.pieces if kind == NORMAL}
    [unknown] = model.named(UNKNOWN)
    byte_fallback = bool(model.named(BYTE))
    if model.algorithm == UNIGRAM:
        lowest = min(scores.values(), default=0.0)
        highest = max(scores.values(), default=0.0)
        # As in SentencePiece, a user-defined piece scores higher than any segmentation of it. The library requires
        # names of bytes in the vocabulary; they score lower than any segmentation, so they never match a text.
        scores |= {text: len(text.encode()) * highest - 0.1 for text in model.named(USER_DEFINED)}
        scores |= dict.fromkeys(model.named(BYTE), lowest - 100)
        return models.Unigram([(name, scores.get(name, 0.0)) for name in names], names.index(unknown), byte_fallback)
    vocab = {name: index for index, name in enumerate(names)}
    merges: list[tuple[str, str]] = []
    for text in sorted(scores, key=lambda text: -scores[text]):  # the best result is merged first
        cuts = ((text[:i], text[i:]) for i in range(1, len(text)))
        pairs = [(a, b) for a, b in cuts if a in scores and b in scores]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)


def has_tokenizer(directory: Path) -> bool:
    """Whether any file of a directory looks like a tokenizer."""
    return any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES)


def read_tokenizers(
    directory: Path, model_type: str, hf_config: Json, chat: Chat | None = None
) -> tuple[Codec, list[str]]:
    """Read the tokenizers of a directory and the special tokens, also of a chat -> codec, notes for the user."""
    settings = read_settings(directory)
    with library_errors(f"{directory}: the settings of its tokenizer are invalid"):
        return _read(directory, model_type, hf_config, settings, chat)


def _read(
    directory: Path, model_type: str, hf_config: Json, settings: Json, chat: Chat | None
) -> tuple[Codec, list[str]]:
    opened = open_vocabulary(directory, model_type, settings)
    names = tokens_of(chat, opened.libraries[0]) if chat else []
    if chat and (end := end_of_turn(chat, names)):
        settings["eos_token"] = end
    special = _SpecialTokens(opened.libraries[0], settings)
    before, after, changed = _around(opened, special, settings, model_type)
    if max(len(before), len(after)) > 1:
        raise UserError(f"{directory}: its tokenizer adds {before} before and {after} after a text; we add one id each")
    frame: Frame = ("both" if after else "start") if before else ("end" if after else "none")
    notes: list[str] = []
    ids = _special_ids(directory, special, hf_config, before, after, notes)
    vocabs = (hf_config.get("vocab_size"), hf_config.get("decoder_vocab_size") or hf_config.get("vocab_size"))
    tokenizers = []
    for library, size, vocab in zip(opened.libraries, opened.sizes, vocabs, strict=False):
        if vocab is not None and size > vocab:
            notes.append(f"the tokenizer has {size} tokens, the model {vocab}: tokens with higher ids are unknown")
        state = json.loads(library.to_str())
        for token in state["added_tokens"]:
            token["special"] |= token["content"] in names
        if changed:
            state["post_processor"] = _post_processor(frame, ids, library)
        text = json.dumps(state, ensure_ascii=False)
        try:
            tokenizers.append(ForeignTokenizer(text, ids, size if vocab is None else min(size, vocab)))
        except UserError as error:
            raise UserError(f"{directory}: {error}") from None
    source, target = tokenizers[0], tokenizers[-1]
    return Codec(source, None if source.to_json() == target.to_json() else target, frame=frame), notes


class _SpecialTokens:
    """Finds the ids of special tokens by role."""

    def __init__(self, library: Library, settings: Json) -> None:
        self._library = library
        self._settings = settings
        added = library.get_added_tokens_decoder()
        self.ids = {token.content: index for index, token in added.items() if token.special}

    def find(self, *roles: str) -> int | None:
        """The id of the first role with a token: the token in the settings, or a special token with a usual name."""
        for role in roles:
            setting = self._settings.get(role)
            usual = [name for name in NAMES[role] if name in self.ids]
            for name in [setting] if isinstance(setting, str) else usual:
                if (index := self._library.token_to_id(name)) is not None:
                    return int(index)
        return None

    def unknown(self) -> int | None:
        """The id of unknown tokens in the library."""
        model = json.loads(self._library.to_str())["model"]
        name = model.get("unk_token")
        return model.get("unk_id") if name is None else self._library.token_to_id(name)


def _around(
    opened: OpenedVocabulary, special: _SpecialTokens, settings: Json, model_type: str
) -> tuple[list[int], list[int], bool]:
    """The ids before and after a text, and whether the tokenizer must be changed to add them."""
    add_first, add_last = (settings.get(key) for key in TOKEN_FLAGS)
    if opened.framed and add_first is None and add_last is None:
        return *_added_ids(opened.libraries[0]), False
    usual = "none" if opened.framed else FRAMES.get(model_type, "none")
    first = usual in ("both", "start") if add_first is None else add_first
    last = usual in ("both", "end") if add_last is None else add_last
    sos = special.find("cls_token", "bos_token")
    eos = special.find("sep_token", "eos_token")
    return [sos] if first and sos is not None else [], [eos] if last and eos is not None else [], True


def _added_ids(library: Library) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer adds before and after a text."""
    library.no_padding()
    library.no_truncation()
    for text in ("a", *library.get_vocab()):  # any text with at least one token
        encoding = library.encode(text)
        special = encoding.special_tokens_mask
        if 0 in special:
            return encoding.ids[: special.index(0)], encoding.ids[len(special) - special[::-1].index(0) :]
    return [], []


def _special_ids(
    directory: Path, special: _SpecialTokens, hf_config: Json, before: list[int], after: list[int], notes: list[str]
) -> SpecialIds:
    """The ids of special tokens: around a text, by name, from config.json, or else the id of the end token."""
    ends = Fields(hf_config, str(directory)).token_ids("eos_token_id")
    eos = _first_id(*after, special.find("eos_token", "sep_token"), *ends)
    if eos is None:
        raise UserError(f"{directory}: neither its tokenizer nor config.json (eos_token_id) defines the end token")
    others = ", ".join(str(end) for end in ends if end != eos)
    if others:
        notes.append(f"a text ends with {eos}; config.json also names {others}, which do not end it")
    configured = (hf_config.get(f"{key}_token_id") for key in ("decoder_start", "bos", "pad"))
    # Unused defaults in config.json may be ids of letters.
    start, bos, pad = (index if index in special.ids.values() else None for index in configured)
    sos = _first_id(*before, special.find("bos_token", "cls_token"), start, bos, eos)
    pad = _first_id(special.find("pad_token"), pad)
    unk = _first_id(special.unknown(), special.find("unk_token"))
    if pad is None:
        notes.append(f"no padding token: the end token ({eos}) is used")
    if unk is None:
        notes.append(f"no token for unknown text: the end token ({eos}) is used")
    mask = special.find("mask_token")
    return SpecialIds(pad=_first_id(pad, eos), unk=_first_id(unk, eos), sos=sos, eos=eos, mask=mask)


def _first_id(*ids: Any) -> Any:
    """The first valid id; some files have -1 for none."""
    return next((index for index in ids if type(index) is int and index >= 0), None)


def _post_processor(frame: Frame, ids: SpecialIds, library: Library) -> Json | None:
    """A post-processor of the library, which adds the special tokens around a text or a pair of texts."""
    before, after = ids.around(frame)
    if not before and not after:
        return None
    names = {index: library.id_to_token(index) for index in (ids.sos, ids.eos)}

    def special(index: int, type_id: int = 0) -> Json:
        return {"SpecialToken": {"id": names[index], "type_id": type_id}}

    single = [*map(special, before), {"Sequence": {"id": "A", "type_id": 0}}, *map(special, after)]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, *(special(index, 1) for index in after)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": {name: {"id": name, "ids": [index], "tokens": [name]} for index, name in names.items()},
    }


def write_tokenizers(codec: Codec, directory: Path, model_type: str) -> list[str]:
    """Write the tokenizers for transformers, a separate target tokenizer into a subdirectory -> notes for the user."""
    if codec.features:
        raise UserError("features are tokens outside the text, which a Hugging Face tokenizer cannot express")
    notes = _write(codec.source, codec.frame, directory, model_type)
    if not codec.shared:
        (directory / TARGET).mkdir(exist_ok=True)
        notes += _write(codec.target, "end", directory / TARGET, model_type)
        notes += [f"two tokenizers: transformers reads the source's from {directory}, the target's from its {TARGET}/"]
    if "nfd" in (codec.source.scheme, codec.target.scheme):
        notes.append("transformers does not compose letters and combining marks when it decodes")
    return notes


def _write(tokenizer: Tokenizer, frame: Frame, directory: Path, model_type: str) -> list[str]:
    ids = tokenizer.ids
    ours = not isinstance(tokenizer, ForeignTokenizer)
    library = Library.from_str(tokenizer.to_json())
    if ours:
        library.add_special_tokens([name for name in SPECIALS if library.token_to_id(name) is not None])
        if tokenizer.scheme != "space":  # the default of the library
            library.decoder = decoders.Fuse() if tokenizer.scheme in ("char", "nfd", "word") else decoders.ByteLevel()
    state = json.loads(library.to_str())
    if ours or _added_ids(library) != ids.around(frame):
        state["post_processor"] = _post_processor(frame, ids, library)
    first, last = ("cls_token", "sep_token") if frame == "both" else ("bos_token", "eos_token")
    roles = {"pad_token": ids.pad, "unk_token": ids.unk, "mask_token": ids.mask, first: ids.sos, last: ids.eos}
    if ids.sos == ids.pad:  # no separate start token
        roles = {role: index for role, index in roles.items() if index != ids.sos or role == "pad_token"}
    token_types = ["token_type_ids"] if model_type == "bert" else []
    settings: Json = {
        **{role: library.id_to_token(index) for role, index in roles.items() if index is not None},
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", *token_types, "attention_mask"],
    }
    if ours and ids.mask is None:  # special tokens in a text are plain text, except the mask token
        settings["split_special_tokens"] = True
    removed = _remove_tokens(state, tokenizer.size)
    write_json(directory / JSON, state)
    write_json(directory / SETTINGS, settings)
    if not removed:
        return []
    return [f"{directory / JSON}: removed {plural(removed, 'token')} beyond the vocabulary of the model"]


def _remove_tokens(state: Json, size: int) -> int:
    """Remove tokens with ids from `size` on, which the model does not have -> their number."""
    model = state["model"]
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = vocab[:size]
    else:
        model["vocab"] = {token: index for token, index in vocab.items() if index < size}
    if "merges" in model:
        removed = vocab.keys() - model["vocab"].keys()
        model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & removed]
    added = [token for token in state["added_tokens"] if token["id"] < size]
    count = len(vocab) - len(model["vocab"]) + len(state["added_tokens"]) - len(added)
    state["added_tokens"] = added
    return count


def id_tokenizer(hf_config: Json, size: int, frame: Frame) -> ForeignTokenizer:
    """A tokenizer for texts of ids such as `12 7 103`; the frame is none or end."""

    def first(*roles: str) -> int:
        """The id of the first of these roles with an id in the vocabulary."""
        ids = (index for role in roles for index in Fields(hf_config, "").token_ids(f"{role}_token_id"))
        return next((index for index in ids if index < size), 0)

    require_ids([size - 1])
    pad = first("pad", "eos")
    eos = first("eos", "pad")
    sos = first("bos", "decoder_start", "eos")
    library = Library(models.WordLevel({str(index): index for index in range(size)}, unk_token=str(pad)))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # line ends count as white space
    if frame == "end":  # for other programs that read the tokenizer
        library.post_processor = processors.TemplateProcessing(f"$A {eos}", special_tokens=[(str(eos), eos)])
    return ForeignTokenizer(library.to_str(), SpecialIds(pad=pad, unk=pad, sos=sos, eos=eos), size)
