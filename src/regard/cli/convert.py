"""`regard convert`: models from Hugging Face directories, and back."""

from __future__ import annotations

from typing import Annotated

import typer

from regard.cli.common import Json, out, out_json, talk
from regard.errors import UserError

EXAMPLE = "regard convert opus-mt-en-de runs/en-de"


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A Hugging Face directory, or with --to a run.")],
    new: Annotated[str, typer.Argument(metavar="OUT", help="The directory to write.")],
    to: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Write a run for another library: hf (transformers).")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Random inputs that both models must agree on.")] = 4,
    json: Json = False,
) -> None:
    """Make a run of a Hugging Face directory, or with --to hf the other way round.

    Where transformers is installed, both models answer sample inputs, and a difference stops the conversion.
    """
    from regard.convert.hf import from_hf, to_hf
    from regard.errors import one_of
    from regard.run import Run

    if to == "ctranslate2":
        raise UserError("--to ctranslate2: not available yet; --to hf is")
    if to not in (None, "hf"):
        raise one_of("--to", to, ["hf"])
    report = from_hf(source, new, samples, talk) if to is None else to_hf(Run.load(source), new, samples, talk)
    talk(report.told())
    if json:
        out_json(report.to_json())
    else:
        difference = "" if report.proof is None else f"{report.proof.difference:.2g}"
        rows = {"model": report.architecture, "parameters": f"{report.parameters:,}", "difference": difference or "-"}
        for name, value in rows.items():
            out(f"{name}\t{value}")
    talk(f"{new}: written")
