"""Options of decoding, the same for every verb that decodes, and the engine that they open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
import typer

from regard.cli.input import FieldOption, field_options, with_workers
from regard.cli.tables import message
from regard.decode.engine import Engine, TorchEngine
from regard.decode.request import Options
from regard.device import usable_precision
from regard.errors import UserError
from regard.run import Run
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
ENGINES = ("torch", "ctranslate2")

Ensemble = Annotated[
    list[str] | None,
    typer.Option("--ensemble", metavar="RUN", help="A further run to decode with. Repeatable.", rich_help_panel=SEARCH),
]
PrefixColumn = Annotated[
    bool, typer.Option("--prefix-column", help="The last column of a line is its prefix.", rich_help_panel=STEERING)
]
EngineName = Annotated[
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


@dataclass(frozen=True)
class Decoding:
    """How a command line asks to decode: options of the search, and the engine with its processes and threads."""

    options: Options
    ctranslate2: bool
    precision: str  # of the engine ctranslate2
    workers: int | None
    threads: int | None

    @classmethod
    def of(cls, given: dict[str, Any], engine: str | None, workers: int | None, threads: int | None) -> Decoding:
        """Check the options that were given."""
        if engine == "regard":  # its name up to version 0.5
            message("--engine regard is now called --engine torch")
            engine = "torch"
        if engine not in (None, *ENGINES):
            raise one_of("--engine", str(engine), ENGINES)
        ctranslate2 = engine == "ctranslate2"
        options = {key: value for key, value in given.items() if not (ctranslate2 and key == "precision")}
        if "alignment_heads" in options:
            options["alignment_heads"] = [_head(pair) for pair in options["alignment_heads"]]
        precision = given.get("precision", "fp32") if ctranslate2 else "fp32"
        return cls(Options.of(**options), ctranslate2, precision, workers, threads)

    def on(self, device: torch.device) -> Decoding:
        """The same with a precision that works on a device; a message tells that outputs may differ with it."""
        precision = usable_precision(self.options.precision, device, message)
        if (used := self.precision if self.ctranslate2 else precision) != "fp32":
            message(f"precision: {used}: faster, but outputs and scores may differ from those in fp32")
        return replace(self, options=self.options.model_copy(update={"precision": precision}))

    def open(self, runs: Sequence[Run], scores: Literal["tokens", "totals", "none"]) -> Engine:
        """An engine with its processes; `scores` are those that are needed."""
        if not self.ctranslate2:
            return with_workers(TorchEngine(runs, self.options), self.workers, self.threads)
        from regard.decode.ctranslate2 import CTranslate2Engine  # an optional dependency

        return CTranslate2Engine.open(runs, self.options, self.precision, scores, self.workers, self.threads)


def _head(pair: str) -> tuple[int, int]:
    """Layer and head, counted from 0, of a text that counts them from 1."""
    layer, _, head = pair.strip().partition(".")
    if not (layer.isdecimal() and head.isdecimal() and int(layer) and int(head)):
        raise UserError(f"--alignment-heads: {pair!r} is not LAYER.HEAD, both counted from 1, such as 2.1")
    return int(layer) - 1, int(head) - 1
