"""What the verbs share: talking, printing, and reading settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import UserError

if TYPE_CHECKING:
    from regard.data.reader import Source
    from regard.recipe import Column
    from regard.run import Run


Json = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Processor threads. (default: 1 for a small model, else one per core)")
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes. (default: one per core for many lines and a small model, else 1)"),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first bad line instead of skipping it.")]
Columns = Annotated[
    str | None, typer.Option(metavar="NAMES", help="What the columns are. (default: as the run was trained)")
]
Target = Annotated[str | None, typer.Option(help="Targets in a file of their own; PAIRS then holds the sources.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. dropout=0.2 or train.lr=3e-4. Repeatable."),
]


SMALL = 20_000_000  # parameters: below, threads wait for each other longer than they work


class ReaderGone(Exception):
    """Nobody reads our output any more."""


def talk(message: str) -> None:
    """Say something to the person at the terminal."""
    print(message, file=sys.stderr, flush=True)


def left_out(value: object) -> bool:
    """Whether an option was not given."""
    return value is None or value is False  # not `in`: 0 equals False, and an option of 0 is to be refused, not ignored


def option_name(name: str) -> str:
    """An option as people write it."""
    return "--" + name.replace("_", "-")


def out(line: str) -> None:
    """Write a line of data."""
    with _told():
        sys.stdout.write(line + "\n")


def out_json(value: dict[str, Any]) -> None:
    """Write a line of JSON."""
    out(json.dumps(value, ensure_ascii=False))


def flush() -> None:
    """Let whoever waits for our output have what there is."""
    with _told():
        sys.stdout.flush()


@contextmanager
def _told() -> Iterator[None]:
    """Say what is wrong with our output, if it cannot be written."""
    if sys.stdout is None:
        raise UserError("cannot write the output: stdout is closed")
    try:
        yield
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        raise UserError(f"cannot write the output: {error.strerror or error}") from None


def open_runs(paths: list[str], device: str = "cpu", threads: int | None = None) -> list[Run]:
    """Load runs onto a device, and use so many threads from here on; small models are fastest with one."""
    import torch

    from regard.device import choose_device, tune_allocator
    from regard.run import Run

    tune_allocator()
    where = choose_device(device)
    runs = [Run.load(path, where) for path in paths]
    if threads is None and sum(p.numel() for run in runs for p in run.model.parameters()) < SMALL:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)
    return runs


def pairs_of(path: str, target: str | None, columns: str | None, of_run: tuple[Column, ...]) -> Source:
    """The pairs in a file, or in two; the columns are those named, or those the run was trained with."""
    from regard.config import parse
    from regard.data.reader import Source
    from regard.recipe import Data

    if target is not None:
        return Source((path, target))
    return Source((path,), parse(Data, {"columns": columns.split(",")}, "--columns").columns if columns else of_run)
