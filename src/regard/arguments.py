"""Arguments of the library's calls, checked before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.decode.hypothesis import unknown_flags
from regard.decode.request import Request
from regard.errors import UserError, shown_value
from regard.files import to_toml
from regard.presets import changed_recipe
from regard.recipe import Recipe, load_recipe
from regard.text.codec import Codec, Example

Texts = str | Path | Sequence[str]  # a file with a text per line, or the texts


def checked_list(verb: str, what: str, items: Any, kinds: tuple[type, ...], example: str) -> list[Any]:
    """A list of what a verb takes; one text alone would be taken for a list of its letters."""
    if isinstance(items, str | bytes | Example | Request | dict) or not isinstance(items, Iterable):
        raise UserError(f"{verb}: takes a list of {what}, such as {example}, not {shown_value(items)}")
    checked = list(items)
    for index, item in enumerate(checked):
        if not isinstance(item, kinds):
            raise UserError(f"{verb}: takes a list of {what}, such as {example}; item {index} is {shown_value(item)}")
        check_texts(f"{verb}: item {index}", item)
    return checked


def check_texts(where: str, item: Any) -> None:
    """Check the fields of an Example: they are texts as in their columns. A Request checks itself."""
    for name in Example._fields if isinstance(item, Example) else ():
        value = getattr(item, name)
        if not isinstance(value, str) and (value is not None or name == "source"):
            hint = ", as in its column: 'N;PL'" if name == "features" else ""
            raise UserError(f"{where}: {name} is a text{hint}, not {shown_value(value)}")


def named_references(references: Any, texts: dict[str, list[str]]) -> list[str]:
    """Each of several references, as `named_texts` has one."""
    given = () if references is None else references
    several = checked_list("evaluate: reference", "files or lists of texts", given, (object,), '["test.ref"]')
    return [named_texts(f"reference[{index}]", each, texts) for index, each in enumerate(several)]


def named_texts(name: str, given: Any, texts: dict[str, list[str]]) -> str:
    """The file with a text per line; if the texts are given themselves, they go into `texts` under their name."""
    if isinstance(given, str | Path) and os.path.isfile(given):
        return str(given)
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        items = list(given)
        if all(isinstance(item, str) for item in items):
            texts[name] = items
            return name
    missing = "; there is no such file" if isinstance(given, str | Path) else ""
    run = "a loaded run, such as regard.load(...), " if name == "against" else ""
    what = f"{run}a file with a text per line or a list of texts"
    raise UserError(f"evaluate: {name} is {what}, not {shown_value(given)}{missing}")


def check_example(codec: Codec, example: Example) -> str:
    """Refuse features that do not fit a run -> a remark on what the run does not know in the example, if anything."""
    if problem := codec.features_problem(example):
        raise UserError(problem)
    target = codec.target.encode([example.target])[0] if example.target else []
    unknown = codec.unknown_tokens(example, codec.encode_source([example])[0], target)
    return unknown_flags(unknown).get("unknown", "")


def checked_ids(name: str, ids: Any, vocab: int) -> Tensor:
    """A table of ids as a tensor, checked."""
    try:
        table = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        table = torch.empty(0)
    if table.ndim != 2 or table.numel() == 0 or table.dtype.is_floating_point or table.dtype == torch.bool:
        raise UserError(f"logits: {name} are equally long rows of whole numbers, not {shown_value(ids)}")
    least, most = int(table.min()), int(table.max())
    if least < 0 or most >= vocab:
        wrong = least if least < 0 else most
        raise UserError(f"logits: {name}: the ids of this vocabulary are 0 to {vocab - 1}, not {wrong}")
    return table.long()


def changed(recipe: Mapping[str, Any] | str | Path | None, given: dict[str, Any], settings: list[str]) -> Recipe:
    """A recipe with what was given instead, and settings."""
    try:
        tables = changed_recipe(recipe, given, settings)
    except UserError as error:
        raise UserError(str(error).replace("--set ", "settings: ")) from None
    return load_recipe(tables, str(recipe) if isinstance(recipe, str | Path) else "recipe")


def as_settings(settings: Mapping[str, Any] | None) -> list[str]:
    """Settings as they are written on a command line."""
    if settings is None:
        return []
    if not isinstance(settings, Mapping):
        raise UserError(f"train: settings are a mapping, such as {{'lr': 1e-3}}, not {shown_value(settings)}")
    lines = []
    for key, value in settings.items():
        try:
            text = "none" if value is None else to_toml({"": [value]}).strip().removeprefix('"" = [').removesuffix("]")
        except TypeError:
            raise UserError(f"train: settings: {key} cannot be {shown_value(value)}") from None
        except (ValueError, RecursionError):
            raise UserError(f"train: settings: {key}: this {type(value).__name__} is too large") from None
        lines.append(f"{key}={text}")
    return lines
