"""`regard train`: from data to a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from regard.cli.tables import Set

EXAMPLE = "regard train --data pairs.tsv --out runs/first --minutes 5"
DATA, MODEL, TRAINING = "Data", "Model and text", "Training"


def command(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A TOML file, or the name of a shipped one.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="RUN", help="The run directory to write.")] = None,
    task: Annotated[
        str | None,
        typer.Option(help="pairs, lm, masked, span, classify or image. (default: pairs)", rich_help_panel=DATA),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A TSV of pairs, plain text, or an .npz of images, as the task has it.", rich_help_panel=DATA
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Sources, one per line; goes with --target.", rich_help_panel=DATA)
    ] = None,
    target: Annotated[str | None, typer.Option(help="Targets, one per line.", rich_help_panel=DATA)] = None,
    valid: Annotated[
        str | None,
        typer.Option(help="Validation data of the same kind; without it some is set apart.", rich_help_panel=DATA),
    ] = None,
    valid_source: Annotated[str | None, typer.Option(help="Validation sources.", rich_help_panel=DATA)] = None,
    valid_target: Annotated[str | None, typer.Option(help="Validation targets.", rich_help_panel=DATA)] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="What the TSV's columns are: source,features,target.", rich_help_panel=DATA),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first bad line instead of skipping it.", rich_help_panel=DATA)
    ] = False,
    preset: Annotated[
        str | None, typer.Option(help="The model to start from; `regard info` lists them.", rich_help_panel=MODEL)
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="RUN", help="Start from a run's weights and text.", rich_help_panel=MODEL),
    ] = None,
    source_tokens: Annotated[
        str | None,
        typer.Option(help="char, nfd, space, word, byte, bpe:N, unigram:N or auto.", rich_help_panel=MODEL),
    ] = None,
    target_tokens: Annotated[str | None, typer.Option(help="The same for the targets.", rich_help_panel=MODEL)] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so many minutes.", rich_help_panel=TRAINING)] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after so many steps.", rich_help_panel=TRAINING)] = None,
    epochs: Annotated[int | None, typer.Option(help="Stop after so many epochs.", rich_help_panel=TRAINING)] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, order and dropout.", rich_help_panel=TRAINING)] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; 0 is one per core.", rich_help_panel=TRAINING)] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps.", rich_help_panel=TRAINING)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out where it stopped.", rich_help_panel=TRAINING)
    ] = False,
    settings: Set = None,
) -> None:
    """Train a model and write a run directory.

    Without a recipe or options, tokens and model are chosen from the data; the choices are printed and saved. Options
    change a recipe, --set changes both. Paths, those in a recipe too, are relative to the current directory.

    Tasks: pairs (source to target), lm (plain text, the next token), masked (plain text, masked tokens), span (plain
    text, masked spans), classify (text to a label), image (picture to a label).
    """
    from regard.errors import UserError

    if out is None:
        raise UserError("--out RUN is missing: the directory that the run is written to")
    told: dict[str, Any] = {
        "task": task,
        "preset": preset,
        "train.start_from": from_,
        "data.train": data,
        "data.source": source,
        "data.target": target,
        "data.valid": valid,
        "data.valid_source": valid_source,
        "data.valid_target": valid_target,
        "data.columns": columns.split(",") if columns is not None else None,
        "data.strict": strict or None,
        "text.source_tokens": source_tokens,
        "text.target_tokens": target_tokens,
        "train.minutes": minutes,
        "train.steps": steps,
        "train.epochs": epochs,
        "train.seed": seed,
        "train.workers": workers,
        "train.device": device,
    }
    told = {key: value for key, value in told.items() if value is not None}
    tables = recipe_with(recipe, told, settings or [])
    from regard.recipe import load_recipe
    from regard.training.fit import fit

    where = "command line" if recipe is None else f"{recipe} and the command line" if told or settings else recipe
    fit(load_recipe(tables, where), out, resume=resume)


def recipe_with(recipe: str | None, told: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Lay options over a recipe's tables, and `--set` over both.

    A recipe's settings of its own preset that another one has no use for are left out.
    """
    from regard.presets import PRESETS, unused_changes
    from regard.recipe import assign, recipe_tables

    tables = recipe_tables(recipe) if recipe is not None else {}
    chosen: dict[str, Any] = {"preset": told.get("preset", tables.get("preset"))}
    for setting in settings:
        if setting.partition("=")[0].strip() == "preset":
            assign(chosen, setting)
    if chosen["preset"] != tables.get("preset") and isinstance(tables.get("model"), dict):
        for tower, key in unused_changes(PRESETS.get(chosen["preset"], {}), tables["model"]):
            del tables["model"][tower][key]
    if {"train.minutes", "train.steps", "train.epochs"} & told.keys():  # a budget given here replaces the recipe's
        for key in ("minutes", "steps", "epochs"):
            tables.get("train", {}).pop(key, None)
    if {"data.train", "data.source"} & told.keys():
        for key in ("train", "source", "target"):
            tables.get("data", {}).pop(key, None)
    for key, value in told.items():
        *path, leaf = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[leaf] = value
    for setting in settings:
        assign(tables, setting)
    return tables
