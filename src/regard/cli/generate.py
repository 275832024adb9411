"""`regard generate`: one line in, one line out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.tables import Device, Json, Threads, Workers, flush, left_out, open_runs, out, out_json, talk
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.decode.hypothesis import Hypothesis
    from regard.decode.options import Options
    from regard.engines.ctranslate2 import Engine, Scores
    from regard.run import Run

EXAMPLE = "echo hello | regard generate runs/g2p --beam 5"
SEARCH, SAMPLING, STEERING, OUTPUT = "Search", "Sampling", "Steering", "Length and output"

# Every option left at None keeps the default of decode.options.Options, which a test compares with the help below.
Whole = int | None
Real = float | None


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Sources, one per line, or images (.npz); - is stdin.")
    ] = "-",
    beam: Annotated[
        Whole, typer.Option(help="Hypotheses kept at each step. (default: 1, greedy)", rich_help_panel=SEARCH)
    ] = None,
    nbest: Annotated[Whole, typer.Option(help="Outputs per line. (default: 1)", rich_help_panel=SEARCH)] = None,
    length_penalty: Annotated[
        Real, typer.Option(help="Rank by score / length ** PENALTY. (default: 1.0)", rich_help_panel=SEARCH)
    ] = None,
    coverage_penalty: Annotated[
        Real, typer.Option(help="Rank lower what leaves source tokens unread. (default: 0.0)", rich_help_panel=SEARCH)
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Stop only when nothing can overtake any more.", rich_help_panel=SEARCH)
    ] = False,
    groups: Annotated[
        Whole, typer.Option(help="Diverse beam: groups that avoid each other. (default: 1)", rich_help_panel=SEARCH)
    ] = None,
    diversity: Annotated[
        Real, typer.Option(help="What a token of an earlier group costs. (default: 0.5)", rich_help_panel=SEARCH)
    ] = None,
    mbr: Annotated[
        Whole, typer.Option(help="Choose from so many candidates by expected utility.", rich_help_panel=SEARCH)
    ] = None,
    utility: Annotated[
        str | None, typer.Option(help="Of --mbr: chrf, bleu, edit or exact. (default: chrf)", rich_help_panel=SEARCH)
    ] = None,
    ensemble: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="A further run to decode with. Repeatable.", rich_help_panel=SEARCH),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="W,W,...", help="Of RUN and each --ensemble. (default: equal)", rich_help_panel=SEARCH),
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Draw tokens instead of searching for the best.", rich_help_panel=SAMPLING)
    ] = False,
    temperature: Annotated[
        Real, typer.Option(help="Below 1 sharper, above 1 flatter. (default: 1.0)", rich_help_panel=SAMPLING)
    ] = None,
    top_k: Annotated[Whole, typer.Option(help="Draw from the K best. (default: all)", rich_help_panel=SAMPLING)] = None,
    top_p: Annotated[
        Real, typer.Option(help="Draw from the best that make up P. (default: 1.0)", rich_help_panel=SAMPLING)
    ] = None,
    min_p: Annotated[
        Real, typer.Option(help="Leave out what is below P times the best. (default: 0.0)", rich_help_panel=SAMPLING)
    ] = None,
    seed: Annotated[Whole, typer.Option(help="Of the draws. (default: 1)", rich_help_panel=SAMPLING)] = None,
    prefix: Annotated[str | None, typer.Option(help="Every output starts so.", rich_help_panel=STEERING)] = None,
    prefix_column: Annotated[
        bool,
        typer.Option(
            "--prefix-column", help="The last column of each line is its own prefix.", rich_help_panel=STEERING
        ),
    ] = False,
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="PHRASE", help="The output contains it. Repeatable.", rich_help_panel=STEERING),
    ] = None,
    forbid: Annotated[
        list[str] | None,
        typer.Option(metavar="PHRASE", help="The output lacks it. Repeatable.", rich_help_panel=STEERING),
    ] = None,
    alternatives: Annotated[
        Whole, typer.Option(help="The K best tokens at one place, each completed.", rich_help_panel=STEERING)
    ] = None,
    alternatives_at: Annotated[
        Whole, typer.Option(help="That place, from 0. (default: after the prefix)", rich_help_panel=STEERING)
    ] = None,
    no_repeat_ngram: Annotated[
        Whole, typer.Option(help="No N tokens in a row occur twice.", rich_help_panel=STEERING)
    ] = None,
    repetition_penalty: Annotated[
        Real, typer.Option(help="Above 1: avoid tokens already there. (default: 1.0)", rich_help_panel=STEERING)
    ] = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Let the unknown token be produced.", rich_help_panel=STEERING)
    ] = False,
    min_length: Annotated[
        Whole, typer.Option(help="Fewest output tokens. (default: 0)", rich_help_panel=OUTPUT)
    ] = None,
    max_length: Annotated[
        Whole,
        typer.Option(help="Most output tokens. (default: 3 times the source and 50)", rich_help_panel=OUTPUT),
    ] = None,
    min_ratio: Annotated[
        Real, typer.Option(help="Fewest, in units of the source's length. (default: 0.0)", rich_help_panel=OUTPUT)
    ] = None,
    max_ratio: Annotated[
        Real, typer.Option(help="Most, in units of the source's length.", rich_help_panel=OUTPUT)
    ] = None,
    max_source: Annotated[
        Whole, typer.Option(help="A longer source gets an empty output. (default: 2048)", rich_help_panel=OUTPUT)
    ] = None,
    alignment: Annotated[
        bool, typer.Option("--alignment", help="Show which source tokens made each token.", rich_help_panel=OUTPUT)
    ] = False,
    alignment_heads: Annotated[
        str | None,
        typer.Option(metavar="L.H,L.H,...", help="Layers and heads it is read from, from 1.", rich_help_panel=OUTPUT),
    ] = None,
    batch_tokens: Annotated[
        Whole, typer.Option(help="Source tokens times hypotheses at once. (default: 8192)", rich_help_panel=OUTPUT)
    ] = None,
    window: Annotated[
        Whole, typer.Option(help="Lines read ahead, to be sorted by length. (default: 4096)", rich_help_panel=OUTPUT)
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="bf16: faster where the processor has it, scores less exact. int8: of engine ctranslate2."
            " (default: fp32)",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="ctranslate2: faster for a Transformer with encoder and decoder, on a CPU. (default: regard)",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    json: Json = False,
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Give the best output for every line of input.

    Lines come from FILE or stdin, outputs in the same order. A language model is given prompts and says how they go
    on. A plain output is one line of text. With several outputs per line (--nbest, --alternatives) each becomes a
    line of its own: number of the input line, score, text, separated by tabs. With --alignment the links follow,
    written source-target from 0. A classifier gives a label for every line, or for every image of an .npz.
    """
    from contextlib import ExitStack

    from regard.cli.input import InputLines, staffed, tell_labels
    from regard.decode.generate import Decoder
    from regard.decode.options import Options
    from regard.device import choose_device, usable_precision
    from regard.errors import one_of

    given = locals()
    told: dict[str, Any] = {
        name: given[name] for name in Options.model_fields if name in given and not left_out(given[name])
    }
    if weights is not None:
        told["weights"] = weights.split(",")
    if alignment_heads is not None:
        told["alignment_heads"] = [_head(pair) for pair in alignment_heads.split(",")]
    if engine not in (None, "regard", "ctranslate2"):
        raise one_of("--engine", engine, ["regard", "ctranslate2"])
    elsewhere = engine == "ctranslate2"
    options = Options.of(**{name: value for name, value in told.items() if not (elsewhere and name == "precision")})
    runs = open_runs([run, *(ensemble or [])], device, threads)
    if runs[0].config.output == "classes":
        others = [name for name in ("prefix_column", "ensemble", "workers", "engine") if not left_out(given[name])]
        tell_labels(runs[0], file, options, [*told, *others], json)
        return
    usable = usable_precision(options.precision, choose_device(device), talk)
    options = options.model_copy(update={"precision": usable})
    several = options.nbest > 1 or options.alternatives > 0
    if elsewhere:
        scores: Scores = "symbols" if json else "totals" if several else "none"
        decoder: Decoder = _ctranslate2(runs, options, precision or "fp32", device, workers, threads, scores)
    else:
        decoder = Decoder(runs, options)
    lines, number = InputLines(file, runs[0].codec, prefix_column, decoder.scorer.continues), 0
    with ExitStack() as stack:
        answer = None
        for batch in lines.batches(options.window):
            if answer is None:
                most = len(batch) if lines.is_file else 1  # from a pipe they may come one by one
                answer = decoder if elsewhere else stack.enter_context(staffed(decoder, most, workers, threads))
            for request, hypotheses in zip(batch, answer(batch), strict=True):
                number += 1
                lines.note(number, hypotheses[0].flags)
                _show(request.source, number, hypotheses, json, several)
            flush()
    for remark in lines.remarks():
        talk(remark)


def _ctranslate2(
    runs: list[Run],
    options: Options,
    precision: str,
    device: str,
    workers: int | None,
    threads: int | None,
    scores: Scores,
) -> Engine:
    """The other engine, with a worker for every core unless something else is asked for."""
    from regard.device import cores
    from regard.engines.ctranslate2 import Engine
    from regard.errors import one_of

    if precision not in ("fp32", "int8"):
        raise one_of("--precision of engine ctranslate2", precision, ["fp32", "int8"])
    if len(runs) > 1:
        raise UserError("--ensemble: the engine ctranslate2 decodes with one run; use the engine regard")
    if device != "cpu":
        raise UserError(f"--device {device}: the engine ctranslate2 works on the CPU here; use the engine regard")
    if workers is None:
        workers = 1 if threads or options.sample else cores()
    return Engine(runs[0], options, "int8" if precision == "int8" else "fp32", workers, threads or 1, scores)


def _show(source: str, number: int, hypotheses: list[Hypothesis], json: bool, several: bool) -> None:
    if json:
        candidates = [candidate._asdict() for candidate in hypotheses[0].candidates]
        told = {"source": source, "hypotheses": [h.as_dict() for h in hypotheses]}
        out_json({**told, "candidates": candidates} if candidates else told)
    elif several:
        for hypothesis in hypotheses:
            out(f"{number}\t{hypothesis.score:.4f}\t{_line(hypothesis)}")
    else:
        out(_line(hypotheses[0]))


def _head(pair: str) -> tuple[int, int]:
    """A layer and a head as people count them, from 1."""
    layer, _, head = pair.strip().partition(".")
    if not (layer.isdecimal() and head.isdecimal() and int(layer) and int(head)):
        raise UserError(f"--alignment-heads: {pair!r} is not LAYER.HEAD, both counted from 1, such as 2.1")
    return int(layer) - 1, int(head) - 1


def _line(hypothesis: Hypothesis) -> str:
    # A line in is a line out: what would end the line for its reader is shown as a blank.
    text = hypothesis.text.replace("\n", " ").replace("\r", " ")
    if hypothesis.alignment is None:
        return text
    return f"{text}\t{' '.join(f'{s}-{t}' for s, t in hypothesis.alignment.hard)}"
