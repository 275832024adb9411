"""`regard convert`: Hugging Face directories to runs, and runs to other formats."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from regard.cli.options import Json
from regard.cli.output import message, out_json, print_table
from regard.convert import to_ctranslate2
from regard.convert.hf import from_hf, to_hf
from regard.errors import UserError
from regard.inspect.live import PRECISIONS, write_live_page
from regard.run import Run
from regard.suggest import one_of
from regard.text.codec import Example

EXAMPLE = "regard convert runs/g2p g2p.html --to html"
QUANTIZATIONS = {"ctranslate2": get_args(to_ctranslate2.Precision), "html": PRECISIONS}
FORMATS = ("hf", *QUANTIZATIONS)


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A Hugging Face directory; with --to a run.")],
    new: Annotated[str, typer.Argument(metavar="OUT", help="The directory to write; for --to html the file.")],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Export a run: hf (transformers), ctranslate2, or html, a page that runs in the browser.",
        ),
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="int8 or fp32; html: also fp16. (default: fp32 for ctranslate2, int8 for html)")
    ] = None,
    text: Annotated[str | None, typer.Option(help="With --to html: the first input that the page shows.")] = None,
    features: Annotated[str | None, typer.Option(help="Features of --text, for a run trained with features.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Random inputs for which both models must agree.")] = 4,
    json: Json = False,
) -> None:
    """Convert a Hugging Face directory to a run, or export a run.

    Without --to, SRC is a Hugging Face directory and OUT the new run. With --to, SRC is a run and OUT its export.

    Every conversion is proven: both models answer sample inputs, and a difference stops the conversion. Proofs for
    Hugging Face directories need transformers; without it the model is converted unproven, with a message.
    """
    if to not in (None, *FORMATS):
        raise one_of("--to", str(to), FORMATS)
    if quantization is not None and to not in QUANTIZATIONS:
        raise UserError(f"--quantization belongs to --to {' or '.join(QUANTIZATIONS)}")
    if quantization is not None and quantization not in QUANTIZATIONS[str(to)]:
        raise one_of("--quantization", quantization, QUANTIZATIONS[str(to)])
    if to != "html" and (text is not None or features is not None):
        raise UserError("--text and --features belong to --to html")
    if to == "html":
        precision = next(name for name in PRECISIONS if name == (quantization or "int8"))
        example = None if text is None else Example(text, features=features)
        report = write_live_page(Run.load(source), new, precision, example, samples)
    elif to == "ctranslate2":
        quantized: to_ctranslate2.Precision = "int8" if quantization == "int8" else "fp32"
        report = to_ctranslate2.to_ctranslate2(Run.load(source), new, samples, quantized)
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
