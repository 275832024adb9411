"""The recipe of a run: written when it begins, compared when it is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.errors import UserError
from regard.files import replace_file
from regard.settings import Recipe, load_recipe, read_recipe
from regard.train.toml import dumps

RECIPE = "recipe.toml"
BUDGET = ("minutes", "steps", "epochs")
# What a run is made of. `training` is not among them: data prepared in vain is no run.
OURS = (
    "config.json",
    "model.safetensors",
    "adapters.safetensors",
    RECIPE,
    "log.jsonl",
    "README.md",
    "source.tokenizer.json",
    "target.tokenizer.json",
    "tokenizer.json",
)


def begun(run: Path) -> bool:
    """Whether a directory holds a run that was set up completely; config.json is written last."""
    return (run / "config.json").is_file() and (run / RECIPE).is_file()


def require_free(run: Path) -> None:
    """Refuse to write over a run, or over somebody's files."""
    if run.exists() and not run.is_dir():
        raise UserError(f"{run}: is a file; --out takes a directory")
    if begun(run):
        raise UserError(f"{run}: there is a run already; continue it with --resume, or choose another --out")
    taken = [name for name in OURS if (run / name).exists()]
    if taken:
        raise UserError(f"{run}: has {', '.join(taken)}, which training would overwrite; choose another --out")


def save_recipe(recipe: Recipe, run: Path) -> None:
    """Write the complete recipe; what is not set has no key, for TOML knows no null."""
    text = dumps(recipe.model_dump(mode="json"))

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    replace_file(run / RECIPE, write)


def saved_recipe(run: Path) -> Recipe:
    return load_recipe(read_recipe(run / RECIPE), str(run / RECIPE))


def resumed_recipe(given: Recipe, saved: Recipe, run: Path) -> Recipe:
    """The recipe to continue with: the saved one, with the budget that is given now, if any.

    Whatever else is given must be as it was; what is not given, or left to choose, is as it was.
    """
    now, then = _flat(given.model_dump(mode="json", exclude_unset=True)), _flat(saved.model_dump(mode="json"))
    budget = {f"train.{key}" for key in BUDGET}
    changed = [
        f"{key}: now {value!r}, then {_then(key, then)}"
        for key, value in now.items()
        if key not in budget and value != then.get(key) and not _open(key, value)
    ]
    if changed:
        raise UserError(
            f"{run}: cannot resume with a changed recipe (only minutes, steps and epochs may change)\n  "
            + "\n  ".join(changed)
            + "\n  leave these out, or start a new run with another --out"
        )
    new = {key: getattr(given.train, key) for key in BUDGET}
    if any(value is not None for value in new.values()):
        return saved.model_copy(update={"train": saved.train.model_copy(update=new)})
    return saved


def _then(key: str, then: dict[str, Any]) -> str:
    return "as the preset has it" if key.startswith("model.") and key not in then else repr(then.get(key))


def _open(key: str, value: Any) -> bool:
    if key == "train.precision" and value == "bf16":  # wished for, where the machine is good at it: that was settled
        return True
    return value == "auto" or value is None or (key == "train.workers" and value == 0)


def _flat(tables: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return flat
