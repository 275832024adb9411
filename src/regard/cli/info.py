"""`regard info`: parameters, FLOPs, memory and time of a model, before training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.options import Json, Set, chosen_options, field_options, option_name, with_options
from regard.cli.output import at_terminal, message, out_json, print_table
from regard.config import Config, parse
from regard.cost.describe import Info, Workload, count_parameters, describe, duration, measure_rate, si
from regard.cost.scaling import Hardware, Scaling, plan_scaling
from regard.errors import UserError, plural
from regard.model import on_meta
from regard.presets import ABOUT, PRESETS, changed_recipe, model_without_data, preset
from regard.recipe import Train, load_recipe, recipe_names, recipe_summary
from regard.run import accept_run, closest_run, read_config, verify_run
from regard.suggest import closest
from regard.tasks import infer_task

EXAMPLE = "regard info transformer-base --vocab 37000"
RANKS = "Training in several processes"


@with_options("options", *field_options(Train, "strategy", "precision", "recompute", table="train", panel=RANKS))
def command(
    options: dict[str, Any],
    what: Annotated[
        str | None, typer.Argument(metavar="RUN|PRESET|RECIPE", help="Without it, list presets and recipes.")
    ] = None,
    settings: Set = None,
    vocab: Annotated[int | None, typer.Option(min=4, help="Vocabulary size of a preset or recipe.")] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens per source and per target.")] = 32,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per training batch. (default: as in the recipe, or 4096)")
    ] = None,
    beam: Annotated[int, typer.Option(min=1, help="Beam width of decoding.")] = 5,
    sentences: Annotated[int, typer.Option(min=1, help="Sentences per decoding batch.")] = 32,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Show memory and communication per process.", rich_help_panel=RANKS)
    ] = None,
    flops: Annotated[
        float | None, typer.Option(min=1e-6, metavar="TFLOP/s", help="Speed of a process.", rich_help_panel=RANKS)
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(min=1e-6, metavar="GB/s", help="Bandwidth of its slowest link.", rich_help_panel=RANKS),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare all files of the run with its manifest.")] = False,
    accept: Annotated[bool, typer.Option("--accept", help="Accept intentional changes to files of the run.")] = False,
    json: Json = False,
) -> None:
    """Show parameters, FLOPs and memory of a model.

    No weights are allocated, so the model may be larger than this machine. Without an argument, all presets and
    recipes are listed.
    """
    if what is None:
        _list_all(json)
        return
    for flag, option, check in ((accept, "--accept", accept_run), (verify, "--verify", verify_run)):
        if flag and not Path(what).is_dir():
            raise UserError(f"{option}: needs a run directory, and {what} is not one")
        if flag:
            message(check(Path(what)))
    config, train = find_config(what, vocab, settings or [], options)
    scaled = chosen_options(**{name.removeprefix("train."): value for name, value in options.items()})
    scaled |= chosen_options(flops=flops, bandwidth=bandwidth)
    if ranks is None and scaled:
        name = next(iter(scaled))
        raise UserError(f"{option_name(name)}: belongs to --ranks N, the number of processes")
    if (flops is None) != (bandwidth is None):
        raise UserError("--flops and --bandwidth belong together: both are needed for the time of a step")
    info = describe(config, Workload(length, batch_tokens or train.batch_tokens, sentences, beam))
    rate = measure_rate(config.top.width)
    scaling = None
    if ranks is not None:
        hardware = Hardware(1e12 * flops, 1e9 * bandwidth) if flops and bandwidth else None
        scaling = plan_scaling(config, info, train, ranks, hardware, on_cpu=train.device == "cpu")
    tokens = train.steps * train.accumulate * info.workload.batch_tokens if train.steps else None
    if json:
        time = {"flops_per_second": rate, "training_per_million_tokens": info.training_seconds(1e6, rate)}
        if tokens:
            time["recipe"] = info.training_seconds(tokens, rate)
        out_json({**info.to_json(), "time": time, **({} if scaling is None else {"scaling": scaling.to_json()})})
    else:
        _print_parts(what, info)
        rows = _costs(config, info, rate, tokens) + ([] if scaling is None else _scaling_costs(scaling, info))
        print_table(rows, left=(0, 2), bold=(1,))


def _list_all(json: bool) -> None:
    """List presets with their sizes and purposes, and recipes."""
    sizes = {name: sum(count_parameters(on_meta(preset(name))).values()) for name in ABOUT}
    recipes = {name: recipe_summary(name) for name in recipe_names()}
    if json:
        for name, size in sizes.items():
            out_json({"preset": name, "parameters": size, "about": ABOUT[name]})
        for name, about in recipes.items():
            out_json({"recipe": name, "about": about})
        return
    rows = [("preset", name, si(size), ABOUT[name]) for name, size in sizes.items()]
    print_table([*rows, *(("recipe", name, "", about) for name, about in recipes.items())], left=(0, 1, 3))
    message("sizes: parameters with the published vocabulary, else with 8,000 tokens; details: regard info NAME")


def find_config(
    what: str, vocab: int | None, settings: list[str], options: Mapping[str, Any] = {}
) -> tuple[Config, Train]:
    """The model of a run directory, preset or recipe, with changed settings, and its training settings."""
    if Path(what).is_dir():
        if settings or vocab:
            raise UserError("--set and --vocab apply to presets and recipes, not to a run")
        train = {key.removeprefix("train."): value for key, value in options.items()}
        return read_config(Path(what)).model, parse(Train, train, "command line")
    if what in PRESETS:
        tables = changed_recipe(None, {"preset": what, **options}, settings)
    elif what in recipe_names() or Path(what).suffix == ".toml":
        tables = changed_recipe(what, options, settings)
    else:
        names = [*PRESETS, *recipe_names()]
        hint = closest(what, names) or closest_run(Path(what))
        raise UserError(f"{what}: not a run directory, preset or recipe{hint}\n  known: {', '.join(names)}")
    recipe = load_recipe(tables, what)
    return model_without_data(recipe, vocab, what), recipe.train


def _print_parts(what: str, info: Info) -> None:
    """Print the parameters as an indented list, groups before their parts; at a terminal with shares."""
    rows = []
    styles = []
    framed = at_terminal()
    for depth, name, count in _parts(info):
        share = [f"{count / info.total:.1%}"] if framed else []
        rows.append(["  " * depth + name, f"{count:,}", si(count), *share])
        styles.append("bold" if depth == 0 else "dim" if depth > 2 else "")
    header = ("part", "parameters", "", "share") if framed else ()
    print_table(rows, header, title=what, styles=styles, sections=[len(rows) - 1])


def _parts(info: Info) -> list[tuple[int, str, int]]:
    """(depth, name, count) of every part, and of every group before its parts."""
    rows: list[tuple[int, str, int]] = []
    sums = info.subtotals()
    listed = set()
    for part, count in info.parameters.items():
        *groups, leaf = part.split(".")
        for depth in range(len(groups)):
            prefix = ".".join(groups[: depth + 1])
            if prefix not in listed:
                listed.add(prefix)
                rows.append((depth, groups[depth].replace("_", "-"), sums[prefix]))
        projected = leaf in ("query", "query_key", "key", "value")
        if leaf in ("query", "query_key"):
            joined = "query + key + value" if leaf == "query" else "query = key + value"
            rows.append((len(groups), joined, sums[".".join((*groups, "query_key_value"))]))
        tied = part == "prediction" and not count
        rows.append((len(groups) + projected, "prediction (tied)" if tied else leaf.replace("_", " "), count))
    return [*rows, (0, "total", info.total)]


def _costs(config: Config, info: Info, rate: float, tokens: int | None) -> list[tuple[str, str, str]]:
    """(name, amount, remark) of FLOPs, memory and time."""
    workload = info.workload
    both = len(config.stacks) == 2
    image = infer_task(config) == "image"
    unit = "patches" if image else "target tokens" if both else "tokens"
    if image:
        each = f"one of the {workload.length} patches of an image, counting the class token"
    else:
        each = f"{'a source and a target token' if both else 'a token'} at length {workload.length}"
        each += f" after {config.top.memory} remembered" if config.has_memory else ""
    batch = f"{workload.batch_tokens:,} {'tokens a side' if both else unit} {si(info.activations, 'B')}"
    costs = [
        ("FLOPs per token", si(info.flops_per_token), f"forward, {each}; training {si(3 * info.flops_per_token)}"),
        ("memory, training", si(info.training, "B"), f"weights, gradients and Adam {si(info.optimizer, 'B')}; {batch}"),
    ]
    if "decoder" in config.stacks:
        texts = f"{workload.sentences} {'sentences' if both else 'texts'} with beam {workload.beam}"
        remark = f"weights {si(info.weights, 'B')}; {texts} {si(info.cache, 'B')}"
        costs.append(("memory, decoding", si(info.decoding, "B"), remark))
    else:
        costs.append(("memory, use", si(info.weights, "B"), "weights"))
    speed = f"at the {si(rate)}FLOP/s of this processor's matrix products: at best"
    costs.append(("time, training", duration(info.training_seconds(1e6, rate)), f"per million {unit}, {speed}"))
    if tokens:
        costs.append(("", duration(info.training_seconds(tokens, rate)), f"for the recipe's {si(tokens)} {unit}"))
    return costs


def _scaling_costs(scaling: Scaling, info: Info) -> list[tuple[str, str, str]]:
    """(name, amount, remark) of memory, communication and time of each process."""
    train = scaling.train
    memory = scaling.memory
    sizes = scaling.communication
    names = {
        "weights": "weights", "gradients": "gradients", "moments": "Adam", "average": "moving average",
        "gathered": "gathered weights", "unreduced": "unreduced gradients",
        "activations": f"activations of {plural(info.workload.batch_tokens // scaling.ranks, 'token')}",
    }  # fmt: skip
    parts = [f"{name} {si(size, 'B')}" for key, name in names.items() if (size := getattr(memory, key))]
    how = ", ".join((train.strategy, train.precision, *(["recompute"] if train.recompute else [])))
    collectives = {
        name: size for name in ("all_reduce", "all_gather", "reduce_scatter") if (size := getattr(sizes, name))
    }
    sent = ", ".join(f"{name.replace('_', '-')} of {si(size, 'B')}" for name, size in collectives.items())
    rows = [
        (f"memory of each of {scaling.ranks}", si(memory.step, "B"), f"{how}: {', '.join(parts)}"),
        *([("", si(memory.host, "B"), "of it in CPU memory")] if memory.host else []),
        ("", si(scaling.start, "B"), "at start"),
        ("", si(scaling.validation, "B"), "during validation, decoding included"),
        ("sent per step", si(scaling.sent, "B"), f"by each, in a ring{': ' * bool(sent)}{sent}"),
    ]
    if (hardware := scaling.hardware) is None:
        return rows
    speed = f"{si(hardware.flops)}FLOP/s and {si(hardware.bandwidth, 'B')}/s"
    computing = f"{scaling.compute_seconds:.3g} s computing"
    without_overlap = f"without overlap {scaling.seconds(overlap=False):.3g} s"
    return [
        *rows,
        ("time per step", f"{scaling.seconds():.3g} s", f"{computing}; {without_overlap}; at {speed}"),
        ("efficiency", f"{scaling.efficiency():.1%}", f"without overlap {scaling.efficiency(overlap=False):.1%}"),
    ]
