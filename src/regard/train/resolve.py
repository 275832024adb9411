"""Settling what a recipe leaves open, once the data is known, and saying so."""

from __future__ import annotations

from regard.config import Config
from regard.data.prepare import AnyPrepared, Prepared
from regard.errors import UserError
from regard.presets import TASK_PRESETS
from regard.settings import Recipe
from regard.train.budget import DEFAULT_MINUTES
from regard.train.choose import Choice, choose_preset, choose_workers
from regard.train.feed import Feed
from regard.train.machine import choose_device, cores, usable_precision
from regard.train.talk import Talk


def resolve(recipe: Recipe, prepared: AnyPrepared, talk: Talk) -> Recipe:
    """Fill in what the recipe leaves open, and say so."""
    train, text = recipe.train, recipe.text
    device = choose_device(train.device)
    changes: dict[str, object] = {"device": device.type} if train.device == "auto" else {}
    if train.minutes is None and train.steps is None and train.epochs is None:
        changes["minutes"] = DEFAULT_MINUTES
        talk.say(f"budget: {DEFAULT_MINUTES:g} minutes, since none is given")
    changes["precision"] = usable_precision(train.precision, device, talk.say)
    name = recipe.preset
    if name == "auto" and train.start_from is None:
        if isinstance(prepared, Prepared) and recipe.task == "pairs":
            corpus = prepared.train
            symbols = int(corpus.source_lengths.sum() + corpus.target_lengths.sum())
            name, reason = choose_preset(len(corpus), symbols, device.type)
        else:
            name, reason = TASK_PRESETS[recipe.task], f"for task {recipe.task}"
        talk.say(f"preset: {name}, {reason}")
    tokens = {}
    if train.start_from is None and recipe.task != "image":
        found = prepared.codec.config
        sides = ("source_tokens", "target_tokens")
        tokens = {side: getattr(found, side) for side in sides if getattr(text, side) == "auto"}
    return recipe.model_copy(
        update={
            "preset": name,
            "text": text.model_copy(update=tokens),
            "train": train.model_copy(update=changes),
        }
    )


def share_out(recipe: Recipe, feed: Feed, config: Config, talk: Talk, processes: int) -> Recipe:
    """Decide how many processes train."""
    train = recipe.train
    if processes > 1:
        chosen = Choice(str(processes), "as they were started")
    elif config.reads_on and not train.workers:
        chosen = Choice("1", "the model remembers the text it has read, in order")
    else:
        first, examples = feed.portion(0, 0), sum(map(len, feed.order(0)))
        rows = max(1, examples // feed.batches_in(0))
        symbols = rows * first.symbols // first.examples
        chosen = choose_workers(train, choose_device(train.device).type, cores(), examples, rows, symbols)
    if config.reads_on and int(chosen.value) > 1:
        raise UserError("train.workers: a model that remembers the text it has read is trained by one process")
    if not train.workers:
        talk.say(f"processes: {chosen.value}, {chosen.reason}")
    return recipe.model_copy(update={"train": train.model_copy(update={"workers": int(chosen.value)})})
