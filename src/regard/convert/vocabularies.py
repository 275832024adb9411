"""The vocabulary files of Hugging Face directories, in their several forms, as tokenizers of one library."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from regard.errors import UserError
from regard.files import read_json
from regard.text.tokenizer import HIDDEN, read_text

JSON, SETTINGS, SPECIALS, ADDED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
TARGET = "target"  # the directory beside tokenizer.json in which we put the other side's
MODELS = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
SENTINELS = 100

Json = dict[str, Any]


class OpenedVocabulary(NamedTuple):
    """One tokenizer for both sides, or two; how many of its tokens count; and whether it puts marks around a text."""

    libraries: list[Tokenizer]
    sizes: list[int]
    framed: bool


def read_settings(directory: Path) -> Json:
    """What is said beside the vocabulary, with the names of special tokens as plain strings."""
    found: Json = {}
    for name in (SPECIALS, SETTINGS):
        if (directory / name).is_file():
            found |= {key: value for key, value in _table(directory / name).items() if value is not None}
    return {k: v["content"] if k.endswith("_token") and isinstance(v, dict) else v for k, v in found.items()}


def open_vocabulary(directory: Path, model_type: str, settings: Json) -> OpenedVocabulary:
    """Find the vocabulary of a directory; the form that says most comes first."""

    def has(*names: str) -> bool:
        return all((directory / name).is_file() for name in names)

    if has("source.spm", "target.spm", "vocab.json"):
        return _two_sides(directory)
    if has(JSON):
        names = [JSON, f"{TARGET}/{JSON}"] if has(f"{TARGET}/{JSON}") else [JSON]
        return _counted([_parse(directory / name) for name in names], framed=True)
    model = next((name for name in MODELS if has(name)), None)
    if model is not None:
        library = build(read_pieces(directory / model))
        if model_type == "t5":
            count = settings.get("extra_ids", SENTINELS)
            library.add_special_tokens([f"<extra_id_{index}>" for index in reversed(range(count))])
    elif has("vocab.txt"):
        library = _word_pieces(directory / "vocab.txt", settings)
    elif has("vocab.json", "merges.txt"):
        library = _byte_level(directory / "vocab.json", directory / "merges.txt", settings)
    else:
        there = ", ".join(sorted(path.name for path in directory.iterdir())) or "nothing"
        raise UserError(
            f"{directory}: no tokenizer that can be read\n"
            f"  wanted: {JSON}, vocab.txt, vocab.json with merges.txt, or a SentencePiece model: {', '.join(MODELS)}, "
            f"or source.spm and target.spm with vocab.json\n  found: {there}"
        )
    _add(library, directory, settings)
    return _counted([library], framed=False)


def _counted(libraries: list[Tokenizer], framed: bool) -> OpenedVocabulary:
    return OpenedVocabulary(libraries, [1 + max(library.get_vocab().values()) for library in libraries], framed)


def _parse(path: Path) -> Tokenizer:
    text = read_text(path)
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"{path}: not a readable tokenizer: {error}") from None


def _two_sides(directory: Path) -> OpenedVocabulary:
    """Two SentencePiece models whose tokens are numbered in a table of their own, for both or for each."""
    libraries, sizes = [], []
    for side, table in (("source", "vocab.json"), ("target", "target_vocab.json")):
        path = directory / table if (directory / table).is_file() else directory / "vocab.json"
        numbers = _numbers(path)
        marks = ["</s>", "<pad>"]
        missing = [name for name in ("<unk>", *marks) if name not in numbers]
        if missing:
            raise UserError(f"{path}: has no number for {', '.join(missing)}")
        languages = [name for name in numbers if name.startswith(">>") and name.endswith("<<")]
        library = build(read_pieces(directory / f"{side}.spm"), numbers, [*marks, *languages])
        library.add_special_tokens(marks)
        library.add_tokens([AddedToken(name, normalized=False) for name in languages])
        libraries.append(library)
        sizes.append(1 + max(numbers.values()))
    return OpenedVocabulary(libraries, sizes, framed=False)


def _word_pieces(path: Path, settings: Json) -> Tokenizer:
    """Whole words and their parts, one to a line."""
    vocab = {symbol: index for index, symbol in enumerate(read_text(path).removesuffix("\n").split("\n"))}
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
    """Pieces of bytes, and the order in which they are joined."""
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(read_text(merges).split("\n"), 1):
        if line and not line.startswith("#version"):
            left, _, right = line.partition(" ")
            if not right or " " in right:
                raise UserError(f"{merges}:{number}: {line!r} is not a pair of pieces")
            pairs.append((left, right))
    try:
        library = Tokenizer(models.BPE(_numbers(vocab), pairs))
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"{merges}: does not fit {vocab.name}: {error}") from None
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([name for name in ("<|endoftext|>",) if library.token_to_id(name) is not None])
    return library


def _add(library: Tokenizer, directory: Path, settings: Json) -> None:
    """Add what was added to the vocabulary later, which must come out where it was, and mark what is special."""
    table = settings.get("added_tokens_decoder", {})
    added = {int(index): (token["content"], bool(token.get("special"))) for index, token in table.items()}
    if (directory / ADDED).is_file():
        for name, index in _numbers(directory / ADDED).items():
            added.setdefault(index, (name, False))
    for index, (name, special) in sorted(added.items()):
        token = AddedToken(name, normalized=False, special=special)
        (library.add_special_tokens if special else library.add_tokens)([token])
        if library.token_to_id(name) != index:
            raise UserError(f"{directory}: its added token {name!r} cannot have the number {index}")
    named = [value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str)]
    library.add_special_tokens([name for name in named if library.token_to_id(name) is not None])


def _numbers(path: Path) -> dict[str, int]:
    numbers = _table(path)
    if not numbers or not all(type(index) is int and index >= 0 for index in numbers.values()):
        raise UserError(f"{path}: must hold the number of every token")
    return numbers


def _table(path: Path) -> Json:
    data = read_json(path)
    if not isinstance(data, dict):
        raise UserError(f"{path}: must hold a table, not {json.dumps(data)[:40]}")
    return data


NORMAL, UNKNOWN, CONTROL, CHOSEN, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
SPACE = "▁"


class Piece(NamedTuple):
    """A token."""

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
        """The tokens of some kinds."""
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
        raise UserError(f"{path}: not a SentencePiece model: it has no unknown token")
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

    `numbers` are the ids of its tokens where they are not counted through. Among them may be others: `marks`, which
    keep their names, and tokens of another text, which are never found in this one. Tokens without a number come
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
    # What somebody chose as a token is better than any way of cutting it. The name of a byte is no text, but the
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
