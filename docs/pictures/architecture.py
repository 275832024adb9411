"""Draw the packages of regard and the imports between them: python docs/pictures/architecture.py

Writes architecture.svg next to this file. The layers come from tests/test_policy.py, everything else from the imports,
lazy ones included. Only the standard library is used, and the same source always gives the same bytes. Transitive
imports have no arrow; the tooltip of a box lists all its imports. An arrow with two tips joins two packages of one
layer whose modules import each other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from math import fsum
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "regard"
OUT = Path(__file__).with_suffix(".svg")

# All lengths are in pixels.
MARGIN = 16  # around the drawing
LABEL_WIDTH = 34  # column of layer numbers on the left
CHAR_WIDTH = 6.05  # a character of the small monospaced text
LINE_HEIGHT = 14
BOX_GAP = 14
ROW_GAP = 30
LANE_WIDTH = 10  # space of an arrow that passes a row
MAX_NAMES_WIDTH = 270  # module names in a box are wrapped at this width
LONG_ARROW_WEIGHT = 8  # pull of the neighbours on the same long arrow, which makes it straight

STYLE = """
svg { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.layer { fill: #f1f4f8; } .layer.odd { fill: #e7ecf3; } .number { font-size: 15px; fill: #6b7685; }
.box { fill: #ffffff; stroke: #44617f; } .name { font-size: 13px; font-weight: 600; fill: #14202e; }
.modules { font-size: 10px; fill: #4a5765; } .import { fill: none; stroke: #7d93ab; stroke-width: 1.2; }
.tip { fill: #7d93ab; }
@media (prefers-color-scheme: dark) {
.layer { fill: #161b22; } .layer.odd { fill: #1d242d; } .number { fill: #8b96a3; }
.box { fill: #0d1117; stroke: #7fa3c7; } .name { fill: #e6edf3; }
.modules { fill: #a3afbb; } .import { stroke: #62788f; } .tip { fill: #62788f; }
}
"""


@dataclass(eq=False)
class Node:
    """A box, or (without a name) a point where an arrow passes a row."""

    row: int
    name: str = ""
    lines: list[str] = field(default_factory=list)  # the module names of a package
    width: float = LANE_WIDTH
    height: float = 0
    x: float = 0  # middle
    y: float = 0  # top
    above: list[Node] = field(default_factory=list)
    below: list[Node] = field(default_factory=list)


def layers() -> dict[str, int]:
    """The layer of every package and top-level module in the policy test, without entry points."""
    for node in ast.parse((ROOT / "tests" / "test_policy.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            table: dict[str, int] = ast.literal_eval(node.value)
            return {name: layer for name, layer in table.items() if not name.startswith("_") and exists(name)}
    raise ValueError("tests/test_policy.py has no LAYERS")


def exists(name: str) -> bool:
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()


def modules_of(name: str) -> list[str]:
    """The modules of a package; a top-level module has none."""
    return sorted(file.stem for file in (SOURCE / name).glob("*.py") if not file.stem.startswith("_"))


def imported_names(file: Path) -> Iterator[str]:
    """Names of packages and top-level modules that a file imports from regard."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inside = node.module == "regard"  # from regard import demo
            names = [f"regard.{alias.name}" for alias in node.names] if inside else [node.module or ""]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "regard" and rest:
                yield rest[0]


def imports(names: dict[str, int]) -> dict[str, set[str]]:
    """The boxes that each box imports from."""
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name in names:
        files = (SOURCE / name).rglob("*.py") if (SOURCE / name).is_dir() else [SOURCE / f"{name}.py"]
        for file in files:
            graph[name] |= {other for other in imported_names(file) if other in names and other != name}
    return graph


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """All direct and indirect imports of a box."""
    reached: set[str] = set()
    pending = [start]
    while pending:
        for other in graph[pending.pop()] - reached:
            reached.add(other)
            pending.append(other)
    return reached


def mutual(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Pairs of boxes that import each other."""
    return [(a, b) for a in sorted(graph) for b in sorted(graph[a]) if a < b and a in graph[b]]


def direct(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without transitive imports."""
    reach = {name: reachable(graph, name) for name in graph}
    for name in graph:
        if name in reach[name]:
            raise ValueError(f"import cycle through {name}")
    return {name: {b for b in others if not any(b in reach[c] for c in others)} for name, others in graph.items()}


def rows_of(names: dict[str, int], graph: dict[str, set[str]]) -> dict[str, int]:
    """The row of every box, from the top. Within a layer, an imported box is below the importing one."""
    depth: dict[str, int] = {}

    def deep(name: str) -> int:
        if name not in depth:
            same = [other for other in graph[name] if names[other] == names[name]]
            depth[name] = 1 + max(map(deep, same), default=-1)
        return depth[name]

    keys = sorted({(names[name], deep(name)) for name in names}, reverse=True)
    return {name: keys.index((names[name], deep(name))) for name in names}


def make_box(name: str, row: int) -> Node:
    lines: list[str] = []
    for module in modules_of(name):
        if lines and (len(lines[-1]) + 1 + len(module)) * CHAR_WIDTH <= MAX_NAMES_WIDTH:
            lines[-1] += f" {module}"
        else:
            lines.append(module)
    title = len(name) * CHAR_WIDTH * 1.3
    width = max([title, *(len(line) * CHAR_WIDTH for line in lines)]) + 16
    return Node(row, name, lines, width, 26 + LINE_HEIGHT * len(lines) + (2 if lines else 0))


def lay_out(names: dict[str, int], graph: dict[str, set[str]]) -> tuple[list[list[Node]], dict[str, Node]]:
    """Boxes and passing arrows in rows, ordered for short arrows with few crossings."""
    of_row = rows_of(names, graph)
    boxes = {name: make_box(name, of_row[name]) for name in sorted(names)}
    rows: list[list[Node]] = [[] for _ in range(max(of_row.values()) + 1)]
    for box in boxes.values():
        rows[box.row].append(box)
    for name in sorted(graph):
        for other in sorted(graph[name]):
            here = boxes[name]
            for row in range(here.row + 1, boxes[other].row):
                point = Node(row)
                rows[row].append(point)
                join(here, point)
                here = point
            join(here, boxes[other])
    for turn in range(40):
        order = range(1, len(rows)) if turn % 2 == 0 else range(len(rows) - 2, -1, -1)
        for row in order:
            place = {id(node): i / max(1, len(r) - 1) for r in rows for i, node in enumerate(r)}
            keys = {id(n): mean([place[id(m)] for m in (n.above if turn % 2 == 0 else n.below)]) for n in rows[row]}
            rows[row].sort(key=lambda n, k=keys, p=place: p[id(n)] if k[id(n)] is None else k[id(n)])
    set_x(rows)
    return rows, boxes


def join(upper: Node, lower: Node) -> None:
    upper.below.append(lower)
    lower.above.append(upper)


def mean(values: list[float]) -> float | None:
    return fsum(values) / len(values) if values else None  # fsum: the same in every version of Python


def set_x(rows: list[list[Node]]) -> None:
    """Move every node towards the middle of its neighbours, in the order of its row and without overlap."""
    for row in rows:
        spread(row, [0.0] * len(row))
    for turn in range(600):
        for row in rows if turn % 2 else rows[::-1]:
            spread(row, [middle(node) for node in row])
    left = min(node.x - node.width / 2 for row in rows for node in row)
    for row in rows:
        for node in row:
            node.x += MARGIN + LABEL_WIDTH - left


def middle(node: Node) -> float:
    """The weighted mean position of the neighbours."""
    neighbours = node.above + node.below
    weights = [1 if node.name or other.name else LONG_ARROW_WEIGHT for other in neighbours]
    total = fsum(weight * other.x for weight, other in zip(weights, neighbours, strict=True))
    return total / sum(weights) if neighbours else node.x


def spread(row: list[Node], targets: list[float]) -> None:
    """Set positions near the targets without overlap: the mean of pushing to the right and pushing to the left."""
    gaps = [(a.width + b.width) / 2 + BOX_GAP for a, b in pairwise(row)]
    right = list(targets)
    left = list(targets)
    for i, gap in enumerate(gaps):
        right[i + 1] = max(right[i + 1], right[i] + gap)
    for i, gap in reversed(list(enumerate(gaps))):
        left[i] = min(left[i], left[i + 1] - gap)
    for node, a, b in zip(row, right, left, strict=True):
        node.x = (a + b) / 2


def draw() -> str:
    """The drawing as SVG."""
    names = layers()
    everything = imports(names)
    pairs = mutual(everything)
    graph = {
        name: {other for other in others if not {(name, other), (other, name)} & {*pairs}}
        for name, others in everything.items()
    }
    rows, boxes = lay_out(names, direct(graph))
    y = float(MARGIN)
    bands: dict[int, tuple[float, float]] = {}
    for row in rows:
        height = max(node.height for node in row)
        layer = names[next(node.name for node in row if node.name)]
        for node in row:
            node.y = y + (height - node.height) / 2 if node.name else y
            if not node.name:
                node.height = height
        top = bands.get(layer, (y - ROW_GAP / 2, 0.0))[0]
        bands[layer] = (top, y + height + ROW_GAP / 2)
        y += height + ROW_GAP
    height = y - ROW_GAP + MARGIN
    width = max(node.x + node.width / 2 for row in rows for node in row) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="Packages of regard by layer, and the imports between them">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    for layer, (top, bottom) in sorted(bands.items(), reverse=True):
        odd = " odd" if layer % 2 else ""
        parts.append(
            f'<rect class="layer{odd}" x="0" y="{top:.1f}" width="{width:.0f}" height="{bottom - top:.1f}"/>'
            f'<text class="number" x="{MARGIN}" y="{(top + bottom) / 2 + 5:.1f}">{layer}</text>'
        )
    for name in sorted(boxes):
        for lower in boxes[name].below:
            parts.append(arrow(boxes[name], lower))
    parts += [two_tips(boxes[a], boxes[b]) for a, b in pairs]
    for name, box in sorted(boxes.items()):
        parts.append(draw_box(box, sorted(everything[name])))
    return "\n".join([*parts, "</svg>", ""])


def arrow(upper: Node, lower: Node) -> str:
    """One import, from the bottom of a box through its passing points to the top of another."""
    points = [(port(upper, upper.below, lower), upper.y + upper.height)]
    before = upper
    while not lower.name:
        points += [(lower.x, lower.y), (lower.x, lower.y + lower.height)]
        before, lower = lower, lower.below[0]
    points.append((port(lower, lower.above, before), lower.y))
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x1, y1), (x2, y2) in pairwise(points):
        bend = (y1 + y2) / 2
        path += f"C{x1:.1f} {bend:.1f} {x2:.1f} {bend:.1f} {x2:.1f} {y2:.1f}"
    return f'<path class="import" d="{path}" marker-end="url(#tip)"/>'


def two_tips(a: Node, b: Node) -> str:
    """The arrow between two boxes of a row that import each other."""
    left, right = sorted((a, b), key=lambda box: box.x)
    y = (max(a.y, b.y) + min(a.y + a.height, b.y + b.height)) / 2
    path = f"M{left.x + left.width / 2:.1f} {y:.1f}H{right.x - right.width / 2:.1f}"
    return f'<path class="import" d="{path}" marker-start="url(#tip)" marker-end="url(#tip)"/>'


def port(box: Node, ends: list[Node], end: Node) -> float:
    """The x of the arrow to or from `end` at a box; the arrows of all `ends` are side by side around its middle."""
    index = sorted(ends, key=lambda node: node.x).index(end)
    last = len(ends) - 1
    return box.x + (index - last / 2) * min(12.0, (box.width - 20) / max(1, last))


def draw_box(box: Node, others: list[str]) -> str:
    x, y = box.x - box.width / 2, box.y
    tooltip = f"{box.name} imports {', '.join(others)}" if others else f"{box.name} imports nothing of regard"
    name = f"{box.name}/" if box.lines else box.name
    lines = "".join(
        f'<text class="modules" x="{box.x:.1f}" y="{y + 31 + LINE_HEIGHT * i:.1f}" text-anchor="middle">'
        f"{escape(line)}</text>"
        for i, line in enumerate(box.lines)
    )
    return (
        f"<g><title>{escape(tooltip)}</title>"
        f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="5"/>'
        f'<text class="name" x="{box.x:.1f}" y="{y + 17:.1f}" text-anchor="middle">{escape(name)}</text>{lines}</g>'
    )


if __name__ == "__main__":
    OUT.write_text(draw(), encoding="utf-8")
