"""`regard generate`: one line in, one line out."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from regard.cli.decoding import Decoding, EngineName, Ensemble, PrefixColumn, decoding_options
from regard.cli.input import (
    Device,
    InputLines,
    Json,
    RunPath,
    Threads,
    Workers,
    chosen_options,
    open_runs,
    option_name,
    with_options,
)
from regard.cli.tables import flush, message, out, out_json
from regard.decode.hypothesis import Hypothesis
from regard.decode.options import Options
from regard.errors import UserError
from regard.run import Run
from regard.text.codec import Example

EXAMPLE = "echo hello | regard generate runs/g2p --beam 5"
LABEL_OPTIONS = {"labelled": ("max_source", "batch_tokens", "window"), "images": ()}  # by what a task reads


@with_options("options", *decoding_options())
def command(
    run: RunPath,
    options: dict[str, Any],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Sources, one per line, or images (.npz); - is stdin.")
    ] = "-",
    ensemble: Ensemble = None,
    prefix_column: PrefixColumn = False,
    engine: EngineName = None,
    json: Json = False,
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Give the best output for every line of input.

    Lines come from FILE or stdin, outputs in the same order. A language model continues prompts. A plain output is one
    line of text. With several outputs per line (--nbest, --alternatives) each becomes a line of its own: number of the
    input line, score, text, separated by tabs. With --alignment the links follow, written source-target from 0. A
    classifier gives a label for every line, or for every image of an .npz.
    """
    decoding = Decoding.of(options, engine, workers, threads, device)
    runs = open_runs([run, *(ensemble or [])], device, threads)
    if runs[0].task.labels:
        others = chosen_options(prefix_column=prefix_column, ensemble=ensemble, workers=workers, engine=engine)
        _print_labels(runs[0], file, decoding.options, [*options, *others], json)
        return
    decoding = decoding.on(runs[0].model.device)
    several = decoding.options.nbest > 1 or decoding.options.alternatives > 0
    lines, number = InputLines(file, runs[0].codec, prefix_column, prompts=not runs[0].task.seq2seq), 0
    with ExitStack() as stack:
        decoder = stack.enter_context(decoding.open(runs, "tokens" if json else "totals" if several else "none"))
        for batch in lines.batches(decoding.options.window):
            if not number:
                count = len(batch) if lines.is_file else 1  # from a pipe they may come one by one
                decoder = stack.enter_context(decoding.share(decoder, count))
            inputs = decoder.prepare(batch)
            lines.note_unknown(batch, [item.sources[0] if item.sources else () for item in inputs])
            for request, hypotheses in zip(batch, decoder.decode(inputs), strict=True):
                number += 1
                lines.note_flags(number, hypotheses[0].flags)
                _print_hypotheses(request.source, number, hypotheses, json, several)
            flush()
    for remark in lines.remarks():
        message(remark)


def _print_hypotheses(source: str, number: int, hypotheses: list[Hypothesis], json: bool, several: bool) -> None:
    if json:
        answer = {"source": source, "hypotheses": [h.as_dict() for h in hypotheses]}
        candidates = [{"text": h.text, "utility": h.utility, "score": h.score} for h in hypotheses[0].candidates]
        out_json({**answer, "candidates": candidates} if candidates else answer)
    elif several:
        for hypothesis in hypotheses:
            out(f"{number}\t{hypothesis.score:.4f}\t{_line(hypothesis)}")
    else:
        out(_line(hypotheses[0]))


def _line(hypothesis: Hypothesis) -> str:
    text = _one_line(hypothesis.text)
    if hypothesis.alignment is None:
        return text
    return f"{text}\t{' '.join(f'{s}-{t}' for s, t in hypothesis.alignment.hard)}"


def _print_labels(run: Run, file: str, options: Options, given: Collection[str], json: bool) -> None:
    """Print the label of every line, or of every image; `given` are the names of the options that were given."""
    # here, since generating text needs none of it
    from regard.data.images import read_images
    from regard.decode.classify import Classification, classify_ids, classify_images

    supported = LABEL_OPTIONS[run.task.reads]
    if unsupported := [option_name(name) for name in given if name not in supported]:
        names = [option_name(name) for name in (*supported, "json", "threads", "device")]
        raise UserError(
            f"{', '.join(unsupported)}: {run.path} tells labels, for which there are {', '.join(names)} only"
        )
    if run.task.reads == "images":
        for answer in classify_images(run, read_images(file, labelled=False).images_NCHW):
            _print_label(answer.label, answer.as_dict(), json)
        return
    empty = Classification("", {}, {"empty": "the text is empty"})
    lines, number = InputLines(file, run.codec), 0
    for batch in lines.batches(options.window):
        rows = run.codec.encode_source([Example(request.source, features=request.features) for request in batch])
        lines.note_unknown(batch, rows)
        texts = [row for row, request in zip(rows, batch, strict=True) if request.source.strip()]
        answers = iter(classify_ids(run, texts, options.batch_tokens, options.max_source))
        for request in batch:
            number += 1
            answer = next(answers) if request.source.strip() else empty
            lines.note_flags(number, answer.flags)
            _print_label(answer.label, {"source": request.source, **answer.as_dict()}, json)
        flush()
    for remark in lines.remarks():
        message(remark)


def _print_label(label: str, answer: dict[str, Any], json: bool) -> None:
    if json:
        out_json(answer)
    else:
        out(_one_line(label))


def _one_line(text: str) -> str:
    """Text whose line breaks are shown as blanks: a line in is a line out."""
    return text.replace("\n", " ").replace("\r", " ")
