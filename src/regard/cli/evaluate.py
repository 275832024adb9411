"""`regard evaluate`: how good a run is on what it has not seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from regard.cli.common import (
    Columns,
    Device,
    Json,
    Strict,
    Target,
    Threads,
    Workers,
    open_runs,
    out,
    out_json,
    pairs_of,
    talk,
)

if TYPE_CHECKING:
    from rich.console import Console

    from regard.data.account import Account
    from regard.evaluate import Evaluation
    from regard.run import Run

T = TypeVar("T")

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
        int | None, typer.Option(help="Most output symbols. (default: 3 times the source and 50)")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Source symbols times hypotheses at once. (default: 8192)")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Symbols of plain text read at a time. (default: as in training)")
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(min=1, help="Symbols remembered while reading on, in models that do. (default: as in training)"),
    ] = None,
    strict: Strict = False,
    json: Json = False,
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Score a run on what it has not seen.

    Of pairs, the sources are decoded and compared with the targets. Language models are judged by the probability of a
    text, encoders by the symbols they guess when some are hidden, models that were trained to fill in hidden stretches
    by those, classifiers by their labels. Scores come with 95% bootstrap intervals. wer is the share of sequences that
    are wrong, per and cer count edits per symbol and character. Shares are in percent.
    """
    from regard.data.account import Account
    from regard.decode.options import Options
    from regard.errors import UserError
    from regard.evaluate import evaluate

    settings = dict(beam=beam, length_penalty=length_penalty, max_length=max_length, batch_tokens=batch_tokens)
    options = Options.of(**{name: value for name, value in settings.items() if value is not None})
    runs = open_runs([run, *([against] if against else [])], device, threads)
    kinds = [_kind(each) for each in runs]
    if len(set(kinds)) > 1:
        raise UserError(f"--against: {against} is a model of another kind than {run}")
    plain = kinds[0] in ("text", "hidden", "stretches")
    if not plain and (context is not None or memory is not None):
        raise UserError("--context and --memory are for models of plain text")
    account = Account(strict)
    if plain:
        result = _text(runs, file, account, metric or [], bootstrap, context, memory)
    elif kinds[0] == "image":
        result = _images(runs, file, bootstrap)
    else:
        source = pairs_of(file, target, columns, runs[0].codec.columns)
        examples = [item.example for item in source.read(account)]
        if kinds[0] == "labels":
            from regard.evaluate import classify, evaluate_labels

            said = [classify(each, [example.source for example in examples]) for each in runs]
            result = evaluate_labels([e.target or "" for e in examples], said[0], _second(said), bootstrap)
        else:
            from functools import partial

            from regard.cli.lines import staffed

            other, staff = runs[1] if against else None, partial(staffed, workers=workers, threads=threads)
            result = evaluate(runs[0], examples, options, metric or (), other, bootstrap, staff)
    if account.skipped:
        talk(account.summary())
    if json:
        out_json(result.to_json(dict(account.skipped)))
    else:
        _show(result, run, against)


def _second(found: list[T]) -> T | None:
    return found[1] if len(found) > 1 else None


def _kind(run: Run) -> str:
    """What a run is evaluated on."""
    config = run.config
    if config.patches is not None:
        return "image"
    if config.output == "classes":
        return "labels"
    if config.encoder is None:
        return "text"
    if config.decoder is None:
        return "hidden"
    from regard.textscore import recipe_of

    recipe = recipe_of(run)
    return "stretches" if recipe is not None and recipe.task == "span" else "pairs"


def _text(
    runs: list[Run],
    file: str,
    account: Account,
    metrics: list[str],
    samples: int,
    context: int | None,
    memory: int | None,
) -> Evaluation:
    from regard.data.source import Source
    from regard.data.stream import read_pieces, tokenised
    from regard.evaluate import evaluate_text, judge_text

    pieces = list(read_pieces(Source((file,)), account))
    scores = [judge_text(run, tokenised(pieces, run.codec.source, file), context, memory) for run in runs]
    return evaluate_text(runs[0], scores[0], metrics, _second(scores), samples)


def _images(runs: list[Run], file: str, samples: int) -> Evaluation:
    from regard.data.images import read_images
    from regard.evaluate import evaluate_labels
    from regard.label import classify_images

    pictures = read_images(file)
    said = [classify_images(run, pictures.images_NCHW) for run in runs]
    return evaluate_labels(pictures.labels or [], said[0], _second(said), samples)


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
