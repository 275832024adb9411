"""Errors that a user can act on: what is wrong, where, what is allowed, what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the user; the command line prints its message and exits with 2."""


def closest(word: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the allowed word nearest to `word`, or an empty string."""
    near = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def one_of(what: str, word: str, allowed: Iterable[str]) -> UserError:
    """The error for a word that is not allowed."""
    names = sorted(allowed)
    return UserError(f"{what}: {word!r} is not known{closest(word, names)}\n  allowed: {', '.join(names)}")
