"""`regard train`: from data to a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from regard.cli.input import Set, field_options, with_options
from regard.errors import UserError
from regard.presets import changed_recipe
from regard.recipe import Data, Recipe, Text, Train, load_recipe
from regard.training.fit import fit

EXAMPLE = "regard train --data pairs.tsv --out runs/first --minutes 5"
DATA, MODEL, TRAINING = "Data", "Model and text", "Training"
FILES = ("train", "source", "target", "valid", "valid_source", "valid_target", "columns", "strict")


@with_options(
    "options",
    *field_options(Recipe, "task", panel=DATA),
    *field_options(Data, *FILES, table="data", panel=DATA, flags={"train": "--data"}),
    *field_options(Recipe, "preset", panel=MODEL),
    *field_options(Train, "start_from", table="train", panel=MODEL, flags={"start_from": "--from"}),
    *field_options(Text, "source_tokens", "target_tokens", table="text", panel=MODEL),
    *field_options(Train, "minutes", "steps", "epochs", "seed", "workers", "device", table="train", panel=TRAINING),
)
def command(
    options: dict[str, Any],
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A TOML file, or the name of a shipped one.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="RUN", help="The run directory to write.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out where it stopped.", rich_help_panel=TRAINING)
    ] = False,
    settings: Set = None,
) -> None:
    """Train a model and write a run directory.

    Without a recipe or options, tokens and model are chosen from the data; the choices are printed and saved. Options
    change a recipe, --set changes both. Paths, those in a recipe too, are relative to the current directory.
    """
    if out is None:
        raise UserError("--out RUN is missing: the directory that the run is written to")
    tables = changed_recipe(recipe, options, settings or [])
    changed = f"{recipe} and the command line" if options or settings else recipe
    fit(load_recipe(tables, "command line" if recipe is None else str(changed)), out, resume=resume)
