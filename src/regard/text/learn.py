"""The ways of cutting text into tokens, and how a request for one is read."""

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
from regard.recipe import Text

SIMPLE = ("char", "nfd", "space", "word", "byte")  # the tokens follow from the text
LEARNED = ("bpe", "unigram")  # the tokens are learned, as many as asked for
ALLOWED = "char, nfd, space, word, byte, bpe:N, unigram:N (N tokens, for example bpe:8000) or auto"
SMALLEST = 260  # four tokens that are not text and 256 bytes
LARGEST = 1_000_000


class Scheme(NamedTuple):
    """A way of cutting text, with the number of tokens where that is free."""

    kind: str
    size: int | None = None

    def __str__(self) -> str:
        return self.kind if self.size is None else f"{self.kind}:{self.size}"


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
                f"{where}: {request!r} is out of range; N counts every token, among them the 256 bytes and 4 that are "
                f"not text, and goes from {SMALLEST} to {LARGEST}"
            )
        return Scheme(kind, int(number))
    near = closest(kind, ("auto", *SIMPLE, *LEARNED))
    raise UserError(f"{where}: {request!r} is not a way of cutting text{near}\n  allowed: {ALLOWED}")


# Left alone the library starts threads at its first call, and a process forked later warns or waits for them for ever.
SWITCH = "TOKENIZERS_PARALLELISM"
_OURS = SWITCH not in os.environ
os.environ.setdefault(SWITCH, "false")

IDS = SpecialIds()  # of the vocabularies that we learn; those from elsewhere have their own
SPECIALS = tuple(f"< {name} >" for name in ("pad", "unk", "sos", "eos", "mask"))  # the last only when asked for
EVERY = 2**40  # more tokens than any text has

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
    """The letter that stands for each of the 256 bytes in byte-level tokens: itself if it can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]


def learn(scheme: Scheme, texts: Iterable[str], min_count: int = 1, mask: bool = False) -> Tokenizer:
    """Learn the tokens of `texts`; what is not text comes first, then the rest, most frequent first."""
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
    """The tokens of a scheme that learns nothing. The library counts words; for single tokens a Counter is faster."""
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
    """The tokens of the schemes that need no library: characters, decomposed characters, or what is between spaces."""
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
    """Make the learned pieces fit: at most `room` tokens, among them every byte, the same ones each time.

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


# (lines up to, tokens): few lines cannot teach the embedding of many tokens
SIZES = ((1_000, 1_000), (5_000, 2_000), (20_000, 4_000), (200_000, 8_000), (2_000_000, 16_000))
LARGE = 32_000


class TokenizerChoice(NamedTuple):
    """A scheme and why."""

    scheme: str
    reason: str

    def __str__(self) -> str:
        return f"{self.scheme}: {self.reason}"


def choose(sample: Sequence[str], lines: int | None = None) -> TokenizerChoice:
    """Choose a scheme for text like `sample`, of which there are `lines` lines in all.

    Tokens separated by spaces are recognised by their number: few different ones that come again and again, or very
    short ones. Short lines and unbroken strings over a small alphabet go by character, all else by learned pieces.
    """
    lines = len(sample) if lines is None else lines
    symbols = Counter(symbol for text in sample for symbol in text.split(" ") if symbol)
    letters = Counter("".join(sample))
    total = symbols.total()
    words = total / max(1, len(sample))
    size = sum(len(symbol) * count for symbol, count in symbols.items()) / max(1, total)
    length = letters.total() / max(1, len(sample))

    spaced = sum(" " in text.strip(" ") for text in sample) >= len(sample) / 2
    again = total / max(1, len(symbols))
    closed = len(symbols) <= 500 and again >= 20
    short = size <= 1.5 or (size <= 2.5 and len(symbols) <= 1_000 and again >= 3)
    if spaced and (closed or short):
        return TokenizerChoice(
            "space", f"{len(symbols):,} distinct tokens separated by spaces, {size:.1f} characters each"
        )
    parts = set(unicodedata.normalize("NFD", "".join(letters)))
    ideographs = len(parts) > 500  # one of them says as much as several letters
    if (words < 1.5 and len(parts) <= 100) or length <= (10 if ideographs else 30 if words < 3 else 12):
        composed = all(unicodedata.is_normalized("NFC", text) for text in sample)
        if composed and len(parts) <= 0.75 * len(letters):
            return TokenizerChoice(
                "nfd", f"short lines of {len(letters):,} distinct characters, made of {len(parts)} parts"
            )
        return TokenizerChoice(
            "char", f"short lines (mean {words:.1f} words, {length:.1f} characters, {len(letters)} distinct)"
        )
    number = next((number for most, number in SIZES if lines <= most), LARGE)
    return TokenizerChoice(
        f"bpe:{number}", f"sentences (mean {words:.1f} words, {length:.0f} characters), {lines:,} lines"
    )


LEARNED_LINES = 1_000_000  # bpe and unigram learn from about so many lines at most, drawn from all
LEARNED_TEXT = 50_000_000  # and from so many characters
# In a script without spaces every line is one long word to the learner, whose memory grows with the length of all
# different words: 400 MB for these.
UNBROKEN = 20  # characters between spaces that tell such a script
UNBROKEN_TEXT = {"bpe": 1_000_000, "unigram": 300_000}


def requests(text: Text) -> dict[str, str]:
    """The schemes asked for, by side, or one for both."""
    asked = {"source": text.source_tokens, "target": text.target_tokens}
    for side, request in asked.items():
        parse_scheme(request, f"text.{side}_tokens")
    if not text.shared:
        return asked
    return {"shared": one_request(text, "text.shared: one vocabulary")}


def one_request(text: Text, what: str) -> str:
    """The scheme asked for where there is one vocabulary."""
    asked = {"source": text.source_tokens, "target": text.target_tokens}
    for side, request in asked.items():
        parse_scheme(request, f"text.{side}_tokens")
    found = sorted({request for request in asked.values() if request != "auto"}) or ["auto"]
    if len(found) > 1:
        raise UserError(f"{what} cannot be {' and '.join(found)}; ask for the same on both sides")
    return found[0]


def share(scheme: str, sample: Sequence[str], lines: int) -> int:
    """How many lines a scheme learns from."""
    kind = parse_scheme(scheme).kind
    if kind not in LEARNED:
        return lines
    characters = sum(map(len, sample))
    words = sum(len(text.split()) for text in sample)
    budget = LEARNED_TEXT if characters <= UNBROKEN * words else UNBROKEN_TEXT[kind]
    return min(lines, LEARNED_LINES, max(1, budget * len(sample) // max(1, characters)))
