"""Model families as config values, read from presets.toml. Only this module and `convert` use family names."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from regard.config import Config, parse
from regard.errors import UserError, shown_value
from regard.recipe import Recipe, assign, put, recipe_tables, split_setting
from regard.suggest import one_of
from regard.tasks import BOTH

Table = dict[str, Any]


def merge(base: Table, changes: Table) -> Table:
    """`base` updated with `changes`; nested tables are merged."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _load_presets() -> tuple[dict[str, Table], dict[str, str]]:
    """The presets and their descriptions. presets.toml explains its keys that are not config keys."""
    presets: dict[str, Table] = {}
    about: dict[str, str] = {}
    for name, table in tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")).items():
        about[name] = table.pop("about")
        base = presets[table.pop("like")] if "like" in table else {}
        values = {key: value for key, value in base.items() if key not in ("source_vocab", "target_vocab")}
        if both := table.pop("both", None):
            values = merge(values, {"encoder": both, "decoder": both})
        if vocab := table.pop("vocab", None):
            values |= {"source_vocab": vocab, "target_vocab": vocab}
        presets[name] = merge(values, table)
    return presets, about


PRESETS, ABOUT = _load_presets()


def with_changes(base: Table, changes: Table) -> Table:
    """`base` merged with `changes`; changes of both stacks do not create a stack that `base` lacks."""
    encoder = changes.get("encoder")
    decoder = changes.get("decoder")
    if isinstance(encoder, dict) and isinstance(decoder, dict):
        shared = encoder.keys() & decoder.keys()
        changes = {key: x for key, x in changes.items() if key not in BOTH or base.get(key) or x.keys() - shared}
    return merge(base, changes)


# Keys that a recurrent stack uses; only a decoder has attention. All other keys are for attention layers.
_RECURRENT_KEYS = {"encoder": {"mixer", "layers", "width", "dropout"}}
_RECURRENT_KEYS["decoder"] = _RECURRENT_KEYS["encoder"] | {
    *("score", "cross_window", "cross_center", "max_length", "attention_dropout", "input_feeding", "attend_first")
}


def unused_changes(base: Table, changes: Table) -> list[tuple[str, str]]:
    """(stack, key) of changes that a recurrent stack does not use, unless the other stack uses the same change."""
    unused: list[tuple[str, str, Any]] = []
    used: list[tuple[str, Any]] = []
    for name in BOTH:
        stack: Table = changes[name] if isinstance(changes.get(name), dict) else {}
        recurrent = merge(base.get(name) or {}, stack).get("mixer") in ("gru", "lstm")
        for key, value in sorted(stack.items()):
            if recurrent and key not in _RECURRENT_KEYS[name] and value != "none":
                unused.append((name, key, value))
            else:
                used.append((key, value))
    return [(name, key) for name, key, value in unused if (key, value) not in used]


def refuse_unused(base: Table, changes: Table) -> None:
    """Raise UserError for changes that a recurrent stack does not use."""
    if unused := unused_changes(base, changes):
        names = ", ".join(f"{stack}.{key}" for stack, key in unused)
        raise UserError(f"model: {names}: not used by a recurrent stack (gru, lstm), only by attention layers")


def preset(
    name: str,
    vocab: int | None = None,
    *,
    source_vocab: int | None = None,
    target_vocab: int | None = None,
    changes: Table | None = None,
) -> Config:
    """The config of a preset with these vocabulary sizes (`vocab` sets both sides) and changed keys."""
    if not isinstance(name, str) or name not in PRESETS:
        raise UserError(f"{one_of('preset', str(name), PRESETS)}\n  regard info describes them")
    if changes is not None and not isinstance(changes, dict):
        example = "{'encoder': {'layers': 2}}"
        raise UserError(f"preset: changes must be a table, such as {example}, not {shown_value(changes)}")
    table = with_changes(PRESETS[name], changes or {})
    for side, size in (("source_vocab", source_vocab), ("target_vocab", target_vocab)):
        size = vocab if size is None else size
        table[side] = table.get(side, 8000) if size is None else size
    if table["source_vocab"] != table["target_vocab"] and "share_embeddings" not in (changes or {}):
        table["share_embeddings"] = False  # two vocabularies cannot share an embedding
    return parse(Config, table, f"preset {name}")


def changed_recipe(
    recipe: str | Path | Mapping[str, Any] | None, options: Mapping[str, Any], settings: Sequence[str]
) -> dict[str, Any]:
    """The tables of a recipe, updated with options (train.steps: 9) and then with `--set` settings.

    The recipe is a file, the name of a shipped recipe, or its tables. If the preset is replaced, model keys that the
    new preset does not use are dropped.
    """
    for setting in settings:
        split_setting(setting)  # checked first: in `--set lr 3`, the 3 would be read as a recipe
    tables = recipe_tables(recipe) if isinstance(recipe, str | Path) else deepcopy(dict(recipe or {}))
    chosen: dict[str, Any] = {"preset": options.get("preset", tables.get("preset"))}
    for setting in settings:
        if setting.partition("=")[0].strip() == "preset":
            assign(chosen, setting)
    if chosen["preset"] != tables.get("preset") and isinstance(tables.get("model"), dict):
        for stack, key in unused_changes(PRESETS.get(chosen["preset"], {}), tables["model"]):
            del tables["model"][stack][key]
    for table, alternatives in (("train", {"minutes", "steps", "epochs"}), ("data", {"train", "source", "target"})):
        old = tables.get(table)
        if isinstance(old, dict) and any(f"{table}.{key}" in options for key in alternatives):
            for key in alternatives:  # an option replaces the budget or the data of the recipe
                old.pop(key, None)
    for path, value in options.items():
        put(tables, path.split("."), value)
    for setting in settings:
        assign(tables, setting)
    return tables


def model_without_data(recipe: Recipe, vocab: int | None, where: str) -> Config:
    """The model of a recipe before its data is read; the vocabulary size is `vocab` or that in the token scheme."""
    if recipe.preset == "auto":
        raise UserError(f"{where}: its preset is chosen from the data; name one, for example preset=transformer-small")
    source, target = (
        vocab or (int(size) if (size := tokens.partition(":")[2]).isdigit() else None)
        for tokens in (recipe.text.source_tokens, recipe.text.target_tokens)
    )
    config = preset(recipe.preset, source_vocab=source, target_vocab=target, changes=recipe.model)
    refuse_unused(PRESETS[recipe.preset], recipe.model)
    return config
