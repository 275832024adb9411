"""`regard generate`: one line in, one line out."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from regard.cli.decoding import EngineOption, Ensemble, PrefixColumn, decoding_options, usable_here
from regard.cli.input import (
    IMAGES,
    Device,
    InputLines,
    Json,
    RunPath,
    Threads,
    Workers,
    announce_stdin,
    chosen_options,
    option_name,
    with_options,
)
from regard.cli.lines import GenerateJob, Show, links, no_output, one_line, shown_label
from regard.cli.sharded import check_output, write_shards
from regard.cli.tables import flush, message, out_json
from regard.cli.tables import out as write
from regard.decode.engine import TokenStream, TorchEngine
from regard.decode.request import check_engine, check_streaming, check_supported
from regard.errors import UserError
from regard.run import Run

EXAMPLE = "echo hello | regard generate runs/g2p --beam 5"


@with_options("options", *decoding_options())
def command(
    run: RunPath,
    options: dict[str, Any],
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="Sources, one per line, requests (.jsonl), or images (.npz); - is stdin."),
    ] = "-",
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Lines are JSON objects, as in a file .jsonl. Implies --json.")
    ] = False,
    ensemble: Ensemble = None,
    prefix_column: PrefixColumn = False,
    engine: EngineOption = None,
    json: Json = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print tokens as they are decoded, one line after the other.")
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Write to a file, in shards of --window lines; started again, it goes on."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="With --out: on a Ray cluster; local starts one here, auto finds it."),
    ] = None,
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Give the best output for every line of input.

    Lines come from FILE or stdin, outputs in the same order. A language model continues prompts. A plain output is one
    line of text. With several outputs per line (--nbest, --alternatives) each becomes a line of its own: number of the
    input line, score, text, separated by tabs. With --alignment the links follow, written source-target from 0. A
    line of a .jsonl is an object with the key source and, if wanted, constraints of its own: features, prefix,
    require, forbid, stop, min_length, max_length, seed. A masked language model fills the masks of a line; with
    --top-tokens K the K best tokens of each mask are lines of their own: number of the input line, of the mask,
    probability, token. A classifier gives a label for every line, or for every image of an .npz.
    """
    paths = (run, *(ensemble or ()))
    asked = GenerateJob(paths, file, options, engine, workers, threads, device, jsonl, json, prefix_column)
    job = check_output(asked, out, ray, stream)
    decoding, engine_name = job.decoding()
    runs = job.load()
    task = runs[0].task
    if task.options is not None:
        others = chosen_options(
            prefix_column=prefix_column, ensemble=ensemble, workers=None if ray else workers, engine=engine,
            stream=stream, jsonl=jsonl, out=out, ray=ray,
        )  # fmt: skip
        files = () if task.reads == "images" else ("jsonl", "out", "ray")
        supported = (*task.options, *files, "json", "threads", "device")
        check_supported([*options, *others], supported, task, run, option_name)
    if task.reads == "images":
        _print_image_labels(runs[0], file, json)
        return
    if stream:
        if (workers or 1) > 1:
            raise UserError(f"--stream: one process decodes one line after the other; leave out --workers {workers}")
        check_engine(engine_name, decoding, stream=True, show=option_name)
        check_streaming(decoding, option_name)
        decoding = usable_here(decoding, runs[0].model.device)
        lines = job.lines(runs[0])
        _stream(TorchEngine(runs, decoding), lines, job.show(lines, decoding))
    else:
        with job.answerer(runs, decoding, engine_name) as answerer:
            lines = answerer.lines()
            if out is not None:
                write_shards(asked, answerer, lines, out, ray)
            else:
                for batch in lines.batches(answerer.options.window):
                    for text in answerer.answer(lines, batch):
                        write(text)
                    flush()
    for remark in lines.remarks():
        message(remark)


def _stream(engine: TorchEngine, lines: InputLines, show: Show) -> None:
    """Decode one line after the other, and print every token at once."""
    for line in (line for batch in lines.batches(engine.options.window) for line in batch):
        if line.error:
            for text in show.answer(line, [no_output(line)]):
                write(text)
        else:
            (item,) = engine.prepare([line.request])
            lines.unknown.count(item.unknown)
            pieces = TokenStream(engine, item)
            for piece in pieces:
                if show.json:
                    out_json({"line": line.number, **piece.as_dict()})
                else:
                    write(one_line(piece.text), end="")
                flush()
            assert pieces.hypothesis is not None
            lines.note_flags(line, pieces.hypothesis.flags)
            if show.json:
                for text in show.answer(line, [pieces.hypothesis]):
                    write(text)
            else:
                write(links(pieces.hypothesis))
        flush()


def _print_image_labels(run: Run, file: str, json: bool) -> None:
    # here, since generating text needs none of it
    from regard.data.images import read_images
    from regard.decode.encoder_only import classify_images

    announce_stdin(file, IMAGES)
    for answer in classify_images(run, read_images(file, labelled=False).images_NCHW):
        write(shown_label(answer.label, answer.as_dict(), json))
