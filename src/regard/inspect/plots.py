"""Drawings of attention: matplotlib figures (the extra `plot`) without global state, and terminal output."""

from __future__ import annotations

import logging
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from regard.errors import UserError, missing_extra
from regard.files import replace_file
from regard.inspect.page import KIND_NAMES, PALETTES, RAMP
from regard.inspect.trace import AttentionMatrix, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELL = 0.26  # inches
MIN_SIDE = 2.2  # inches
MAX_SIDE = 14.0  # inches
MAX_LABELS = 60  # labelled tokens on an axis
LABEL_LENGTH = 16  # characters
# Font families with glyphs that the default font lacks; families that are not installed are skipped.
FALLBACKS = ("DejaVu Sans", *(f"Noto Sans{script}" for script in ("", " Arabic", " Hebrew", " Devanagari", " CJK JP")))
INK = PALETTES["light"]["ink"]
SOFT = PALETTES["light"]["soft"]
LINE = "#d9d6cf"
LINE_COLOURS = (PALETTES["light"]["accent"], PALETTES["light"]["second"], SOFT, RAMP[-1])
SMALL = {"fontsize": 7, "color": SOFT}
NON_JOINER = "\N{ZERO WIDTH NON-JOINER}"
SHADES = " ░▒▓█"
DARKEST = (24, 26, 38)  # colour of weight 0
BRIGHTEST = (96, 205, 255)  # colour of weight 1
LTR_MARK = "\N{LEFT-TO-RIGHT MARK}"
MIN_CELL = 2  # columns of a cell
MAX_CELL = 12
Weights = Sequence[Sequence[float]]  # rows: target tokens; columns: source tokens
Cell = tuple[str, float | None]  # a text without a weight, or blanks of the width of the cell with its weight


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes in inches."""
    if find_spec("matplotlib") is None:
        raise missing_extra("a picture", "matplotlib", "plot")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as png, svg or pdf, by the suffix of the path; the output is deterministic."""
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("png", "svg", "pdf"):
        raise UserError(f"{path}: a picture ends in .png, .svg or .pdf")
    import matplotlib
    from matplotlib.font_manager import get_font_names

    installed = set(get_font_names())
    fonts = [name for name in FALLBACKS if name in installed] or ["sans-serif"]
    date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    log = logging.getLogger("matplotlib.font_manager")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "regard", "font.family": fonts}):
            warnings.simplefilter("ignore")  # glyphs missing from all fonts are drawn as boxes
            replace_file(path, lambda to: figure.savefig(to, format=kind, dpi=200, metadata=date, facecolor="white"))
    finally:
        log.setLevel(level)


def draw_matrix(matrix: AttentionMatrix) -> Figure:
    """Attention weights with tokens on both axes: queries down, keys across."""
    rows, columns = matrix.tokens
    width, height = (min(MAX_SIDE, max(MIN_SIDE, CELL * len(tokens) + 1.2)) for tokens in (columns, rows))
    figure = new_figure(width + 0.5, height)
    axes = figure.add_subplot()
    image = _heatmap(axes, matrix.weights_TS, grid=True)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    for tokens, set_ticks in ((columns, axes.set_xticks), (rows, axes.set_yticks)):
        every = max(1, -(-len(tokens) // MAX_LABELS))
        labels = [_picture_label(token)[:LABEL_LENGTH] for token in tokens[::every]]
        # Dollar signs are text, not the start of a formula.
        set_ticks(range(0, len(tokens), every), labels, fontsize=9, color=INK, parse_math=False)
    for text in axes.get_xticklabels():
        if len(text.get_text()) > 3:
            text.set(rotation=60, ha="left", rotation_mode="anchor")
    if matrix.right_to_left:
        axes.invert_xaxis()
    axes.set_ylabel(matrix.names[0], color=SOFT, fontsize=8)
    axes.set_xlabel(matrix.names[1], color=SOFT, fontsize=8)
    _colorbar(figure, image, axes, shrink=0.6, aspect=18)
    return figure


def _picture_label(token: str) -> str:
    """A token as a label; a Hebrew or Arabic point without a letter is placed before its circle.

    The font has no anchor for such points on a circle. The invisible first character prevents a second circle.
    """
    label = visible(token)
    points = "".join(takewhile(lambda char: unicodedata.category(char) == "Mn", label[1:]))
    if label[0] == "◌" and points and unicodedata.name(points[0], "").startswith(("HEBREW", "ARABIC")):
        return NON_JOINER + points + "◌" + label[1 + len(points) :]
    return label


def draw_all_heads(trace: Trace, kind: str) -> Figure:
    """All heads of one kind of attention: layers down, heads across."""
    maps = [m for m in trace.maps if m.kind == kind]
    if not maps:
        kinds = ", ".join(sorted({m.kind for m in trace.maps}))
        raise UserError(f"no {kind} attention in this model; it has {kinds}")
    heads = max(max(m.heads) for m in maps) + 1
    figure = new_figure(min(MAX_SIDE, 0.95 * heads + 0.6), min(MAX_SIDE, 0.95 * len(maps) + 0.5))
    cells = figure.subplots(len(maps), heads, squeeze=False)
    for row, (line, m) in enumerate(zip(cells, maps, strict=True)):
        for number, axes in enumerate(line):
            axes.set_xticks([])
            axes.set_yticks([])
            if number in m.heads:
                _heatmap(axes, m.weights_HTS[m.heads.index(number)], grid=False)
                if trace.directions[m.columns] == "rtl":
                    axes.invert_xaxis()
            else:
                axes.set_axis_off()
            if row == 0:
                axes.set_title(str(number + 1), pad=3, **SMALL)
        line[0].set_ylabel(f"layer {m.layer + 1}", **SMALL)
    figure.suptitle(KIND_NAMES.get(kind, kind), fontsize=9, color=INK)
    return figure


def draw_heads(grids: dict[str, np.ndarray], label: str) -> Figure:
    """A number per head (layers, heads), one grid per kind of attention; NaN for missing heads."""
    layers = max(grid.shape[0] for grid in grids.values())
    heads = max(grid.shape[1] for grid in grids.values())
    figure = new_figure(len(grids) * (0.32 * heads + 0.8) + 0.6, 0.32 * layers + 1.1)
    top = max(float(np.nanmax(grid, initial=0.0)) for grid in grids.values()) or 1.0
    image: Any = None
    for axes, (kind, grid) in zip(figure.subplots(1, len(grids), squeeze=False)[0], grids.items(), strict=True):
        image = _heatmap(axes, grid, grid=True, top=top)
        axes.set_title(KIND_NAMES.get(kind, kind), fontsize=8, color=INK)
        for count, set_ticks in ((grid.shape[1], axes.set_xticks), (grid.shape[0], axes.set_yticks)):
            set_ticks(range(count), [str(i + 1) for i in range(count)], **SMALL)
        axes.set_xlabel("head", **SMALL)
        axes.set_ylabel("layer", **SMALL)
    _colorbar(figure, image, figure.axes, shrink=0.8, aspect=14).set_label(label, **SMALL)
    return figure


def draw_lines(lines: dict[str, tuple[Sequence[float], Sequence[float]]], x_label: str, y_label: str) -> Figure:
    """Curves by name, each with x and y values."""
    figure = new_figure(4.6, 3.0)
    axes = figure.add_subplot()
    for (name, (x, y)), colour in zip(lines.items(), LINE_COLOURS, strict=False):
        axes.plot(x, y, marker="o", markersize=3, linewidth=1.4, color=colour, label=name)
    axes.set_xlabel(x_label, fontsize=8, color=SOFT)
    axes.set_ylabel(y_label, fontsize=8, color=SOFT)
    axes.tick_params(labelsize=7, colors=SOFT, length=2)
    axes.grid(color=LINE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    if len(lines) > 1:
        axes.legend(fontsize=7, frameon=False)
    return figure


def _heatmap(axes: Axes, values: np.ndarray, grid: bool, top: float | None = None) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("weights", RAMP)
    top = top or max(1e-9, float(values.max()))
    image = axes.imshow(values, cmap=ramp, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    axes.spines[:].set(color=LINE, linewidth=0.6)
    axes.tick_params(length=0)
    if grid and max(values.shape) <= MAX_LABELS:
        axes.set_xticks(np.arange(values.shape[1] + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(values.shape[0] + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
    return image


def _colorbar(figure: Figure, image: Any, axes: Any, shrink: float, aspect: int) -> Any:
    bar = figure.colorbar(image, ax=axes, shrink=shrink, aspect=aspect, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, colors=SOFT, length=2)
    return bar


def draw_in_shades(
    source: Sequence[str], target: Sequence[str], weights: Weights, width: int = 80, right_to_left: bool = False
) -> list[str]:
    """Plain lines: source across, target down; source tokens beyond `width` columns continue in a band below."""
    return [
        "".join(text if weight is None else shade(weight) * len(text) for text, weight in row).rstrip()
        for row in _rows(source, target, weights, width, right_to_left)
    ]


def draw_in_colour(
    source: Sequence[str], target: Sequence[str], weights: Weights, width: int = 80, right_to_left: bool = False
) -> Text:
    """Coloured terminal text: brighter cells have larger weights."""
    text = Text(no_wrap=True, overflow="ignore")
    for number, row in enumerate(_rows(source, target, weights, width, right_to_left)):
        text.append("\n" if number else "")
        for piece, weight in row:
            text.append(piece, style="bold" if weight is None else f"on {colour(weight)}")
    return text


def shade(weight: float) -> str:
    """One of five shades; weights below an eighth are blank."""
    return SHADES[round(4 * min(1.0, max(0.0, weight)))]


def colour(weight: float) -> str:
    """The background of a cell."""
    share = min(1.0, max(0.0, weight))
    rgb = (round(low + share * (high - low)) for low, high in zip(DARKEST, BRIGHTEST, strict=True))
    return "#" + "".join(f"{x:02x}" for x in rgb)


def visible(token: str) -> str:
    """A token as a short label: visible blanks, combining marks on a circle, no control characters."""
    normal = unicodedata.normalize("NFC", token)
    text = "".join(_visible_character(char, first=i == 0) for i, char in enumerate(normal)) or "∅"
    while cell_len(text) > MAX_CELL:
        text = text[:-2] + "…"
    return text


def _visible_character(char: str, first: bool) -> str:
    category = unicodedata.category(char)
    if char == " ":
        return "␣"
    if category in ("Cc", "Zl", "Zp"):
        return chr(0x2400 + ord(char)) if ord(char) < 32 else "�"
    if category in ("Cf", "Cs", "Co", "Cn", "Zs"):
        return "·"
    return "◌" + char if first and category.startswith("M") else char


def _padded(text: str, width: int) -> str:
    """Text padded to `width` terminal columns."""
    blank = " " * max(0, width - cell_len(text))
    right_to_left = any(unicodedata.bidirectional(char) in ("R", "AL", "AN") for char in text)
    return (LTR_MARK + text + LTR_MARK if right_to_left else text) + blank


def _rows(
    source: Sequence[str], target: Sequence[str], weights: Weights, width: int, right_to_left: bool
) -> Iterator[list[Cell]]:
    if len(weights) != len(target) or any(len(row) != len(source) for row in weights):
        tokens = f"{len(target)} target and {len(source)} source tokens"
        raise ValueError(f"{tokens} need as many rows and columns of weights")
    across = [visible(token) for token in source]
    down = [visible(token) for token in target]
    margin = max(map(cell_len, down), default=0) + 1
    sizes = [max(MIN_CELL, cell_len(label)) for label in across]
    for columns in _bands(sizes, max(1, width - margin)):
        if columns.start:
            yield []
        columns = columns[::-1] if right_to_left else columns
        yield [(" " * margin, None), *((_padded(across[s], sizes[s]) + " ", None) for s in columns)]
        for t, label in enumerate(down):
            row: list[Cell] = [(_padded(label, margin), None)]
            for s in columns:
                row += [(" " * sizes[s], float(weights[t][s])), (" ", None)]
            yield row


def _bands(sizes: Sequence[int], width: int) -> Iterator[range]:
    """Ranges of columns that fit into the width, each at least one column."""
    start = used = 0
    for i, size in enumerate(sizes):
        if i > start and used + size + 1 > width:
            yield range(start, i)
            start = i
            used = 0
        used += size + 1
    if start < len(sizes):
        yield range(start, len(sizes))
