"""`regard score`: how probable given targets are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import tee
from typing import Annotated, Any

import typer

from regard.answers import score_json
from regard.batch import windows
from regard.cli.lines import announce_data, announce_stdin
from regard.cli.options import (
    Columns,
    Device,
    Json,
    RunPath,
    Strict,
    Target,
    Threads,
    field_options,
    open_runs,
    pairs_of,
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
from regard.decode.forced import score
from regard.decode.request import Options
from regard.evaluate.test_data import UnknownParts
from regard.text.codec import Example

EXAMPLE = "regard score runs/g2p pairs.tsv --json"


@with_options("options", *field_options(Options, "weights", "max_source", "batch_tokens"))
def command(
    run: RunPath,
    options: dict[str, Any],
    pairs: Annotated[str, typer.Argument(metavar="PAIRS", help="A TSV of sources and targets; - is stdin.")] = "-",
    target: Target = None,
    columns: Columns = None,
    ensemble: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="A further run to score with. Repeatable.")
    ] = None,
    strict: Strict = False,
    json: Json = False,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Print how probable each target is, given its source.

    Scores are natural logarithms, the end token included. Plain output is one number per line of PAIRS, nan where
    the line could not be used. With --json the number of every token is given too.

    For a language model, a line is a text, or a prompt and how it goes on, separated by a tab.
    """
    chosen = Options.of(**options)
    runs = open_runs([run, *(ensemble or [])], device, threads)
    counter, unknown = LineCounter(strict), UnknownParts(runs[0])
    if runs[0].task.name == "lm" and target is None and columns is None:
        source = Source((pairs,))
        announce_stdin(pairs, "a text per line, or a prompt and its continuation, separated by a tab")
        located = _continuations(pairs, counter)
    else:
        source = pairs_of(pairs, target, columns, runs[0].codec.columns)
        announce_data(source, "pairs")
        located = source.read(counter)
    ahead, behind = tee(_noted(located, unknown, chosen.window))
    printed = 0
    for scored, (number, example) in zip(score(runs, (item.example for item in ahead), chosen), behind, strict=False):
        for name, reason in (("too_long", TOO_LONG), ("error", BAD_REQUEST), ("out_of_memory", NO_MEMORY)):
            if name in scored.flags:
                counter.skip(reason, f"{shown(pairs)}:{number}", scored.flags[name], tell=True)
        if json:
            out_json({"line": number, **score_json(example, scored)})
        else:
            for _ in range(printed + 1, number):
                out("nan")
            out(f"{scored.score:.6f}")
            printed = number
    if not json:
        for _ in range(printed, counter.read):
            out("nan")
    if counter.read:
        source.require(counter)
    for remark in [counter.summary()] * bool(counter.skipped) + unknown.remarks():
        message(remark)


def _noted(located: Iterator[Located], unknown: UnknownParts, most: int) -> Iterator[Located]:
    """The same examples, with their unknown tokens counted."""
    for window in windows(located, most):
        unknown.note([item.example for item in window])
        yield from window


def _continuations(path: str, counter: LineCounter) -> Iterator[Located]:
    """Lines that are a text, which continues an empty prompt, or a prompt and its continuation."""
    for number, text, problem in read_lines(path):
        counter.read += 1
        *prompt, rest = text.split("\t")
        reason = problem or (BLANK if not text.strip() else COLUMNS if len(prompt) > 1 else None)
        if reason:
            counter.skip(reason, f"{shown(path)}:{number}")
        else:
            yield Located(number, Example("".join(prompt), rest))
