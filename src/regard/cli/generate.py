"""`regard generate`: one line in, one line out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import typer

from regard.cli.decoding import Decoding, EngineName, Ensemble, PrefixColumn, decoding_options
from regard.cli.input import (
    Device,
    InputLine,
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
from regard.decode.generate import Engine, TorchEngine
from regard.decode.hypothesis import Hypothesis, empty_hypothesis
from regard.decode.options import Options
from regard.errors import UserError
from regard.run import Run
from regard.text.codec import Example

EXAMPLE = "echo hello | regard generate runs/g2p --beam 5"
LABEL_OPTIONS = {"labelled": ("max_source", "batch_tokens", "window", "jsonl"), "images": ()}  # by what a task reads


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
    engine: EngineName = None,
    json: Json = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print tokens as they are decoded, one line after the other.")
    ] = False,
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Give the best output for every line of input.

    Lines come from FILE or stdin, outputs in the same order. A language model continues prompts. A plain output is one
    line of text. With several outputs per line (--nbest, --alternatives) each becomes a line of its own: number of the
    input line, score, text, separated by tabs. With --alignment the links follow, written source-target from 0. A
    line of a .jsonl is an object with the key source and, if wanted, constraints of its own: features, prefix,
    require, forbid, stop, min_length, max_length, seed. A classifier gives a label for every line, or for every image
    of an .npz.
    """
    decoding = Decoding.of(options, engine, workers, threads, device)
    runs = open_runs([run, *(ensemble or [])], device, threads)
    if runs[0].task.labels:
        others = chosen_options(
            prefix_column=prefix_column, ensemble=ensemble, workers=workers, engine=engine, stream=stream, jsonl=jsonl
        )
        _print_labels(runs[0], file, jsonl, decoding.options, [*options, *others], json)
        return
    decoding = decoding.on(runs[0].model.device)
    lines = InputLines(file, runs[0].codec, prefix_column, not runs[0].task.seq2seq, jsonl)
    show = Show(json or lines.jsonl, several=decoding.options.nbest > 1 or decoding.options.alternatives > 0)
    if decoding.options.top_tokens and not show.json:
        raise UserError("--top-tokens: plain output does not show them; give --json too")
    if stream:
        if decoding.ctranslate2 or (workers or 1) > 1:
            raise UserError("--stream: lines are decoded one after the other by one process of the engine torch")
        _stream(TorchEngine(runs, decoding.options), lines, show)
    else:
        with decoding.open(runs, "tokens" if show.json else "totals" if show.several else "none") as decoder:
            _decode(decoder, lines, show)
    for remark in lines.remarks():
        message(remark)


def _decode(engine: Engine, lines: InputLines, show: Show) -> None:
    """Decode a window of lines at a time, in batches."""
    for batch in lines.batches(engine.options.window):
        good = [line for line in batch if not line.error]
        inputs = engine.prepare([line.request for line in good])
        lines.note_unknown(good, [item.sources[0] if item.sources else () for item in inputs])
        answers = iter(engine.decode(inputs))
        for line in batch:
            hypotheses = [_no_output(line)] if line.error else next(answers)
            lines.note_flags(line, hypotheses[0].flags)
            show.answer(line, hypotheses)
        flush()


def _no_output(line: InputLine) -> Hypothesis:
    return empty_hypothesis({"error": line.error})


def _error(line: InputLine) -> dict[str, str]:
    return {"error": f"{line.location}: {line.error}"} if line.error else {}


def _stream(engine: TorchEngine, lines: InputLines, show: Show) -> None:
    """Decode one line after the other, and print every token at once."""
    from regard.decode.stream import TokenStream, check_streaming  # most outputs are printed at once

    check_streaming(engine.options)
    for line in (line for batch in lines.batches(engine.options.window) for line in batch):
        if line.error:
            show.answer(line, [_no_output(line)])
        else:
            (item,) = engine.prepare([line.request])
            lines.note_unknown([line], [item.sources[0] if item.sources else ()])
            pieces = TokenStream(engine, item)
            for piece in pieces:
                if show.json:
                    out_json({"line": line.number, **piece.as_dict()})
                else:
                    out(_one_line(piece.text), end="")
                flush()
            assert pieces.hypothesis is not None
            lines.note_flags(line, pieces.hypothesis.flags)
            if show.json:
                show.answer(line, [pieces.hypothesis])
            else:
                out(_links(pieces.hypothesis))
        flush()


class Show(NamedTuple):
    """How outputs are printed."""

    json: bool
    several: bool  # outputs per line

    def answer(self, line: InputLine, hypotheses: list[Hypothesis]) -> None:
        """Print the outputs of a line."""
        if self.json:
            answer = {**line.extra, "source": line.request.source, "hypotheses": [h.as_dict() for h in hypotheses]}
            if candidates := hypotheses[0].candidates:
                answer["candidates"] = [{"text": h.text, "utility": h.utility, "score": h.score} for h in candidates]
            out_json({**answer, **_error(line)})
        elif self.several:
            for hypothesis in hypotheses:
                out(f"{line.number}\t{hypothesis.score:.4f}\t{_one_line(hypothesis.text)}{_links(hypothesis)}")
        else:
            out(_one_line(hypotheses[0].text) + _links(hypotheses[0]))


def _links(hypothesis: Hypothesis) -> str:
    """The column of an alignment, if there is one."""
    alignment = hypothesis.alignment
    return "" if alignment is None else f"\t{' '.join(f'{s}-{t}' for s, t in alignment.hard)}"


def _print_labels(run: Run, file: str, jsonl: bool, options: Options, given: Collection[str], json: bool) -> None:
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
    lines = InputLines(file, run.codec, jsonl=jsonl)
    lines.fields = [name for name in lines.fields if name in ("source", "features")]
    for batch in lines.batches(options.window):
        good = [line for line in batch if not line.error]
        rows = run.codec.encode_source([Example(x.request.source, features=x.request.features) for x in good])
        lines.note_unknown(good, rows)
        texts = [row for row, line in zip(rows, good, strict=True) if line.request.source.strip()]
        answers = iter(classify_ids(run, texts, options.batch_tokens, options.max_source))
        for line in batch:
            answer = empty if line.error or not line.request.source.strip() else next(answers)
            if line.error:
                answer = replace(empty, flags={"error": line.error})
            lines.note_flags(line, answer.flags)
            shown = {**line.extra, "source": line.request.source, **answer.as_dict()}
            _print_label(answer.label, {**shown, **_error(line)}, json or lines.jsonl)
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
