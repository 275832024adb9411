"""Texts of the translation endpoints: the parts that are translated, and the language of a text."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

LINE_BREAK = re.compile(r"(\r?\n\s*)")  # with blank lines and indentation
# Tags as browsers read them. Every pattern is linear in the length of the text, unlike `html.parser`, which took 100 s
# for 100,000 characters of `<a `.
MARKUP_START = re.compile(r"<(?=/?[a-z]|[!?])", re.IGNORECASE)
MARKUP = re.compile(
    r"""<!--.*?--> | <(?:!(?!--)|\?)[^>]*+>
    | <(/?[a-z][^\s/>]*+) (?: [\s/]++
        | [^\s/>=][^\s/>=]*+ (?: \s*+ = \s*+ (?: "[^"]*+" | '[^']*+' | [^\s>"'][^\s>]*+ | (?=>) ) )?+ )*+ >""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
RAW_ELEMENTS = ("script", "style", "iframe", "noembed", "noframes", "xmp", "plaintext")  # without text or tags inside
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-\w+)*", re.IGNORECASE)
UNSEEN = 0.5  # count of a character that the training data lacks


class Part(NamedTuple):
    """A part of a text: an input, or text that is copied."""

    text: str
    is_input: bool = False


def line_parts(text: str) -> list[Part]:
    """Every line that is not blank is an input; line breaks and indentation are copied."""
    return [Part(part, bool(part.strip())) for part in LINE_BREAK.split(text)]


def html_parts(text: str) -> list[Part]:
    """Every text node is an input; tags, comments, scripts and styles are copied. An unfinished tag is text."""
    parts: list[Part] = []
    at = 0
    while (start := MARKUP_START.search(text, at)) and (tag := MARKUP.match(text, start.start())):
        parts += _text_node(text[at : start.start()])
        at = tag.end()
        if (name := (tag[1] or "").lower()) in RAW_ELEMENTS:
            closing = re.compile(f"</{name}", re.IGNORECASE).search(text, at)
            at = closing.start() if closing else len(text)
        parts.append(Part(text[start.start() : at]))
    return [*parts, *_text_node(text[at:])]


def _text_node(text: str) -> Iterator[Part]:
    plain = html.unescape(text)
    words = plain.split()
    if not words:
        yield Part(text)
        return
    before = plain[: plain.index(words[0])]
    after = plain[len(plain.rstrip()) :]
    yield from (Part(before), Part(" ".join(words), True), Part(after))


def join_parts(parts: Sequence[Part], outputs: Iterator[Sequence[str]], as_html: bool) -> list[str]:
    """The translations of a text, best first, from the outputs for each of its inputs."""
    encode = partial(html.escape, quote=False) if as_html else str
    columns = [list(map(encode, next(outputs))) if part.is_input else [part.text] for part in parts]
    count = max(map(len, columns))
    texts = ["".join(column[i if i < len(column) else 0] for column in columns) for i in range(count)]
    return list(dict.fromkeys(texts))


def is_language_classifier(labels: Iterable[str], sources: Collection[str]) -> bool:
    """Whether the labels of a classifier are language codes, those of `sources` among them."""
    return all(map(LANGUAGE_CODE.fullmatch, labels)) and set(sources) <= set(labels)


def rank_languages(text: str, counts: Mapping[str, Mapping[str, int]]) -> list[tuple[str, float]]:
    """Languages with probabilities, best first, by the counts of characters in texts of each language.

    A probability is that of the language among these languages, times the share of characters that it has.
    """
    letters = [x for x in text.lower() if x.isalpha()]
    rows: dict[str, Counter[str]] = {language: Counter() for language in counts}
    for language, row in counts.items():
        for character, count in row.items():
            rows[language][character.lower()] += count * character.isalpha()
    characters = set[str]().union(*rows.values())
    scores = {}
    for language, row in rows.items():
        total = sum(row.values()) + UNSEEN * (len(characters) + 1)
        scores[language] = sum(math.log((row[x] + UNSEEN) / total) for x in letters)
    best = max(scores.values(), default=0.0)
    weights = {language: math.exp(score - best) for language, score in scores.items()}
    known = {language: sum(x in row for x in letters) / max(1, len(letters)) for language, row in rows.items()}
    ranked = [(language, weights[language] / sum(weights.values()) * known[language]) for language in counts]
    return sorted(ranked, key=lambda item: -item[1])
