"""`regard demo`: the first thing a newcomer runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, RenderableType

    from regard.demo import Pronounced
    from regard.evaluate import Evaluation

EXAMPLE = "regard demo --minutes 3"


def command(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long to train.")] = 3.0,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where to leave data and run. (default: runs/demo, then runs/demo-2, ...)"),
    ] = None,
) -> None:
    """Train a pronunciation model and show what it learned.

    It learns from the CMU dictionary, is scored on words that were held out, and pronounces a few that are new.
    """
    from rich.console import Console

    from regard import demo
    from regard.cli.tables import talk
    from regard.run import Run

    place = _place(out)
    words = demo.split(demo.dictionary())
    demo.write(words, place)
    talk(
        f"The CMU dictionary: {len(words.train):,} words to learn from, {len(words.valid):,} to watch the training by, "
        f"{len(words.test):,} kept for the test, all in {place}\n"
        f"Training for {minutes:g} minutes. This is what it does: regard train --data {place}/train.tsv ..."
    )
    demo.train(place, minutes)
    run = Run.load(place / "run")
    talk("Scoring the held-out words ...")
    result = demo.judge(run, place)
    console = Console()
    _show_scores(console, result)
    spoken = demo.pronounce(run, demo.choose_words(words))
    for pronounced in spoken:
        _show_word(console, pronounced)
    page = place / "attention.html"
    demo.write_page(run, spoken[0], page)
    _show_next(console, place, page)


def _place(out: str | None) -> Path:
    from pathlib import Path

    from regard.errors import UserError

    if out is not None:
        place = Path(out)
        if (place / "run").exists():
            raise UserError(f"{place}: a demo is already there; name another directory with --out")
        return place
    names = (Path("runs") / ("demo" if number == 1 else f"demo-{number}") for number in range(1, 10_000))
    return next(place for place in names if not place.exists())


def _show_scores(console: Console, result: Evaluation) -> None:
    wer, per = result.metrics["wer"], result.metrics["per"]
    console.print()
    console.rule(f"{result.examples:,} words it has never seen", align="left", characters="─")
    for measured, meaning in ((per, "of the phones need an edit"), (wer, "of the words have at least one wrong phone")):
        name = "PER" if measured is per else "WER"
        interval = f"(95%: {measured.low:.1f} to {measured.high:.1f})"
        console.print(f" {name} [bold]{measured.score:5.1f} %[/]  {meaning} [dim]{interval}[/]")


def _show_word(console: Console, pronounced: Pronounced) -> None:
    from math import exp

    from rich.table import Table
    from rich.text import Text

    origin = "not in the dictionary" if pronounced.reference is None else "held out"
    console.print()
    console.print(Text.assemble((f" {pronounced.word}", "bold"), (f"  {origin}", "dim")))
    table = Table(box=None, show_header=False, padding=(0, 1))
    for hypothesis in pronounced.hypotheses:
        mark = Text("✓", style="green") if hypothesis.text == pronounced.reference else Text(" ")
        table.add_row(Text(f"{exp(hypothesis.score):6.1%}", style="cyan"), Text(hypothesis.text), mark)
    if pronounced.reference not in (None, *(h.text for h in pronounced.hypotheses)):
        table.add_row(Text("should be", style="dim"), Text(str(pronounced.reference), style="dim"), "")
    console.print(table)
    picture = _picture(console, pronounced)
    if picture is not None:
        console.print(picture)


def _picture(console: Console, pronounced: Pronounced) -> RenderableType | None:
    from rich.padding import Padding

    from regard.inspect.plots import draw, draw_in_colour

    best = pronounced.hypotheses[0]
    if best.alignment is None or not best.alignment.soft.size:
        return None
    source = ["∎" if piece == "<eos>" else piece for piece in best.alignment.source]
    target = best.tokens[: len(best.alignment.soft)]
    weights = best.alignment.soft.tolist()
    width = console.width - 3
    if console.is_terminal:
        return Padding(draw_in_colour(source, target, weights, width), (0, 0, 0, 3))
    from rich.text import Text

    return Text("\n".join("   " + line for line in draw(source, target, weights, width)))


def _show_next(console: Console, place: Path, page: Path) -> None:
    console.print()
    console.print(f" Every layer and head of the first word: open {page} in a browser", highlight=False, soft_wrap=True)
    console.print()
    console.rule("Now try", align="left", characters="─")
    for line in (
        f"echo transformer | regard generate {place}/run --beam 5 --nbest 3",
        f"regard evaluate {place}/run {place}/test.tsv --beam 5",
        f"regard inspect {place}/run transformer --terminal",
        f"regard info {place}/run",
        "regard train --data YOUR.tsv --out runs/yours",
    ):
        console.print(f" {line}", highlight=False, soft_wrap=True)
