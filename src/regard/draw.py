"""Drawing attention with characters: a shaded grid of source pieces against target pieces, for any script.

Pieces are put into cells by the columns they take on a terminal: combining marks take none, CJK characters two. Letters
that run from right to left are kept in their cells by an invisible left-to-right mark on either side: a terminal would
mirror the row otherwise.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.text import Text

SHADES = " ░▒▓█"
DARKEST, BRIGHTEST = (24, 26, 38), (96, 205, 255)  # of a coloured cell: weight 0 and weight 1
MARK = "\N{LEFT-TO-RIGHT MARK}"
SMALLEST, LARGEST = 2, 12  # columns of a cell
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
    while cell_len(text) > LARGEST:
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
    sizes = [max(SMALLEST, cell_len(piece)) for piece in across]
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
