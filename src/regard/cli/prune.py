"""`regard prune`: remove attention heads from a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from regard.cli.options import Columns, Device, Json, OneThread, RunPath, Strict, Target, open_runs, pairs_of
from regard.cli.output import message, out_json, print_table
from regard.data.reader import LineCounter
from regard.errors import UserError
from regard.inspect.inputs import describe_size, read_task_data
from regard.inspect.plots import draw_lines, save as save_picture
from regard.inspect.prune import Criterion, PruneAmount
from regard.run import require_numbers
from regard.suggest import one_of
from regard.training.pruning import PruneReport, Tuning, prune, save_pruned, split_data

EXAMPLE = "regard prune runs/g2p runs/small --data train.tsv --heads 0.4 --greedy --by ablation --tune 1000"


def command(
    run: RunPath,
    new: Annotated[str, typer.Argument(metavar="OUT", help="The run directory to write.")],
    data: Annotated[
        str, typer.Option(metavar="DATA", help="Data to rank and tune on: pairs (TSV), text, images (.npz).")
    ],
    target: Target = None,
    columns: Columns = None,
    valid: Annotated[
        str | None, typer.Option(metavar="DATA", help="Data to measure the result on. (default: a tenth of --data)")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="Heads to remove: a share (0.4 or 40%) or a number (12).")
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="Remove all heads below this importance.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Rank again after each removal; often better.")] = False,
    by: Annotated[str, typer.Option(help="Importance measure: gradient, ablation, or gates (learned).")] = "gradient",
    tune: Annotated[int, typer.Option(min=0, metavar="STEPS", help="Training steps after pruning.")] = 0,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of --tune.")] = 7e-4,
    examples: Annotated[int, typer.Option(min=1, help="Pairs, images or windows of text to rank heads on.")] = 256,
    picture: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw the loss by number of removed heads (.png, .svg, .pdf).")
    ] = None,
    strict: Strict = False,
    json: Json = False,
    threads: OneThread = 1,
    device: Device = "cpu",
) -> None:
    """Remove attention heads and write a smaller, faster run.

    The heads are physically removed; the new run answers as the old one does with these heads silenced. Every attention
    layer keeps at least one head. OUT/prune.json has the report of quality, size and speed.
    """
    if by not in get_args(Criterion):
        raise one_of("--by", by, get_args(Criterion))
    if Path(new).exists():
        raise UserError(f"{new}: exists already; name a new directory for the pruned run")
    criterion = cast(Criterion, by)
    amount = PruneAmount.parse(heads, threshold)
    (opened,) = open_runs([run], device, threads)
    require_numbers(opened)
    counter = LineCounter(strict)
    learn = read_task_data(opened, pairs_of(data, target, columns, opened), counter)
    if valid is None:
        learn, held = split_data(learn)
    else:
        held = read_task_data(opened, pairs_of(valid, None, columns, opened), counter)
    if counter.skipped:
        message(counter.summary())
    if not len(learn) or not len(held):
        raise UserError(f"{data}: {describe_size(learn)} are too few to judge heads and measure the result")
    smaller, report = prune(
        opened, learn, held, amount, greedy=greedy, by=criterion, tuning=Tuning(tune, lr), judge_on=examples,
        notify=message,
    )  # fmt: skip
    save_pruned(smaller, report, new, opened.path)
    if json:
        out_json(asdict(report))
    else:
        _print_report(report)
    if picture:
        _draw_curve(report, picture)
    message(f"{new}: written")


def _print_report(report: PruneReport) -> None:
    states = {"before": report.before, "pruned": report.pruned}
    if report.tuned_steps:
        states["tuned"] = report.after
    rows = [
        ["heads", *(str(state.heads) for state in states.values())],
        ["parameters", *(f"{state.parameters:,}" for state in states.values())],
        ["loss", *(f"{state.loss:.4f}" for state in states.values())],
    ]
    for name in report.before.metrics:
        rows.append([name, *(f"{state.metrics[name]:.2f}" for state in states.values())])
    rows.append(["sentences/CPU s", *(f"{state.sentences_per_second:.1f}" for state in states.values())])
    print_table(rows, ["", *states])


def _draw_curve(report: PruneReport, path: str) -> None:
    removed, losses = zip(*report.curve, strict=True)
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {"silenced": (removed, losses)}
    if report.tuned_steps:
        lines["tuned"] = ((report.before.heads - report.after.heads,), (report.after.loss,))
    save_picture(draw_lines(lines, f"heads removed, of {report.before.heads}", "loss per token"), path)
    message(f"{path}: written")
