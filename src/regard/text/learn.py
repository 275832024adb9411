"""Learning a tokenizer for a training file: which scheme suits its text, and how much of it to learn from."""

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

SAMPLE = 10_000  # texts looked at, drawn from all; taking every n-th would fall for patterns in the file
CUT = 1_000  # characters looked at of each

# (lines up to, tokens): few lines cannot teach the embedding of many tokens
SIZES = ((1_000, 1_000), (5_000, 2_000), (20_000, 4_000), (200_000, 8_000), (2_000_000, 16_000))
LARGE = 32_000

LEARNED_LINES = 1_000_000  # bpe and unigram learn from about so many lines at most, drawn from all
LEARNED_TEXT = 50_000_000  # and from so many characters
# In a script without spaces every line is one long word to the learner, whose memory grows with the length of all
# different words: 400 MB for these.
UNBROKEN = 20  # characters between spaces that tell such a script
UNBROKEN_TEXT = {"bpe": 1_000_000, "unigram": 300_000}

T = TypeVar("T")


class BaseText(NamedTuple):
    """The codec and labels of the run that training starts from, used instead of learning new ones."""

    codec: Codec
    labels: tuple[str, ...] = ()

    def note(self, run: str | None) -> str:
        return f"tokens: those of {run}, {self.codec.source_vocab:,} tokens"


class Sample:
    """The beginnings of some texts (or of texts side by side), drawn from a stream with equal probability."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = []
        self.count = 0  # of all that passed
        self._random = Random(0)

    def add(self, *texts: str) -> None:
        self.count += 1
        if self.count <= SAMPLE:
            self.rows.append(tuple(text[:CUT] for text in texts))
        elif (slot := int(self._random.random() * self.count)) < SAMPLE:
            self.rows[slot] = tuple(text[:CUT] for text in texts)

    def column(self, index: int = 0) -> list[str]:
        return [row[index] for row in self.rows]


def draw_sample(items: Iterable[T], wanted: int, total: int) -> Iterator[T]:
    """About `wanted` of `total` items, from all over."""
    random = Random(0)
    return (item for item in items if wanted >= total or random.random() * total < wanted)


class TokenizerChoice(NamedTuple):
    """A scheme and why."""

    scheme: str
    reason: str


def choose(sample: Sequence[str], lines: int | None = None) -> TokenizerChoice:
    """Choose a scheme for text like `sample`, of which there are `lines` lines in all.

    Tokens separated by spaces are recognised by their number: few different ones that come again and again, or very
    short ones. Short lines and unbroken strings over a small alphabet go by character, all else by learned pieces.
    """
    lines = len(sample) if lines is None else lines
    tokens = Counter(token for text in sample for token in text.split(" ") if token)
    letters = Counter("".join(sample))
    total = tokens.total()
    words = total / max(1, len(sample))
    size = sum(len(token) * count for token, count in tokens.items()) / max(1, total)
    length = letters.total() / max(1, len(sample))

    spaced = sum(" " in text.strip(" ") for text in sample) >= len(sample) / 2
    again = total / max(1, len(tokens))
    closed = len(tokens) <= 500 and again >= 20
    short = size <= 1.5 or (size <= 2.5 and len(tokens) <= 1_000 and again >= 3)
    if spaced and (closed or short):
        reason = f"{len(tokens):,} distinct tokens separated by spaces, {size:.1f} characters each"
        return TokenizerChoice("space", reason)
    parts = set(unicodedata.normalize("NFD", "".join(letters)))
    ideographs = len(parts) > 500  # one of them says as much as several letters
    if (words < 1.5 and len(parts) <= 100) or length <= (10 if ideographs else 30 if words < 3 else 12):
        composed = all(unicodedata.is_normalized("NFC", text) for text in sample)
        if composed and len(parts) <= 0.75 * len(letters):
            reason = f"short lines of {len(letters):,} distinct characters, made of {len(parts)} parts"
            return TokenizerChoice("nfd", reason)
        reason = f"short lines (mean {words:.1f} words, {length:.1f} characters, {len(letters)} distinct)"
        return TokenizerChoice("char", reason)
    number = next((number for most, number in SIZES if lines <= most), LARGE)
    reason = f"sentences (mean {words:.1f} words, {length:.0f} characters), {plural(lines, 'line')}"
    return TokenizerChoice(f"bpe:{number}", reason)


def learned_lines(scheme: str, sample: Sequence[str], lines: int) -> int:
    """How many of `lines` lines a scheme learns from."""
    kind = parse_scheme(scheme).kind
    if kind not in LEARNED:
        return lines
    characters = sum(map(len, sample))
    words = sum(len(text.split()) for text in sample)
    budget = LEARNED_TEXT if characters <= UNBROKEN * words else UNBROKEN_TEXT[kind]
    return min(lines, LEARNED_LINES, max(1, budget * len(sample) // max(1, characters)))


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
    """Learn a tokenizer -> it, and a note on it; `texts` gives the texts of about so many of the lines.

    With `line_ends`, tokens keep the white space between them: instead of space, word is chosen.
    """
    choice = choose(sample, lines) if request == "auto" else TokenizerChoice(request, "as asked for")
    if line_ends and choice.scheme == "space":
        choice = choice._replace(scheme="word")
    tokenizer = Tokenizer.train(choice.scheme, texts(learned_lines(choice.scheme, sample, lines)), min_count, mask)
    return tokenizer, f"tokens: {choice.scheme}: {choice.reason}; {tokenizer.size:,} tokens"


def requests(text: Text) -> dict[str, str]:
    """The schemes asked for, by side, or one for both."""
    return {"shared": one_request(text, "text.shared: one vocabulary")} if text.shared else _by_side(text)


def one_request(text: Text, what: str) -> str:
    """The scheme asked for where there is one vocabulary."""
    schemes = sorted({request for request in _by_side(text).values() if request != "auto"}) or ["auto"]
    if len(schemes) > 1:
        raise UserError(f"{what} cannot be {' and '.join(schemes)}; ask for the same on both sides")
    return schemes[0]


def _by_side(text: Text) -> dict[str, str]:
    schemes = {"source": text.source_tokens, "target": text.target_tokens}
    for side, scheme in schemes.items():
        parse_scheme(scheme, f"text.{side}_tokens")
    return schemes
