"""`regard heads`: what every head does, and how much it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.tables import Columns, Device, Json, Strict, Target, Threads, open_runs, out, out_json, pairs_of, talk

if TYPE_CHECKING:
    from regard.inspect.heads import HeadStatistics

EXAMPLE = "regard heads runs/g2p dev.tsv --picture heads.png"
NAMES = ("attention", "layer", "head", "gradient", "ablation", "confidence", "entropy", "distance", "looks at", "share")


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    pairs: Annotated[
        str,
        typer.Argument(
            metavar="[DATA]", help="A TSV of pairs; for a language model text, for images .npz; - is stdin."
        ),
    ] = "-",
    target: Target = None,
    columns: Columns = None,
    examples: Annotated[
        int, typer.Option(min=1, help="Judge by the first so many pairs, images or windows of text.")
    ] = 200,
    no_ablation: Annotated[
        bool, typer.Option("--no-ablation", help="Leave out the slow part, a pass over the pairs for every head.")
    ] = False,
    links: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="An alignment of the pairs (0-0 1-2 ..., a line for each) to compare with."),
    ] = None,
    no_store: Annotated[
        bool, typer.Option("--no-store", help="Do not keep the best alignment heads in the run.")
    ] = False,
    picture: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw importance by layer and head: .png, .svg or .pdf.")
    ] = None,
    strict: Strict = False,
    json: Json = False,
    threads: Threads = 1,
    device: Device = "cpu",
) -> None:
    """Judge every head of every layer: its importance, how sharp it looks, how far, and at what.

    gradient is the expected slope of the loss at a gate on the head, ablation the rise of the loss per token without
    it. The heads that align best are kept in the run, and used by `generate --alignment` and `inspect`. Of a language
    model, induction heads are named.
    """
    from regard.data.reader import LineCounter
    from regard.decode.alignment import read_links, save_heads
    from regard.inspect.heads import best_alignment_heads, grids, induction_heads, measure_heads
    from regard.inspect.inputs import describe_size, read_task_data
    from regard.run import HEADS

    (opened,) = open_runs([run], device, threads)
    account = LineCounter(strict)
    where = pairs_of(pairs, target, columns, opened.codec.columns)
    material = read_task_data(opened, where.paths, where.columns, account, examples)
    if account.skipped:
        talk(account.summary())
    given = None if links is None else read_links(links)[: len(material)]
    heads = measure_heads(opened, material, ablation=not no_ablation, links=given)
    for head in heads if json else ():
        out_json(head.to_json())
    if not json:
        _show(heads, f"{run}, {describe_size(material)}")
    for head in induction_heads(heads):
        talk(f"induction head: layer {head.layer + 1} head {head.head + 1}, {head.induction:.2f}")
    best = best_alignment_heads(heads)
    if best and len(heads) > 1:
        told = ", ".join(f"layer {head.layer + 1} head {head.head + 1}" for head in best)
        reason = f"agreement with {links}" if links else "sharpness and coverage"
        talk(f"best alignment heads, by {reason}: {told}")
        if not no_store:
            save_heads(opened.path, [(head.layer, head.index) for head in best])
            talk(f"{opened.path / HEADS}: written")
    if picture:
        from regard.inspect.plots import draw_heads, save

        by = (lambda head: head.gradient) if no_ablation else (lambda head: head.ablation)
        save(draw_heads(grids(heads, by), "gradient" if no_ablation else "rise of the loss"), picture)
        talk(f"{picture}: written")


def _show(heads: list[HeadStatistics], title: str) -> None:
    from rich.box import ROUNDED
    from rich.console import Console
    from rich.table import Table

    names = NAMES if heads[0].induction is None else (*NAMES, "induction")
    rows = [_row(head) for head in heads]
    console = Console()
    if not console.is_terminal:
        for row in (list(names), *rows):
            out("\t".join(row))
        return
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=ROUNDED)
    for name in names:
        table.add_column(name, justify="left" if name in ("attention", "looks at") else "right", no_wrap=True)
    for before, head, row in zip([None, *heads], heads, rows, strict=False):
        if before is not None and before.name != head.name:
            table.add_section()
        table.add_row(*row)
    console.print(table)


def _row(head: HeadStatistics) -> list[str]:
    ablation = "" if head.ablation is None else f"{head.ablation:+.4f}"
    numbers = [
        f"{head.gradient:.4f}",
        ablation,
        f"{head.confidence:.2f}",
        f"{head.entropy:.2f}",
        f"{head.distance:.1f}",
    ]
    row = [head.kind, str(head.layer + 1), str(head.head + 1), *numbers, head.what, f"{head.share:.2f}"]
    return row if head.induction is None else [*row, f"{head.induction:.2f}"]
