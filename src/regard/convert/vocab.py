"""The vocabulary files of Hugging Face directories, in their several forms, as tokenizers of one library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from regard.convert.pieces import build, read_pieces
from regard.errors import UserError
from regard.files import read_json
from regard.text.tokenizer import read_text

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


class Opened(NamedTuple):
    """One tokenizer for both sides, or two; how many of its symbols count; and whether it puts marks around a text."""

    libraries: list[Tokenizer]
    sizes: list[int]
    framed: bool


def read_settings(directory: Path) -> Json:
    """What is said beside the vocabulary, with the names of special symbols as plain strings."""
    found: Json = {}
    for name in (SPECIALS, SETTINGS):
        if (directory / name).is_file():
            found |= {key: value for key, value in _table(directory / name).items() if value is not None}
    return {k: v["content"] if k.endswith("_token") and isinstance(v, dict) else v for k, v in found.items()}


def open_vocabulary(directory: Path, model_type: str, settings: Json) -> Opened:
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


def _counted(libraries: list[Tokenizer], framed: bool) -> Opened:
    return Opened(libraries, [1 + max(library.get_vocab().values()) for library in libraries], framed)


def _parse(path: Path) -> Tokenizer:
    text = read_text(path)
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"{path}: not a readable tokenizer: {error}") from None


def _two_sides(directory: Path) -> Opened:
    """Two SentencePiece models whose symbols are numbered in a table of their own, for both or for each."""
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
    return Opened(libraries, sizes, framed=False)


def _word_pieces(path: Path, settings: Json) -> Tokenizer:
    """Whole words and their parts, one to a line."""
    vocab = {symbol: index for index, symbol in enumerate(read_text(path).removesuffix("\n").split("\n"))}
    unknown = settings.get("unk_token", "[UNK]")
    if unknown not in vocab:
        raise UserError(f"{path}: has no symbol {unknown}, which stands for unknown words")
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
            raise UserError(f"{directory}: its added symbol {name!r} cannot have the number {index}")
    named = [value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str)]
    library.add_special_tokens([name for name in named if library.token_to_id(name) is not None])


def _numbers(path: Path) -> dict[str, int]:
    numbers = _table(path)
    if not numbers or not all(type(index) is int and index >= 0 for index in numbers.values()):
        raise UserError(f"{path}: must hold the number of every symbol")
    return numbers


def _table(path: Path) -> Json:
    data = read_json(path)
    if not isinstance(data, dict):
        raise UserError(f"{path}: must hold a table, not {json.dumps(data)[:40]}")
    return data
