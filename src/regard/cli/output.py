"""Output of the verbs: results on stdout as lines, JSON or tables, messages on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from regard.errors import UserError


class OutputClosed(Exception):
    """Nobody reads our output any more."""


def message(text: str) -> None:
    """Write to stderr, for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


def out(line: str, end: str = "\n") -> None:
    """Write a line of data."""
    with report_write_errors():
        sys.stdout.write(line + end)


def out_json(value: dict[str, Any]) -> None:
    """Write a line of JSON."""
    out(json_line(value))


def json_line(value: dict[str, Any]) -> str:
    """A value as JSON; numbers that JSON does not know become null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    """The same with None for infinite numbers and those that are none."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flush() -> None:
    """Hand on what was written so far."""
    with report_write_errors():
        sys.stdout.flush()


@contextmanager
def report_write_errors() -> Iterator[None]:
    """Turn a failed write to stdout into a UserError."""
    if sys.stdout is None:
        raise UserError("cannot write the output: stdout is closed")
    try:
        yield
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        raise UserError(f"cannot write the output: {error.strerror or error}") from None


def at_terminal() -> bool:
    """Whether stdout is a terminal, where tables are drawn with frames."""
    from rich.console import Console  # most verbs print plain lines, and start sooner without it

    return Console().is_terminal


def print_table(
    rows: Sequence[Sequence[str]],
    header: Sequence[str] = (),
    *,
    title: str | None = None,
    left: Collection[int] = (0,),
    bold: Collection[int] = (),
    styles: Sequence[str] = (),
    sections: Collection[int] = (),
) -> None:
    """Print a table: with frames at a terminal, otherwise tab-separated.

    `left` and `bold` are numbers of columns, `styles` are those of the rows, and a line is drawn before each row that
    `sections` names. A table without a header has no frame.
    """
    if not at_terminal():
        for row in (header, *rows) if header else rows:
            out("\t".join(row))
        return
    from rich.box import ROUNDED
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="dim", box=ROUNDED if header else None,
        show_header=bool(header), padding=(0, 1),
    )  # fmt: skip
    for i in range(len(rows[0])):
        name = header[i] if header else ""
        wrap = not header and i == len(rows[0]) - 1
        table.add_column(
            name, justify="left" if i in left else "right", style="bold" if i in bold else None, no_wrap=not wrap
        )
    for number, row in enumerate(rows):
        if number in sections:
            table.add_section()
        table.add_row(*row, style=styles[number] if styles else None)
    Console().print(table)
