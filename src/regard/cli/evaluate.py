"""`regard evaluate`: how good a run is on pairs it has not seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.common import Columns, Device, Json, Strict, Target, Threads, open_runs, out, out_json, pairs_of, talk

if TYPE_CHECKING:
    from rich.console import Console

    from regard.evaluate import Evaluation

EXAMPLE = "regard evaluate runs/g2p test.tsv --beam 5"


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    pairs: Annotated[str, typer.Argument(metavar="PAIRS", help="A TSV of sources and targets; - is stdin.")] = "-",
    target: Target = None,
    columns: Columns = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="accuracy, wer, per, cer, bleu, chrf, ter or perplexity. Repeatable. (default: by the task)"),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="RUN", help="Compare with another run, with paired significance.")
    ] = None,
    bootstrap: Annotated[int, typer.Option(min=0, help="Samples for the 95% intervals; 0 for none.")] = 1000,
    beam: Annotated[int | None, typer.Option(help="Hypotheses kept at each step. (default: 1, greedy)")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Rank by score / length ** PENALTY. (default: 1.0)")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Most output symbols. (default: 3 times the source and 50)")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Source symbols times hypotheses at once. (default: 8192)")
    ] = None,
    strict: Strict = False,
    json: Json = False,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Score a run on pairs that it has not seen.

    The sources are decoded and compared with the targets; scores come with 95% bootstrap intervals. wer is the share
    of sequences that are wrong, per and cer count edits per symbol and character. Everything but perplexity is in
    percent.
    """
    from regard.data.account import Account
    from regard.decode.options import Options
    from regard.evaluate import evaluate

    settings = dict(beam=beam, length_penalty=length_penalty, max_length=max_length, batch_tokens=batch_tokens)
    options = Options.of(**{name: value for name, value in settings.items() if value is not None})
    runs = open_runs([run, *([against] if against else [])], device, threads)
    account = Account(strict)
    examples = [item.example for item in pairs_of(pairs, target, columns, runs[0].codec.columns).read(account)]
    if account.skipped:
        talk(account.summary())
    other = runs[1] if against else None
    result = evaluate(runs[0], examples, options, metric or (), other, samples=bootstrap)
    if json:
        out_json(result.to_json(dict(account.skipped)))
    else:
        _show(result, run, against)


def _show(result: Evaluation, run: str, against: str | None) -> None:
    from rich.console import Console

    rows = [["metric", "score", "95% interval", *([against, "p"] if against else [])]]
    for name, measured in result.metrics.items():
        interval = "" if measured.low is None else f"{measured.low:.2f} to {measured.high:.2f}"
        row = [name, f"{measured.score:.2f}", interval]
        rows.append([*row, f"{result.others[name].score:.2f}", f"{result.p_values[name]:.3f}"] if against else row)
    console = Console()
    if console.is_terminal:
        _show_table(console, rows, f"{run}, {result.examples:,} examples")
    else:
        for row in rows:
            out("\t".join(row))
    for measured in result.metrics.values():
        if measured.signature:
            out(measured.signature)


def _show_table(console: Console, rows: list[list[str]], title: str) -> None:
    from rich.box import ROUNDED
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=ROUNDED)
    for i, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if i else "left", style="bold" if i == 1 else None)
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)
