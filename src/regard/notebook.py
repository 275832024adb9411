"""HTML tables of results for notebooks. All texts are escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
MAX_ROWS = 200  # of a table
MAX_TEXT = 2000  # characters per cell
_CELL = "text-align:left;vertical-align:top;white-space:pre-wrap"


def text_cell(value: object, shade: float = 0.0, tag: str = "td") -> str:
    """A cell with the text of a value; `shade`, from 0 to 1, is the strength of its colour."""
    text = "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
    colour = f";background:rgba(66,133,244,{min(1.0, max(0.0, shade)) * 0.7:.2f})" if shade > 0 else ""
    return f'<{tag} style="{_CELL}{colour}">{escape(text[:MAX_TEXT])}{"…" * (len(text) > MAX_TEXT)}</{tag}>'


def table(rows: Iterable[Sequence[object]], header: Sequence[object] = (), caption: str = "") -> str:
    """An HTML table; without a header, the first column holds the names."""
    top = "<thead><tr>" + "".join(text_cell(each, tag="th") for each in header) + "</tr></thead>" if header else ""
    body = []
    for row in rows:
        cells = [text_cell(each, tag="td" if header or index else "th") for index, each in enumerate(row)]
        body.append("<tr>" + "".join(cells) + "</tr>")
    return f"<table>{_caption(caption)}{top}<tbody>{''.join(body)}</tbody></table>"


def table_of(rows: Sequence[Mapping[str, object]], caption: str = "") -> str:
    """An HTML table of rows that map column names to values."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    shown = [[row.get(name) for name in header] for row in rows[:MAX_ROWS]]
    rest = len(rows) - len(shown)
    return table(shown, header, caption) + (f"<p>and {rest:,} more</p>" if rest else "")


def token_table(tokens: Sequence[str], scores: Sequence[float], caption: str = "") -> str:
    """A row of tokens above a row of their log-probabilities, shaded by their probabilities."""
    first = "".join(text_cell(token, tag="th") for token in tokens)
    second = "".join(text_cell(float(score), math.exp(min(0.0, score))) for score in scores)
    return f"<table>{_caption(caption)}<tbody><tr>{first}</tr><tr>{second}</tr></tbody></table>"


def heat_table(
    weights: Iterable[Iterable[float]], rows: Sequence[str], columns: Sequence[str], caption: str = ""
) -> str:
    """Weights from 0 to 1 as shades, with the names of rows and columns."""
    top = "<th></th>" + "".join(text_cell(column, tag="th") for column in columns)
    body = [
        f"<tr>{text_cell(name, tag='th')}{''.join(text_cell(f'{w:.2f}', float(w)) for w in row)}</tr>"
        for name, row in zip(rows, weights, strict=False)
    ]
    return f"<table>{_caption(caption)}<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _caption(text: str) -> str:
    return f'<caption style="text-align:left;white-space:pre-wrap">{escape(text[:MAX_TEXT])}</caption>' if text else ""


def result_cells(
    row: Mapping[str, object], tokens: Sequence[str], scores: Sequence[float], flags: Mapping[str, str]
) -> dict[str, object]:
    """The cells of a result, with its tokens and its flags if it has any."""
    scored = " ".join(f"{token}\u00a0{score:.2f}" for token, score in zip(tokens, scores, strict=False))
    cells = {**row, **({"tokens and their scores": scored} if scored else {})}
    return {**cells, "flags": "; ".join(flags.values())} if flags else cells


class Results(list[T]):
    """A list of results, or of lists of results, that a notebook shows as a table of their `cells`, with the inputs."""

    def __init__(self, results: Iterable[T] = (), inputs: Sequence[str] = ()) -> None:
        super().__init__(results)
        self.inputs = tuple(inputs)

    def __getattr__(self, name: str) -> NoReturn:
        """Explain how to access an attribute of the results, which the list does not have."""
        first: Any = self[:1]
        index = ""
        while isinstance(first, list) and first:
            first = first[0]
            index += "[0]"
        if name.startswith("_") or isinstance(first, list) or not hasattr(first, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        kind = "one list of hypotheses per input" if index == "[0][0]" else "a list"
        raise AttributeError(f"{kind}; write results{index}.{name}")

    def _repr_html_(self) -> str:
        rows: list[dict[str, Any]] = []
        for source, result in zip_longest(self.inputs[: len(self)], self):
            for rank, each in enumerate(result if isinstance(result, list) else [result]):
                first = {"input": None if rank else source} if self.inputs else {}
                rows.append({**first, **each.cells()})
        return table_of(rows)
