"""`regard score`: log-probabilities of given targets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import tee
from typing import Annotated, Any

import typer

from regard.answers import Answerer, open_engine, score_json
from regard.batch import windows
from regard.cli.lines import announce_data, announce_stdin, usable_here
from regard.cli.options import (
    Columns,
    Device,
    EngineOption,
    Json,
    RunPath,
    Strict,
    Target,
    Threads,
    field_options,
    open_runs,
    pairs_of,
    parse_decoding,
    with_options,
)
from regard.cli.output import message, out, out_json
from regard.data.reader import (
    BAD_REQUEST,
    BLANK,
    COLUMNS,
    NO_MEMORY,
    TOO_LONG,
    LineCounter,
    Located,
    Source,
    read_lines,
    shown,
)
from regard.decode.request import Options
from regard.evaluate.test_data import UnknownParts
from regard.text.codec import Example

EXAMPLE = "regard score runs/g2p pairs.tsv --json"


@with_options("options", *field_options(Options, "weights", "max_source", "batch_tokens", "precision"))
def command(
    run: RunPath,
    options: dict[str, Any],
    pairs: Annotated[str, typer.Argument(metavar="PAIRS", help="A TSV of sources and targets; - is stdin.")] = "-",
    target: Target = None,
    columns: Columns = None,
    ensemble: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="Also score with this run. Repeatable.")
    ] = None,
    engine: EngineOption = None,
    strict: Strict = False,
    json: Json = False,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Print the log-probability of each target given its source.

    Scores are natural logarithms and include the end token. Plain output is one number per line of PAIRS; nan stands
    for a line that could not be used. A header has none. --json adds the score of every token.

    For a language model, a line is a text, or a prompt and its continuation, separated by a tab.
    """
    decoding, engine_name = parse_decoding(options, engine)
    runs = open_runs([run, *(ensemble or [])], device, threads, load=False)
    decoding = usable_here(decoding, runs[0])
    counter = LineCounter(strict)
    unknown = UnknownParts(runs[0])
    if runs[0].task.name == "lm" and target is None and columns is None:
        source = Source((pairs,))
        announce_stdin(pairs, "a text per line, or a prompt and its continuation, separated by a tab")
        located = _continuations(pairs, counter)
    else:
        source = pairs_of(pairs, target, columns, runs[0])
        announce_data(source, "pairs")
        located = source.read(counter)
    rows: list[int] = []  # of the examples, from 1: a header is no row
    ahead, behind = tee(_count_unknown(_note_rows(located, counter, rows), unknown, decoding.window))
    printed = 0
    opened = open_engine(runs, decoding, engine_name, threads=threads)
    scores = Answerer(runs, decoding, opened).score(item.example for item in ahead)
    for scored, (number, example) in zip(scores, behind, strict=False):
        for name, reason in (("too_long", TOO_LONG), ("error", BAD_REQUEST), ("out_of_memory", NO_MEMORY)):
            if name in scored.flags:
                counter.skip(reason, f"{shown(pairs)}:{number}", scored.flags[name], tell=True)
        if json:
            out_json({"line": number, **score_json(example, scored)})
        else:
            row = rows.pop(0)
            out("nan\n" * (row - printed - 1) + f"{scored.score:.6f}")
            printed = row
    if not json:
        out("nan\n" * (counter.read - printed), end="")
    if counter.read:
        source.require(counter)
    for remark in [counter.summary()] * bool(counter.skipped) + unknown.remarks():
        message(remark)


def _note_rows(located: Iterator[Located], counter: LineCounter, rows: list[int]) -> Iterator[Located]:
    for item in located:
        rows.append(counter.read)
        yield item


def _count_unknown(located: Iterator[Located], unknown: UnknownParts, count: int) -> Iterator[Located]:
    """Count the unknown tokens of the examples on their way, `count` examples at a time."""
    for window in windows(located, count):
        unknown.note([item.example for item in window])
        yield from window


def _continuations(path: str, counter: LineCounter) -> Iterator[Located]:
    """Lines with a prompt and its continuation, or with a text, which continues an empty prompt."""
    for number, text, problem in read_lines(path):
        counter.read += 1
        *prompt, rest = text.split("\t")
        reason = problem or (BLANK if not text.strip() else COLUMNS if len(prompt) > 1 else None)
        if reason:
            counter.skip(reason, f"{shown(path)}:{number}")
        else:
            yield Located(number, Example("".join(prompt), rest))
