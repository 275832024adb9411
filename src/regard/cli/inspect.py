"""`regard inspect`: look at one example on its way through a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.tables import Device, Threads, open_runs, out, talk

if TYPE_CHECKING:
    import numpy as np

    from regard.inspect.trace import Trace
    from regard.run import Run

EXAMPLE = "regard inspect runs/g2p hello -o hello.html"
SELECTION = "What --png, --svg and --terminal show"


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The source, or an .npz of images; - reads one line of stdin.")
    ],
    target: Annotated[
        str | None,
        typer.Option(help="The output to look at, a continuation, or a class; by default what the model says."),
    ] = None,
    go_on: Annotated[
        int, typer.Option("--continue", metavar="N", min=0, help="Tokens by which a language model goes on.")
    ] = 0,
    index: Annotated[int, typer.Option(min=0, help="Which image of the file, from 0.")] = 0,
    features: Annotated[str | None, typer.Option(help="Features of the source, as in their column.")] = None,
    output: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="The page; by default attention.html.")
    ] = None,
    png: Annotated[str | None, typer.Option(metavar="FILE", help="Draw a picture.")] = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Draw a picture that can be enlarged.")] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Draw on the terminal.")] = False,
    attention: Annotated[
        str | None,
        typer.Option(help="cross, encoder or decoder; by default the alignment.", rich_help_panel=SELECTION),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(min=1, help="One layer of it; by default all.", rich_help_panel=SELECTION)
    ] = None,
    head: Annotated[
        int | None, typer.Option(min=1, help="One head of it; by default the mean.", rich_help_panel=SELECTION)
    ] = None,
    beam: Annotated[int, typer.Option(min=1, help="Hypotheses kept while the output is searched.")] = 5,
    threads: Threads = 1,
    device: Device = "cpu",
) -> None:
    """Write the attention page of one example: one file, which any browser opens without a network.

    It shows the alignment, every head of every layer, how each output token was chosen, what each layer would have
    said, positions, and one token's walk through a layer with the model's own numbers. Of an image it shows where heads
    look in it, and how far.
    """
    import sys

    from regard.errors import UserError, one_of
    from regard.inspect.trace import trace_text

    if attention not in (None, "cross", "encoder", "decoder"):
        raise one_of("--attention", attention, ("cross", "encoder", "decoder"))
    if head is not None and layer is None:
        raise UserError("--head: say which layer it is in, with --layer")
    if text == "-":
        text = sys.stdin.readline().rstrip("\r\n")
    if not text.strip():
        raise UserError("there is nothing to look at: TEXT is empty")
    (opened,) = open_runs([run], device, threads)
    config = opened.config
    if config.patches is not None:
        found = _image(opened, text, index, target)
    elif config.encoder is None or config.decoder is None:
        found = trace_text(opened, text, target, go_on, features)
        talk("  →  ".join(found.texts.values()))
    elif go_on:
        raise UserError("--continue: only a language model goes on with a text")
    else:
        found = _pair(opened, text, target, features, beam)
    for note in found.notes:
        talk(note)
    for path in filter(None, (png, svg)):
        _picture(found, path, attention, layer, head)
        talk(f"{path}: written")
    if terminal:
        _draw(found, attention, layer, head)
    if output is not None or not (png or svg or terminal):
        _page(found, output or "attention.html")


def _pair(opened: Run, text: str, target: str | None, features: str | None, beam: int) -> Trace:
    from regard.decode.alignment import load_heads
    from regard.decode.generate import Decoder, Request
    from regard.decode.options import Options
    from regard.errors import UserError
    from regard.inspect.trace import trace
    from regard.text.codec import Example

    if target is not None:
        ids = opened.codec.encode_target([target])[0]
    else:
        best = Decoder(opened, Options(beam=beam))([Request(text, features)])[0][0]
        if not best.ids:
            raise UserError(f"the model has no output for this source: {', '.join(best.flags.values())}")
        talk(f"{text} → {best.text}")
        ids = list(best.ids)
    return trace(opened, Example(text, None, features), ids, heads=load_heads(opened.path))


def _image(opened: Run, path: str, index: int, label: str | None) -> Trace:
    from pathlib import Path

    from regard.data.images import read_images
    from regard.errors import UserError
    from regard.inspect.trace import trace_image

    pictures = read_images(path, labelled=False)
    if index >= len(pictures.images_NCHW):
        raise UserError(f"--index {index}: {path} has {len(pictures.images_NCHW):,} images, the first being 0")
    if label is None and pictures.labels is not None and pictures.labels[index] in opened.labels:
        label = pictures.labels[index]
    found = trace_image(opened, pictures.images_NCHW[index], label, f"{Path(path).name}, {index}")
    talk(", ".join(f"{name}: {text}" for name, text in found.texts.items()))
    return found


def _page(found: Trace, path: str) -> None:
    from pathlib import Path

    from regard.files import replace_file

    html = found.to_html()
    replace_file(Path(path), lambda to: to.write_text(html, encoding="utf-8") and None)
    talk(f"{path}: written; open it in a browser")


def _picture(found: Trace, path: str, attention: str | None, layer: int | None, head: int | None) -> None:
    from regard.inspect.plots import draw_alignment, draw_all_heads, draw_map, save

    kind = attention or _kind(found)
    if attention is None and layer is None and found.alignment:
        figure = draw_alignment(found)
    elif layer is None:
        figure = draw_all_heads(found, kind)
    else:
        figure = draw_map(found, found.find(kind, layer - 1), None if head is None else head - 1)
    save(figure, path)


def _kind(found: Trace) -> str:
    """The attention that is meant when none is named."""
    return "cross" if found.alignment else found.maps[0].kind


def _draw(found: Trace, attention: str | None, layer: int | None, head: int | None) -> None:
    from rich.console import Console

    from regard.inspect.plots import draw, draw_in_colour

    weights, rows, columns = _chosen(found, attention, layer, head)
    console = Console()
    if console.is_terminal:
        console.print(draw_in_colour(columns, rows, weights.tolist(), console.width))
    else:
        for line in draw(columns, rows, weights.tolist()):
            out(line)


def _chosen(
    found: Trace, attention: str | None, layer: int | None, head: int | None
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    from regard.errors import UserError

    if attention is None and layer is None and found.alignment:
        return next(iter(found.alignment.values())), found.tokens["output"], found.tokens["source"]
    kind = attention or _kind(found)
    last = max((m.layer for m in found.maps if m.kind == kind), default=0)
    chosen = found.find(kind, last if layer is None else layer - 1)
    if head is not None and head - 1 not in chosen.heads:
        known = ", ".join(str(number + 1) for number in chosen.heads)
        raise UserError(f"--head {head}: layer {chosen.layer + 1} has {known}")
    weights = chosen.weights_HTS.mean(0) if head is None else chosen.weights_HTS[chosen.heads.index(head - 1)]
    return weights, found.tokens[chosen.rows], found.tokens[chosen.columns]
