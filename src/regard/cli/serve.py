"""`regard serve`: an HTTP server for runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from regard.cli.options import field_options, with_options
from regard.cli.output import message
from regard.config import parse
from regard.errors import missing_extra
from regard.serve.settings import ServeSettings, named_runs

EXAMPLE = "regard serve en-de=runs/translation --port 8000"


@with_options("options", *field_options(ServeSettings, *ServeSettings.model_fields))
def command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories, or NAME=DIRECTORY.")],
    options: dict[str, Any],
) -> None:
    """Serve runs over HTTP, with a web page.

    A run is called by the last part of its directory, or as given; a name such as en-de is a language pair for
    LibreTranslate's clients. The page is at /, the description of the API at /docs, metrics at /metrics.
    """
    try:
        from regard.serve.server import serve
    except ModuleNotFoundError as error:
        raise missing_extra("regard serve", error.name or "aiohttp", "serve") from None
    settings = parse(ServeSettings, options, "serve")
    serve(named_runs(runs), settings, message)
