"""`regard info`: what a model costs, before it is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.tables import Json, Set, out, out_json

if TYPE_CHECKING:
    from rich.console import Console

    from regard.config import Config
    from regard.cost import Info
    from regard.recipe import Train

EXAMPLE = "regard info transformer-base --vocab 37000"


def command(
    what: Annotated[
        str | None, typer.Argument(metavar="RUN|PRESET|RECIPE", help="Left out: list presets and recipes.")
    ] = None,
    settings: Set = None,
    vocab: Annotated[int | None, typer.Option(min=4, help="Tokens of the vocabulary, for presets and recipes.")] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a source and of a target.")] = 32,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a training batch. (default: the recipe's, or 4096)")
    ] = None,
    beam: Annotated[int, typer.Option(min=1, help="Hypotheses per sentence in decoding.")] = 5,
    sentences: Annotated[int, typer.Option(min=1, help="Sentences decoded at once.")] = 32,
    json: Json = False,
) -> None:
    """Show parameters, FLOPs and memory of a model.

    Nothing is built, so models that would not fit this machine can be described too.
    """
    if what is None:
        _list()
        return
    from regard.cost import Workload, describe, measure_rate

    config, train = find_config(what, vocab, settings or [])
    load = Workload(length, batch_tokens or train.batch_tokens, sentences, beam)
    info = describe(config, load)
    stack = config.decoder or config.encoder
    assert stack is not None
    rate = measure_rate(stack.width)
    symbols = train.steps * train.accumulate * load.batch_tokens if train.steps else None
    if json:
        time = {"flops_per_second": rate, "training_per_million_tokens": info.training_seconds(1e6, rate)}
        out_json(
            {**info.to_json(), "time": time | ({"recipe": info.training_seconds(symbols, rate)} if symbols else {})}
        )
    else:
        _show(what, config, info, rate, symbols)


def find_config(what: str, vocab: int | None, settings: list[str]) -> tuple[Config, Train]:
    """The model that a run directory, a preset or a recipe means, with changed settings, and how it is trained."""
    from pathlib import Path

    from regard.cli.train import recipe_with
    from regard.cost import configure
    from regard.errors import UserError, closest
    from regard.presets import PRESETS
    from regard.recipe import Train, assign, recipe_names
    from regard.run import read_config

    if Path(what).is_dir():
        if settings or vocab:
            raise UserError("--set and --vocab change presets and recipes; a run is what it is")
        return read_config(Path(what)).model, Train()
    if what in PRESETS:
        tables = {"preset": what}
    elif what in recipe_names() or Path(what).suffix == ".toml":
        return configure(recipe_with(what, {}, settings), vocab, what)
    else:
        names = [*PRESETS, *recipe_names()]
        raise UserError(
            f"{what}: no run directory, preset or recipe{closest(what, names)}\n  known: {', '.join(names)}"
        )
    for setting in settings:
        assign(tables, setting)
    return configure(tables, vocab, what)


def _list() -> None:
    from regard.presets import PRESETS
    from regard.recipe import recipe_names

    for name in PRESETS:
        out(f"preset\t{name}")
    for name in recipe_names():
        out(f"recipe\t{name}")


def _show(what: str, config: Config, info: Info, rate: float, symbols: int | None) -> None:
    from rich.console import Console

    from regard.cost import si

    rows, costs = _rows(info), _costs(config, info, rate, symbols)
    console = Console()
    if console.is_terminal:
        _show_tables(console, what, rows, costs, info.total)
        return
    for depth, name, count in rows:
        out(f"{'  ' * depth}{name}\t{count:,}\t{si(count)}")
    for name, amount, remark in costs:
        out(f"{name}\t{amount}\t{remark}")


def _costs(config: Config, info: Info, rate: float, symbols: int | None) -> list[tuple[str, str, str]]:
    """What there is to pay, in the words of what the model reads and writes."""
    from regard.cost import duration, si

    load, pairs = info.load, config.encoder is not None and config.decoder is not None
    symbol = "patches" if config.patches is not None else "target tokens" if pairs else "tokens"
    if config.patches is not None:
        each = f"one of the {load.length} patches of an image, counting the first vector"
    else:
        each = f"{'a source and a target token' if pairs else 'a token'} at length {load.length}"
        each += f" after {config.decoder.memory} remembered" if config.has_memory and config.decoder is not None else ""
    costs = [
        (
            "FLOPs per token",
            si(info.flops_per_token),
            f"forward, {each}; training {si(3 * info.flops_per_token)}",
        ),
        (
            "memory, training",
            si(info.training, "B"),
            f"weights, gradients and Adam {si(info.optimizer, 'B')}; {load.batch_tokens:,} "
            f"{'tokens a side' if pairs else symbol} {si(info.activations, 'B')}",
        ),
    ]
    if config.decoder is None:
        costs.append(("memory, use", si(info.weights, "B"), "weights"))
    else:
        texts = f"{load.sentences} {'sentences' if pairs else 'texts'} with beam {load.beam}"
        remark = f"weights {si(info.weights, 'B')}; {texts} {si(info.cache, 'B')}"
        costs.append(("memory, decoding", si(info.decoding, "B"), remark))
    speed = f"at the {si(rate)}FLOP/s of this processor's matrix products: at best"
    costs.append(("time, training", duration(info.training_seconds(1e6, rate)), f"per million {symbol}, {speed}"))
    if symbols:
        costs.append(("", duration(info.training_seconds(symbols, rate)), f"for the recipe's {si(symbols)} {symbol}"))
    return costs


def _rows(info: Info) -> list[tuple[int, str, int]]:
    """The parts as an indented list, each group under its sum."""
    rows: list[tuple[int, str, int]] = []
    sums, told = info.subtotals(), set()
    for part, count in info.parameters.items():
        *groups, leaf = part.split(".")
        for depth in range(len(groups)):
            prefix = ".".join(groups[: depth + 1])
            if prefix not in told:
                told.add(prefix)
                rows.append((depth, groups[depth].replace("_", "-"), sums[prefix]))
        projected = leaf in ("query", "query_key", "key", "value")
        if leaf in ("query", "query_key"):
            joined = "query + key + value" if leaf == "query" else "query = key + value"
            rows.append((len(groups), joined, sums[".".join((*groups, "query_key_value"))]))
        tied = part == "prediction" and not count
        rows.append((len(groups) + projected, "prediction (tied)" if tied else leaf.replace("_", " "), count))
    return [*rows, (0, "total", info.total)]


def _show_tables(
    console: Console, what: str, rows: list[tuple[int, str, int]], costs: list[tuple[str, str, str]], total: int
) -> None:
    from rich.box import ROUNDED
    from rich.table import Table

    from regard.cost import si

    table = Table(title=what, title_justify="left", title_style="bold", header_style="dim", box=ROUNDED)
    for name in ("part", "parameters", "", "share"):
        table.add_column(name, justify="right" if name != "part" else "left", no_wrap=True)
    for depth, name, count in rows:
        if name == "total":
            table.add_section()
        style = "bold" if depth == 0 else "dim" if depth > 2 else ""
        table.add_row("  " * depth + name, f"{count:,}", si(count), f"{count / total:.1%}", style=style)
    console.print(table)
    below = Table(show_header=False, box=None, padding=(0, 1))
    below.add_column()
    below.add_column(justify="right", style="bold", no_wrap=True)
    below.add_column(style="dim")
    for row in costs:
        below.add_row(*row)
    console.print(below)
