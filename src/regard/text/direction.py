"""The writing direction of a text."""

from __future__ import annotations

from typing import Literal
from unicodedata import bidirectional

Direction = Literal["ltr", "rtl"]


def direction(text: str) -> Direction:
    """The direction of the first strong character (Unicode bidi class L, R or AL); left to right without one."""
    for character in text:
        bidi_class = bidirectional(character)
        if bidi_class in ("R", "AL"):
            return "rtl"
        if bidi_class == "L":
            return "ltr"
    return "ltr"
