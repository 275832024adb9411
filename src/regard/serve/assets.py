"""The files of the web page and of the API's documentation, from the package; nothing comes from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from aiohttp import web

from regard.inspect.page import page_hashes

TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
FOLDER = "web"
# path -> file of this package
ASSETS = {"/": "index.html", "/docs": "docs.html"} | {
    f"/{FOLDER}/{name}": name
    for name in (
        "style.css", "icon.svg", "main.js", "dom.js", "api.js", "single.js", "output.js", "links.js", "batch.js",
        "docs.js",
    )
}  # fmt: skip


@cache
def policy() -> str:
    """The content security policy: files of this server alone.

    A frame with an attention page inherits it, hence the hashes of that page's own style and script.
    """
    framed = page_hashes()
    return (
        f"default-src 'none'; script-src 'self' '{framed['script']}'; style-src 'self' '{framed['style']}';"
        " img-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


async def asset_response(request: web.Request) -> web.Response:
    """A file of the package."""
    resource = request.match_info.route.resource
    assert resource is not None
    name = ASSETS[resource.canonical]
    headers = {"Content-Security-Policy": policy(), "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return web.Response(body=_read(name), content_type=TYPES[name.rpartition(".")[2]], charset="utf-8", headers=headers)


@cache
def _read(name: str) -> bytes:
    return files("regard.serve").joinpath(FOLDER, name).read_bytes()
