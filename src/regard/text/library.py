"""What we ask of the `tokenizers` library: cutting, learning, and running in threads only when that is safe.

The symbols that are not text carry a space inside (`< pad >`). No scheme cuts text into such a piece: `char` gives
single characters, `space` none with a space, `word` a space at most in front, and the byte-level schemes write a space
as another letter. The library's own special tokens, which are searched for in user text, are never used.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from regard.config import Ids
from regard.text.scheme import LEARNED, Scheme

# Left alone the library starts threads at its first call, and a process forked later warns or waits for them for ever.
SWITCH = "TOKENIZERS_PARALLELISM"
_OURS = SWITCH not in os.environ
os.environ.setdefault(SWITCH, "false")

IDS = Ids()  # of the vocabularies that we learn; those from elsewhere have their own
SPECIALS = tuple(f"< {name} >" for name in ("pad", "unk", "sos", "eos", "mask"))  # the last only when asked for
EVERY = 2**40  # more symbols than any text has

_INSIDE = r"\p{L}\p{M}\p{N}_\x{200C}\x{200D}"  # letters, marks, digits and the joiners that some scripts write in words
PATTERNS = {
    "char": r"[\s\S]",
    "nfd": r"[\s\S]",
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


def learn(scheme: Scheme, texts: Iterable[str], min_count: int = 1, mask: bool = False) -> Tokenizer:
    """Learn the symbols of `texts`; what is not text comes first, then the rest, most frequent first."""
    specials = SPECIALS if mask else SPECIALS[:-1]
    model: Any
    if scheme.kind == "byte":
        model = models.BPE(_numbered(specials, byte_letters()), [])
    elif scheme.kind in LEARNED:
        assert scheme.size is not None
        room = scheme.size - len(specials)
        model = _bpe(specials, texts, room) if scheme.kind == "bpe" else _unigram(specials, texts, room)
    else:
        symbols = _symbols(scheme.kind, texts, min_count)
        model = models.WordLevel(_numbered(specials, symbols), unk_token=SPECIALS[IDS.unk])
    library = Tokenizer(model)
    library.pre_tokenizer = cutter(scheme.kind)
    if scheme.kind == "nfd":
        library.normalizer = normalizers.NFD()
    return library


def _symbols(kind: str, texts: Iterable[str], min_count: int) -> list[str]:
    """The symbols of a scheme that learns nothing. The library counts words; for single symbols a Counter is faster."""
    if kind == "word":
        learner = Tokenizer(models.WordLevel({}, unk_token=SPECIALS[IDS.unk]))
        learner.pre_tokenizer = cutter(kind)
        trainer = trainers.WordLevelTrainer(vocab_size=EVERY, min_frequency=min_count, show_progress=False)
        learner.train_from_iterator(texts, trainer)
        vocab = learner.get_vocab()
        return sorted(vocab, key=vocab.__getitem__)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(single(kind, text))
    return sorted((s for s, count in counts.items() if count >= min_count), key=lambda s: (-counts[s], s))


def single(kind: str, text: str) -> Sequence[str]:
    """The symbols of the schemes that need no library: characters, decomposed characters, or what is between spaces."""
    if kind == "space":
        return [symbol for symbol in text.split(" ") if symbol]
    return unicodedata.normalize("NFD", text) if kind == "nfd" else text


def _numbered(specials: Sequence[str], symbols: Iterable[str]) -> dict[str, int]:
    return {symbol: index for index, symbol in enumerate((*specials, *symbols))}


def _trained(kind: str, texts: Iterable[str], trainer: Any, room: int) -> dict[str, Any]:
    learner = Tokenizer(models.BPE() if kind == "bpe" else models.Unigram())
    learner.pre_tokenizer = cutter(kind)
    learner.train_from_iterator(
        texts, trainer(vocab_size=room, initial_alphabet=sorted(byte_letters()), show_progress=False)
    )
    state: dict[str, Any] = json.loads(learner.to_str())["model"]
    return state


def _bpe(specials: Sequence[str], texts: Iterable[str], room: int) -> Any:
    state = _trained("bpe", texts, trainers.BpeTrainer, room)
    vocab = state["vocab"]
    symbols = _numbered(specials, sorted(vocab, key=vocab.__getitem__))
    return models.BPE(symbols, [tuple(pair) for pair in state["merges"]])


def _unigram(specials: Sequence[str], texts: Iterable[str], room: int) -> Any:
    """Make the learned pieces fit: at most `room` symbols, among them every byte, the same ones each time.

    The library gives bytes that it has no score for steps of 0.0001 near the lowest score, in random order; here all of
    them get the lowest.
    """
    state = _trained("unigram", texts, trainers.UnigramTrainer, room)
    letters = byte_letters()
    scores = {piece: round(score, 4) for piece, score in state["vocab"]}
    floor = min(scores.values())
    steps = floor + len(letters) * 0.0001 + 0.00005
    single = [(score if (score := scores.get(letter, floor)) > steps else floor, letter) for letter in letters]
    longer = sorted(((score, piece) for piece, score in scores.items() if len(piece) > 1), key=_best_first)
    pieces = sorted((*longer[: room - len(letters)], *single), key=_best_first)
    return models.Unigram(
        [*((name, 0.0) for name in specials), *((piece, score) for score, piece in pieces)],
        unk_id=IDS.unk,
        byte_fallback=False,
    )


def _best_first(scored: tuple[float, str]) -> tuple[float, str]:
    score, piece = scored
    return -score, piece
