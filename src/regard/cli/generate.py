"""`regard generate`: one line in, one line out."""

from __future__ import annotations

import math
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
TEXTS = ("max_source", "batch_tokens", "window", "jsonl")
# The options of tasks that do not search, beside --json, --threads and --device.
SUPPORTED = {"classify": TEXTS, "image": (), "masked": ("top_tokens", *TEXTS)}


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
    require, forbid, stop, min_length, max_length, seed. A masked language model fills the masks of a line; with
    --top-tokens K the K best tokens of each mask are lines of their own: number of the input line, of the mask,
    probability, token. A classifier gives a label for every line, or for every image of an .npz.
    """
    decoding = Decoding.of(options, engine, workers, threads, device)
    runs = open_runs([run, *(ensemble or [])], device, threads)
    task = runs[0].task
    if task.name in SUPPORTED:
        others = chosen_options(
            prefix_column=prefix_column, ensemble=ensemble, workers=workers, engine=engine, stream=stream, jsonl=jsonl
        )
        _check_given(runs[0], [*options, *others])
    if task.labels:
        _print_labels(runs[0], file, jsonl, decoding.options, json)
        return
    lines = InputLines(file, runs[0].codec, prefix_column, not task.seq2seq, jsonl)
    if task.name == "masked":
        _fill_masks(runs[0], lines, decoding.options, json)
        return
    decoding = decoding.on(runs[0].model.device)
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


def _check_given(run: Run, given: Collection[str]) -> None:
    """Refuse options without a meaning for a run; `given` are the names of those that were given."""
    supported = SUPPORTED[run.task.name]
    if unsupported := [option_name(name) for name in given if name not in supported]:
        names = [option_name(name) for name in (*supported, "json", "threads", "device")]
        raise UserError(
            f"{', '.join(unsupported)}: {run.path} is {run.task.model}, for which there are {', '.join(names)} only"
        )


def _fill_masks(run: Run, lines: InputLines, options: Options, json: bool) -> None:
    from regard.decode.masked import MaskFiller  # generating text needs none of it

    lines.fields = ["source"]
    _decode(MaskFiller(run, options), lines, Show(json or lines.jsonl, candidates=options.top_tokens > 0))
    for remark in lines.remarks():
        message(remark)


def _decode(engine: Engine, lines: InputLines, show: Show) -> None:
    """Decode a window of lines at a time, in batches."""
    for batch in lines.batches(engine.options.window):
        good = [line for line in batch if not line.error]
        inputs = engine.prepare([line.request for line in good])
        for item in inputs:
            lines.unknown.count(item.unknown)
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
            lines.unknown.count(item.unknown)
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
    several: bool = False  # outputs per line
    candidates: bool = False  # of masks, instead of an output

    def answer(self, line: InputLine, hypotheses: list[Hypothesis]) -> None:
        """Print the outputs of a line."""
        if self.json:
            answer = {**line.extra, "source": line.request.source, "hypotheses": [h.as_dict() for h in hypotheses]}
            if candidates := hypotheses[0].candidates:
                answer["candidates"] = [{"text": h.text, "utility": h.utility, "score": h.score} for h in candidates]
            out_json({**answer, **_error(line)})
        elif self.candidates:
            rows = [(n, top) for n, row in enumerate(hypotheses[0].top_tokens, 1) for top in row]
            for number, (token, score) in rows:
                out(f"{line.number}\t{number}\t{math.exp(score):.4f}\t{_escaped(token)}")
            if not rows:
                out(f"{line.number}\t\t\t")
        elif self.several:
            for hypothesis in hypotheses:
                out(f"{line.number}\t{hypothesis.score:.4f}\t{_one_line(hypothesis.text)}{_links(hypothesis)}")
        else:
            out(_one_line(hypotheses[0].text) + _links(hypotheses[0]))


def _links(hypothesis: Hypothesis) -> str:
    """The column of an alignment, if there is one."""
    alignment = hypothesis.alignment
    return "" if alignment is None else f"\t{' '.join(f'{s}-{t}' for s, t in alignment.hard)}"


def _print_labels(run: Run, file: str, jsonl: bool, options: Options, json: bool) -> None:
    """Print the label of every line, or of every image."""
    # here, since generating text needs none of it
    from regard.data.images import read_images
    from regard.decode.classify import Classification, classify, classify_images

    if run.task.reads == "images":
        for answer in classify_images(run, read_images(file, labelled=False).images_NCHW):
            _print_label(answer.label, answer.as_dict(), json)
        return
    empty = Classification("", {}, {"empty": "the text is empty"})
    lines = InputLines(file, run.codec, jsonl=jsonl)
    lines.fields = [name for name in lines.fields if name in ("source", "features")]
    for batch in lines.batches(options.window):
        good = [line for line in batch if not line.error]
        texts = [Example(x.request.source, features=x.request.features) for x in good if x.request.source.strip()]
        run.codec.note_unknown(texts, lines.unknown)
        answers = iter(classify(run, texts, options.batch_tokens, options.max_source))
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


def _escaped(token: str) -> str:
    """A token without the characters that end cells and lines."""
    return token.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def _one_line(text: str) -> str:
    """Text whose line breaks are shown as blanks: a line in is a line out."""
    return text.replace("\n", " ").replace("\r", " ")
