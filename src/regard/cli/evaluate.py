"""`regard evaluate`: how good a run is on what it has not seen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from regard.answers import open_engine
from regard.cli.decoding import EngineOption, Ensemble, PrefixColumn, decoding_options, parse_decoding, usable_here
from regard.cli.input import (
    Device,
    Json,
    Strict,
    Target,
    Threads,
    Workers,
    announce_data,
    chosen_options,
    field_options,
    open_runs,
    option_name,
    with_options,
)
from regard.cli.tables import message, out, out_json, print_table
from regard.config import parse
from regard.data.reader import STDIN, LineCounter, Source, is_jsonl, shown
from regard.decode.engine import Engine
from regard.decode.request import Options
from regard.errors import UserError, plural
from regard.evaluate.by_task import EvaluationOptions, check_given, evaluate_file, parse_columns
from regard.evaluate.evaluator import Evaluation, System
from regard.evaluate.test_data import ParallelFiles
from regard.metrics import MetricSettings
from regard.recipe import Column
from regard.run import Run

EXAMPLE = "regard evaluate runs/g2p test.tsv --beam 5"
# fields of what is shown beside the one output that is judged
ONE_OUTPUT = ("nbest", "alternatives", "alternatives_at", "alignment", "top_tokens")


@with_options("options", *decoding_options(*ONE_OUTPUT))
@with_options("settings", *field_options(MetricSettings, *MetricSettings.model_fields))
def command(
    *,
    options: dict[str, Any],
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="A run directory; left out with --outputs.")] = None,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE", help="Pairs or labelled texts (TSV, .jsonl), text, or images (.npz); - is stdin."
        ),
    ] = None,
    target: Target = None,
    reference: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Further references, one per line. Repeatable.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="What the columns are; target may be there several times. (default: as the run was trained)",
        ),
    ] = None,
    outputs: Annotated[
        str | None, typer.Option(metavar="FILE", help="Judge these outputs, one per line; no RUN is needed then.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="accuracy, wer, per, cer, bleu, chrf, chrf++, ter, perplexity; of plain text also bits_per_char, "
            "loss, pseudo_perplexity. Repeatable. (default: by the task)",
        ),
    ] = None,
    settings: dict[str, Any],
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN|FILE", help="Compare with another run or outputs, with paired significance."),
    ] = None,
    bootstrap: Annotated[int, typer.Option(min=0, help="Samples for the 95% intervals; 0 for none.")] = 1000,
    confusions: Annotated[
        int | None, typer.Option(min=0, help="Most frequent confusions to tell. (default: 10, of sentences 0)")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of text read at a time. (default: as in training)")
    ] = None,
    memory: Annotated[
        int | None, typer.Option(min=1, help="Tokens of segment memory while reading on. (default: as in training)")
    ] = None,
    ensemble: Ensemble = None,
    prefix_column: PrefixColumn = False,
    engine: EngineOption = None,
    strict: Strict = False,
    json: Json = False,
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Score a run on what it has not seen.

    Of pairs, the sources are decoded as by `regard generate` with the same options and compared with the targets.
    Language models are judged by the probability of a text, masked language models by the masked tokens they predict,
    models trained by span corruption by the masked spans, classifiers by their labels. Scores come with 95% bootstrap
    intervals. wer is the share of sequences that are wrong, per and cer count edits per token and character. Shares are
    in percent.
    """
    if outputs is not None and file is not None:
        raise UserError(f"--outputs: {shown(outputs)} is judged as it is, without a run; leave out {run}")
    if outputs is None and run is None:
        raise UserError("RUN is missing: name a run directory, or outputs that are ready by --outputs FILE")
    decoding, engine_name = parse_decoding(options, engine)
    metrics = [name for each in metric or [] for name in each.split(",")]
    reading = chosen_options(confusions=confusions, context=context, memory=memory, strict=strict)
    asked = parse(EvaluationOptions, {"metrics": metrics, "bootstrap": bootstrap, **settings, **reading}, "options")
    compared = against if against is not None and _is_file(against) else None  # ready outputs, too
    paths = [] if outputs is not None or run is None else [run, *(ensemble or [])]
    count = len(paths)
    if against is not None and compared is None:
        if not os.path.isdir(against):
            raise UserError(f"--against: {against} is neither a run directory nor a file of outputs")
        paths.append(against)
    runs = open_runs(paths, device, threads)
    ours, theirs = runs[:count], runs[count:]
    lines = dict(target=target, columns=columns, reference=reference, outputs=outputs)
    rest = dict(ensemble=ensemble, prefix_column=prefix_column, engine=engine, workers=workers)
    given = {*options, *settings, *reading, *chosen_options(**lines, **rest)}
    reads = check_given(given, [*ours[:1], *theirs], compared is not None, option_name)
    if "length_penalty" in options and decoding.beam == 1:
        raise UserError("--length-penalty: it ranks the hypotheses of a beam; give --beam too")
    if runs and reads == "pairs":
        decoding = usable_here(decoding, runs[0].model.device)

    def open_one(runs: Sequence[Run], options: Options) -> Engine:
        return open_engine(runs, options, engine_name, "none", workers, threads)

    systems = [System(ours, decoding, outputs)]
    if against is not None:  # which answers alone: weights are those of an ensemble
        alone = decoding.model_copy(update={"weights": ()})
        systems.append(System(theirs, alone, compared))
    table = run if outputs is not None else file or STDIN
    if reads in ("pairs", "labelled"):
        named = runs[0].codec.columns if runs else ("source", "target")
        ready = [path for path in dict.fromkeys((outputs, compared)) if path is not None]
        files = _files(table, target, columns, reference or [], named, prefix_column, ready)
    else:
        files = ParallelFiles(Source((table or STDIN,)))
    if files.table is not None:
        announce_data(files.table, reads)
    counter = LineCounter(strict)
    evaluation = evaluate_file(asked.request(systems, files, counter, open_one))
    skipped = [f"{files.name}: {counter.summary()}"] if counter.skipped else []
    for remark in skipped + evaluation.remarks:
        message(remark)
    if json:
        out_json(evaluation.to_json(dict(counter.skipped)))
    else:
        _print_scores(evaluation, str(run if outputs is None else outputs), against)


def _is_file(path: str) -> bool:
    return path == STDIN or os.path.isfile(path)


def _files(
    table: str | None,
    target: str | None,
    columns: str | None,
    references: Sequence[str],
    of_run: Sequence[Column],
    prefix_column: bool,
    outputs: Sequence[str],
) -> ParallelFiles:
    """Where sources, references and outputs are."""
    if target is not None:
        references = [target, *references]
    if table is None:
        if not references:
            raise UserError("--outputs: what to compare with? Name FILE, a table of pairs, or --reference FILE")
        if columns or prefix_column:
            raise UserError("--columns, --prefix-column: there is no table; name FILE")
        return ParallelFiles(None, references, outputs)
    if is_jsonl(table) and (columns or prefix_column):
        raise UserError(f"--columns, --prefix-column: {table} has JSON objects in its lines, with keys")
    names = parse_columns(columns, bool(references), "--columns") if columns else tuple(of_run)
    if target is not None and columns and "target" in names:
        raise UserError(f"--columns: the targets are in {shown(target)}; name the columns of {shown(table)} without it")
    if target is not None:
        names = tuple(name for name in names if name != "target")
    return ParallelFiles(Source((table,), names, prefix_column=prefix_column), references, outputs)


def _print_scores(evaluation: Evaluation, name: str, against: str | None) -> None:
    rows = []
    for metric, measured in evaluation.metrics.items():
        interval = "" if measured.low is None else f"{measured.low:.2f} to {measured.high:.2f}"
        compared = ["", ""] if against else []
        if metric in evaluation.others:
            compared = [f"{evaluation.others[metric].score:.2f}", f"{evaluation.p_values[metric]:.3f}"]
        rows.append([metric, f"{measured.score:.2f}", interval, *compared])
    header = ["metric", "score", "95% interval", *([against, "p"] if against else [])]
    examples = plural(evaluation.examples, "example")
    print_table(rows, header, title=f"{shown(name)}, {examples}", bold=(1,))
    for metric, measured in evaluation.metrics.items():
        if measured.signature:
            out(f"{metric}: {measured.signature}")
    if evaluation.confusions:
        out("")
        cells = [each.cells() for each in evaluation.confusions]
        rows = [list(row.values()) for row in cells]
        print_table(rows, list(cells[0]), title="most frequent confusions", left=(0, 1, 3))
