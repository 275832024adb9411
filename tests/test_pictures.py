"""The drawings in docs/attention.md equal the output of their script, and each has a description."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "docs" / "pictures" / "attention.py"
PAGE = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
DRAWINGS = sorted(file.stem for file in SCRIPT.parent.glob("attention-*.svg"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attention_pictures", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(drawing: str, expected: str) -> None:
    """Compare drawings with a tolerance of one unit in the last digit, because sums depend on the processor."""
    assert NUMBER.sub("#", drawing) == NUMBER.sub("#", expected), "run: python docs/pictures/attention.py"
    for number, other in zip(NUMBER.findall(drawing), NUMBER.findall(expected), strict=True):
        unit = 10.0 ** -len(number.partition(".")[2])
        assert float(number) == pytest.approx(float(other), abs=1.01 * unit), "run: python docs/pictures/attention.py"


@pytest.mark.parametrize("name", [name for name in DRAWINGS if name != "attention-cross"])
def test_drawing_is_up_to_date(script, name):
    compare(str(script.PICTURES[name]()), (SCRIPT.parent / f"{name}.svg").read_text(encoding="utf-8"))


def test_drawing_of_a_trained_model_shows_the_reversal(script):
    """Training differs between machines by more than rounding errors: compare only where the largest weights are."""
    drawing = str(script.PICTURES["attention-cross"]())
    for text in (drawing, (SCRIPT.parent / "attention-cross.svg").read_text(encoding="utf-8")):
        cells = re.findall(r'class="cell weight" x="([\d.]+)" y="([\d.]+)"[^>]*?(?:fill-opacity="([\d.]+)")?/>', text)
        assert len(cells) == 72
        first = [float(opacity or 1) for *_, opacity in cells[:36]]
        rows = [first[i : i + 6] for i in range(0, 36, 6)]
        assert [row.index(max(row)) for row in rows] == [5, 4, 3, 2, 1, 0]
        assert all(sum(row) == pytest.approx(1, abs=0.04) for row in rows)


def test_every_drawing_is_shown_and_described(script):
    assert sorted(script.PICTURES) == DRAWINGS
    for name in DRAWINGS:
        descriptions = re.findall(rf"!\[([^\]]+)\]\(pictures/{name}\.svg\)", PAGE)
        assert len(descriptions) == 1 and len(descriptions[0]) > 40, name
        picture = ElementTree.fromstring((SCRIPT.parent / f"{name}.svg").read_bytes())
        assert picture.get("role") == "img" and len(picture.get("aria-label", "")) > 40
