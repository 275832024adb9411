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
    """Serve runs over HTTP, with an API and a web page.

    The name of a run is NAME, or the last part of its directory. LibreTranslate clients read a name such as en-de as
    a language pair. The page is at /, the API documentation at /docs, and metrics are at /metrics.
    """
    try:
        from regard.serve.server import serve
    except ModuleNotFoundError as error:
        raise missing_extra("regard serve", error.name or "aiohttp", "serve") from None
    settings = parse(ServeSettings, options, "serve")
    serve(named_runs(runs), settings, message)
