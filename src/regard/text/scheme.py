"""Tokenizer schemes: how a request such as `bpe:8000` is read, and how the vocabulary of a scheme is learned.

The work is that of the `tokenizers` library; here are its settings for each scheme.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from regard.config import SpecialIds
from regard.errors import UserError, closest

SIMPLE = ("char", "nfd", "space", "word", "byte")  # the tokens follow from the text
LEARNED = ("bpe", "unigram")  # the tokens are learned, as many as asked for
ALLOWED = "char, nfd, space, word, byte, bpe:N, unigram:N (N tokens, for example bpe:8000) or auto"
SMALLEST = 260  # four special tokens and 256 bytes
LARGEST = 1_000_000

IDS = SpecialIds()  # of the vocabularies that we learn; imported ones have their own
SPECIALS = tuple(f"< {name} >" for name in ("pad", "unk", "sos", "eos", "mask"))  # the last only when asked for
EVERY = 2**40  # more tokens than any text has

_INSIDE = r"\p{L}\p{M}\p{N}_\x{200C}\x{200D}"  # letters, marks, digits and the joiners that some scripts write in words
PATTERNS = {"char": r"[\s\S]", "nfd": r"[\s\S]", "word": rf" ?[{_INSIDE}]+| ?[^\s{_INSIDE}]|[\s\S]"}

# Left alone the library starts threads at its first call, and a process forked later warns or waits for them for ever.
SWITCH = "TOKENIZERS_PARALLELISM"
_OURS = SWITCH not in os.environ
os.environ.setdefault(SWITCH, "false")


@contextmanager
def threads() -> Iterator[None]:
    """Let the library use all cores for the time being, unless the user's environment says otherwise."""
    if not _OURS:
        yield
        return
    os.environ[SWITCH] = "true"
    try:
        yield
    finally:
        os.environ[SWITCH] = "false"


class Scheme(NamedTuple):
    """A way of cutting text into tokens, with the size of the vocabulary where that is free."""

    kind: str
    size: int | None = None


def parse_scheme(request: str, where: str = "tokens") -> Scheme:
    """Read `char`, `bpe:8000` and the like; `auto` is kept as it is."""
    kind, colon, number = request.partition(":")
    if kind in ("auto", *SIMPLE):
        if colon:
            raise UserError(f"{where}: {kind} takes no number; write {kind!r}, not {request!r}")
        return Scheme(kind)
    if kind in LEARNED:
        if not re.fullmatch(r"[0-9]{1,9}", number):
            raise UserError(f"{where}: {request!r} lacks its number of tokens; write it as {kind}:8000")
        if not SMALLEST <= int(number) <= LARGEST:
            raise UserError(
                f"{where}: {request!r} is out of range; N counts every token, among them the 256 bytes and 4 special "
                f"tokens, and goes from {SMALLEST} to {LARGEST}"
            )
        return Scheme(kind, int(number))
    near = closest(kind, ("auto", *SIMPLE, *LEARNED))
    raise UserError(f"{where}: {request!r} is not a way of cutting text{near}\n  allowed: {ALLOWED}")


def pre_tokenizer(kind: str) -> Any:
    """The library's pre-tokenizer of a scheme."""
    if kind == "space":
        return pre_tokenizers.Split(" ", "removed")
    if kind in PATTERNS:
        return pre_tokenizers.Split(Regex(PATTERNS[kind]), "isolated")
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "byte")


def split_simple(kind: str, text: str) -> Sequence[str]:
    """The tokens of char, nfd and space, without the library: characters, or what is between spaces."""
    if kind == "space":
        return [token for token in text.split(" ") if token]
    return unicodedata.normalize("NFD", text) if kind == "nfd" else text


def byte_letters() -> list[str]:
    """The letter that stands for each of the 256 bytes in byte-level tokens: itself if it can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]


BYTE_OF = {letter: byte for byte, letter in enumerate(byte_letters())}


def learn(scheme: Scheme, texts: Iterable[str], min_count: int = 1, mask: bool = False) -> Tokenizer:
    """Learn the vocabulary of `texts`: special tokens first, then the others, most frequent first."""
    specials = SPECIALS if mask else SPECIALS[:-1]
    model: Any
    if scheme.kind == "byte":
        model = models.BPE(_numbered(specials, byte_letters()), [])
    elif scheme.kind in LEARNED:
        assert scheme.size is not None
        size = scheme.size - len(specials)
        model = _bpe(specials, texts, size) if scheme.kind == "bpe" else _unigram(specials, texts, size)
    else:
        tokens = _count_tokens(scheme.kind, texts, min_count)
        model = models.WordLevel(_numbered(specials, tokens), unk_token=SPECIALS[IDS.unk])
    library = Tokenizer(model)
    library.pre_tokenizer = pre_tokenizer(scheme.kind)
    if scheme.kind == "nfd":
        library.normalizer = normalizers.NFD()
    return library


def _numbered(specials: Sequence[str], tokens: Iterable[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate((*specials, *tokens))}


def _count_tokens(kind: str, texts: Iterable[str], min_count: int) -> list[str]:
    """The tokens of a simple scheme. The library counts words; for the other schemes a Counter is faster."""
    if kind == "word":
        learner = Tokenizer(models.WordLevel({}, unk_token=SPECIALS[IDS.unk]))
        learner.pre_tokenizer = pre_tokenizer(kind)
        trainer = trainers.WordLevelTrainer(vocab_size=EVERY, min_frequency=min_count, show_progress=False)
        learner.train_from_iterator(texts, trainer)
        vocab = learner.get_vocab()
        return sorted(vocab, key=vocab.__getitem__)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split_simple(kind, text))
    return sorted((s for s, count in counts.items() if count >= min_count), key=lambda s: (-counts[s], s))


def _train_library(kind: str, texts: Iterable[str], trainer: Any, size: int) -> dict[str, Any]:
    """What the library learns, as in its file."""
    learner = Tokenizer(models.BPE() if kind == "bpe" else models.Unigram())
    learner.pre_tokenizer = pre_tokenizer(kind)
    learner.train_from_iterator(
        texts, trainer(vocab_size=size, initial_alphabet=sorted(byte_letters()), show_progress=False)
    )
    state: dict[str, Any] = json.loads(learner.to_str())["model"]
    return state


def _bpe(specials: Sequence[str], texts: Iterable[str], size: int) -> Any:
    state = _train_library("bpe", texts, trainers.BpeTrainer, size)
    vocab = state["vocab"]
    tokens = _numbered(specials, sorted(vocab, key=vocab.__getitem__))
    return models.BPE(tokens, [tuple(pair) for pair in state["merges"]])


def _unigram(specials: Sequence[str], texts: Iterable[str], size: int) -> Any:
    """Make the learned pieces fit: at most `size` tokens, among them every byte, the same ones each time.

    The library gives bytes that it has no score for steps of 0.0001 near the lowest score, in random order; here all of
    them get the lowest.
    """
    state = _train_library("unigram", texts, trainers.UnigramTrainer, size)
    letters = byte_letters()
    scores = {piece: round(score, 4) for piece, score in state["vocab"]}
    floor = min(scores.values())
    steps = floor + len(letters) * 0.0001 + 0.00005
    single = [(-score if (score := scores.get(letter, floor)) > steps else -floor, letter) for letter in letters]
    longer = sorted((-score, piece) for piece, score in scores.items() if len(piece) > 1)  # the best first
    pieces = [(piece, -cost) for cost, piece in sorted((*longer[: size - len(letters)], *single))]
    return models.Unigram([*((name, 0.0) for name in specials), *pieces], unk_id=IDS.unk, byte_fallback=False)
