"""Shell completion; only completing the name of an option imports the module of a verb, and so torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer.core
from pydantic import BaseModel
from typer.completion import shell_completion  # type: ignore[attr-defined]

from regard.config import Config, Stack
from regard.decode.request import Options
from regard.presets import PRESETS
from regard.recipe import SECTIONS, Data, Recipe, Train, recipe_names, setting_names
from regard.serve.settings import ServeSettings

MAX_RUNS = 200
READS_RUNS = ("generate", "score", "evaluate", "inspect", "heads", "prune", "convert", "serve", "average", "info")
# The config values that a verb has options for; their fields give the choices of an option.
VALUES: dict[str, tuple[type[BaseModel], ...]] = {
    "train": (Recipe, Data), "info": (Train,), "generate": (Options,), "score": (Data,), "evaluate": (Options, Data),
    "heads": (Data,), "prune": (Data,), "serve": (ServeSettings,),
}  # fmt: skip
SETTINGS: tuple[type[BaseModel], ...] = (Recipe, Stack, Config, *SECTIONS.values())  # changed by --set


class VerbCompletion(typer.core.TyperCommand):
    """Replaces a verb during completion. Without a suggestion the shell completes file names."""

    def __init__(self, verb: str, load: Callable[[str], Any]) -> None:
        """`load` returns the command of a verb."""
        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
        super().__init__(verb, context_settings=settings, add_help_option=False)
        self._load = load

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        if not incomplete.startswith("-"):
            words = suggestions(str(self.name), ctx.args, incomplete)
            return [shell_completion.CompletionItem(word) for word in words if word.startswith(incomplete)]
        command = self._load(str(self.name))  # it leaves out options on the command line that cannot be repeated
        with command.make_context(self.name, list(ctx.args), parent=ctx.parent, resilient_parsing=True) as context:
            options: list[Any] = command.shell_complete(context, incomplete)
        return options


def suggestions(verb: str, words: list[str], incomplete: str) -> list[str]:
    """Suggestions for the next word of a command line; the shell completes file names."""
    before = words[-1] if words else ""
    if before == "--preset":
        return list(PRESETS)
    if before == "--set":
        key, equals, _ = incomplete.partition("=")
        known = list(PRESETS) if key == "preset" else choices(key.rpartition(".")[2], SETTINGS)
        return [f"{key}={name}" for name in known] if equals else [f"{name}=" for name in setting_names()]
    if before in ("--from", "--against", "--ensemble"):
        return find_runs(incomplete)
    if before.startswith("-"):
        return choices(before.lstrip("-").replace("-", "_"), VALUES.get(verb, ()))
    names = [*PRESETS, *recipe_names()] if verb == "info" else recipe_names() if verb == "train" else []
    return [*([] if words else names), *(find_runs(incomplete) if verb in READS_RUNS else [])]


def choices(name: str, values: Iterable[type[BaseModel]]) -> list[str]:
    """The choices of a field of these config values, if it is a literal."""
    fields = [value.model_fields[name] for value in values if name in value.model_fields]
    return [word for field in fields for word in _words(field.annotation)]


def _words(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for part in get_args(annotation) for word in _words(part)]


def find_runs(incomplete: str) -> list[str]:
    """Run directories that begin with a path, up to two levels deeper."""
    parent = incomplete[: incomplete.rfind("/") + 1]  # as typed: ./ or ../
    base = Path(parent or ".")
    runs = [path.parent for depth in ("*", "*/*") for path in base.glob(f"{depth}/config.json")]
    return sorted(parent + run.relative_to(base).as_posix() for run in runs)[:MAX_RUNS]
