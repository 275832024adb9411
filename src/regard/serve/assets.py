"""The files of the web page and of the API's documentation, from the package; nothing comes from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
# path -> file of this package
ASSETS: dict[str, str] = {}


async def asset_response(request: web.Request) -> web.Response:
    """A file of the package."""
    name = ASSETS[request.match_info.route.resource.canonical]  # type: ignore[union-attr]
    data = files("regard.serve").joinpath("web", name).read_bytes()
    kind = TYPES[name.rpartition(".")[2]]
    return web.Response(body=data, content_type=kind, charset="utf-8", headers={"Content-Security-Policy": POLICY})
