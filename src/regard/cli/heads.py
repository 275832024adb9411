"""`regard heads`: the importance and behaviour of every attention head."""

from __future__ import annotations

from typing import Annotated

import typer

from regard.cli.lines import announce_data
from regard.cli.options import Columns, Device, Json, OneThread, RunPath, Strict, Target, open_runs, pairs_of
from regard.cli.output import message, out_json, print_table
from regard.data.reader import LineCounter
from regard.decode.alignment import read_links, save_heads
from regard.inspect.heads import HeadStatistics, best_alignment_heads, grids, induction_heads, measure_heads
from regard.inspect.inputs import describe_size, read_task_data
from regard.inspect.plots import draw_heads, save
from regard.run import HEADS, require_numbers

EXAMPLE = "regard heads runs/g2p dev.tsv --picture heads.png"
NAMES = ("attention", "layer", "head", "gradient", "ablation", "confidence", "entropy", "distance", "looks at", "share")
LEFT = (NAMES.index("attention"), NAMES.index("looks at"))


def command(
    run: RunPath,
    file: Annotated[
        str, typer.Argument(metavar="[DATA]", help="Pairs (TSV), text for a language model, images (.npz); - is stdin.")
    ] = "-",
    target: Target = None,
    columns: Columns = None,
    examples: Annotated[int, typer.Option(min=1, help="Pairs, images or windows of text to measure on.")] = 200,
    no_ablation: Annotated[bool, typer.Option("--no-ablation", help="Skip ablation (one pass per head).")] = False,
    links: Annotated[str | None, typer.Option(metavar="FILE", help="Alignments, a line per pair: 0-0 1-2 ...")] = None,
    no_store: Annotated[bool, typer.Option("--no-store", help="Do not store the alignment heads in the run.")] = False,
    picture: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw the importance by layer and head (.png, .svg, .pdf).")
    ] = None,
    strict: Strict = False,
    json: Json = False,
    threads: OneThread = 1,
    device: Device = "cpu",
) -> None:
    """Measure every attention head.

    The table has the importance of each head, the sharpness of its attention, its mean distance and its main target.
    gradient is the expected slope of the loss at a gate on the head; ablation is the increase of the loss per token
    without the head.

    The heads that align best are stored in the run, for `generate --alignment` and `inspect`. For a language model,
    induction heads are listed.
    """
    (opened,) = open_runs([run], device, threads)
    require_numbers(opened)
    counter = LineCounter(strict)
    source = pairs_of(file, target, columns, opened)
    announce_data(source, "pairs" if opened.task.seq2seq else opened.task.reads)
    data = read_task_data(opened, source, counter, examples)
    if counter.skipped:
        message(counter.summary())
    reference = None if links is None else read_links(links)[: len(data)]
    heads = measure_heads(opened, data, ablation=not no_ablation, links=reference)
    if json:
        for head in heads:
            out_json(head.to_json())
    else:
        header = NAMES if heads[0].induction is None else (*NAMES, "induction")
        sections = [i for i in range(1, len(heads)) if heads[i].name != heads[i - 1].name]
        title = f"{run}, {describe_size(data)}"
        print_table([_row(head) for head in heads], header, title=title, left=LEFT, sections=sections)
    for head in induction_heads(heads):
        message(f"induction head: layer {head.layer + 1} head {head.head + 1}, {head.induction:.2f}")
    best = best_alignment_heads(heads)
    if best and len(heads) > 1:
        names = ", ".join(f"layer {head.layer + 1} head {head.head + 1}" for head in best)
        reason = f"agreement with {links}" if links else "sharpness and coverage"
        message(f"best alignment heads, by {reason}: {names}")
        if not no_store:
            save_heads(opened.path, [(head.layer, head.index) for head in best])
            message(f"{opened.path / HEADS}: written")
    if picture:
        by = (lambda head: head.gradient) if no_ablation else (lambda head: head.ablation)
        save(draw_heads(grids(heads, by), "gradient" if no_ablation else "rise of the loss"), picture)
        message(f"{picture}: written")


def _row(head: HeadStatistics) -> list[str]:
    ablation = "" if head.ablation is None else f"{head.ablation:+.4f}"
    numbers = [f"{head.confidence:.2f}", f"{head.entropy:.2f}", f"{head.distance:.1f}"]
    row = [head.kind, str(head.layer + 1), str(head.head + 1), f"{head.gradient:.4f}", ablation, *numbers]
    row += [head.description, f"{head.share:.2f}"]
    return row if head.induction is None else [*row, f"{head.induction:.2f}"]
