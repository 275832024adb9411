"""Pictures for papers and slides, drawn by matplotlib (the extra `plot`) without touching its global state."""

from __future__ import annotations

import logging
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from regard.errors import UserError
from regard.files import replace_file
from regard.inspect.trace import Map, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


CELL = 0.26  # inches
SMALLEST, LARGEST = 2.2, 14.0  # inches of a side
LONGEST_LABEL = 16  # letters
# Families that cover what the default font lacks; those that are not installed are left out.
SCRIPTS = ("Arabic", "Hebrew", "Devanagari", "CJK JP")
FALLBACKS = ("DejaVu Sans", "Noto Sans", *(f"Noto Sans {script}" for script in SCRIPTS))
INK, SOFT, LINE = "#1c2026", "#5d6470", "#d9d6cf"
RAMP = ["#ffffff", "#d6e4f1", "#80b2d8", "#2c70b0", "#082d63"]  # one hue: the lightness carries the number
KIND_NAMES = {"encoder": "Encoder self-attention", "decoder": "Decoder self-attention", "cross": "Cross-attention"}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    if find_spec("matplotlib") is None:
        raise UserError("pictures need matplotlib: pip install 'regard[plot]'")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure; the ending of the name says how: png, svg or pdf. The same figure gives the same file."""
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("png", "svg", "pdf"):
        raise UserError(f"{path}: a picture ends in .png, .svg or .pdf")
    import matplotlib

    date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    log = logging.getLogger("matplotlib.font_manager")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "regard", "font.family": _fonts()}):
            warnings.simplefilter("ignore")  # a glyph that no font has is drawn as a box
            replace_file(path, lambda to: figure.savefig(to, format=kind, dpi=200, metadata=date, facecolor="white"))
    finally:
        log.setLevel(level)


def draw_alignment(trace: Trace, name: str | None = None) -> Figure:
    """An alignment of a trace, by default its first."""
    if not trace.alignment:
        raise UserError("this model does not attend to a source")
    title = name or next(iter(trace.alignment))
    return draw_matrix(trace.alignment[title], trace.tokens["output"], trace.tokens["source"], ("output", "source"))


def draw_map(trace: Trace, found: Map, head: int | None = None) -> Figure:
    """One attention of a trace: a head by its number, or the mean of all."""
    if head is not None and head not in found.heads:
        known = ", ".join(str(number + 1) for number in found.heads)
        raise UserError(f"no head {head + 1} in layer {found.layer + 1}; it has {known}")
    weights = found.weights_HTS.mean(0) if head is None else found.weights_HTS[found.heads.index(head)]
    return draw_matrix(weights, trace.tokens[found.rows], trace.tokens[found.columns], (found.rows, found.columns))


def draw_matrix(weights_TS: np.ndarray, rows: Sequence[str], columns: Sequence[str], names: tuple[str, str]) -> Figure:
    """Weights with tokens on both axes: rows look at columns."""
    wide, high = (min(LARGEST, max(SMALLEST, CELL * len(tokens) + 1.2)) for tokens in (columns, rows))
    figure = new_figure(wide + 0.5, high)
    axes = figure.add_subplot()
    image = _matrix(axes, weights_TS, grid=True)
    _tokens(axes, rows, columns)
    axes.set_ylabel(names[0], color=SOFT, fontsize=8)
    axes.set_xlabel(names[1], color=SOFT, fontsize=8)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=18, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, colors=SOFT, length=2)
    return figure


def draw_all_heads(trace: Trace, kind: str) -> Figure:
    """Every head of one kind of attention, layers down, heads across."""
    maps = [found for found in trace.maps if found.kind == kind]
    if not maps:
        kinds = ", ".join(sorted({found.kind for found in trace.maps}))
        raise UserError(f"no {kind} attention in this model; it has {kinds}")
    across = max(max(found.heads) for found in maps) + 1
    figure = new_figure(min(LARGEST, 0.95 * across + 0.6), min(LARGEST, 0.95 * len(maps) + 0.5))
    cells = figure.subplots(len(maps), across, squeeze=False)
    for row, (line, found) in enumerate(zip(cells, maps, strict=True)):
        for number, axes in enumerate(line):
            axes.set_xticks([])
            axes.set_yticks([])
            if number in found.heads:
                _matrix(axes, found.weights_HTS[found.heads.index(number)], grid=False)
            else:
                axes.set_axis_off()
            if row == 0:
                axes.set_title(str(number + 1), fontsize=7, color=SOFT, pad=3)
        line[0].set_ylabel(f"layer {found.layer + 1}", fontsize=7, color=SOFT)
    figure.suptitle(KIND_NAMES.get(kind, kind), fontsize=9, color=INK)
    return figure


def draw_heads(grids: dict[str, np.ndarray], label: str) -> Figure:
    """A number for every head (layers, heads), one grid per kind of attention; NaN where there is no head."""
    layers = max(grid.shape[0] for grid in grids.values())
    heads = max(grid.shape[1] for grid in grids.values())
    figure = new_figure(len(grids) * (0.32 * heads + 0.8) + 0.6, 0.32 * layers + 1.1)
    top = max(float(np.nanmax(grid, initial=0.0)) for grid in grids.values()) or 1.0
    image: Any = None
    for axes, (kind, grid) in zip(figure.subplots(1, len(grids), squeeze=False)[0], grids.items(), strict=True):
        image = _matrix(axes, grid, grid=True, top=top)
        axes.set_title(KIND_NAMES.get(kind, kind), fontsize=8, color=INK)
        axes.set_xticks(range(grid.shape[1]), [str(i + 1) for i in range(grid.shape[1])], fontsize=7, color=SOFT)
        axes.set_yticks(range(grid.shape[0]), [str(i + 1) for i in range(grid.shape[0])], fontsize=7, color=SOFT)
        axes.set_xlabel("head", fontsize=7, color=SOFT)
        axes.set_ylabel("layer", fontsize=7, color=SOFT)
    bar = figure.colorbar(image, ax=figure.axes, shrink=0.8, aspect=14, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=7, color=SOFT)
    bar.ax.tick_params(labelsize=7, colors=SOFT, length=2)
    return figure


def draw_lines(lines: dict[str, tuple[Sequence[float], Sequence[float]]], across: str, up: str) -> Figure:
    """Curves by name, each as its places across and up."""
    figure = new_figure(4.6, 3.0)
    axes = figure.add_subplot()
    for (name, (x, y)), colour in zip(lines.items(), ("#1a5a9e", "#d08a3c", "#5d6470", "#082d63"), strict=False):
        axes.plot(x, y, marker="o", markersize=3, linewidth=1.4, color=colour, label=name)
    axes.set_xlabel(across, fontsize=8, color=SOFT)
    axes.set_ylabel(up, fontsize=8, color=SOFT)
    axes.tick_params(labelsize=7, colors=SOFT, length=2)
    axes.grid(color=LINE, linewidth=0.5)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    if len(lines) > 1:
        axes.legend(fontsize=7, frameon=False)
    return figure


def _matrix(axes: Axes, values: np.ndarray, grid: bool, top: float | None = None) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("weights", RAMP)
    image = axes.imshow(
        values, cmap=ramp, vmin=0, vmax=top or max(1e-9, float(values.max())), aspect="auto", interpolation="nearest"
    )
    for side in axes.spines.values():
        side.set_color(LINE)
        side.set_linewidth(0.6)
    axes.tick_params(length=0)
    if grid and max(values.shape) <= 60:
        axes.set_xticks(np.arange(values.shape[1] + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(values.shape[0] + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
    return image


def _tokens(axes: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Name the rows and columns; of many, only some. A dollar sign is a dollar sign, not the start of a formula."""
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    for tokens, put, turn in ((columns, axes.set_xticks, True), (rows, axes.set_yticks, False)):
        every = max(1, -(-len(tokens) // 60))
        labels = [_label(token) for token in tokens[::every]]
        put(range(0, len(tokens), every), labels, fontsize=9, color=INK, parse_math=False)
        for text in axes.get_xticklabels() if turn else ():
            if len(text.get_text()) > 3:
                text.set(rotation=60, ha="left", rotation_mode="anchor")


def _label(token: str) -> str:
    from regard.inspect.plots import shown

    return shown(token)[:LONGEST_LABEL]


def _fonts() -> list[str]:
    from matplotlib.font_manager import get_font_names

    installed = set(get_font_names())
    return [name for name in FALLBACKS if name in installed] or ["sans-serif"]


SHADES = " ░▒▓█"
DARKEST, BRIGHTEST = (24, 26, 38), (96, 205, 255)  # of a coloured cell: weight 0 and weight 1
MARK = "\N{LEFT-TO-RIGHT MARK}"
NARROWEST, WIDEST = 2, 12  # columns of a cell
Weights = Sequence[Sequence[float]]  # a row per target piece, a column per source piece
Cell = tuple[str, float | None]  # text to print; blanks of the cell's width with their weight


def draw(source: Sequence[str], target: Sequence[str], weights: Weights, width: int = 80) -> list[str]:
    """Draw as plain lines: source across, target down; what does not fit `width` columns goes on below."""
    lines = []
    for row in _rows(source, target, weights, width):
        lines.append("".join(text if weight is None else shade(weight) * len(text) for text, weight in row).rstrip())
    return lines


def draw_in_colour(source: Sequence[str], target: Sequence[str], weights: Weights, width: int = 80) -> Text:
    """Draw for a terminal: the brighter a cell, the larger the weight."""
    text = Text(no_wrap=True, overflow="ignore")
    for number, row in enumerate(_rows(source, target, weights, width)):
        text.append("\n" if number else "")
        for piece, weight in row:
            text.append(piece, style="bold" if weight is None else f"on {colour(weight)}")
    return text


def shade(weight: float) -> str:
    """One of five shades; a weight from an eighth up can be seen."""
    return SHADES[round(4 * min(1.0, max(0.0, weight)))]


def colour(weight: float) -> str:
    """The background of a cell."""
    share = min(1.0, max(0.0, weight))
    return "#" + "".join(
        f"{round(low + share * (high - low)):02x}" for low, high in zip(DARKEST, BRIGHTEST, strict=True)
    )


def shown(piece: str) -> str:
    """A piece as it can stand in a cell: blanks visible, marks on something, nothing that moves the cursor, short."""
    text = "".join(_visible(char, first=i == 0) for i, char in enumerate(unicodedata.normalize("NFC", piece))) or "∅"
    while cell_len(text) > WIDEST:
        text = text[:-2] + "…"
    return text


def pad(text: str, width: int) -> str:
    """Fill up to `width` columns, by what a terminal shows and not by the number of characters."""
    blank = " " * max(0, width - cell_len(text))
    backwards = any(unicodedata.bidirectional(char) in ("R", "AL", "AN") for char in text)
    return (MARK + text + MARK if backwards else text) + blank


def _visible(char: str, first: bool) -> str:
    category = unicodedata.category(char)
    if char == " ":
        return "␣"
    if category in ("Cc", "Zl", "Zp"):
        return chr(0x2400 + ord(char)) if ord(char) < 32 else "�"
    if category in ("Cf", "Cs", "Co", "Cn", "Zs"):
        return "·"
    return "◌" + char if first and category.startswith("M") else char


def _rows(source: Sequence[str], target: Sequence[str], weights: Weights, width: int) -> Iterator[list[Cell]]:
    if len(weights) != len(target) or any(len(row) != len(source) for row in weights):
        raise ValueError(
            f"{len(target)} target and {len(source)} source pieces need as many rows and columns of weights"
        )
    across, down = [shown(piece) for piece in source], [shown(piece) for piece in target]
    margin = max(map(cell_len, down), default=0) + 1
    sizes = [max(NARROWEST, cell_len(piece)) for piece in across]
    for start, end in _bands(sizes, max(1, width - margin)):
        if start:
            yield []
        columns = range(start, end)
        yield [(" " * margin, None), *((pad(across[s], sizes[s]) + " ", None) for s in columns)]
        for t, piece in enumerate(down):
            row: list[Cell] = [(pad(piece, margin), None)]
            for s in columns:
                row += [(" " * sizes[s], float(weights[t][s])), (" ", None)]
            yield row


def _bands(sizes: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """Cut the columns into runs that fit beside the margin, each at least one column."""
    start, used = 0, 0
    for i, size in enumerate(sizes):
        if i > start and used + size + 1 > width:
            yield start, i
            start, used = i, 0
        used += size + 1
    if start < len(sizes):
        yield start, len(sizes)
