"""`regard train`: train a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.options import Set, field_options, with_options
from regard.cli.output import message, print_table
from regard.config import parse
from regard.errors import UserError
from regard.parallel.ray_cluster import NoCluster
from regard.presets import changed_recipe
from regard.recipe import Data, Recipe, Text, Train
from regard.training.fit import fit
from regard.training.log import with_sinks
from regard.training.ray_tune import choose_cluster, run_on_ray
from regard.training.report import format_duration, format_score, make_reporter
from regard.training.sweep import SWEEP, Sweep, describe_sweep, make_points, run_sweep

EXAMPLE = "regard train --data pairs.tsv --out runs/first --minutes 5"
DATA, MODEL, TRAINING, EXPERIMENTS = "Data", "Model and text", "Training", "Experiments"
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
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="A TOML file or a shipped recipe.")] = None,
    out: Annotated[str | None, typer.Option(metavar="RUN", help="The run directory to write.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the interrupted run in --out.", rich_help_panel=TRAINING)
    ] = False,
    settings: Set = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="Train one run per value, in directories below --out; repeated, one per combination. Repeatable.",
            rich_help_panel=EXPERIMENTS,
        ),
    ] = None,
    sweep_random: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Train only N random combinations.", rich_help_panel=EXPERIMENTS),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Ray cluster for the runs of --sweep: local, auto or HOST:PORT; off: train them here one by one.",
            rich_help_panel=EXPERIMENTS,
        ),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Log to tensorboard, mlflow or wandb. Repeatable.", rich_help_panel=EXPERIMENTS
        ),
    ] = None,
) -> None:
    """Train a model and write a run directory.

    Settings that neither a recipe nor an option gives, such as tokens and model size, are chosen from the data; all
    choices are printed and saved in the run. Options override the recipe, and --set overrides both. All paths, also
    those in a recipe, are relative to the current directory.
    """
    if out is None:
        raise UserError("--out RUN is missing: the run directory to write")

    def make_recipe(more: Sequence[str] = ()) -> Recipe:
        tables = changed_recipe(recipe, options, [*(settings or []), *more])
        changed = f"{recipe} and the command line" if options or settings or more else recipe
        return parse(Recipe, tables, "command line" if recipe is None else str(changed))

    reporter = make_reporter()
    if log:
        reporter = with_sinks(reporter, log, Path(out))  # wrong names fail before training
    if sweep:
        points = make_points(sweep, make_recipe, sweep_random)
        result = None
        if (cluster := choose_cluster(points, ray, out)) is not None:
            try:
                result = run_on_ray(points, out, resume, make_reporter(), cluster, log or [])
            except NoCluster as error:
                if ray is not None:
                    raise
                message(f"warning: Ray does not start, so runs are trained one after the other: {error}")
        if result is None:
            result = run_sweep(points, out, resume, make_reporter, log or [])
        _print_sweep(result)
        if all(row.state == "failed" for row in result.rows):
            raise UserError(f"{out}: every run of the sweep failed")
        return
    for option, value in (("--sweep-random", sweep_random), ("--ray", ray)):
        if value is not None:
            raise UserError(f"{option}: belongs to --sweep KEY=VALUE,VALUE")
    if (Path(out) / SWEEP).exists():
        raise UserError(f"{out}: contains a sweep; repeat its --sweep options, or name one of its runs with --out")
    fit(make_recipe(), out, resume=resume, reporter=reporter)


def _print_sweep(sweep: Sweep) -> None:
    """One row per run, the swept settings first."""
    keys = list(sweep.rows[0].settings)
    rows = []
    for row in sweep.rows:
        score = (row.error or row.state).splitlines()[0]
        if row.metric is not None and row.value is not None:
            score = format_score(row.metric, row.value)
        steps = "" if row.steps is None else f"{row.steps:,}"
        seconds = "" if row.seconds is None else format_duration(row.seconds)
        rows.append([*row.settings.values(), score, steps, seconds, row.run])
    print_table(rows, [*keys, "result", "steps", "time", "run"], left=(*range(len(keys) + 1), len(keys) + 3))
    message(describe_sweep(sweep))
