"""Learning of tokenizers: the choice of a scheme, and of the amount of text to learn from."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import NamedTuple, TypeVar

from regard.errors import UserError, plural
from regard.recipe import Text
from regard.text.codec import Codec
from regard.text.tokenizer import LEARNED, Tokenizer, parse_scheme

SAMPLE_TEXTS = 10_000  # drawn at random, because every n-th text could follow a pattern in the file
SAMPLE_CHARACTERS = 1_000  # of each text

# (maximum number of lines, vocabulary size): few lines cannot train the embeddings of many tokens
SIZES = ((1_000, 1_000), (5_000, 2_000), (20_000, 4_000), (200_000, 8_000), (2_000_000, 16_000))
MAX_SIZE = 32_000

# bpe and unigram learn from a sample with at most about this number of lines and characters
MAX_LINES = 1_000_000
MAX_CHARACTERS = 50_000_000
# In a script without spaces, every line is one long word for the learner, whose memory grows with the total length of
# the distinct words: 400 MB for these limits.
MIN_UNSPACED_LENGTH = 20  # mean number of characters between spaces above which a text counts as unspaced
MAX_UNSPACED_CHARACTERS = {"bpe": 1_000_000, "unigram": 300_000}

T = TypeVar("T")


class BaseText(NamedTuple):
    """The codec and the labels of the run that training starts from."""

    codec: Codec
    labels: tuple[str, ...] = ()

    def note(self, run: str | None) -> str:
        return f"tokens: those of {run}, {self.codec.source_vocab:,} tokens"


class Sample:
    """A uniform random sample of a stream of texts, or of rows of texts; each text is shortened."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = []
        self.count = 0  # of the whole stream
        self._random = Random(0)

    def add(self, *texts: str) -> None:
        self.count += 1
        if self.count <= SAMPLE_TEXTS:
            self.rows.append(tuple(text[:SAMPLE_CHARACTERS] for text in texts))
        elif (slot := int(self._random.random() * self.count)) < SAMPLE_TEXTS:
            self.rows[slot] = tuple(text[:SAMPLE_CHARACTERS] for text in texts)

    def column(self, index: int = 0) -> list[str]:
        return [row[index] for row in self.rows]


def draw_sample(items: Iterable[T], count: int, total: int) -> Iterator[T]:
    """About `count` of `total` items, drawn at random, in order."""
    random = Random(0)
    return (item for item in items if count >= total or random.random() * total < count)


class TokenizerChoice(NamedTuple):
    """A scheme, and the reason for it."""

    scheme: str
    reason: str


def choose(sample: Sequence[str], lines: int | None = None) -> TokenizerChoice:
    """Choose a scheme for a text of `lines` lines: space for few distinct or very short tokens, char or nfd for short
    lines or lines without spaces over a small alphabet, bpe for all other texts.
    """
    lines = len(sample) if lines is None else lines
    tokens = Counter(token for text in sample for token in text.split(" ") if token)
    letters = Counter("".join(sample))
    total = tokens.total()
    words = total / max(1, len(sample))
    size = sum(len(token) * count for token, count in tokens.items()) / max(1, total)
    length = letters.total() / max(1, len(sample))

    spaced = sum(" " in text.strip(" ") for text in sample) >= len(sample) / 2
    repetitions = total / max(1, len(tokens))
    few = len(tokens) <= 500 and repetitions >= 20
    short = size <= 1.5 or (size <= 2.5 and len(tokens) <= 1_000 and repetitions >= 3)
    if spaced and (few or short):
        reason = f"{len(tokens):,} distinct tokens separated by spaces, {size:.1f} characters each"
        return TokenizerChoice("space", reason)
    parts = set(unicodedata.normalize("NFD", "".join(letters)))
    ideographs = len(parts) > 500  # carry more information per character
    if (words < 1.5 and len(parts) <= 100) or length <= (10 if ideographs else 30 if words < 3 else 12):
        composed = all(unicodedata.is_normalized("NFC", text) for text in sample)
        if composed and len(parts) <= 0.75 * len(letters):
            reason = f"short lines of {len(letters):,} distinct characters, made of {len(parts)} parts"
            return TokenizerChoice("nfd", reason)
        reason = f"short lines (mean {words:.1f} words, {length:.1f} characters, {len(letters)} distinct)"
        return TokenizerChoice("char", reason)
    number = next((number for limit, number in SIZES if lines <= limit), MAX_SIZE)
    reason = f"sentences (mean {words:.1f} words, {length:.0f} characters), {plural(lines, 'line')}"
    return TokenizerChoice(f"bpe:{number}", reason)


def learned_lines(scheme: str, sample: Sequence[str], lines: int) -> int:
    """The number of lines to learn from, at most `lines`."""
    kind = parse_scheme(scheme).kind
    if kind not in LEARNED:
        return lines
    characters = sum(map(len, sample))
    words = sum(len(text.split()) for text in sample)
    budget = MAX_CHARACTERS if characters <= MIN_UNSPACED_LENGTH * words else MAX_UNSPACED_CHARACTERS[kind]
    return min(lines, MAX_LINES, max(1, budget * len(sample) // max(1, characters)))


def learn_tokenizer(
    request: str,
    sample: Sequence[str],
    lines: int,
    texts: Callable[[int], Iterable[str]],
    *,
    min_count: int,
    mask: bool = False,
    line_ends: bool = False,
) -> tuple[Tokenizer, str]:
    """Learn a tokenizer -> the tokenizer and a note; `texts(n)` returns the texts of about n lines."""
    choice = choose(sample, lines) if request == "auto" else TokenizerChoice(request, "as requested")
    if line_ends and choice.scheme == "space":
        choice = choice._replace(scheme="word")  # keeps the white space between tokens
    tokenizer = Tokenizer.train(choice.scheme, texts(learned_lines(choice.scheme, sample, lines)), min_count, mask)
    return tokenizer, f"tokens: {choice.scheme}: {choice.reason}; {tokenizer.size:,} tokens"


def requests(text: Text) -> dict[str, str]:
    """The requested scheme of each side, or of the shared vocabulary."""
    return {"shared": one_request(text, "text.shared: one vocabulary")} if text.shared else _by_side(text)


def one_request(text: Text, noun: str) -> str:
    """The requested scheme of a single vocabulary; `noun` names it in the error."""
    schemes = sorted({request for request in _by_side(text).values() if request != "auto"}) or ["auto"]
    if len(schemes) > 1:
        raise UserError(f"{noun} cannot be {' and '.join(schemes)}; set the same scheme for both sides")
    return schemes[0]


def _by_side(text: Text) -> dict[str, str]:
    schemes = {"source": text.source_tokens, "target": text.target_tokens}
    for side, scheme in schemes.items():
        parse_scheme(scheme, f"text.{side}_tokens")
    return schemes
