"""`regard inspect`: one example on its way through a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from regard.answers import Answerer, unknown_remark
from regard.cli.options import Device, OneThread, RunPath, open_runs
from regard.cli.output import message, out
from regard.data.images import read_images
from regard.errors import UserError, plural
from regard.files import replace_file
from regard.inspect.live import live_page
from regard.inspect.plots import draw_all_heads, draw_in_colour, draw_in_shades, draw_matrix, save
from regard.inspect.trace import Trace, trace_image
from regard.run import Run, require_numbers
from regard.suggest import one_of
from regard.text.codec import Example

EXAMPLE = "regard inspect runs/g2p hello -o hello.html"
KINDS = ("cross", "encoder", "decoder")
SELECTION = "Attention shown by --png, --svg and --terminal"


def command(
    run: RunPath,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The source text, or an .npz file of images; - reads a line of stdin.")
    ],
    target: Annotated[
        str | None, typer.Option(help="Output, continuation or label to inspect. (default: the model's output)")
    ] = None,
    go_on: Annotated[
        int, typer.Option("--continue", metavar="N", min=0, help="Tokens that a language model generates after TEXT.")
    ] = 0,
    index: Annotated[int, typer.Option(min=0, help="Index of the image in the file, from 0.")] = 0,
    features: Annotated[str | None, typer.Option(help="Features of the source, as in the data.")] = None,
    output: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="The page. (default: attention.html)")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Embed the model, so that the page answers any input.")] = False,
    png: Annotated[str | None, typer.Option(metavar="FILE", help="Draw a picture.")] = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Draw a scalable picture.")] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Draw on the terminal.")] = False,
    attention: Annotated[
        str | None, typer.Option(help="cross, encoder or decoder. (default: the alignment)", rich_help_panel=SELECTION)
    ] = None,
    layer: Annotated[int | None, typer.Option(min=1, help="Layer. (default: all)", rich_help_panel=SELECTION)] = None,
    head: Annotated[
        int | None, typer.Option(min=1, help="Head. (default: the mean)", rich_help_panel=SELECTION)
    ] = None,
    beam: Annotated[int, typer.Option(min=1, help="Beam width of the search for the output.")] = 5,
    threads: OneThread = 1,
    device: Device = "cpu",
) -> None:
    """Write the attention page of one example, an HTML file.

    The page works offline in any browser. It shows the alignment, every head of every layer, the probabilities of each
    output token, the logit lens, positions, and the computation of a layer step by step with the model's numbers. For
    an image it shows the regions and distances that heads attend to.
    """
    if attention not in (None, *KINDS):
        raise one_of("--attention", str(attention), KINDS)
    if head is not None and layer is None:
        raise UserError("--head: needs --layer, the layer of the head")
    if text == "-":
        text = sys.stdin.readline().rstrip("\r\n")
    if not text.strip():
        raise UserError("TEXT is empty: there is nothing to inspect")
    (opened,) = open_runs([run], device, threads)
    require_numbers(opened)
    try:
        remark = unknown_remark(opened.codec, Example(text, None if opened.task.labels else target, features))
    except UserError as error:
        raise UserError(f"--{error}") from None  # the message begins with the name of the option
    if remark and opened.task.reads != "images":
        message(remark)
    if opened.task.reads == "images":
        trace = _trace_image(opened, text, index, target)
    elif go_on and opened.task.seq2seq:
        raise UserError("--continue: only a language model continues a text")
    else:
        trace = Answerer([opened]).trace(Example(text, features=features), target, beam, go_on)
        if target is None or not opened.task.seq2seq:
            message(" → ".join(trace.texts.values()))
    selected = None if layer is None else layer - 1, None if head is None else head - 1
    for note in trace.notes:
        message(note.text)
    for path in filter(None, (png, svg)):
        if layer is None and (attention is not None or not trace.alignment):
            save(draw_all_heads(trace, attention or trace.main_kind), path)
        else:
            save(draw_matrix(trace.matrix(attention, *selected)), path)
        message(f"{path}: written")
    if terminal:
        _draw_at_terminal(trace, attention, *selected)
    if live or output is not None or not (png or svg or terminal):
        path = output or "attention.html"
        html = trace.to_html()
        if live:
            example = None if opened.task.reads == "images" else Example(text, features=features)
            html, report = live_page(opened, example=example, first=trace)
            message(report.summary)
        replace_file(Path(path), lambda temporary: temporary.write_text(html, encoding="utf-8"))
        message(f"{path}: written; open it in a browser")


def _trace_image(run: Run, path: str, index: int, label: str | None) -> Trace:
    images = read_images(path, labelled=False)
    if index >= len(images.images_NCHW):
        raise UserError(f"--index {index}: {path} has {plural(len(images.images_NCHW), 'image')}, the first being 0")
    if label is None and images.labels and images.labels[index] in run.labels:
        label = images.labels[index]
    trace = trace_image(run, images.images_NCHW[index], label, f"{Path(path).name}, {index}")
    message(", ".join(f"{name}: {text}" for name, text in trace.texts.items()))
    return trace


def _draw_at_terminal(trace: Trace, kind: str | None, layer: int | None, head: int | None) -> None:
    matrix = trace.matrix(kind, layer, head)
    rows, columns = matrix.tokens
    weights = matrix.weights_TS.tolist()
    console = Console()
    if console.is_terminal:
        console.print(draw_in_colour(columns, rows, weights, console.width, matrix.right_to_left))
    else:
        for line in draw_in_shades(columns, rows, weights, right_to_left=matrix.right_to_left):
            out(line)
