"""The attention page: one HTML file that needs no network, no server and no other file.

Untrusted text (tokens, names) is escaped JSON in a data block; it becomes text nodes, never markup. The content
security policy allows only the page's own script and style, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import posixpath
import re
import zlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from regard.text.codec import strong_ranges
from regard.text.tokenizer import SHOWN

MISSING = -32768  # stands for "no number" in signed arrays
TOKEN_NAMES = dict(zip(("pad", "unk", "sos", "eos", "mask"), SHOWN, strict=True))  # of special tokens
KIND_NAMES = {"encoder": "Encoder self-attention", "decoder": "Decoder self-attention", "cross": "Cross-attention"}
PALETTES = {  # custom properties of the style sheets; the dark theme keeps the other colours of the light one
    "light": {"paper": "#faf9f6", "card": "#ffffff", "ink": "#1c2026", "soft": "#5d6470", "faint": "#6c7380",
              "line": "#e5e2db", "accent": "#1a5a9e", "on-accent": "#ffffff", "second": "#d08a3c", "wash": "#e8f0f8",
              "warn": "#8a5a00", "warn-wash": "#fdf3dd"},
    "dark": {"paper": "#131519", "card": "#1a1d22", "ink": "#e9e7e2", "soft": "#a4aab4", "faint": "#8f96a2",
             "line": "#2c3038", "accent": "#84b9f2", "on-accent": "#10151b", "wash": "#1d2a3a", "warn": "#e9c46a",
             "warn-wash": "#2b2514"},
}  # fmt: skip
RAMP = ["#ffffff", "#d6e4f1", "#80b2d8", "#2c70b0", "#082d63"]  # one hue; lightness encodes the value
COLOURS = {name: " ".join(f"--{key}: {x};" for key, x in palette.items()) for name, palette in PALETTES.items()}
IMPORT = re.compile(r"^import \{([^}]*)\} from \"(\.\.?/[\w/-]+\.js)\";[ \t]*\n", re.M)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|const|let|class) )", re.M)
DECLARED = re.compile(r"^(export )?(?:async )?(?:function\*?|const|let|class) (\w+)", re.M)


class Packer:
    """Converts values to JSON and collects their arrays as two-byte integers with a scale."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._packed: dict[int, tuple[np.ndarray, dict[str, Any]]] = {}

    def json(self, value: Any, name: str = "") -> Any:
        """A value as JSON; a dataclass becomes an object with its field names, without shape suffixes."""
        if isinstance(value, np.ndarray):
            return self.weights(value) if name == "weights" and value.min(initial=0.0) >= 0 else self.signed(value)
        if isinstance(value, float):
            return float(f"{value:.5g}") if np.isfinite(value) else None  # the page shows fewer digits
        if isinstance(value, tuple | list):
            return [self.json(item) for item in value]
        if is_dataclass(value):
            value = {re.sub("_[A-Z]+$", "", f.name): getattr(value, f.name) for f in fields(value)}
        if isinstance(value, dict):
            return {key: self.json(x, key) for key, x in value.items()}
        return value

    def weights(self, x: np.ndarray) -> dict[str, Any]:
        """Add non-negative numbers; a row of 300 attention weights still sums to 1 within 0.003."""
        scale = float(x.max(initial=0.0)) / 65535 or 1.0
        return self._add(np.rint(np.maximum(x, 0.0) / scale).astype("<u2"), scale, "u2")

    def signed(self, x: np.ndarray) -> dict[str, Any]:
        """Add numbers of any sign; infinities and NaN become MISSING."""
        if id(x) in self._packed:  # the entry keeps the array alive, so its id stays unique
            return self._packed[id(x)][1]
        finite = np.isfinite(x)
        scale = float(np.abs(x[finite]).max(initial=0.0)) / 32767 or 1.0
        rounded = np.full(x.shape, MISSING, dtype=np.float64)
        np.rint(x.astype(np.float64) / scale, out=rounded, where=finite)
        entry = self._add(rounded.astype("<i2"), scale, "i2")
        self._packed[id(x)] = (x, entry)
        return entry

    def _add(self, x: np.ndarray, scale: float, dtype: str) -> dict[str, Any]:
        entry = {"at": len(self._bytes), "type": dtype, "shape": list(x.shape), "scale": scale}
        self._bytes += x.tobytes()
        return entry

    def pack(self) -> str:
        """All bytes, compressed, in base64."""
        return base64.b64encode(zlib.compress(self._bytes, 6)).decode("ascii")


def read_asset(name: str) -> str:
    """A file of `regard/web`: a template, a style sheet or a JavaScript module."""
    return files("regard").joinpath("web", name).read_text("utf-8")


@cache
def bundle(entry: str, read: Callable[[str], str] = read_asset) -> str:
    """Bundle a JavaScript module and its imports into one function, dependencies first.

    Modules may only use named imports and exports, and no two may declare the same name.
    """
    parts: dict[str, str] = {}
    exported: dict[str, set[str]] = {}
    owners: dict[str, str] = {}

    def add(name: str, importing: tuple[str, ...]) -> None:
        if name in importing:
            raise ValueError(f"modules import each other: {' -> '.join([*importing, name])}")
        if name in parts:
            return
        text = read(name)
        for names, path in IMPORT.findall(text):
            other = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
            add(other, (*importing, name))
            imported = {item.strip() for item in names.split(",")} - {""}
            if missing := imported - exported[other]:
                raise ValueError(f"{name} imports {', '.join(sorted(missing))}, which {other} does not export")
        declared = DECLARED.findall(text)
        for _, variable in declared:
            if owners.setdefault(variable, name) != name:
                raise ValueError(f"{name} and {owners[variable]} both declare {variable}")
        exported[name] = {variable for export, variable in declared if export}
        script = EXPORT.sub("", IMPORT.sub("", text))
        if statement := re.search(r"^(?:import|export)\b.*", script, re.M):
            raise ValueError(f"{name}: cannot be bundled: {statement[0]}")
        parts[name] = script

    add(entry, ())
    return '(() => {\n"use strict";\n' + "".join(parts.values()) + "})();\n"


def page_hashes() -> dict[str, str]:
    """The hashes of the page's style and script, for the content security policy of a page that frames it."""
    return {"style": _digest(fill_template("page/page.css", COLOURS)), "script": _digest(bundle("page/start.js"))}


def render_page(data: dict[str, Any], model: dict[str, Any] | None = None) -> str:
    """The HTML file of a trace (`Trace.page_data`) or, with a model, of a live page, which may compile WebAssembly."""
    style = fill_template("page/page.css", COLOURS)
    script = bundle("page/start.js" if model is None else "page/live.js")
    compiles = "" if model is None else " 'wasm-unsafe-eval'"
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'{compiles};"
        " base-uri 'none'; form-action 'none'"
    )
    block = "" if model is None else f'<script type="application/json" id="model">{escaped_json(model)}</script>\n'
    parts = {"policy": policy, "style": style, "data": escaped_json(data), "model": block, "script": script}
    return fill_template("page/page.html", parts)


def shared_constants() -> dict[str, Any]:
    """The constants of the scripts of both pages: `web/shared/constants.js`."""
    return {"tokens": TOKEN_NAMES, "strong": strong_ranges()}


def fill_template(name: str, parts: dict[str, str]) -> str:
    """A file of `regard/web` with its placeholders filled; the inserted text is not searched for placeholders."""
    pieces = re.split(r"\[\[(\w+)\]\]", read_asset(name))
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def escaped_json(value: dict[str, Any]) -> str:
    """JSON for a script element: nothing in it can end the element, open a comment or break a line."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII only, so U+2028 and surrogates are safe
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def render_frame(page: str) -> str:
    """A page in a sandboxed frame, for a notebook cell."""
    return (
        f'<iframe srcdoc="{html.escape(page, quote=True)}" sandbox="allow-scripts" title="attention" width="100%"'
        ' height="760" style="border:0;border-radius:8px"></iframe>'
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
