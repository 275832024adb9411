"""Shell completion without the verbs' own modules, which import torch: names of presets, recipes, settings and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer.core
from typer.completion import shell_completion  # type: ignore[attr-defined]

from regard.presets import PRESETS
from regard.recipe import recipe_names, setting_names
from regard.tasks import TASKS

MOST_RUNS = 200  # listed at once
READS_RUNS = ("generate", "score", "evaluate", "inspect", "heads", "prune", "convert", "serve", "average", "info")


class VerbCompletion(typer.core.TyperCommand):
    """Stands for a verb while a command line is completed. Without a suggestion the shell completes file names."""

    def __init__(self, verb: str) -> None:
        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
        super().__init__(verb, context_settings=settings, add_help_option=False)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        words = suggestions(str(self.name), ctx.args, incomplete)
        return [shell_completion.CompletionItem(word) for word in words if word.startswith(incomplete)]


def suggestions(verb: str, words: list[str], incomplete: str) -> list[str]:
    """What may follow the words of a command line; file names are left to the shell."""
    before = words[-1] if words else ""
    if before == "--preset":
        return list(PRESETS)
    if before == "--task":
        return list(TASKS)
    if before == "--set":
        key, equals, _ = incomplete.partition("=")
        known = {"preset": PRESETS, "task": TASKS}.get(key, ())
        return [f"{key}={name}" for name in known] if equals else [f"{name}=" for name in setting_names()]
    if before in ("--from", "--against", "--ensemble"):
        return find_runs(incomplete)
    if before.startswith("-"):
        return []
    names = [*PRESETS, *recipe_names()] if verb == "info" else recipe_names() if verb == "train" else []
    return [*([] if words else names), *(find_runs(incomplete) if verb in READS_RUNS else [])]


def find_runs(incomplete: str) -> list[str]:
    """The run directories that a path may go on to, up to two levels deeper."""
    parent = incomplete[: incomplete.rfind("/") + 1]  # kept as it was written: ./ or ../
    base = Path(parent or ".")
    found = [path.parent for depth in ("*", "*/*") for path in base.glob(f"{depth}/config.json")]
    return sorted(parent + run.relative_to(base).as_posix() for run in found)[:MOST_RUNS]
