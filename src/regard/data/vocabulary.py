"""Learning the symbols of a text: how much of it a scheme looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from regard.config import Frame, Ids
from regard.errors import UserError
from regard.settings import Text
from regard.text.codec import Codec
from regard.text.scheme import LEARNED, parse_scheme

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


# The marks around a text, by task; where a run is started from, they are as there.
FRAMES: dict[str, Frame] = {"pairs": "end", "span": "end", "masked": "both", "classify": "both", "lm": "none"}


class Base(NamedTuple):
    """What a run that training starts from says about text and labels."""

    codec: Codec
    labels: tuple[str, ...] = ()


def marks(frame: Frame, ids: Ids) -> tuple[list[int], list[int]]:
    """What stands before and after a text."""
    return [ids.sos] * (frame in ("both", "start")), [ids.eos] * (frame in ("both", "end"))
