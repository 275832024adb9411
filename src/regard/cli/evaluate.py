"""`regard evaluate`: the quality of a run on held-out data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, get_args

import typer

from regard.answers import load_models, open_engine
from regard.cli.lines import announce_data, usable_here
from regard.cli.options import (
    Device,
    EngineOption,
    Ensemble,
    Json,
    PrefixColumn,
    Target,
    Threads,
    Workers,
    chosen_options,
    decoding_options,
    field_options,
    open_runs,
    option_name,
    parse_decoding,
    with_options,
)
from regard.cli.output import message, out, out_json, print_table
from regard.config import parse
from regard.data.pairs import read_table
from regard.data.reader import STDIN, Source, shown
from regard.data.tables import format_of
from regard.errors import UserError, plural
from regard.evaluate.evaluator import Evaluation, EvaluationOptions, EvaluationRequest, evaluate_file, parse_columns
from regard.metrics import MEANING
from regard.recipe import Column, Data
from regard.run import Run
from regard.tasks import NOT_EVALUATED, Reads

EXAMPLE = "regard evaluate runs/g2p test.tsv --beam 5"
SETTINGS = [name for name in EvaluationOptions.model_fields if name != "engine"]


@with_options("options", *decoding_options(*NOT_EVALUATED))
@with_options("settings", *field_options(EvaluationOptions, *SETTINGS, flags={"metrics": "--metric"}))
def command(
    *,
    options: dict[str, Any],
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="A run directory; not with --outputs.")] = None,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="Pairs or labels (TSV, .jsonl), text, or images (.npz); - is stdin."),
    ] = None,
    target: Target = None,
    reference: Annotated[list[str] | None, typer.Option(metavar="FILE", help="More references. Repeatable.")] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Columns of FILE; target may be repeated. (default: as in training)"),
    ] = None,
    outputs: Annotated[
        str | None, typer.Option(metavar="FILE", help="Evaluate these outputs, one per line, instead of a run.")
    ] = None,
    settings: dict[str, Any],
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN|FILE", help="Compare with another run or outputs, with paired significance."),
    ] = None,
    ensemble: Ensemble = None,
    prefix_column: PrefixColumn = False,
    engine: EngineOption = None,
    json: Json = False,
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Score a run on held-out data.

    Sources of pairs are decoded with the same options as in `regard generate`, and the outputs are compared with the
    targets. Language models are scored by the probability of the text, masked language models by their predictions of
    masked tokens, models trained by span corruption by the masked spans, classifiers by their labels.

    Scores come with 95% bootstrap intervals. wer is the sequence error rate, the percentage of sequences with an
    error; per, word_edits and cer are edits per token, word and character, in percent.
    """
    if outputs is not None and file is not None:
        raise UserError(f"--outputs: {shown(outputs)} is evaluated without a run; leave out {run}")
    if outputs is None and run is None:
        raise UserError("RUN is missing: name a run directory, or a file of outputs with --outputs FILE")
    decoding, engine_name = parse_decoding(options, engine)
    metrics = [name for each in settings.get("metrics", []) for name in each.split(",")]
    evaluation_options = parse(EvaluationOptions, {**settings, "metrics": metrics}, "options")
    paths = [] if outputs is not None or run is None else [run, *(ensemble or [])]
    compared_run = against if against not in (None, STDIN) and not os.path.isfile(str(against)) else None
    if compared_run is not None and not os.path.isdir(compared_run):
        raise UserError(f"--against: {against} is neither a run directory nor a file of outputs")
    runs = open_runs([*paths, *filter(None, [compared_run])], device, threads, load=False)
    other = against if compared_run is None else runs.pop()
    others = chosen_options(
        target=target, columns=columns, reference=reference, outputs=outputs, ensemble=ensemble,
        prefix_column=prefix_column, engine=engine, workers=workers,
    )  # fmt: skip
    request = EvaluationRequest(
        options=evaluation_options,
        chosen={*options, *evaluation_options.chosen, *others},
        runs=runs,
        outputs=outputs,
        against=other,
        references=[*([target] if target is not None else []), *(reference or [])],
        open_engine=partial(open_engine, engine=engine_name, scores="none", workers=workers, threads=threads),
    )
    reads = request.check(option_name)
    if "length_penalty" in options and decoding.beam == 1:
        raise UserError("--length-penalty: it ranks the hypotheses of a beam; give --beam too")
    loaded = [*runs, other] if isinstance(other, Run) else runs
    if reads != "pairs":
        load_models(loaded, threads)
    elif loaded:
        decoding = usable_here(decoding, loaded[0])
    table = run if outputs is not None else file or STDIN
    source = _source(reads, table, loaded, target, columns, request.references, prefix_column)
    if source is not None:
        announce_data(source, reads)
    evaluation = evaluate_file(replace(request, decoding=decoding), source)
    for remark in evaluation.remarks:
        message(remark)
    if json:
        out_json(evaluation.to_json())
    else:
        _print_scores(evaluation, str(run if outputs is None else outputs), against)


def _source(
    reads: Reads,
    table: str | None,
    runs: Sequence[Run],
    target: str | None,
    columns: str | None,
    references: Sequence[str],
    prefix_column: bool,
) -> Source | None:
    """The table, text or images; None if outputs are compared with references in other files."""
    if reads not in ("pairs", "labelled"):
        return Source((table or STDIN,))
    if table is None:
        if not references:
            raise UserError("--outputs: what to compare with? Name FILE, a table of pairs, or --reference FILE")
        if columns or prefix_column:
            raise UserError("--columns, --prefix-column: there is no table; name FILE")
        return None
    names: tuple[Column, ...] = runs[0].codec.columns if runs else ("source", "target")
    keys = None
    if columns and set(columns.split(",")).isdisjoint(get_args(Column)):
        data = parse(Data, {"columns": columns.split(",")}, "--columns")
        names = data.columns
        keys = data.column_names
    elif columns:
        names = parse_columns(columns, bool(references), "--columns")
    if format_of(table) == "jsonl" and (prefix_column or (columns and not keys)):
        raise UserError(f"--columns, --prefix-column: {table} has JSON objects in its lines, with keys")
    if target is not None and columns and "target" in names:
        raise UserError(f"--columns: the targets are in {shown(target)}; name the columns of {shown(table)} without it")
    if target is not None:
        names = tuple(name for name in names if name != "target")
    return read_table(table, names, keys, prefix_column, message)


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
        if metric in MEANING:
            out(f"{metric}: {MEANING[metric]}")
        if measured.signature:
            out(f"{metric}: {measured.signature}")
    if evaluation.confusions:
        out("")
        cells = [each.cells() for each in evaluation.confusions]
        rows = [list(row.values()) for row in cells]
        print_table(rows, list(cells[0]), title="most frequent confusions", left=(0, 1, 3))
