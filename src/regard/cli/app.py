"""The program: verbs, which are loaded on use, and exit codes.

0: done; 2: a mistake of the user, reported in one message; 1: a fault in regard; 129, 130 and 143: stopped by a signal.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import sys
import threading
import traceback
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from regard import __version__
from regard.cli import READER
from regard.cli.output import OutputClosed, out
from regard.errors import NO_TORCH, UserError, is_out_of_memory, lacks_torch, memory_message
from regard.suggest import closest, nearest, synonym

# Verbs, each a module of this package, with the first sentence of their help.
VERBS = {
    "demo": "Train a pronunciation model and show its answers.",
    "train": "Train a model and write a run directory.",
    "generate": "Give the best output for every line of input.",
    "score": "Print the log-probability of each target given its source.",
    "evaluate": "Score a run on held-out data.",
    "inspect": "Write the attention page of one example, an HTML file.",
    "heads": "Measure every attention head.",
    "prune": "Remove attention heads and write a smaller, faster run.",
    "convert": "Convert a Hugging Face directory to a run, or export a run.",
    "serve": "Serve runs over HTTP, with an API and a web page.",
    "info": "Show parameters, FLOPs and memory of a model.",
    "average": "Average the weights of several runs.",
}
OPTIONS = {  # of settings in messages of the library
    "data.train": "--data", "data.source": "--source", "data.target": "--target", "data.columns": "--columns",
    "data.strict": "--strict", "train.start_from": "--from", "train.workers": "--workers",
}  # fmt: skip
SETTINGS = {"help_option_names": ["-h", "--help"]}
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class LazyGroup(typer.core.TyperGroup):
    """Lists the verbs with their summaries, and imports a verb when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in VERBS and not args[0].startswith("-"):
            hint = "; a verb comes first" if os.path.exists(args[0]) else closest(args[0], VERBS)
            verbs = f"verbs: {', '.join(VERBS)}\n  more: regard --help"
            raise UserError(f"regard has no verb {args[0]!r:.100}{hint}\n  {verbs}")
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and ctx.resilient_parsing:  # shell completion
            from regard.cli.completion import VerbCompletion

            return name, VerbCompletion(name, load_verb), rest
        command = command if name is None else load_verb(name)
        if not gc.isenabled():  # see main: imported modules live as long as the process
            gc.freeze()
            gc.enable()
        return name, command, rest


def load_verb(name: str) -> Any:
    """The click command of a verb, made from the `command` and the `EXAMPLE` of its module."""
    module = import_module(f"regard.cli.{name}")
    paragraphs = cleandoc(module.command.__doc__).split("\n\n")
    verb = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    verb.command(
        name,
        help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
        epilog=f"Example: {module.EXAMPLE}",
        context_settings=SETTINGS,
    )(module.command)
    return typer.main.get_command(verb)


app = typer.Typer(
    name="regard",
    cls=LazyGroup,
    help="Train, understand and ship sequence models built on attention.",
    epilog="Start with: regard demo",
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
    rich_markup_mode=None,  # the list of verbs is plain and quick; the help of verbs has panels
)


for _name, _summary in VERBS.items():
    app.command(_name, help=_summary)(lambda: None)  # replaced on use


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (also: REGARD_DEBUG=1).")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        typer.echo(f"regard {__version__}")
        raise typer.Exit
    if debug:
        os.environ["REGARD_DEBUG"] = "1"
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line and exit with its code."""
    gc.disable()  # until the verb is loaded: garbage collection among new modules takes a seventh of the start
    code = run()
    if any(thread.name == READER for thread in threading.enumerate()):
        # At exit Python would wait for this thread, which reads stdin.
        if sys.stdout is not None:
            sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)


def run() -> int:
    """Run the command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        code = typer.main.get_command(app)(standalone_mode=False, prog_name="regard")
        out("", end="", flush=True)
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _fail(_with_options(str(error)), 2)
    except (OutputClosed, BrokenPipeError):
        _drop_output()
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        usage_message = getattr(error, "format_message", None)  # of click's usage errors
        if usage_message is not None:
            context = getattr(error, "ctx", None)
            path = context.command_path if context else "regard"
            text = usage_message()
            if context is not None and (name := getattr(error, "option_name", "")) and hasattr(error, "possibilities"):
                text = f"no such option: {name:.100}{_probable_option(name, context.command)}"
            return _fail(f"{text}\n  more: {path} --help", 2)
        if isinstance(error, OSError) and error.filename is None and error.errno in DISK_ERRORS:
            return _fail(f"cannot write the output: {error.strerror}", 2)
        if lacks_torch(error):
            return _fail(f"this {NO_TORCH}", 2)
        if is_out_of_memory(error):
            return _fail(memory_message(error), 2)
        if os.environ.get("REGARD_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
            return 1
        fault = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return _fail(f"{fault}\n  this is a fault in regard, not in your input; REGARD_DEBUG=1 shows where", 1)


def _with_options(message: str) -> str:
    """A message of the library, whose advice is given as options: data.train=FILE becomes --data FILE."""
    for key, option in OPTIONS.items():
        message = re.sub(rf"\b{key}\b(?![.:=])", option, message.replace(f"{key}=", f"{option} "))
    return message.replace("resume=True", "--resume")


def _probable_option(name: str, command: Any) -> str:
    """A suggestion from the options of a command, or from the keys of its --set."""
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    settings: list[str] = []
    if "--set" in options:
        from regard.recipe import setting_keys  # only here: it imports pydantic

        settings = setting_keys()
    word = name.lstrip("-").replace("-", "_")
    for find in (synonym, nearest):
        if (option := find(name, options)) is not None:
            return f"; did you mean '{option}'?"
        if (setting := find(word, settings)) is not None:
            return f"; did you mean --set {setting}=VALUE?"
    return ""


def _fail(message: str, code: int) -> int:
    try:
        out("", end="", flush=True)
    except (UserError, OutputClosed):
        _drop_output()
    print(f"error: {message}", file=sys.stderr)
    return code


def _drop_output() -> None:
    """Discard buffered output, which would be written at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
