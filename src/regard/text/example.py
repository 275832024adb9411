"""One example: what goes in, what should come out."""

from __future__ import annotations

from typing import NamedTuple


class Example(NamedTuple):
    """A source text, its target if there is one, and the features as written in their column."""

    source: str
    target: str | None = None
    features: str | None = None
