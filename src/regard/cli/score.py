"""`regard score`: how probable given targets are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.tables import Columns, Device, Json, Strict, Target, Threads, open_runs, out, out_json, pairs_of, talk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regard.cli.input import UnknownParts
    from regard.data.reader import LineCounter, Located

EXAMPLE = "regard score runs/g2p pairs.tsv --json"


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    pairs: Annotated[str, typer.Argument(metavar="PAIRS", help="A TSV of sources and targets; - is stdin.")] = "-",
    target: Target = None,
    columns: Columns = None,
    ensemble: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="A further run to score with. Repeatable.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="W,W,...", help="Of RUN and each --ensemble. (default: equal)")
    ] = None,
    max_source: Annotated[
        int | None, typer.Option(help="A longer source or target is not scored. (default: 2048)")
    ] = None,
    strict: Strict = False,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens at once. (default: 8192)")] = None,
    json: Json = False,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Print how probable each target is, given its source.

    Scores are natural logarithms, the end token included. Plain output is one number per line of PAIRS, nan where
    the line could not be used. With --json the number of every token is given too.

    For a language model, a line is a text, or a prompt and how it goes on, separated by a tab.
    """
    from itertools import tee

    from regard.cli.input import UnknownParts
    from regard.data.reader import LONG, LineCounter, shown
    from regard.decode.options import Options
    from regard.decode.score import score

    told = {"batch_tokens": batch_tokens, "max_source": max_source, "weights": weights and weights.split(",")}
    options = Options.of(**{name: value for name, value in told.items() if value is not None})
    runs = open_runs([run, *(ensemble or [])], device, threads)
    account, unknown = LineCounter(strict), UnknownParts(runs[0])
    if runs[0].config.encoder is None and target is None and columns is None:
        located = _texts(pairs, account)
    else:
        located = pairs_of(pairs, target, columns, runs[0].codec.columns).read(account)
    ahead, behind = tee(_noted(located, unknown, options.window))
    printed = 0
    for scored, (number, example) in zip(score(runs, (item.example for item in ahead), options), behind, strict=False):
        if scored.flags:
            account.skip(LONG, f"{shown(pairs)}:{number}", scored.flags["too_long"], tell=True)
        if json:
            out_json({"line": number, "source": example.source, "target": example.target, **scored.as_dict()})
        else:
            for _ in range(printed + 1, number):
                out("nan")
            out(f"{scored.score:.6f}")
            printed = number
    if not json:
        for _ in range(printed, account.read):
            out("nan")
    for remark in [account.summary()] * bool(account.skipped) + unknown.remarks():
        talk(remark)


def _noted(located: Iterator[Located], unknown: UnknownParts, most: int) -> Iterator[Located]:
    """The same, with what is unknown in them counted."""
    from regard.decode.scorer import windows

    for window in windows(located, most):
        unknown.note([item.example for item in window])
        yield from window


def _texts(path: str, account: LineCounter) -> Iterator[Located]:
    """Lines that are a text, which goes on from nothing, or a prompt and how it goes on."""
    from regard.data.reader import BLANK, COLUMNS, Located, read_lines, shown
    from regard.text.codec import Example

    for number, text, problem in read_lines(path):
        account.read += 1
        *prompt, rest = text.split("\t")
        reason = problem or (BLANK if not text.strip() else COLUMNS if len(prompt) > 1 else None)
        if reason:
            account.skip(reason, f"{shown(path)}:{number}")
        else:
            yield Located(number, Example("".join(prompt), rest))
