"""Options of decoding, the same for every verb that decodes."""

from __future__ import annotations

from typing import Annotated, Any, cast

import torch
import typer

from regard.answers import usable_options
from regard.cli.input import FieldOption, field_options
from regard.cli.tables import message
from regard.decode.request import ENGINES, EngineName, Options
from regard.errors import UserError
from regard.suggest import one_of

SEARCH, SAMPLING, STEERING, OUTPUT = "Search", "Sampling", "Steering", "Length and output"
FIELDS = {
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

Ensemble = Annotated[
    list[str] | None,
    typer.Option("--ensemble", metavar="RUN", help="A further run to decode with. Repeatable.", rich_help_panel=SEARCH),
]
PrefixColumn = Annotated[
    bool, typer.Option("--prefix-column", help="The last column of a line is its prefix.", rich_help_panel=STEERING)
]
EngineOption = Annotated[
    str | None,
    typer.Option("--engine", help="torch (default), or ctranslate2: often faster on a CPU.", rich_help_panel=OUTPUT),
]


def decoding_options(*left_out: str) -> list[FieldOption]:
    """The options of decoding, in panels, without those that a verb has no use for."""
    return [
        option
        for panel, names in FIELDS.items()
        for option in field_options(Options, *(name for name in names if name not in left_out), panel=panel)
    ]


def parse_decoding(given: dict[str, Any], engine: str | None) -> tuple[Options, EngineName]:
    """The checked options and engine of a command line."""
    if engine == "regard":  # its name up to version 0.5
        message("--engine regard is now called --engine torch")
        engine = "torch"
    if engine is not None and engine not in ENGINES:
        raise one_of("--engine", engine, ENGINES)
    values = dict(given)
    if "alignment_heads" in values:
        values["alignment_heads"] = [_head(pair) for pair in values["alignment_heads"]]
    return Options.of(**values), cast(EngineName, engine or "torch")


def usable_here(options: Options, device: torch.device) -> Options:
    """The options with a precision that works on a device; a message warns that outputs may differ with it."""
    usable = usable_options(options, device, message)
    if usable.precision != "fp32":
        message(f"precision: {usable.precision}: faster, but outputs and scores may differ from those in fp32")
    return usable


def _head(pair: str) -> tuple[int, int]:
    """Layer and head, counted from 0, of a text that counts them from 1."""
    layer, _, head = pair.strip().partition(".")
    if not (layer.isdecimal() and head.isdecimal() and int(layer) and int(head)):
        raise UserError(f"--alignment-heads: {pair!r} is not LAYER.HEAD, both counted from 1, such as 2.1")
    return int(layer) - 1, int(head) - 1
