"""`regard train`: from data to a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.options import Set, field_options, with_options
from regard.cli.output import message, print_table
from regard.errors import UserError
from regard.parallel.ray_cluster import NoCluster
from regard.presets import changed_recipe
from regard.recipe import Data, Recipe, Text, Train, load_recipe
from regard.training.fit import fit
from regard.training.ray_tune import choose_cluster, run_on_ray
from regard.training.report import format_duration, format_score, make_reporter
from regard.training.sinks import with_sinks
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
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A TOML file, or the name of a shipped one.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="RUN", help="The run directory to write.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out where it stopped.", rich_help_panel=TRAINING)
    ] = False,
    settings: Set = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="Train one run per value, below --out; with several of them, one per combination. Repeatable.",
            rich_help_panel=EXPERIMENTS,
        ),
    ] = None,
    sweep_random: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Only N random combinations of --sweep.", rich_help_panel=EXPERIMENTS),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Where Ray Tune trains the runs of --sweep: local, auto or HOST:PORT; off: one after the other, here.",
            rich_help_panel=EXPERIMENTS,
        ),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Log to tensorboard, mlflow or wandb too. Repeatable.", rich_help_panel=EXPERIMENTS
        ),
    ] = None,
) -> None:
    """Train a model and write a run directory.

    Without a recipe or options, tokens and model are chosen from the data; the choices are printed and saved. Options
    change a recipe, --set changes both. Paths, those in a recipe too, are relative to the current directory.
    """
    if out is None:
        raise UserError("--out RUN is missing: the directory that the run is written to")

    def make_recipe(more: Sequence[str] = ()) -> Recipe:
        tables = changed_recipe(recipe, options, [*(settings or []), *more])
        changed = f"{recipe} and the command line" if options or settings or more else recipe
        return load_recipe(tables, "command line" if recipe is None else str(changed))

    reporter = with_sinks(make_reporter(), log or [], Path(out))  # wrong names are refused before training
    if sweep:
        points = make_points(sweep, make_recipe, sweep_random)
        result = None
        if (cluster := choose_cluster(points, ray, out)) is not None:
            try:
                result = run_on_ray(points, out, resume, make_reporter(), cluster, log or [])
            except NoCluster as error:
                if ray is not None:
                    raise
                message(f"warning: runs are trained one after the other, for Ray does not start: {error}")
        if result is None:
            result = run_sweep(points, out, resume, make_reporter, log or [])
        _print_sweep(result)
        if all(row.state == "failed" for row in result.rows):
            raise UserError(f"{out}: every run of the sweep failed")
        return
    for option, given in (("--sweep-random", sweep_random), ("--ray", ray)):
        if given is not None:
            raise UserError(f"{option}: belongs to --sweep KEY=VALUE,VALUE")
    if (Path(out) / SWEEP).exists():
        raise UserError(f"{out}: holds a sweep; repeat its --sweep options, or name one of its runs with --out")
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
