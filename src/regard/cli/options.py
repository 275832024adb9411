"""Options that several verbs share, options made from the fields of config values, and the runs that options name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import typer
from pydantic import BaseModel

from regard.answers import load_models
from regard.cli.output import message
from regard.config import parse
from regard.data.pairs import read_table
from regard.data.reader import Source
from regard.decode.request import ENGINE_HELP, ENGINES, EngineChoice, Options
from regard.device import choose_device, tune_allocator
from regard.errors import UserError
from regard.recipe import Data
from regard.run import Run
from regard.suggest import one_of

SEARCH, SAMPLING, STEERING, OUTPUT = "Search", "Sampling", "Steering", "Length and output"
PANELS = {  # options of decoding by panel of the help
    SEARCH: (
        "beam", "nbest", "length_penalty", "coverage_penalty", "exact", "groups", "diversity", "mbr", "utility",
        "weights",
    ),
    SAMPLING: ("sample", "temperature", "top_k", "top_p", "min_p", "seed"),
    STEERING: (
        "prefix", "require", "require_any", "forbid", "stop", "alternatives", "alternatives_at", "no_repeat_ngram",
        "repetition_penalty", "unknown",
    ),
    OUTPUT: (
        "min_length", "max_length", "min_ratio", "max_ratio", "max_source", "alignment", "alignment_heads",
        "top_tokens", "batch_tokens", "window", "precision",
    ),
}  # fmt: skip

RunPath = Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads. (default: one per core; torch: 1 for a small model)")
]
OneThread = Annotated[int, typer.Option("--threads", min=1, help="Threads.")]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, help="Batches decoded at once. (default: one per core; torch: for a small model and enough input)"
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first bad line instead of skipping it.")]
Columns = Annotated[str | None, typer.Option(metavar="NAMES", help="Columns of the data. (default: as in training)")]
Target = Annotated[
    str | None, typer.Option(help="A separate file with the targets; the data file has the sources only.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: train.lr=3e-4. Repeatable.")
]
Ensemble = Annotated[
    list[str] | None,
    typer.Option("--ensemble", metavar="RUN", help="Another run to decode with. Repeatable.", rich_help_panel=SEARCH),
]
PrefixColumn = Annotated[
    bool, typer.Option("--prefix-column", help="The last column is the prefix of the output.", rich_help_panel=STEERING)
]
EngineOption = Annotated[
    str | None,
    typer.Option("--engine", help=ENGINE_HELP, rich_help_panel=OUTPUT),
]


def option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def chosen_options(**values: Any) -> dict[str, Any]:
    """The options with a value; an option that was left out is None, False (not 0) or an empty list."""
    return {name: value for name, value in values.items() if not (value is None or value is False or value == [])}


@dataclass(frozen=True)
class FieldOption:
    """An option that sets a field of a config value."""

    key: str  # the field, after the name of its table if it has one: train.lr
    parameter: Parameter
    split: bool  # the value is a list separated by commas


def field_options(
    value: type[BaseModel], *names: str, panel: str | None = None, table: str = "", flags: Mapping[str, str] = {}
) -> list[FieldOption]:
    """Options for fields of a config value, which has the defaults and checks; an option that was left out is None.

    A list of texts is a repeatable option, since texts may contain commas; other lists are separated by commas.
    """
    options = []
    for name in names:
        field = value.model_fields[name]
        kind = _plain_type(field.annotation)
        texts = kind == tuple[str, ...]
        split = get_origin(kind) is tuple and not texts
        extra: Any = field.json_schema_extra or {}
        text = field.description or ""
        default = field.default
        if "(default:" not in text and not isinstance(default, bool) and default not in (None, "", ()):
            text = f"{text} (default: {','.join(default) if isinstance(default, tuple) else default})"
        flag = flags.get(name, option_name(name))
        option = typer.Option(flag, help=text, metavar=extra.get("metavar"), rich_help_panel=panel)
        annotation: Any = bool if kind is bool else (list[str] if texts else str if split else kind) | None
        unset = False if kind is bool else None
        parameter = Parameter(name, Parameter.KEYWORD_ONLY, default=unset, annotation=Annotated[annotation, option])
        options.append(FieldOption(f"{table}.{name}" if table else name, parameter, split))
    return options


def _plain_type(annotation: Any) -> Any:
    """A field's type without bounds, None and choices, which the config value checks."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return _plain_type(arguments[0])
    if origin in (Union, UnionType):
        (kind,) = (each for each in arguments if each is not type(None))
        return _plain_type(kind)
    if origin is Literal:
        return str
    texts = origin is tuple and get_origin(arguments[0]) is not Literal and _plain_type(arguments[0]) is str
    return tuple[str, ...] if texts else annotation


def with_options(parameter: str, *options: FieldOption) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a parameter of a command by these options; the command receives a dict of the options with a value."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(**values: Any) -> None:
            chosen = chosen_options(**{option.key: values.pop(option.parameter.name) for option in options})
            for option in options:
                if option.split and option.key in chosen:
                    chosen[option.key] = chosen[option.key].split(",")
            command(**values, **{parameter: chosen})

        plain = signature(command, eval_str=True)
        parameters = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in plain.parameters.values()]
        index = [each.name for each in parameters].index(parameter)
        parameters[index : index + 1] = [option.parameter for option in options]
        call.__signature__ = plain.replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def decoding_options(*left_out: str) -> list[FieldOption]:
    """The options of decoding, in panels, except `left_out`, which do not apply to a verb."""
    return [
        option
        for panel, names in PANELS.items()
        for option in field_options(Options, *(name for name in names if name not in left_out), panel=panel)
    ]


def parse_decoding(values: Mapping[str, Any], engine: str | None) -> tuple[Options, EngineChoice]:
    """The checked options and engine of a command line."""
    if engine == "regard":  # its name up to version 0.5
        message("--engine regard is now called --engine torch")
        engine = "torch"
    if engine is not None and engine not in ("auto", *ENGINES):
        raise one_of("--engine", engine, ["auto", *ENGINES])
    options = dict(values)
    if "alignment_heads" in options:
        options["alignment_heads"] = [_head(text) for text in options["alignment_heads"]]
    return parse(Options, options, "options"), cast(EngineChoice, engine or "auto")


def _head(text: str) -> tuple[int, int]:
    """Layer and head, counted from 0; a command line counts them from 1."""
    layer, _, head = text.strip().partition(".")
    if not (layer.isdecimal() and head.isdecimal() and int(layer) and int(head)):
        raise UserError(f"--alignment-heads: {text!r} is not LAYER.HEAD, both counted from 1, such as 2.1")
    return int(layer) - 1, int(head) - 1


def open_runs(paths: Sequence[str], device: str = "cpu", threads: int | None = None, load: bool = True) -> list[Run]:
    """Open runs for a device. Without `load`, weights are loaded by the engine that decodes."""
    tune_allocator()
    run_device = device if device == "cpu" else choose_device(device)
    runs = [Run.load(path, run_device, model=False) for path in paths]
    if load:
        load_models(runs, threads)
    return runs


def pairs_of(path: str, target: str | None, columns: str | None, run: Run) -> Source:
    """The pairs in one file or two, with the named columns or those of the run."""
    if target is not None:
        return Source((path, target))
    named = parse(Data, {"columns": columns.split(",")} if columns else {}, "--columns")
    table = run.task.reads in ("pairs", "labelled") or run.task.seq2seq
    default = run.codec.columns if table else ("source",)
    return read_table(path, named.columns if columns else default, named.column_names, say=message)
