"""`regard convert`: models from Hugging Face directories, and runs written for other libraries."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from regard.cli.input import Json
from regard.cli.tables import message, out_json, print_table
from regard.convert.hf import from_hf, to_hf
from regard.convert.to_ctranslate2 import Precision, to_ctranslate2
from regard.errors import UserError, one_of
from regard.run import Run

EXAMPLE = "regard convert opus-mt-en-de runs/en-de"
FORMATS = ("hf", "ctranslate2")


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A Hugging Face directory, or with --to a run.")],
    new: Annotated[str, typer.Argument(metavar="OUT", help="The directory to write.")],
    to: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Write a run for another library: hf (transformers) or ctranslate2."),
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Of --to ctranslate2: fp32, or int8 for weights of 8 bits. (default: fp32)")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Random inputs that both models must agree on.")] = 4,
    json: Json = False,
) -> None:
    """Make a run of a Hugging Face directory, or export a run.

    With --to a run is written for another library. Both models answer sample inputs, and a difference stops the
    conversion. For Hugging Face directories that needs transformers to be installed; else nothing is proven, and a
    message says so.
    """
    if to not in (None, *FORMATS):
        raise one_of("--to", str(to), FORMATS)
    if quantization is not None and to != "ctranslate2":
        raise UserError("--quantization belongs to --to ctranslate2")
    if quantization not in (None, *get_args(Precision)):
        raise one_of("--quantization", str(quantization), get_args(Precision))
    if to == "ctranslate2":
        report = to_ctranslate2(Run.load(source), new, samples, "int8" if quantization == "int8" else "fp32")
    elif to == "hf":
        report = to_hf(Run.load(source), new, samples, message)
    else:
        report = from_hf(source, new, samples, message)
    message(report.summary)
    if json:
        out_json(report.to_json())
    else:
        proof = report.proof
        rows = [
            ("model", report.architecture),
            ("parameters", f"{report.parameters:,}"),
            ("proven", "no" if proof is None else "yes"),
            ("difference", "-" if proof is None else f"{proof.difference:.2g}"),
        ]
        print_table(rows, left=(0, 1))
    message(f"{new}: written")
