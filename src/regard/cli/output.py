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
    """The reader of stdout has closed it."""


def message(text: str) -> None:
    """Write a message for the user to stderr."""
    print(text, file=sys.stderr, flush=True)


def out(line: str, end: str = "\n", flush: bool = False) -> None:
    with _report_errors():
        print(line, end=end, flush=flush)


def out_json(value: dict[str, Any]) -> None:
    out(json_line(value))


def json_line(value: dict[str, Any]) -> str:
    """A value as JSON, with null for infinity and NaN."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    """A value with None for infinity and NaN."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _report_errors() -> Iterator[None]:
    """Report a failed write to stdout as a UserError."""
    if sys.stdout is None:
        raise UserError("cannot write the output: stdout is closed")
    try:
        yield
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        raise UserError(f"cannot write the output: {error.strerror or error}") from None


def at_terminal() -> bool:
    """Whether stdout is a terminal."""
    from rich.console import Console  # slow to import

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
    """Print a table: at a terminal with frames (unless it has no header), otherwise tab-separated.

    `left` and `bold` are indices of columns, `styles` is by row, and a line precedes the rows with indices `sections`.
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
