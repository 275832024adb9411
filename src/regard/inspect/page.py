"""The attention page: a trace as one HTML file that needs no network, no server and no other file.

Everything that came from outside (tokens, names) travels as JSON in a data block whose special characters are escaped,
and becomes text of the document, never markup. A content security policy allows this page's own script and style by
their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import zlib
from importlib.resources import files
from typing import Any

import numpy as np

from regard.inspect.cards import Card, Scores, Vector, Walk
from regard.inspect.inputs import Shot
from regard.inspect.logit_lens import Candidate
from regard.inspect.trace import Map, Trace

SCRIPTS = ("core.js", "figures.js", "views.js", "image.js", "walk.js", "start.js")
NONE = -32768  # in signed arrays: no number
MOST_TEXT = 4000  # letters
FINE = 1_500_000  # weights up to which two bytes are spent on each


class Packer:
    """Numbers of all arrays in one compressed piece; each is rounded to one or two bytes times a scale."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._at = 0
        self._known: dict[int, tuple[np.ndarray, dict[str, Any]]] = {}

    def weights(self, x: np.ndarray, fine: bool) -> dict[str, Any]:
        """Numbers that are not negative."""
        scale = float(x.max(initial=0.0)) / (65535 if fine else 255) or 1.0
        rounded = np.rint(np.maximum(x, 0.0) / scale)
        return self._add(rounded.astype("<u2" if fine else "u1"), x.shape, scale, "u2" if fine else "u1")

    def signed(self, x: np.ndarray) -> dict[str, Any]:
        """Any numbers; what is not finite is none."""
        if id(x) in self._known:  # kept alive beside its entry, so that the id stays its own
            return self._known[id(x)][1]
        finite = np.isfinite(x)
        largest = float(np.abs(x[finite]).max(initial=0.0))
        scale = largest / 32767 or 1.0
        rounded = np.full(x.shape, NONE, dtype=np.float64)
        np.rint(x.astype(np.float64) / scale, out=rounded, where=finite)
        entry = self._add(rounded.astype("<i2"), x.shape, scale, "i2")
        self._known[id(x)] = (x, entry)
        return entry

    def _add(self, x: np.ndarray, shape: tuple[int, ...], scale: float, kind: str) -> dict[str, Any]:
        data = x.tobytes()
        data += b"\0" * (len(data) % 2)
        entry = {"at": self._at, "type": kind, "shape": list(shape), "scale": scale}
        self._parts.append(data)
        self._at += len(data)
        return entry

    def pack(self) -> str:
        return base64.b64encode(zlib.compress(b"".join(self._parts), 6)).decode("ascii")


def page(trace: Trace) -> str:
    """The whole HTML file."""
    folder = files("regard.inspect")
    read = {name: folder.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", *SCRIPTS)}
    style = read["page.css"]
    script = "(() => {\n" + "".join(read[name] for name in SCRIPTS) + "})();\n"
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}';"
        " base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": style, "data": _escaped(data(trace)), "script": script}
    # Cut once and joined: what is put in is never searched for places to put in more.
    pieces = re.split(r"\[\[(\w+)\]\]", read["page.html"])
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def frame(trace: Trace, height: int = 760) -> str:
    """The page in a frame of its own, for a notebook cell."""
    content = html.escape(page(trace), quote=True)
    return (
        f'<iframe srcdoc="{content}" sandbox="allow-scripts" title="attention" width="100%" height="{height}"'
        ' style="border:0;border-radius:8px"></iframe>'
    )


def data(trace: Trace) -> dict[str, Any]:
    """What the page's script reads."""
    packer = Packer()
    fine = sum(found.weights_HTS.size for found in trace.maps) <= FINE
    return {
        "title": trace.title,
        "facts": trace.facts,
        "texts": {name: text[:MOST_TEXT] for name, text in trace.texts.items()},
        "tokens": {name: list(tokens) for name, tokens in trace.tokens.items()},
        "maps": [_map(found, packer, fine) for found in trace.maps],
        "alignment": [
            {"name": name, "weights": packer.weights(weights, fine)} for name, weights in trace.alignment.items()
        ],
        "steps": [
            {
                "token": step.token,
                "p": _short(step.probability),
                "entropy": _short(step.entropy),
                "normaliser": _short(step.normaliser),
                "candidates": [_candidate(candidate) for candidate in step.candidates],
            }
            for step in trace.steps
        ],
        "lens": [
            {"label": lens.label, "steps": [[_candidate(c)[:2] for c in step] for step in lens.steps]}
            for lens in trace.lens
        ],
        "positions": [
            {
                "name": picture.name,
                "caption": picture.caption,
                "rows": picture.rows,
                "columns": picture.columns,
                "first": picture.first_column,
                "values": packer.signed(picture.values_RC),
            }
            for picture in trace.positions
        ],
        "walks": [_walk(walk, packer) for walk in trace.walks],
        "notes": list(trace.notes),
        "score": _short(trace.score),
        "unit": trace.unit,
        "image": None if trace.shot is None else _image(trace.shot),
        "distances": {name: [_short(x) for x in row] for name, row in trace.distances.items()},
        "numbers": packer.pack(),
    }


def _map(found: Map, packer: Packer, fine: bool) -> dict[str, Any]:
    return {
        "name": found.name,
        "kind": found.kind,
        "layer": found.layer,
        "rows": found.rows,
        "columns": found.columns,
        "heads": list(found.heads),
        "weights": packer.weights(found.weights_HTS, fine),
    }


def _image(shot: Shot) -> dict[str, Any]:
    high, wide, channels = shot.pixels_HWC.shape
    pixels = base64.b64encode(shot.pixels_HWC.tobytes()).decode("ascii")
    return {"height": high, "width": wide, "channels": channels, "size": shot.size, "pixels": pixels}


def _candidate(candidate: Candidate) -> list[Any]:
    return [candidate.token, _short(candidate.probability), _short(candidate.logit)]


def _walk(walk: Walk, packer: Packer) -> dict[str, Any]:
    layers = [{"label": label, "cards": [_card(card, packer) for card in cards]} for label, cards in walk.layers]
    return {"name": walk.name, "rows": walk.rows, "layers": layers}


def _card(card: Card, packer: Packer) -> dict[str, Any]:
    out: dict[str, Any] = {
        "title": card.title,
        "formula": card.formula,
        "text": card.text,
        "shape": card.shape,
        "show": card.show,
        "vectors": [_vector(vector, packer) for vector in card.vectors],
    }
    if card.scores is not None:
        out["scores"] = _scores(card.scores, packer)
    return out


def _vector(vector: Vector, packer: Packer) -> dict[str, Any]:
    return {
        "label": vector.label,
        "first": packer.signed(vector.first),
        "norm": packer.signed(vector.norm),
        "width": vector.width,
    }


def _scores(scores: Scores, packer: Packer) -> dict[str, Any]:
    return {
        "map": scores.map,
        "raw": packer.signed(scores.raw_HTS),
        "scale": scores.scale,
        "bias": None if scores.bias_HTS is None else packer.signed(scores.bias_HTS),
        "seen": None if scores.seen_TS is None else packer.weights(scores.seen_TS.astype(np.float32), fine=False),
        "key": _vector(scores.key_first, packer),
        "value": _vector(scores.value_first, packer),
    }


def _short(number: float) -> float | None:
    """Five digits are more than anyone reads."""
    return float(f"{number:.5g}") if np.isfinite(number) else None


def _escaped(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element, opens a comment or breaks a line."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII alone: U+2028 and lone surrogates too
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
