"""`regard evaluate`: how good a run is on what it has not seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.tables import (
    Columns,
    Device,
    Json,
    Strict,
    Target,
    Threads,
    Workers,
    left_out,
    open_runs,
    option_name,
    out,
    out_json,
    pairs_of,
    talk,
)

if TYPE_CHECKING:
    from rich.console import Console

    from regard.evaluate import Evaluation

EXAMPLE = "regard evaluate runs/g2p test.tsv --beam 5"


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Pairs or labelled texts (TSV), plain text, or images (.npz), by the model; - is stdin.",
        ),
    ] = "-",
    target: Target = None,
    columns: Columns = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="accuracy, wer, per, cer, bleu, chrf, ter, perplexity; of plain text also bits_per_char, loss, "
            "pseudo_perplexity. Repeatable. (default: by the task)"
        ),
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
        int | None, typer.Option(help="Most output tokens. (default: 3 times the source and 50)")
    ] = None,
    max_source: Annotated[
        int | None, typer.Option(help="A longer source or target is left out. (default: 2048)")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Source tokens times hypotheses at once. (default: 8192)")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of plain text read at a time. (default: as in training)")
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens remembered while reading on, in models that do. (default: as in training)"),
    ] = None,
    strict: Strict = False,
    json: Json = False,
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Score a run on what it has not seen.

    Of pairs, the sources are decoded and compared with the targets. Language models are judged by the probability of a
    text, encoders by the tokens they guess when some are hidden, models that were trained to fill in masked spans
    by those, classifiers by their labels. Scores come with 95% bootstrap intervals. wer is the share of sequences that
    are wrong, per and cer count edits per token and character. Shares are in percent.
    """
    from functools import partial

    from regard.cli import kinds
    from regard.cli.input import staffed
    from regard.data.reader import LineCounter
    from regard.decode.options import Options
    from regard.errors import UserError

    given = locals()
    names = {name for allowed in kinds.OPTIONS.values() for name in allowed}
    told = {name: given[name] for name in sorted(names) if not left_out(given[name])}
    options = Options.of(**{name: value for name, value in told.items() if name in Options.model_fields})
    runs = open_runs([run, *([against] if against else [])], device, threads)
    kind, *other = [kinds.kind_of(each) for each in runs]
    if other and other[0] != kind:
        raise UserError(f"--against: {against} is {kinds.NAMES[other[0]]}, {run} is {kinds.NAMES[kind]}")
    if strange := [option_name(name) for name in told if name not in kinds.OPTIONS[kind]]:
        raise UserError(f"{', '.join(strange)}: no meaning for {run}, which is {kinds.NAMES[kind]}")
    if length_penalty is not None and options.beam == 1:
        raise UserError("--length-penalty: it ranks the hypotheses of a beam; give --beam too")
    account, metrics = LineCounter(strict), metric or []
    if kind in ("pairs", "labels"):
        source = pairs_of(file, target, columns, runs[0].codec.columns)
        if kind == "labels":
            found = kinds.evaluate_labelled(runs, source, account, options, metrics, bootstrap)
        else:
            staff = partial(staffed, workers=workers, threads=threads)
            found = kinds.evaluate_pairs(runs, source, account, options, metrics, bootstrap, staff)
    elif kind == "image":
        found = kinds.evaluate_images(runs, file, metrics, bootstrap)
    else:
        found = kinds.evaluate_plain(runs, file, account, metrics, bootstrap, context, memory)
    for remark in [account.summary()] * bool(account.skipped) + found.remarks:
        talk(remark)
    if json:
        shape = found.result.to_json(dict(account.skipped))
        out_json({**shape, "unknown": found.unknown} if found.unknown else shape)
    else:
        _show(found.result, run, against)


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
