"""`regard average`: the mean of the weights of several runs."""

from __future__ import annotations

from typing import Annotated

import typer

from regard.cli.output import message
from regard.errors import plural
from regard.run import average

EXAMPLE = "regard average runs/mean runs/a runs/b runs/c"


def command(
    out: Annotated[str, typer.Argument(metavar="OUT", help="The run directory to write.")],
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs with the same model and vocabulary.")],
) -> None:
    """Average the weights of several runs.

    The runs must have the same model configuration and the same vocabulary.
    """
    average(runs, out)
    message(f"{out}: the mean of {plural(len(runs), 'run')}")
