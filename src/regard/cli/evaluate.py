"""`regard evaluate`: how good a run is on what it has not seen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, get_args

import typer

from regard.cli.decoding import FIELDS, Decoding, EngineName, Ensemble, PrefixColumn, decoding_options
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
from regard.decode.generate import Engine
from regard.decode.options import Options
from regard.errors import UserError, one_of, plural
from regard.evaluate.by_task import EvaluationRequest, evaluate_file
from regard.evaluate.evaluator import Judging, System
from regard.evaluate.parallel import ParallelFiles
from regard.evaluate.results import Evaluation
from regard.metrics import MetricSettings
from regard.recipe import Column
from regard.run import Run
from regard.tasks import Reads

EXAMPLE = "regard evaluate runs/g2p test.tsv --beam 5"
LONGEST = 40  # characters of an example that are shown
NOTHING = "∅"  # in place of a token that was inserted or deleted
# fields of what is shown beside the one output that is judged
ONE_OUTPUT = ("nbest", "alternatives", "alternatives_at", "alignment", "top_tokens")
SEARCH = tuple(name for names in FIELDS.values() for name in names if name not in ONE_OUTPUT)
LINES = ("target", "columns", "reference", "strict", "confusions")
READY = (*LINES, "outputs", *MetricSettings.model_fields)
# The options of each kind of data, beside --metric, --against, --bootstrap, --json, --threads and --device.
SUPPORTED: dict[str, tuple[str, ...]] = {
    "pairs": (*READY, *SEARCH, "ensemble", "prefix_column", "engine", "workers"),
    "labelled": (*LINES, "outputs", "max_source", "batch_tokens"),
    "text": ("context", "memory", "strict"),
    "images": ("confusions",),
}


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
    engine: EngineName = None,
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
    decoding = Decoding.of(options, engine, workers, threads, device)
    judging = Judging(
        [name for each in metric or [] for name in each.split(",")],
        bootstrap,
        parse(MetricSettings, settings, "options"),
    )
    compared = against if against is not None and _is_file(against) else None  # ready outputs, too
    paths = [] if outputs is not None or run is None else [run, *(ensemble or [])]
    ours = len(paths)
    if against is not None and compared is None:
        if not os.path.isdir(against):
            raise UserError(f"--against: {against} is neither a run directory nor a file of outputs")
        paths.append(against)
    runs = open_runs(paths, device, threads)
    lines = dict(target=target, columns=columns, reference=reference, outputs=outputs, confusions=confusions)
    rest = dict(ensemble=ensemble, prefix_column=prefix_column, engine=engine, workers=workers)
    text = dict(context=context, memory=memory, strict=strict)
    given = {*options, *settings, *chosen_options(**lines, **rest, **text)}
    reads = _check_given(given, paths, runs, ours, compared)
    if outputs is not None and (foreign := sorted({"ensemble", "weights"} & given)):
        raise UserError(f"{', '.join(map(option_name, foreign))}: of RUN, which is left out with --outputs")
    if "length_penalty" in options and decoding.options.beam == 1:
        raise UserError("--length-penalty: it ranks the hypotheses of a beam; give --beam too")
    if runs and reads == "pairs":
        decoding = decoding.on(runs[0].model.device)

    def open_engine(runs: Sequence[Run], options: Options) -> Engine:
        return replace(decoding, options=options).open(runs, "none")

    judging = replace(judging, open_engine=open_engine)
    systems = [System(runs[:ours], decoding.options, outputs)]
    if against is not None:  # which answers alone: weights are those of an ensemble
        alone = decoding.options.model_copy(update={"weights": ()})
        systems.append(System(runs[ours:], alone, compared))
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
    evaluation = evaluate_file(EvaluationRequest(systems, files, counter, judging, confusions, context, memory))
    skipped = [f"{files.name}: {counter.summary()}"] if counter.skipped else []
    for remark in skipped + evaluation.remarks:
        message(remark)
    if json:
        out_json(evaluation.to_json(dict(counter.skipped)))
    else:
        _print_scores(evaluation, str(run if outputs is None else outputs), against)


def _is_file(path: str) -> bool:
    return path == STDIN or os.path.isfile(path)


def _check_given(given: set[str], paths: Sequence[str], runs: Sequence[Run], ours: int, compared: str | None) -> Reads:
    """Refuse runs of different tasks, and options without a meaning for them -> what the runs read."""
    if not runs:
        if foreign := sorted(given - set(READY)):
            names = ", ".join(map(option_name, foreign))
            raise UserError(f"{names}: no meaning for outputs that are ready, without a run")
        return "pairs"
    task, path = runs[0].task, paths[0]
    for other, each in list(zip(paths, runs, strict=True))[max(1, ours) :]:
        if each.task != task:
            raise UserError(f"--against: {other} is {each.task.model}, {path} is {task.model}")
    if foreign := sorted(given - set(SUPPORTED[task.reads])):
        raise UserError(f"{', '.join(map(option_name, foreign))}: no meaning for {path}, which is {task.model}")
    if compared is not None and "outputs" not in SUPPORTED[task.reads]:
        raise UserError(f"--against: {compared} is a file; {path}, {task.model}, is compared with another run")
    return task.reads


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
    names = _parse_columns(columns, bool(references)) if columns else tuple(of_run)
    if target is not None and columns and "target" in names:
        raise UserError(f"--columns: the targets are in {shown(target)}; name the columns of {shown(table)} without it")
    if target is not None:
        names = tuple(name for name in names if name != "target")
    return ParallelFiles(Source((table,), names, prefix_column=prefix_column), references, outputs)


def _parse_columns(text: str, references: bool) -> tuple[Column, ...]:
    """The columns that a text names: target may be there several times, or not at all if there are `references`."""
    names: list[Column] = []
    for word in text.split(","):
        if word not in get_args(Column):
            raise one_of("--columns", word, get_args(Column))
        names.append(word)  # type: ignore[arg-type]
    if names.count("source") != 1 or names.count("features") > 1 or not ("target" in names or references):
        raise UserError(f"--columns {text}: name source once, target once or several times, and features if there are")
    return tuple(names)


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
        rows = []
        for each in evaluation.confusions:
            source = each.example.source
            shortened = source if len(source) <= LONGEST else source[: LONGEST - 1] + "…"
            place = f"{each.example.location} {shortened}".rstrip()
            rows.append([_visible(each.reference), _visible(each.output), f"{each.count:,}", place])
        print_table(rows, ["reference", "output", "count", "example"], title="most frequent confusions", left=(0, 1, 3))


def _visible(token: str | None) -> str:
    return NOTHING if token is None else repr(token) if token.isspace() else token or "''"
