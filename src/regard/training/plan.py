"""The decisions before training: budget, precision, preset, model config and number of processes.

Each is taken here once, reported with its reason, and saved in the recipe or the config of the run.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from regard.config import Config, parse
from regard.data.objectives import SENTINELS, context_of, first_sentinel
from regard.data.prepare import Prepared
from regard.device import cores, usable_precision
from regard.errors import UserError
from regard.presets import PRESETS, applicable_changes, merge, preset, refuse_unused
from regard.recipe import Recipe, Train
from regard.run import RunConfig
from regard.tasks import TASKS
from regard.training.checkpoint import Progress
from regard.training.loader import DataLoader
from regard.training.report import Reporter

Table = dict[str, Any]

DEFAULT_MINUTES = 10.0
MOST_VALIDATIONS = 40
FEWEST_VALIDATIONS = 10  # with a time budget, even if no epoch is ever completed
VALIDATION_SHARE = 0.1  # of the time, at most

FEW_TOKENS = 50_000  # of both sides, in all training examples
MANY_EXAMPLES = 100_000
WORTH_EXAMPLES = 1_000  # below, starting processes takes longer than they save
WORTH_STEPS = 200
WORTH_MINUTES = 0.5
LEAST_ROWS = 8  # of a batch, per process; fewer will do if they are long
LEAST_TOKENS = 256

MOST_PATCHES = 64  # that a patch size is chosen for
STACKS = {
    ("encoder", "decoder"): "an encoder and a decoder",
    ("encoder",): "an encoder without a decoder",
    ("decoder",): "a decoder without an encoder",
}


class Budget(NamedTuple):
    """What may be used up; the first to run out ends the run."""

    seconds: float | None
    steps: int | None
    epochs: int | None

    @classmethod
    def of(cls, train: Train) -> Budget:
        """The budget of a recipe; with none, ten minutes."""
        none = train.minutes is None and train.steps is None and train.epochs is None
        minutes = DEFAULT_MINUTES if none else train.minutes
        return cls(None if minutes is None else 60 * minutes, train.steps, train.epochs)

    def done(self, step: int, epochs: float, seconds: float) -> tuple[float, str]:
        """The part that is used up, from 0 to 1, and of what."""
        budgets = (step, self.steps, "steps"), (epochs, self.epochs, "epochs"), (seconds, self.seconds, "minutes")
        parts = [(used / budget if budget else 0.0, name) for used, budget, name in budgets]
        part, name = max(parts, key=lambda item: item[0])
        return min(1.0, part), name


def validation_due(every: int | None, steps_per_epoch: int, budget: Budget, progress: Progress) -> bool:
    """Whether to validate now: every so many steps, or about once per epoch, at most 40 times in a run.

    With a time budget, validation takes at most a tenth of the time, and comes at least ten times if that allows it.
    """
    steps, seconds = progress.step - progress.validated, progress.seconds - progress.validated_at
    if every is not None:
        return steps >= every
    if budget.seconds is None:
        total = min(budget.steps or math.inf, (budget.epochs or math.inf) * steps_per_epoch)
        return steps >= max(steps_per_epoch, math.ceil(total / MOST_VALIDATIONS))
    if steps == 0 or progress.validation_seconds > VALIDATION_SHARE * progress.seconds:
        return False
    epoch_over = steps >= steps_per_epoch and seconds >= budget.seconds / MOST_VALIDATIONS
    return epoch_over or seconds >= budget.seconds / FEWEST_VALIDATIONS


# The recipe


def complete_recipe(recipe: Recipe, prepared: Prepared[Any], device: torch.device, reporter: Reporter) -> Recipe:
    """Fill in what the recipe leaves open, and report it: device, budget, precision, preset, tokens."""
    train, text, name = recipe.train, recipe.text, recipe.preset
    changes: Table = {"device": device.type} if train.device == "auto" else {}
    if train.minutes is None and Budget.of(train).seconds is not None:
        changes["minutes"] = DEFAULT_MINUTES
        reporter.say(f"budget: {DEFAULT_MINUTES:g} minutes, since none is given")
    changes["precision"] = usable_precision(train.precision, device, reporter.say)
    tokens = {}
    if train.start_from is None:
        if name == "auto":
            name, reason = TASKS[recipe.task].preset or "", f"for task {recipe.task}"
            if not name:
                corpus = prepared.train
                tokens_of_both = int(corpus.source_lengths.sum() + corpus.target_lengths.sum())
                name, reason = choose_preset(len(corpus), tokens_of_both, device.type)
            reporter.say(f"preset: {name}, {reason}")
        if TASKS[recipe.task].reads != "images":
            sides = [side for side in ("source_tokens", "target_tokens") if getattr(text, side) == "auto"]
            tokens = {side: getattr(prepared.codec.config, side) for side in sides}
    return recipe.model_copy(
        update={"preset": name, "text": text.model_copy(update=tokens), "train": train.model_copy(update=changes)}
    )


def choose_preset(examples: int, tokens: int, device: str) -> tuple[str, str]:
    """A model for pairs that the data can fill and the machine can train -> name, reason."""
    size = f"{examples:,} training examples, {tokens:,} tokens"
    if tokens < FEW_TOKENS:
        return "transformer-tiny", f"little data ({size})"
    if examples >= MANY_EXAMPLES and device == "cuda":
        return "transformer-base", f"much data ({size}) and a GPU"
    if examples >= MANY_EXAMPLES:
        return "transformer-small", f"much data ({size}), but no GPU"
    return "transformer-small", size


def complete_processes(
    recipe: Recipe, loader: DataLoader, config: Config, device: torch.device, launched: int, reporter: Reporter
) -> Recipe:
    """Decide how many processes train; `launched` is how many a launcher has started."""
    train = recipe.train
    if launched > 1:
        workers, reason = launched, "as they were started"
    elif config.has_memory and not train.workers:
        workers, reason = 1, "its segment memory needs the text in order"
    else:
        first, examples = loader.step(0, 0), sum(map(len, loader.batches(0)))
        rows = max(1, examples // loader.batches_in(0))
        tokens = rows * first.all_tokens // first.examples
        workers, reason = choose_workers(train, device.type, cores(), examples, rows, tokens)
    if config.has_memory and workers > 1:
        raise UserError("train.workers: a model with segment memory is trained by one process")
    if not train.workers:
        reporter.say(f"processes: {workers}, {reason}")
    return recipe.model_copy(update={"train": train.model_copy(update={"workers": workers})})


def choose_workers(train: Train, device: str, cores: int, examples: int, rows: int, tokens: int) -> tuple[int, str]:
    """How many processes, and why; on a CPU, one-thread processes do more than one process with several threads.

    `rows` and `tokens` are those of a batch.
    """
    if train.workers:
        return train.workers, "as asked for"
    if device != "cpu":
        return 1, f"on {device}; for several GPUs use torchrun"
    if cores == 1:
        return 1, "one core"
    short = (train.steps or WORTH_STEPS) < WORTH_STEPS or (train.minutes or WORTH_MINUTES) < WORTH_MINUTES
    if examples < WORTH_EXAMPLES or short:
        return 1, "too little to do for more"
    workers = min(cores, max(1, rows // LEAST_ROWS, min(rows, tokens // LEAST_TOKENS)))
    if workers < cores:
        return workers, f"{cores} cores, but only {rows} examples per batch"
    return workers, "one per core"


# The model config


def check_model(recipe: Recipe, base: RunConfig | None) -> None:
    """Find mistakes in the settings of a model before its data is read."""
    names: tuple[str, ...] = (recipe.preset,)
    if base is None and recipe.preset == "auto":
        default = TASKS[recipe.task].preset
        names = (default,) if default else ("transformer-small", "transformer-base")
    errors = []
    for name in names:
        try:
            model_config(recipe.model_copy(update={"preset": name}), base, None)
            return
        except UserError as error:
            errors.append(error)
    raise errors[0]


def model_config(recipe: Recipe, base: RunConfig | None, prepared: Prepared[Any] | None) -> Config:
    """The model of a recipe: its preset, or the model of the run to start from, made to fit the data.

    Before the data is read `prepared` is None, and what only the data decides is made up.
    """
    changes, start = recipe.model, None if base is None else base.model
    needs = _needs(recipe, start, prepared)
    if prepared is None:
        changes = {key: value for key, value in changes.items() if key != "patches"}  # they depend on the images
    if start is not None:
        table = start.model_dump()
        _check_stacks(table, changes, recipe)
        filled = merge(table, needs)
        filled = merge(filled, applicable_changes(filled, changes))
        config = parse(Config, filled, f"model of {recipe.train.start_from}, changed")
    else:
        table = PRESETS.get(recipe.preset) or preset(recipe.preset).model_dump()  # which suggests a name
        _check_stacks(table, changes, recipe)
        sizes = {"source_vocab": 8000, "target_vocab": 8000}  # made up
        if prepared is not None:
            sizes = {side: needs.pop(side, getattr(prepared.codec, side)) for side in sizes}
        config = preset(recipe.preset, **sizes, changes=merge(needs, changes))
        if longer := _longer(config, recipe, prepared):
            config = preset(recipe.preset, **sizes, changes=merge(merge(needs, longer), changes))
    refuse_unused(table, changes)
    if prepared is not None:
        _check_fit(config, recipe, prepared)
    return config


def _check_stacks(table: Table, changes: Table, recipe: Recipe) -> None:
    table = merge(table, applicable_changes(table, changes))
    has = tuple(name for name in ("encoder", "decoder") if isinstance(table.get(name), dict))
    wanted = TASKS[recipe.task].stacks
    if has != wanted:
        raise UserError(f"{_which(recipe)}: training for {recipe.task} needs a model with {STACKS[wanted]}")


def _which(recipe: Recipe) -> str:
    return recipe.train.start_from or f"preset {recipe.preset}"


def _needs(recipe: Recipe, start: Config | None, prepared: Prepared[Any] | None) -> Table:
    """What the task and its data decide about a model."""
    task = TASKS[recipe.task]
    needs: Table = {}
    if task.labels:
        classes = 2 if prepared is None else len(prepared.labels)
        needs = {"output": "classes", "classes": classes, "output_bias": True}
    if prepared is None:
        return needs
    codec = prepared.codec
    if start is None:
        needs |= {"ids": codec.ids.model_dump(), "frame": codec.frame}
        if task.start != "sos":  # the default of presets, which some change
            needs["start"] = task.start
        if task.reads == "labelled":
            needs["pooler"] = True
    if task.name == "span" and first_sentinel(codec, start) is None:
        vocab = SENTINELS + max(codec.source_vocab, 0 if start is None else start.source_vocab)
        needs |= {"source_vocab": vocab, "target_vocab": vocab}
    if task.reads == "images" and (start is None or start.patches is None):
        channels, height, width = prepared.train.shape
        size = patch_size(height, width)
        needs["patches"] = {"height": height, "width": width, "channels": channels, "size": size}
        requested = recipe.model.get("patches", {}).get("size")
        size = requested if isinstance(requested, int) and requested > 0 else size
        needs["encoder"] = {"max_length": 1 + (height // size) * (width // size)}
    return needs


def patch_size(height: int, width: int) -> int:
    """The side of the patches that an image is cut into: the smallest, from 2, that makes few enough of them."""
    sides = [side for side in range(2, min(height, width) + 1) if height % side == width % side == 0]
    few = [side for side in sides if (height // side) * (width // side) <= MOST_PATCHES]
    return few[0] if few else sides[-1] if sides else 1


def _lengths(recipe: Recipe, prepared: Prepared[Any]) -> dict[str, int]:
    """The longest row that each stack has to read."""
    reads = TASKS[recipe.task].reads
    if reads == "text":
        return dict.fromkeys(("encoder", "decoder"), context_of(recipe.train))
    if reads == "images":
        return {}
    sides = {"encoder": "source_lengths", "decoder": "target_lengths"}
    corpora = prepared.train, prepared.valid
    return {name: max(int(getattr(corpus, side).max()) for corpus in corpora) for name, side in sides.items()}


def _longer(config: Config, recipe: Recipe, prepared: Prepared[Any] | None) -> Table:
    """Changes that let position tables grow to the longest row, unless the recipe sets their length."""
    lengths = {} if prepared is None else _lengths(recipe, prepared)
    return {
        name: {"max_length": lengths[name]}
        for name, stack in config.stacks.items()
        if stack.position == "learned"
        and stack.max_length < lengths.get(name, 0)
        and "max_length" not in (recipe.model.get(name) or {})
    }


def _check_fit(config: Config, recipe: Recipe, prepared: Prepared[Any]) -> None:
    """Raise UserError if the model cannot be trained for the task on this data."""
    task, which = TASKS[recipe.task], _which(recipe)
    images = task.reads == "images"
    if (config.patches is not None) != images:
        raise UserError(f"{which}: {'images are read by a model with patches' if images else 'reads images'}")
    if task.name == "masked" and not config.predicts_tokens:
        raise UserError(f"{which}: task masked needs a model that predicts tokens; add --set output=tokens")
    lengths = _lengths(recipe, prepared)
    for name, stack in config.stacks.items():
        most, longest = stack.max_positions, lengths.get(name, 0)
        if most is not None and longest > most:
            setting = "train.context" if task.reads == "text" else "data.max_length"
            raise UserError(
                f"{setting}: rows of {longest} tokens are more than the {most} positions of the {name}; "
                f"lower it, or raise model.{name}.max_length"
            )
    if config.patches is not None:
        shape = (config.patches.channels, config.patches.height, config.patches.width)
        if shape != prepared.train.shape:
            raise UserError(
                f"model.patches: the model reads images of (channels, height, width) {shape}, the file has "
                f"{prepared.train.shape}"
            )
