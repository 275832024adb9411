"""The plan of a run: budget, precision, metric, model, batch, processes, learning rate, warm-up.

Each is decided here once, so that it fits the data and the budget, reported, and saved in the recipe of the run:
resuming does not plan again.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.config import Config, parse
from regard.data.images import Images
from regard.data.objectives import SENTINELS, context_of, first_sentinel
from regard.data.prepare import Prepared
from regard.data.store import Corpus
from regard.device import bf16_problem, usable_precision
from regard.errors import UserError, plural
from regard.metrics import FITTING, content_of
from regard.model import Model
from regard.parallel.cores import cores
from regard.presets import PRESETS, applicable_changes, merge, preset, refuse_unused
from regard.recipe import Recipe, Train
from regard.run import RunConfig
from regard.tasks import TASKS, Task, infer_task
from regard.training.checkpoint import Progress
from regard.training.distributed import ProcessGroup
from regard.training.loader import DataLoader, make_loader
from regard.training.report import Reporter
from regard.training.step import Stepper

Table = dict[str, Any]

MOST_PATCHES = 64  # that a patch size is chosen for
STACKS = {
    ("encoder", "decoder"): "an encoder and a decoder",
    ("encoder",): "an encoder without a decoder",
    ("decoder",): "a decoder without an encoder",
}


def check_model(recipe: Recipe, base: RunConfig | None) -> None:
    """Find mistakes in the settings of a model before its data is read."""
    names = TASKS[recipe.task].presets if base is None and recipe.preset == "auto" else (recipe.preset,)
    errors = []
    for name in reversed(names):
        try:
            model_config(recipe.model_copy(update={"preset": name}), base, None)
            return
        except UserError as error:
            errors.append(error)
    raise errors[-1]


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
    if start is None and task.seq2seq and not codec.one_vocabulary:  # of presets that share; a recipe may insist
        needs["share_embeddings"] = False
    if start is None:
        needs |= {"ids": codec.ids.model_dump(), "frame": codec.frame}
        if task.start != "sos":  # the default of presets, which some change
            needs["start"] = task.start
        if task.reads == "labelled":
            needs["pooler"] = True
    if task.name == "span" and first_sentinel(codec, start) is None:
        vocab = SENTINELS + max(codec.source_vocab, 0 if start is None else start.source_vocab)
        needs |= {"source_vocab": vocab, "target_vocab": vocab}
    if task.reads == "images" and (start is None or infer_task(start) != "image"):
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
    return {name: max(getattr(corpus, side).longest for corpus in corpora) for name, side in sides.items()}


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
    if (infer_task(config) == "image") != images:
        raise UserError(f"{which}: {'images are read by a model with patches' if images else 'reads images'}")
    if task.name == "masked" and not config.predicts_tokens:
        raise UserError(f"{which}: task masked needs a model that predicts tokens; add --set output=tokens")
    if config.share_embeddings and not prepared.codec.one_vocabulary:
        raise UserError(
            f"{which}: share_embeddings needs one vocabulary for both sides, and there are two; "
            "add --set text.shared=true, or --set share_embeddings=false"
        )
    lengths = _lengths(recipe, prepared)
    for name, stack in config.stacks.items():
        most, longest = stack.max_positions, lengths.get(name, 0)
        if most is not None and longest > most:
            setting = "train.context" if task.reads == "text" else "data.max_length"
            raise UserError(
                f"{setting}: rows of {longest} tokens are more than the {most} positions of the {name}; "
                f"lower it, or raise model.{name}.max_length"
            )
    if images:
        patches = config.image_patches
        shape = (patches.channels, patches.height, patches.width)
        if shape != prepared.train.shape:
            raise UserError(
                f"model.patches: the model reads images of (channels, height, width) {shape}, the file has "
                f"{prepared.train.shape}"
            )


DEFAULT_MINUTES = 10.0
MOST_VALIDATIONS = 40
FEWEST_VALIDATIONS = 10  # with a time budget, even if no epoch is ever completed
VALIDATION_SHARE = 0.1  # of the time, at most

# A preset of pairs is considered if the training examples have so many tokens, both sides together.
TOKENS_NEEDED = (0, 50_000, 400_000, 2_000_000)
ENOUGH_EPOCHS, ENOUGH_STEPS = 8, 20_000  # either is enough for a model of that size
# Expect little from fewer steps, or from fewer examples seen, unless there are no more of them.
FEW_STEPS, FEW_EXAMPLES = 200, 100_000

BATCH_EXAMPLES, BATCH_TOKENS = 64, 1536  # the smaller of the two
TEXT_TOKENS, MASKED_TEXT_TOKENS = 1536, 4096  # of plain text: every token is predicted, or some are
MANY_STEPS, MOST_ENLARGED = 8_000, 4

WARMUP_SHARE, MOST_WARMUP = 1 / 8, 4_000
RATE = 0.021  # times width^-0.5
TUNING_RATE = 3e-4  # for all weights of a trained model
EMA_SHARE, LONGEST_EMA = 0.2, 0.9995  # the window of the moving average, as a share of the steps

TRIED_STEPS, TRIED_SECONDS = 6, 4.0  # to measure the time of a step
TRAINED_SHARE = 0.75  # of the time; the rest goes into validation and into waiting for each other
WORTH_BF16 = 1.0  # minutes; the trial takes some seconds

WORTH_EXAMPLES = 1_000  # below, starting processes takes longer than they save
WORTH_STEPS = 200
WORTH_MINUTES = 0.5
LEAST_ROWS = 8  # of a batch, per process; fewer will do if they are long
LEAST_TOKENS = 256


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


# What does not depend on the model


def complete_recipe(recipe: Recipe, prepared: Prepared[Any], device: torch.device, reporter: Reporter) -> Recipe:
    """Fill in what the recipe leaves open and needs no model: device, budget, precision, metric, tokens, batch."""
    task, train, text = TASKS[recipe.task], recipe.train, recipe.text
    changes: Table = {"device": device.type} if train.device == "auto" else {}
    if train.minutes is None and Budget.of(train).seconds is not None:
        changes["minutes"] = DEFAULT_MINUTES
        reporter.say(f"budget: {DEFAULT_MINUTES:g} minutes, since none is given")
    minutes = changes.get("minutes", train.minutes)
    if "precision" in train.model_fields_set:
        changes["precision"] = usable_precision(train.precision, device, reporter.say)
    elif minutes is not None and minutes >= WORTH_BF16 and not bf16_problem(device):
        changes["precision"] = "bf16"  # more steps in the same time
        reporter.say("precision: bf16 for matrix products, which is faster here")
    if task.reads == "pairs" and "metric" not in train.model_fields_set:
        references = [example.target or "" for example in prepared.valid_examples]
        changes["metric"] = FITTING[content_of(references, prepared.codec.config.target_tokens)][0]
    if not {"batch_tokens", "batch_examples"} & train.model_fields_set:
        changes |= choose_batch(task, prepared)
    sides = [side for side in ("source_tokens", "target_tokens") if getattr(text, side) == "auto"]
    if train.start_from is not None or task.reads == "images":
        sides = []
    tokens = {side: getattr(prepared.codec.config, side) for side in sides}
    return recipe.model_copy(update={"text": text.model_copy(update=tokens), "train": train.model_copy(update=changes)})


def choose_batch(task: Task, prepared: Prepared[Any]) -> Table:
    """The size of a batch: small, for a short run gains more from many steps than from exact gradients."""
    if task.reads == "images":
        return {}  # the task has a default
    if task.reads == "text":
        return {"batch_tokens": TEXT_TOKENS if task.name == "lm" else MASKED_TEXT_TOKENS}
    if BATCH_EXAMPLES * prepared.train.mean_length <= BATCH_TOKENS:
        return {"batch_examples": BATCH_EXAMPLES}
    return {"batch_tokens": BATCH_TOKENS}


# The plan


class Plan(NamedTuple):
    """A model and how to train it within the budget."""

    recipe: Recipe
    config: Config
    loader: DataLoader
    reason: str  # for the number of processes
    steps: int  # expected
    seconds: float | None  # per step, if they were measured

    @property
    def epochs(self) -> float:
        return self.steps * self.recipe.train.accumulate / self.loader.batches_in(0)


def plan_run(
    recipe: Recipe,
    base: RunConfig | None,
    prepared: Prepared[Any],
    device: torch.device,
    launched: int,
    reporter: Reporter,
) -> Plan:
    """Fill in what a recipe leaves open, so that it fits the data and the budget, and report it.

    Of the presets of the task, the largest is taken that the data can fill and that passes over the data often enough.
    `launched` is how many processes a launcher has started.
    """
    given = recipe.train
    recipe = complete_recipe(recipe, prepared, device, reporter)
    names = [recipe.preset]
    if recipe.preset == "auto" and base is None:
        names = presets_for(TASKS[recipe.task], prepared.train, device.type)
    for name in names:
        plan = _try_preset(recipe.model_copy(update={"preset": name}), base, prepared, device, launched)
        if plan.epochs >= ENOUGH_EPOCHS or plan.steps >= ENOUGH_STEPS:
            break
    if len(names) > 1 or recipe.preset != plan.recipe.preset:
        reporter.say(f"preset: {plan.recipe.preset}, {_size(prepared.train)}")
    if not given.workers:
        reporter.say(f"processes: {plan.recipe.train.workers}, {plan.reason}")
    plan = _enlarge_batch(plan, given, prepared)
    train = complete_rates(given, plan)
    plan = plan._replace(recipe=plan.recipe.model_copy(update={"train": train}))
    for line in describe_plan(plan, given):
        reporter.say(line)
    return plan


def presets_for(task: Task, data: Any, device: str) -> list[str]:
    """The presets of a task that the data can fill and the device can train, from large to small."""
    if task.reads != "pairs":
        return list(reversed(task.presets))
    fitting = [name for name, needed in zip(task.presets, TOKENS_NEEDED, strict=True) if data.tokens >= needed]
    return fitting[: len(task.presets) - (device == "cpu")][::-1]


def _size(data: Any) -> str:
    if isinstance(data, Corpus):
        return f"for {data.size:,} training examples of {data.tokens:,} tokens"
    return f"for {data.size:,} {'images' if isinstance(data, Images) else 'characters'}"


def _try_preset(
    recipe: Recipe, base: RunConfig | None, prepared: Prepared[Any], device: torch.device, launched: int
) -> Plan:
    """A model with its data loader and processes, and how many steps the budget is expected to allow."""
    config = model_config(recipe, base, prepared)
    loader = make_loader(recipe, prepared, config)
    recipe, reason = complete_processes(recipe, loader, config, device, launched)
    budget = Budget.of(recipe.train)
    limits = [budget.steps, budget.epochs and budget.epochs * math.ceil(loader.batches_in(0) / recipe.train.accumulate)]
    seconds = None
    if budget.seconds is not None:
        seconds = measure_step(recipe, config, loader, device)
        limits.append(max(1, int(TRAINED_SHARE * budget.seconds / seconds)))
    return Plan(recipe, config, loader, reason, min(limit for limit in limits if limit), seconds)


def measure_step(recipe: Recipe, config: Config, loader: DataLoader, device: torch.device) -> float:
    """Seconds of a training step, as one of the run's processes takes it, on batches from all over an epoch."""
    train, threads, seconds = recipe.train, torch.get_num_threads(), []
    batches = np.linspace(0, loader.batches_in(0) - 1, TRIED_STEPS + 1).astype(int)
    with torch.random.fork_rng(devices=[]):
        if device.type == "cpu" and train.workers > 1:
            torch.set_num_threads(max(1, cores() // train.workers))
        try:
            stepper = Stepper(Model(config).to(device), train, ProcessGroup(device=device))
            for number, batch in enumerate(batches, start=1):
                shares = loader.step(0, int(batch), 0, train.workers).shares
                began = time.monotonic()
                stepper.objective.segment_memory = None
                *_, norm = stepper.backward(number, shares)
                stepper.update(number, 0.0, norm)
                seconds.append(time.monotonic() - began)
                if sum(seconds) > TRIED_SECONDS and number > 1:
                    break
        finally:
            torch.set_num_threads(threads)
    return statistics.mean(seconds[1:])  # the first also allocates memory


def _enlarge_batch(plan: Plan, given: Train, prepared: Prepared[Any]) -> Plan:
    """With time for very many steps, larger batches instead: their gradients are more exact, their products faster."""
    factor = min(MOST_ENLARGED, plan.steps // MANY_STEPS)
    train = plan.recipe.train
    key = "batch_examples" if train.batch_examples else "batch_tokens"
    chosen = not {"batch_tokens", "batch_examples"} & given.model_fields_set
    if factor < 2 or not chosen or plan.seconds is None:
        return plan
    train = train.model_copy(update={key: factor * getattr(train, key)})
    recipe = plan.recipe.model_copy(update={"train": train})
    loader = make_loader(recipe, prepared, plan.config)
    return plan._replace(recipe=recipe, loader=loader, steps=plan.steps // factor, seconds=plan.seconds * factor)


def complete_rates(given: Train, plan: Plan) -> Train:
    """Learning rate, warm-up and moving average for the expected number of steps, where they are not given."""
    train = plan.recipe.train
    changes: Table = {}
    if "warmup" not in given.model_fields_set:
        changes["warmup"] = max(1, min(MOST_WARMUP, round(WARMUP_SHARE * plan.steps)))
    if "lr" not in given.model_fields_set:
        changes["lr"] = choose_rate(train, plan.config.top.width)
    if "ema" not in given.model_fields_set and not train.l0 and plan.steps >= FEW_STEPS:
        changes["ema"] = min(LONGEST_EMA, round(1 - 1 / (EMA_SHARE * plan.steps), 5))
    return train.model_copy(update=changes)


def choose_rate(train: Train, width: int) -> float:
    """The peak of the learning rate."""
    if train.schedule == "noam":
        return 1.0
    if train.start_from is not None and not train.lora:
        return TUNING_RATE
    return float(f"{RATE * width**-0.5:.2g}")


def describe_plan(plan: Plan, given: Train) -> list[str]:
    """The plan in words, with warnings if the budget is too small for the data, or a given setting for the budget."""
    train = plan.recipe.train
    about = "" if plan.seconds is None else "about "
    batch = plural(train.batch_examples, "example") if train.batch_examples else plural(train.batch_tokens, "token")
    epochs = plural(plan.epochs, "epoch", ".2g" if plan.epochs < 10 else ",.0f")
    lines = [
        f"plan: {about}{plural(plan.steps, 'step')} of {batch}, {epochs}; learning rate {train.lr:g}, "
        f"warm-up {train.warmup}" + (f", moving average {train.ema:g}" if train.ema else "")
    ]
    if train.warmup >= plan.steps / 2 and "warmup" in given.model_fields_set:
        lines.append(
            f"warning: train.warmup is {train.warmup:,} of {about}{plural(plan.steps, 'step')}, so the learning rate "
            "hardly reaches its peak; leave it out, and it is planned"
        )
    examples = plan.loader.examples
    needed = max(FEW_STEPS / plan.steps, min(examples, FEW_EXAMPLES) / (plan.epochs * examples))
    if needed > 1:
        lines.append(f"warning: the budget is too small for this data{_enough(train, plan, needed)}")
    return lines


def _enough(train: Train, plan: Plan, factor: float) -> str:
    """What would suffice, in the words of the budget that runs out first."""
    for noun, given, planned in (("step", train.steps, plan.steps), ("epoch", train.epochs, plan.epochs)):
        if given is not None and planned >= given:
            return f": {plural(given, noun)}; with {plural(math.ceil(given * factor), noun)} it could learn something"
    minutes = plural(math.ceil((train.minutes or DEFAULT_MINUTES) * factor), "minute")
    return f"; expect little from a model that is trained for less than about {minutes} on this machine"


def complete_processes(
    recipe: Recipe, loader: DataLoader, config: Config, device: torch.device, launched: int
) -> tuple[Recipe, str]:
    """Decide how many processes train -> the recipe with them, and the reason."""
    train = recipe.train
    if launched > 1:
        workers, reason = launched, "as they were started"
    elif config.has_memory and not train.workers:
        workers, reason = 1, "its segment memory needs the text in order"
    else:
        first, examples = loader.step(0, 0), loader.examples
        rows = max(1, examples // loader.batches_in(0))
        tokens = rows * first.all_tokens // first.examples
        workers, reason = choose_workers(train, device.type, cores(), examples, rows, tokens)
    if config.has_memory and workers > 1:
        raise UserError("train.workers: a model with segment memory is trained by one process")
    return recipe.model_copy(update={"train": train.model_copy(update={"workers": workers})}), reason


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
