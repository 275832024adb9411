"""`regard convert`: models from Hugging Face directories, and runs written for other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.tables import Json, out, out_json, talk
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.convert.proof import ConversionReport

EXAMPLE = "regard convert opus-mt-en-de runs/en-de"


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
    """Make a run of a Hugging Face directory, or with --to write a run for another library.

    Both models answer sample inputs, and a difference stops the conversion. For Hugging Face directories that needs
    transformers to be installed.
    """
    from regard.convert.hf import from_hf, to_hf
    from regard.convert.to_ctranslate2 import to_ctranslate2
    from regard.errors import one_of
    from regard.run import Run

    if to not in (None, "hf", "ctranslate2"):
        raise one_of("--to", to, ["hf", "ctranslate2"])
    if quantization is not None and to != "ctranslate2":
        raise UserError("--quantization belongs to --to ctranslate2")
    report: ConversionReport
    if to == "ctranslate2":
        if quantization not in (None, "fp32", "int8"):
            raise one_of("--quantization", quantization, ["fp32", "int8"])
        report = to_ctranslate2(Run.load(source), new, samples, "int8" if quantization == "int8" else "fp32")
    else:
        report = from_hf(source, new, samples, talk) if to is None else to_hf(Run.load(source), new, samples, talk)
    talk(report.summary)
    if json:
        out_json(report.to_json())
    else:
        difference = "" if report.proof is None else f"{report.proof.difference:.2g}"
        rows = {"model": report.architecture, "parameters": f"{report.parameters:,}", "difference": difference or "-"}
        for name, value in rows.items():
            out(f"{name}\t{value}")
    talk(f"{new}: written")
