"""The recipes that come with the package, usable by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.errors import UserError, closest
from regard.settings import read_recipe

FOLDER = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def recipe_tables(recipe: str | Path) -> dict[str, Any]:
    """The tables of a recipe: a TOML file, or a shipped one by its name. A file of that name comes first."""
    path, names = Path(recipe), recipe_names()
    if not path.is_file():
        if str(recipe) in names:
            path = FOLDER / f"{recipe}.toml"
        elif path.suffix != ".toml":
            hint = closest(str(recipe), names)
            raise UserError(f"{recipe}: no such recipe{hint}\n  a TOML file, or one of: {', '.join(names)}")
    return read_recipe(path)
