"""`regard evaluate`: how good a run is on what it has not seen."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from regard.cli.input import (
    Columns,
    Device,
    Json,
    RunPath,
    Strict,
    Target,
    Threads,
    Workers,
    chosen_options,
    field_options,
    open_runs,
    option_name,
    pairs_of,
    with_options,
    with_workers,
)
from regard.cli.tables import message, out, out_json, print_table
from regard.data.reader import LineCounter, Source
from regard.decode.options import Options
from regard.errors import UserError
from regard.evaluate import Evaluation, EvaluationRequest, evaluate_file

EXAMPLE = "regard evaluate runs/g2p test.tsv --beam 5"
SEARCH = ("beam", "length_penalty", "max_length", "max_source", "batch_tokens")
# The options of each kind of data, beside --metric, --against, --bootstrap, --json, --threads and --device.
SUPPORTED: dict[str, tuple[str, ...]] = {
    "pairs": ("target", "columns", *SEARCH, "strict", "workers"),
    "labelled": ("target", "columns", "max_source", "batch_tokens", "strict"),
    "text": ("context", "memory", "strict"),
    "images": (),
}


@with_options("options", *field_options(Options, *SEARCH))
def command(
    run: RunPath,
    options: dict[str, Any],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Pairs or labelled texts (TSV), text, or images (.npz); - is stdin.")
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
    context: Annotated[
        int | None, typer.Option(help="Tokens of text read at a time. (default: as in training)")
    ] = None,
    memory: Annotated[
        int | None, typer.Option(min=1, help="Tokens of segment memory while reading on. (default: as in training)")
    ] = None,
    strict: Strict = False,
    json: Json = False,
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Score a run on what it has not seen.

    Of pairs, the sources are decoded and compared with the targets. Language models are judged by the probability of a
    text, masked language models by the masked tokens they predict, models trained by span corruption by the masked
    spans, classifiers by their labels. Scores come with 95% bootstrap intervals. wer is the share of sequences that are
    wrong, per and cer count edits per token and character. Shares are in percent.
    """
    search = Options.of(**options)
    runs = open_runs([run, *([against] if against else [])], device, threads)
    task, *other = [each.task for each in runs]
    if other and other[0] != task:
        raise UserError(f"--against: {against} is {other[0].model}, {run} is {task.model}")
    others = dict(target=target, columns=columns, context=context, memory=memory, strict=strict, workers=workers)
    if foreign := sorted((options.keys() | chosen_options(**others)) - set(SUPPORTED[task.reads])):
        raise UserError(f"{', '.join(map(option_name, foreign))}: no meaning for {run}, which is {task.model}")
    if "length_penalty" in options and search.beam == 1:
        raise UserError("--length-penalty: it ranks the hypotheses of a beam; give --beam too")
    counter = LineCounter(strict)
    tables = task.reads in ("pairs", "labelled")
    source = pairs_of(file, target, columns, runs[0].codec.columns) if tables else Source((file,))
    open_engine = partial(with_workers, workers=workers, threads=threads)
    request = EvaluationRequest(runs, source, counter, search, metric or [], bootstrap, context, memory, open_engine)
    evaluation = evaluate_file(request)
    for remark in [counter.summary()] * bool(counter.skipped) + evaluation.remarks:
        message(remark)
    if json:
        out_json(evaluation.to_json(dict(counter.skipped)))
    else:
        _print_scores(evaluation, run, against)


def _print_scores(evaluation: Evaluation, run: str, against: str | None) -> None:
    rows = []
    for name, measured in evaluation.metrics.items():
        interval = "" if measured.low is None else f"{measured.low:.2f} to {measured.high:.2f}"
        compared = [f"{evaluation.others[name].score:.2f}", f"{evaluation.p_values[name]:.3f}"] if against else []
        rows.append([name, f"{measured.score:.2f}", interval, *compared])
    header = ["metric", "score", "95% interval", *([against, "p"] if against else [])]
    print_table(rows, header, title=f"{run}, {evaluation.examples:,} examples", bold=(1,))
    for measured in evaluation.metrics.values():
        if measured.signature:
            out(measured.signature)
