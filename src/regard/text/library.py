"""What we ask of the `tokenizers` library: cutting, learning, and running in threads only when that is safe.

The symbols that are not text carry a space inside (`< pad >`). No scheme cuts text into such a piece: `char` gives single
characters, `space` none with a space, `word` a space at most in front, and the byte-level schemes write a space as another
letter. The library's own special tokens, which are searched for in user text, are never used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from regard.config import Ids
from regard.text.scheme import Scheme

# Left alone the library starts threads at its first call, and a process forked later warns or waits for them for ever.
SWITCH = "TOKENIZERS_PARALLELISM"
_OURS = SWITCH not in os.environ
os.environ.setdefault(SWITCH, "false")

IDS = Ids()
SPECIALS = tuple(f"< {name} >" for name in ("pad", "unk", "sos", "eos"))
FIRST = len(SPECIALS)  # the first id that is text
EVERY = 2**40  # more symbols than any text has

_INSIDE = r"\p{L}\p{M}\p{N}_\x{200C}\x{200D}"  # letters, marks, digits and the joiners that some scripts write in words
PATTERNS = {
    "char": r"[\s\S]",
    "word": rf" ?[{_INSIDE}]+| ?[^\s{_INSIDE}]|[\s\S]",
}


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


def cutter(kind: str) -> Any:
    """The pre-tokenizer of a scheme."""
    if kind == "space":
        return pre_tokenizers.Split(" ", "removed")
    if kind in PATTERNS:
        return pre_tokenizers.Split(Regex(PATTERNS[kind]), "isolated")
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "byte")


def byte_letters() -> list[str]:
    """The letter that stands for each of the 256 bytes in byte-level symbols: itself if it can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]


def learn(scheme: Scheme, texts: Iterable[str], min_count: int = 1) -> Tokenizer:
    """Learn the symbols of `texts`; what is not text comes first, then the rest, most frequent first."""
    if scheme.kind == "byte":
        model = models.BPE(_numbered(byte_letters()), [])
    elif scheme.kind == "bpe":
        model = _bpe(_trained(scheme, texts, trainers.BpeTrainer))
    elif scheme.kind == "unigram":
        model = _unigram(_trained(scheme, texts, trainers.UnigramTrainer))
    else:
        learner = Tokenizer(models.WordLevel({}, unk_token=SPECIALS[IDS.unk]))
        learner.pre_tokenizer = cutter(scheme.kind)
        learner.train_from_iterator(
            texts, trainers.WordLevelTrainer(vocab_size=EVERY, min_frequency=min_count, show_progress=False)
        )
        vocab = learner.get_vocab()
        model = models.WordLevel(_numbered(sorted(vocab, key=vocab.__getitem__)), unk_token=SPECIALS[IDS.unk])
    library = Tokenizer(model)
    library.pre_tokenizer = cutter(scheme.kind)
    return library


def _numbered(symbols: Iterable[str]) -> dict[str, int]:
    return {symbol: index for index, symbol in enumerate((*SPECIALS, *symbols))}


def _trained(scheme: Scheme, texts: Iterable[str], trainer: Any) -> dict[str, Any]:
    assert scheme.size is not None
    learner = Tokenizer(models.BPE() if scheme.kind == "bpe" else models.Unigram())
    learner.pre_tokenizer = cutter(scheme.kind)
    learner.train_from_iterator(
        texts, trainer(vocab_size=scheme.size - FIRST, initial_alphabet=sorted(byte_letters()), show_progress=False)
    )
    state: dict[str, Any] = json.loads(learner.to_str())["model"]
    return state


def _bpe(state: dict[str, Any]) -> Any:
    vocab = state["vocab"]
    return models.BPE(_numbered(sorted(vocab, key=vocab.__getitem__)), [tuple(pair) for pair in state["merges"]])


def _unigram(state: dict[str, Any]) -> Any:
    """Bytes that never occurred come out in a random order with random scores: give them one and the same, the lowest."""
    floor = round(min((score for piece, score in state["vocab"] if len(piece) > 1), default=-10.0), 4)
    scores = {piece: max(round(score, 4), floor) for piece, score in state["vocab"]}
    pieces = sorted({*scores, *byte_letters()}, key=lambda piece: (-scores.get(piece, floor), piece))
    symbols = [(name, 0.0) for name in SPECIALS] + [(piece, scores.get(piece, floor)) for piece in pieces]
    return models.Unigram(symbols, unk_id=IDS.unk, byte_fallback=False)
