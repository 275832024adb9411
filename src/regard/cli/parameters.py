"""Parameters of the command line: those that several verbs share, and options made from the fields of config values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
import typer
from pydantic import BaseModel

from regard.config import parse
from regard.data.reader import Source
from regard.device import choose_device, tune_allocator
from regard.recipe import Column, Data
from regard.run import Run

RunPath = Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")]
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


def open_runs(paths: list[str], device: str = "cpu", threads: int | None = None) -> list[Run]:
    """Load runs onto a device and set the number of threads; small models are fastest with one."""
    tune_allocator()
    where = choose_device(device)
    runs = [Run.load(path, where) for path in paths]
    if threads is None and sum(run.model.size for run in runs) < SMALL:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)
    return runs


def pairs_of(path: str, target: str | None, columns: str | None, of_run: tuple[Column, ...]) -> Source:
    """The pairs in a file, or in two; the columns are those named, or those the run was trained with."""
    if target is not None:
        return Source((path, target))
    return Source((path,), parse(Data, {"columns": columns.split(",")}, "--columns").columns if columns else of_run)


def option_name(name: str) -> str:
    """A parameter's name as it is written on a command line."""
    return "--" + name.replace("_", "-")


def chosen_options(**values: Any) -> dict[str, Any]:
    """The options that the user gave a value; one that was left out is None, False or empty."""
    # not `in (None, False)`: 0 equals False, and an option of 0 is to be checked, not ignored
    return {name: value for name, value in values.items() if not (value is None or value is False or value == [])}


@dataclass(frozen=True)
class FieldOption:
    """An option that sets a field of a config value."""

    key: str  # the field's name, after that of its table if it is in one: train.lr
    parameter: Parameter
    split: bool  # the text is a list with commas


def field_options(
    value: type[BaseModel], *names: str, panel: str | None = None, table: str = "", flags: Mapping[str, str] = {}
) -> list[FieldOption]:
    """Options for fields of a config value: type, default and help come from the field.

    None stands for an option that was left out, so that the value itself has the only defaults and checks. A list of
    texts, which may hold commas, is a repeatable option; any other list is written with commas.
    """
    options = []
    for name in names:
        field = value.model_fields[name]
        kind = _plain_type(field.annotation)
        texts, split = kind == tuple[str, ...], get_origin(kind) is tuple and kind != tuple[str, ...]
        metavar = field.json_schema_extra.get("metavar") if isinstance(field.json_schema_extra, dict) else None
        option = typer.Option(
            flags.get(name, option_name(name)),
            help=_help(field.description or "", field.default),
            metavar=None if metavar is None else str(metavar),
            rich_help_panel=panel,
        )
        annotation: Any = bool if kind is bool else (list[str] if texts else str if split else kind) | None
        parameter = Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=False if kind is bool else None,
            annotation=Annotated[annotation, option],
        )
        options.append(FieldOption(f"{table}.{name}" if table else name, parameter, split))
    return options


def _plain_type(annotation: Any) -> Any:
    """A field's type without bounds, None and the choices of a literal, which the config value checks itself."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _plain_type(arguments[0])
    if origin in (Union, UnionType):
        (kind,) = (each for each in arguments if each is not type(None))
        return _plain_type(kind)
    if origin is Literal:
        return str
    if origin is tuple:
        return (
            tuple[str, ...]
            if _plain_type(arguments[0]) is str and get_origin(arguments[0]) is not Literal
            else annotation
        )
    return annotation


def _help(description: str, default: Any) -> str:
    if "(default:" in description or isinstance(default, bool) or default in (None, "", ()):
        return description
    return f"{description} (default: {','.join(default) if isinstance(default, tuple) else default})"


def with_options(parameter: str, *options: FieldOption) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a parameter of a command by these options; the command gets a dict of those that have a value."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(**values: Any) -> None:
            chosen = chosen_options(**{option.key: values.pop(option.parameter.name) for option in options})
            for option in options:
                if option.split and option.key in chosen:
                    chosen[option.key] = chosen[option.key].split(",")
            command(**values, **{parameter: chosen})

        plain = signature(command, eval_str=True)
        own = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in plain.parameters.values()]
        index = [each.name for each in own].index(parameter)
        own[index : index + 1] = [option.parameter for option in options]
        call.__signature__ = plain.replace(parameters=own)  # type: ignore[attr-defined]
        return call

    return decorate
