"""`regard generate`: one line in, one line out."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from typing import Annotated, Any

import typer

from regard.answers import Answerer, load_models
from regard.cli.lines import IMAGES, GenerateJob, InputLines, LineAnswerer, announce_stdin, links, one_line
from regard.cli.options import (
    Device,
    EngineOption,
    Ensemble,
    Json,
    PrefixColumn,
    RunPath,
    Threads,
    Workers,
    chosen_options,
    decoding_options,
    open_runs,
    option_name,
    parse_decoding,
    with_options,
)
from regard.cli.output import json_line, message, out as write, out_json
from regard.cli.sharded import check_output, write_shards
from regard.data.images import read_images
from regard.decode.hypothesis import empty_hypothesis
from regard.decode.request import check_engine, check_streaming, check_supported
from regard.errors import UserError
from regard.run import Run

EXAMPLE = "echo hello | regard generate runs/g2p --beam 5"


@with_options("options", *decoding_options())
def command(
    run: RunPath,
    options: dict[str, Any],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Source lines, requests (.jsonl), or images (.npz); - is stdin.")
    ] = "-",
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Lines are JSON, as in a .jsonl file. Implies --json.")
    ] = False,
    ensemble: Ensemble = None,
    prefix_column: PrefixColumn = False,
    engine: EngineOption = None,
    json: Json = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print each token as soon as it is decoded.")] = False,
    out: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write a file, in shards of --window lines; a restart continues.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="With --out: a Ray cluster; local starts one, auto finds one.")
    ] = None,
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Give the best output for every line of input.

    FILE or stdin is read line by line; outputs keep the order. A language model continues prompts. A masked language
    model fills the masks of a line. A classifier prints a label for every line, or for every image of an .npz file.

    By default each output is one line of text. With several outputs per input (--nbest, --alternatives) each output is
    a line with the input's line number, the score and the text, separated by tabs. --alignment adds a column of links,
    source-target, counted from 0. For a masked language model, --top-tokens K prints the K best tokens of each mask:
    line number, number of the mask, probability, token.

    A line of a .jsonl file is an object with the key source and optional constraints: features, prefix, require,
    forbid, stop, min_length, max_length, seed.
    """
    paths = (run, *(ensemble or ()))
    request = GenerateJob(paths, file, options, engine, workers, threads, device, jsonl, json, prefix_column)
    job = replace(request, workers=1) if stream else request  # the work of this process
    if out is not None or ray is not None or "WORLD_SIZE" in os.environ:  # the variable is set by torchrun
        job = check_output(job, out, ray, stream)
    decoding, engine_name = parse_decoding(options, engine)
    runs = open_runs(paths, job.device, threads, load=False)
    task = runs[0].task
    if "generate" not in task.answers:
        load_models(runs, threads)
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
    with closing(LineAnswerer(job, runs, decoding, engine_name)) as answerer:
        lines = answerer.lines()
        if stream:
            _stream(answerer, lines)
        elif out is not None and lines.table is not None:
            raise UserError(f"--out: {file} is not divided into lines; write them as text or .jsonl")
        elif out is not None:
            write_shards(request, answerer, lines, out, ray)
        else:
            for text in answerer.outputs(lines):
                write(text, end="", flush=True)
    for remark in lines.remarks():
        message(remark)


def _stream(answerer: LineAnswerer, lines: InputLines) -> None:
    """Decode one line after the other, and print every token as soon as it is decoded."""
    for line in (line for batch in lines.batches(answerer.options.window) for line in batch):
        if line.error:
            for text in answerer.shown(line, [empty_hypothesis({"error": line.error})]):
                write(text, flush=True)
            continue
        pieces = answerer.stream(line.request)
        lines.unknown.count(pieces.unknown)
        for piece in pieces:
            if answerer.json:
                write(json_line({"line": line.number, **piece.as_dict()}), flush=True)
            else:
                write(one_line(piece.text), end="", flush=True)
        assert pieces.hypothesis is not None
        lines.note_flags(line, pieces.hypothesis.flags)
        if answerer.json:
            for text in answerer.shown(line, [pieces.hypothesis]):
                write(text, flush=True)
        else:
            write(links(pieces.hypothesis), flush=True)


def _print_image_labels(run: Run, file: str, json: bool) -> None:
    announce_stdin(file, IMAGES)
    for label in Answerer([run]).classify(read_images(file, labelled=False).images_NCHW):
        if json:
            out_json(label.as_dict())
        else:
            write(one_line(label.label))
