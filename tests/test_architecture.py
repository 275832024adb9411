"""docs/architecture.md and its drawing agree with the source."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from test_policy import LAYERS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "regard"
SCRIPT = ROOT / "docs" / "pictures" / "architecture.py"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`([\w/-]+(?:\.py|\.md|/))`", PAGE)))
# `Rule` in `decode/constraints.py`
DEFINITIONS = sorted(set(re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py)`", PAGE)))


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architecture", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # needed by dataclasses
    spec.loader.exec_module(module)
    return module


def exists(path: str) -> bool:
    return (ROOT / path).exists() or (SOURCE / path).exists()


def test_drawing_is_up_to_date(drawing):
    current = drawing.draw()
    assert current == drawing.draw(), "the same source must give the same drawing"
    assert drawing.OUT.read_text(encoding="utf-8") == current, "run: python docs/pictures/architecture.py"


def test_drawing_shows_every_package_and_import(drawing):
    tree = ElementTree.fromstring(drawing.draw())
    titles = [title.text or "" for title in tree.iter("{http://www.w3.org/2000/svg}title")]
    names_in_drawing = {title.split()[0] for title in titles}
    names_in_source = {file.stem if file.is_file() else file.name for file in SOURCE.iterdir() if holds_code(file)}
    assert names_in_drawing == names_in_source
    assert "decode imports" in " ".join(titles) and "model" in next(t for t in titles if t.startswith("decode "))


def holds_code(file: Path) -> bool:
    if file.is_dir():
        return (file / "__init__.py").is_file()
    return file.suffix == ".py" and not file.stem.startswith("_")


def test_transitive_imports_have_no_arrow(drawing):
    assert drawing.direct({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}
    with pytest.raises(ValueError, match="cycle"):
        drawing.direct({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_mutual_imports_share_one_arrow(drawing):
    assert drawing.mutual({"a": {"b", "c"}, "b": {"a"}, "c": set()}) == [("a", "b")]
    pairs = drawing.mutual(drawing.imports(drawing.layers()))
    assert drawing.draw().count("marker-start") == len(pairs)


def test_layer_table_matches_the_policy():
    table = {}
    for layer, names in re.findall(r"^\| (\d) \| ([^|]+) \|", PAGE, re.MULTILINE):
        table |= {name: int(layer) for name in re.findall(r"`(\w+)/?`", names)}
    existing = (name for name in LAYERS if not name.startswith("_") and (exists(name) or exists(f"{name}.py")))
    assert table == {name: LAYERS[name] for name in existing}


def test_every_module_is_named_in_a_table():
    files = [file.relative_to(SOURCE) for file in SOURCE.rglob("*.py")]
    modules = {str(file) for file in files if not file.stem.startswith("_")}
    assert modules == set(re.findall(r"^\| `([\w/]+\.py)` \|", PAGE, re.MULTILINE))


@pytest.mark.parametrize("path", PATHS)
def test_path_exists(path):
    assert exists(path.replace("NAME.py", "app.py").replace("NAME.md", "train.md"))


@pytest.mark.parametrize(("name", "file"), DEFINITIONS)
def test_definition_is_in_its_file(name, file):
    text = (SOURCE / file).read_text(encoding="utf-8")
    assert re.search(rf"^\s*(?:class|def) {name}\b|^{name}\b.*=", text, re.MULTILINE)
