"""The program: its verbs, and what its exit codes mean.

0 done; 2 a mistake of the user's, told in one message; 1 a mistake of ours; 130 and 143 stopped by a signal.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from inspect import cleandoc
from typing import Annotated

import typer
import typer.main

from regard.cli import average, convert, demo, evaluate, generate, heads, info, inspect, prune, score, train
from regard.cli.tables import ReaderGone, flush
from regard.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what a disk may say

app = typer.Typer(
    name="regard",
    help="Train, understand and ship sequence models built on attention.",
    epilog="Start with: regard demo",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (demo, train, generate, score, evaluate, inspect, heads, prune, convert, info, average):
    _paragraphs = cleandoc(verb.command.__doc__ or "").split("\n\n")
    app.command(
        verb.__name__.rpartition(".")[2],
        help="\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs),
        epilog=f"Example: {verb.EXAMPLE}",
    )(verb.command)


def _show_version(wanted: bool) -> None:
    if wanted:
        from regard import __version__

        typer.echo(f"regard {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (also: REGARD_DEBUG=1).")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    if debug:
        os.environ["REGARD_DEBUG"] = "1"
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> int:
    """Run the command line -> exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        group = typer.main.get_command(app)
        if hasattr(group, "rich_markup_mode"):
            group.rich_markup_mode = None  # the list of verbs is plain and quick; the verbs' own help is set in panels
        code = group(standalone_mode=False, prog_name="regard")
        flush()
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _complain(str(error), 2)
    except (ReaderGone, BrokenPipeError):
        _give_up_output()  # whoever read it has had enough
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        told = getattr(error, "format_message", None)  # a usage error of the parser
        if told is not None:
            return _complain(f"{told()}\n  {_help_for(error)} tells more", 2)
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
            return _complain(f"cannot write the output: {error.strerror}", 2)
        if os.environ.get("REGARD_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
            return 1
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return _complain(
            f"{what}\n  this is a fault in regard, not in your input; REGARD_DEBUG=1 shows where it happened", 1
        )


def _give_up_output() -> None:
    """What is left in the buffer must not be written at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, code: int) -> int:
    try:
        flush()
    except (UserError, ReaderGone):
        _give_up_output()
    print(f"error: {message}", file=sys.stderr)
    return code


def _help_for(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context else 'regard'} --help"
