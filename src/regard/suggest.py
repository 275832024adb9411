"""Suggestions for unknown names: synonyms from other toolkits and names with a similar spelling."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from regard.errors import UserError

MAX_COMPARED_LENGTH = 100  # the time of a comparison grows with the square of the length; messages show as much
MIN_SIMILARITY = 0.6


@cache
def synonyms() -> dict[str, list[str]]:
    """The names in other toolkits for each name in regard."""
    text = Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8")
    return {name: words.split() for name, words in tomllib.loads(text).items()}


@cache
def _meanings() -> dict[str, list[str]]:
    """The names in regard for each name in other toolkits, both normalised."""
    meanings: dict[str, list[str]] = {}
    for name, words in synonyms().items():
        for word in words:
            meanings.setdefault(_normalise(word), []).append(_normalise(name))
    return meanings


def _normalise(word: str) -> str:
    """A name without case and separators: --beam-size, beam_size and beamSize are the same."""
    return re.sub("[-_.]", "", word.lower())


def _candidates(word: str) -> list[str]:
    """The normalised names that a word may mean, best first: decoder.layers, then layers, for dec_layers."""
    plain = _normalise(word)
    names = [plain, *_meanings().get(plain, ())]
    parts = re.split("[-_.]", word.lower())
    for stack in ("encoder", "decoder"):
        rest = [part for part in parts if part not in (stack, stack[:3])]
        if len(rest) < len(parts):
            key = "".join(rest)
            inner = [key, *_meanings().get(key, ())]
            return [*(stack + name for name in inner), *names, *inner]
    return names


def synonym(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed name with the same meaning, or with the same spelling except for case and separators."""
    if len(word) > MAX_COMPARED_LENGTH:
        return None
    names = {_normalise(name): name for name in allowed}
    return next((names[name] for name in _candidates(word) if name in names), None)


def nearest(word: str, allowed: Iterable[str], similarity: float = MIN_SIMILARITY) -> str | None:
    """The allowed name that was probably meant: a synonym, or else the one with the most similar spelling."""
    names = list(allowed)
    if len(word) > MAX_COMPARED_LENGTH:
        return None
    if (same := synonym(word, names)) is not None:
        return same
    short = [name for name in names if len(name) <= MAX_COMPARED_LENGTH]
    return next(iter(difflib.get_close_matches(word, short, n=1, cutoff=similarity)), None)


def closest(word: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the allowed name that was probably meant, or an empty string."""
    near = nearest(word, allowed)
    return f"; did you mean {near!r}?" if near is not None else ""


def one_of(what: str, word: str, allowed: Iterable[str]) -> UserError:
    """The error for a name that is not allowed."""
    names = sorted(allowed)
    return UserError(f"{what}: {word!r:.100} is not known{closest(word, names)}\n  allowed: {', '.join(names)}")
