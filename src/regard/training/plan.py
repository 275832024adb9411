"""The plan of a run: each open setting is decided once, to fit the data and the budget, and printed."""

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
from regard.metrics import FITTING, MEANING, content_of
from regard.model import Model
from regard.parallel.cores import cores
from regard.parallel.ranks import ProcessGroup
from regard.presets import PRESETS, merge, preset, refuse_unused, with_changes
from regard.recipe import Recipe, Train
from regard.run import RunConfig
from regard.tasks import TASKS, Task, infer_task
from regard.training.loader import DataLoader, make_loader
from regard.training.report import Reporter
from regard.training.step import Stepper

Table = dict[str, Any]

MAX_PATCHES = 64  # per image, for the automatic patch size
STACKS = {
    ("encoder", "decoder"): "an encoder and a decoder",
    ("encoder",): "an encoder without a decoder",
    ("decoder",): "a decoder without an encoder",
}


def check_model(recipe: Recipe, base: RunConfig | None) -> None:
    """Report mistakes in the model settings before the data is read; some preset of the task must accept them."""
    names = TASKS[recipe.task].presets if base is None and recipe.preset == "auto" else (recipe.preset,)
    for name in reversed(names):
        try:
            model_config(recipe.model_copy(update={"preset": name}), base, None)
            return
        except UserError:
            if name == names[0]:
                raise


def model_config(recipe: Recipe, base: RunConfig | None, prepared: Prepared[Any] | None) -> Config:
    """The model of a recipe: its preset or the model of the base run, adjusted to the data if it is prepared."""
    changes = recipe.model
    start = None if base is None else base.model
    needs = _needs(recipe, start, prepared)
    if prepared is None:
        changes = {key: value for key, value in changes.items() if key != "patches"}  # depends on the images
    if start is not None:
        table = start.model_dump()
        _check_stacks(table, changes, recipe)
        filled = with_changes(merge(table, needs), changes)
        config = parse(Config, filled, f"model of {recipe.train.start_from}, changed")
    else:
        table = PRESETS.get(recipe.preset) or preset(recipe.preset).model_dump()  # raises, with a suggestion
        _check_stacks(table, changes, recipe)
        sizes = {"source_vocab": 8000, "target_vocab": 8000}  # replaced when the data is prepared
        if prepared is not None:
            sizes = {side: needs.pop(side, getattr(prepared.codec, side)) for side in sizes}
        config = preset(recipe.preset, **sizes, changes=merge(needs, changes))
        if prepared is not None and (longer := _longer(config, recipe, prepared)):
            config = preset(recipe.preset, **sizes, changes=merge(merge(needs, longer), changes))
    refuse_unused(table, changes)
    if prepared is not None:
        _check_fit(config, recipe, prepared)
    return config


def _check_stacks(table: Table, changes: Table, recipe: Recipe) -> None:
    table = with_changes(table, changes)
    stacks = tuple(name for name in ("encoder", "decoder") if isinstance(table.get(name), dict))
    required = TASKS[recipe.task].stacks
    if stacks != required:
        raise UserError(f"{_name(recipe)}: training for {recipe.task} needs a model with {STACKS[required]}")


def _name(recipe: Recipe) -> str:
    return recipe.train.start_from or f"preset {recipe.preset}"


def _needs(recipe: Recipe, start: Config | None, prepared: Prepared[Any] | None) -> Table:
    """The fields of a model config that the task and its data determine."""
    task = TASKS[recipe.task]
    needs: Table = {}
    if task.labels:
        classes = 2 if prepared is None else len(prepared.labels)
        needs = {"output": "classes", "classes": classes, "output_bias": True}
    if prepared is None:
        return needs
    codec = prepared.codec
    if start is None and task.seq2seq and not codec.one_vocabulary:  # a default that the recipe may override
        needs["share_embeddings"] = False
    if start is None:
        needs |= {"ids": codec.ids.model_dump(), "frame": codec.frame}
        if task.start != "sos":  # otherwise the preset decides
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
    """The smallest side of square patches, at least 2, that gives at most MAX_PATCHES per image."""
    sides = [side for side in range(2, min(height, width) + 1) if height % side == width % side == 0]
    few = [side for side in sides if (height // side) * (width // side) <= MAX_PATCHES]
    return few[0] if few else sides[-1] if sides else 1


def _lengths(recipe: Recipe, prepared: Prepared[Any]) -> dict[str, int]:
    """The longest input of each stack, in tokens."""
    reads = TASKS[recipe.task].reads
    if reads == "text":
        return dict.fromkeys(("encoder", "decoder"), context_of(recipe.train))
    if reads == "images":
        return {}
    sides = {"encoder": "source_lengths", "decoder": "target_lengths"}
    corpora = prepared.train, prepared.valid
    return {name: max(getattr(corpus, side).longest for corpus in corpora) for name, side in sides.items()}


def _longer(config: Config, recipe: Recipe, prepared: Prepared[Any]) -> Table:
    """Enlarge position tables to the longest input, unless the recipe sets their length."""
    lengths = _lengths(recipe, prepared)
    return {
        name: {"max_length": lengths[name]}
        for name, stack in config.stacks.items()
        if stack.position == "learned"
        and stack.max_length < lengths.get(name, 0)
        and "max_length" not in (recipe.model.get(name) or {})
    }


def _check_fit(config: Config, recipe: Recipe, prepared: Prepared[Any]) -> None:
    """Raise UserError if the model cannot be trained for the task on this data."""
    task = TASKS[recipe.task]
    name = _name(recipe)
    images = task.reads == "images"
    if (infer_task(config) == "image") != images:
        raise UserError(f"{name}: {'images need a model with patches' if images else 'reads images'}")
    if task.name == "masked" and not config.predicts_tokens:
        raise UserError(f"{name}: task masked needs a model that predicts tokens; set output=tokens")
    if config.share_embeddings and not prepared.codec.one_vocabulary:
        advice = "set text.shared=true or share_embeddings=false"
        raise UserError(f"{name}: share_embeddings needs one vocabulary for both sides, but there are two; {advice}")
    lengths = _lengths(recipe, prepared)
    for side, stack in config.stacks.items():
        limit = stack.max_positions
        longest = lengths.get(side, 0)
        if limit is not None and longest > limit:
            setting = "train.context" if task.reads == "text" else "data.max_length"
            rows = f"rows of {longest} tokens do not fit into the {limit} positions of the {side}"
            raise UserError(f"{setting}: {rows}; lower it, or raise model.{side}.max_length")
    if images:
        patches = config.image_patches
        shape = (patches.channels, patches.height, patches.width)
        if shape != prepared.train.shape:
            expected = f"the model is for images of (channels, height, width) {shape}"
            raise UserError(f"model.patches: {expected}, the file has {prepared.train.shape}")


DEFAULT_MINUTES = 10.0

# Minimum number of training tokens, source and target, for each preset of the task `pairs`
TOKENS_NEEDED = (0, 50_000, 400_000, 2_000_000)
# A preset is chosen if the budget allows this many epochs or steps.
ENOUGH_EPOCHS = 8
ENOUGH_STEPS = 20_000
# A warning is printed for fewer steps, or for fewer examples unless they are an epoch.
FEW_STEPS = 200
FEW_EXAMPLES = 100_000

# Batch sizes. For pairs, the smaller of the first two batches.
BATCH_EXAMPLES = 64
BATCH_TOKENS = 1536
TEXT_TOKENS = 1536  # plain text whose tokens are all predicted
MASKED_TEXT_TOKENS = 4096  # plain text, of which a part is predicted
MANY_STEPS = 8_000  # batches are enlarged if there is time for more
MAX_ENLARGEMENT = 4

WARMUP_SHARE = 1 / 8  # of the steps
MAX_WARMUP = 4_000  # steps
RATE = 0.021  # learning rate times the square root of the width
TUNING_RATE = 3e-4  # learning rate for a trained model without adapters
EMA_SHARE = 0.2  # window of the moving average, as a share of the steps
MAX_EMA = 0.9995

# Measurement of the time of a step
TRIAL_STEPS = 6
TRIAL_SECONDS = 4.0
TRAINING_SHARE = 0.75  # of the time; the rest is validation and waiting for other processes
MIN_MINUTES_BF16 = 1.0  # testing bf16 takes some seconds

# With less work, starting several processes takes longer than it saves.
MIN_EXAMPLES = 1_000
MIN_STEPS = 200
MIN_MINUTES = 0.5
# Minimum size of the batch of a process; one of the two limits is enough.
MIN_ROWS = 8
MIN_TOKENS = 256


class Budget(NamedTuple):
    """The limits of a run, which ends when the first one is reached."""

    seconds: float | None
    steps: int | None
    epochs: int | None

    @classmethod
    def of(cls, train: Train) -> Budget:
        """The budget of a recipe; ten minutes if it has no limit."""
        unlimited = train.minutes is None and train.steps is None and train.epochs is None
        minutes = DEFAULT_MINUTES if unlimited else train.minutes
        return cls(None if minutes is None else 60 * minutes, train.steps, train.epochs)

    def done(self, step: int, epochs: float, seconds: float) -> tuple[float, str]:
        """The used share of the budget (0 to 1), and the name of the limit with the largest share."""
        budgets = (step, self.steps, "steps"), (epochs, self.epochs, "epochs"), (seconds, self.seconds, "minutes")
        parts = [(used / budget if budget else 0.0, name) for used, budget, name in budgets]
        part, name = max(parts, key=lambda item: item[0])
        return min(1.0, part), name


def complete_recipe(recipe: Recipe, prepared: Prepared[Any], device: torch.device, reporter: Reporter) -> Recipe:
    """Fill in open settings that need no model: device, budget, precision, metric, tokens, batch."""
    task = TASKS[recipe.task]
    train = recipe.train
    text = recipe.text
    changes: Table = {"device": device.type} if train.device == "auto" else {}
    if train.minutes is None and Budget.of(train).seconds is not None:
        changes["minutes"] = DEFAULT_MINUTES
        reporter.say(f"budget: {DEFAULT_MINUTES:g} minutes (the default)")
    minutes = changes.get("minutes", train.minutes)
    if "precision" in train.model_fields_set:
        changes["precision"] = usable_precision(train.precision, device, reporter.say)
    elif minutes is not None and minutes >= MIN_MINUTES_BF16 and not bf16_problem(device):
        changes["precision"] = "bf16"  # more steps in the same time
        reporter.say("precision: bf16 for matrix products, which is faster on this machine")
    if task.reads == "pairs" and "metric" not in train.model_fields_set:
        references = [example.target or "" for example in prepared.valid_examples]
        changes["metric"] = FITTING[content_of(references, prepared.codec.config.target_tokens)][0]
    if meaning := MEANING.get(changes.get("metric", train.metric)):
        reporter.say(f"metric: {changes.get('metric', train.metric)}, the {meaning}")
    if not {"batch_tokens", "batch_examples"} & train.model_fields_set:
        changes |= _batch_size(task, prepared)
    sides = [side for side in ("source_tokens", "target_tokens") if getattr(text, side) == "auto"]
    if train.start_from is not None or task.reads == "images":
        sides = []
    tokens = {side: getattr(prepared.codec.config, side) for side in sides}
    return recipe.model_copy(update={"text": text.model_copy(update=tokens)}).with_train(**changes)


def _batch_size(task: Task, prepared: Prepared[Any]) -> Table:
    """Small batches, because short runs gain more from many steps than from exact gradients."""
    if task.reads == "images":
        return {}  # the default of the task
    if task.reads == "text":
        return {"batch_tokens": TEXT_TOKENS if task.name == "lm" else MASKED_TEXT_TOKENS}
    if BATCH_EXAMPLES * prepared.train.mean_length <= BATCH_TOKENS:
        return {"batch_examples": BATCH_EXAMPLES}
    return {"batch_tokens": BATCH_TOKENS}


class Plan(NamedTuple):
    """A model and how it is trained within the budget."""

    recipe: Recipe
    config: Config
    loader: DataLoader
    reason: str  # for the number of processes
    steps: int  # expected number
    seconds: float | None  # per step; measured if the budget limits the time

    @property
    def epochs(self) -> float:
        return self.steps * self.recipe.train.accumulate / len(self.loader.batches(0))


def plan_run(
    recipe: Recipe,
    base: RunConfig | None,
    prepared: Prepared[Any],
    device: torch.device,
    launched: int,
    reporter: Reporter,
) -> Plan:
    """Fill in the open settings; the preset is the largest with enough data and time. `launched` counts processes."""
    request = recipe.train
    recipe = complete_recipe(recipe, prepared, device, reporter)
    names = [recipe.preset]
    if recipe.preset == "auto" and base is None:
        names = presets_for(TASKS[recipe.task], prepared.train, device.type)
    for name in names:
        plan = _try_preset(recipe.model_copy(update={"preset": name}), base, prepared, device, launched)
        if plan.epochs >= ENOUGH_EPOCHS or plan.steps >= ENOUGH_STEPS:
            break
    if len(names) > 1 or recipe.preset != plan.recipe.preset:
        data = prepared.train
        amount = f"{data.size:,} {'images' if isinstance(data, Images) else 'characters'}"
        if isinstance(data, Corpus):
            amount = f"{data.size:,} training examples of {data.tokens:,} tokens"
        reporter.say(f"preset: {plan.recipe.preset}, for {amount}")
    if not request.workers:
        reporter.say(f"processes: {plan.recipe.train.workers}, {plan.reason}")
    plan = _enlarge_batch(plan, request, prepared)
    plan = plan._replace(recipe=plan.recipe.with_train(**planned_rates(request, plan)))
    for line in describe_plan(plan, request):
        reporter.say(line)
    return plan


def presets_for(task: Task, data: Any, device: str) -> list[str]:
    """The presets of a task for this amount of data and this device, from large to small."""
    if task.reads != "pairs":
        return list(reversed(task.presets))
    fitting = [name for name, needed in zip(task.presets, TOKENS_NEEDED, strict=True) if data.tokens >= needed]
    return fitting[: len(task.presets) - (device == "cpu")][::-1]


def _try_preset(
    recipe: Recipe, base: RunConfig | None, prepared: Prepared[Any], device: torch.device, launched: int
) -> Plan:
    """A plan with this preset, without learning rate, warm-up and moving average."""
    config = model_config(recipe, base, prepared)
    loader = make_loader(recipe, prepared, config)
    recipe, reason = complete_processes(recipe, loader, config, device, launched)
    budget = Budget.of(recipe.train)
    limits = [
        budget.steps,
        budget.epochs and budget.epochs * math.ceil(len(loader.batches(0)) / recipe.train.accumulate),
    ]
    seconds = None
    if budget.seconds is not None:
        seconds = measure_step(recipe, config, loader, device)
        limits.append(max(1, int(TRAINING_SHARE * budget.seconds / seconds)))
    return Plan(recipe, config, loader, reason, min(limit for limit in limits if limit), seconds)


def measure_step(recipe: Recipe, config: Config, loader: DataLoader, device: torch.device) -> float:
    """Seconds per training step of one of the run's processes, on batches spread over an epoch."""
    train = recipe.train
    threads = torch.get_num_threads()
    seconds = []
    batches = np.linspace(0, len(loader.batches(0)) - 1, TRIAL_STEPS + 1).astype(int)
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
                if sum(seconds) > TRIAL_SECONDS and number > 1:
                    break
        finally:
            torch.set_num_threads(threads)
    return statistics.mean(seconds[1:])  # without the first, which allocates memory


def _enlarge_batch(plan: Plan, request: Train, prepared: Prepared[Any]) -> Plan:
    """Enlarge batches if there is time for many steps: gradients are more exact and matrix products faster."""
    factor = min(MAX_ENLARGEMENT, plan.steps // MANY_STEPS)
    train = plan.recipe.train
    key = "batch_examples" if train.batch_examples else "batch_tokens"
    if factor < 2 or {"batch_tokens", "batch_examples"} & request.model_fields_set or plan.seconds is None:
        return plan
    recipe = plan.recipe.with_train(**{key: factor * getattr(train, key)})
    loader = make_loader(recipe, prepared, plan.config)
    return plan._replace(recipe=recipe, loader=loader, steps=plan.steps // factor, seconds=plan.seconds * factor)


def planned_rates(request: Train, plan: Plan) -> Table:
    """Learning rate, warm-up and moving average for the expected number of steps, unless the recipe sets them."""
    train = plan.recipe.train
    changes: Table = {}
    if "warmup" not in request.model_fields_set:
        changes["warmup"] = max(1, min(MAX_WARMUP, round(WARMUP_SHARE * plan.steps)))
    if "lr" not in request.model_fields_set:
        width = plan.config.top.width
        tunes = train.start_from is not None and not train.lora
        rate = TUNING_RATE if tunes else float(f"{RATE * width**-0.5:.2g}")
        changes["lr"] = 1.0 if train.schedule == "noam" else rate
    if "ema" not in request.model_fields_set and not train.l0 and plan.steps >= FEW_STEPS:
        changes["ema"] = min(MAX_EMA, round(1 - 1 / (EMA_SHARE * plan.steps), 5))
    return changes


def describe_plan(plan: Plan, request: Train) -> list[str]:
    """The plan as lines of text, with warnings about a budget that is too small and a warm-up that is too long."""
    train = plan.recipe.train
    about = "" if plan.seconds is None else "about "
    batch = plural(train.batch_examples, "example") if train.batch_examples else plural(train.batch_tokens, "token")
    epochs = plural(plan.epochs, "epoch", ".2g" if plan.epochs < 10 else ",.0f")
    steps = f"{about}{plural(plan.steps, 'step')}"
    ema = f", moving average {train.ema:g}" if train.ema else ""
    lines = [f"plan: {steps} of {batch}, {epochs}; learning rate {train.lr:g}, warm-up {train.warmup}{ema}"]
    if train.warmup >= plan.steps / 2 and "warmup" in request.model_fields_set:
        effect = "the learning rate hardly reaches its peak; without this setting the warm-up is planned"
        lines.append(f"warning: train.warmup is {train.warmup:,} of {steps}, so {effect}")
    examples = plan.loader.examples
    needed = max(FEW_STEPS / plan.steps, min(examples, FEW_EXAMPLES) / (plan.epochs * examples))
    if needed > 1:
        lines.append(f"warning: the budget is too small for this data{_enough(train, plan, needed)}")
    return lines


def _enough(train: Train, plan: Plan, factor: float) -> str:
    """A sufficient budget in the unit of the limit that is reached first, as the end of a message."""
    for noun, limit, planned in (("step", train.steps, plan.steps), ("epoch", train.epochs, plan.epochs)):
        if limit is not None and planned >= limit:
            return f": {plural(limit, noun)}; use at least {plural(math.ceil(limit * factor), noun)}"
    minutes = plural(math.ceil((train.minutes or DEFAULT_MINUTES) * factor), "minute")
    return f"; use at least about {minutes} on this machine"


def complete_processes(
    recipe: Recipe, loader: DataLoader, config: Config, device: torch.device, launched: int
) -> tuple[Recipe, str]:
    """Decide the number of processes -> the recipe with this number, and the reason."""
    train = recipe.train
    if launched > 1:
        workers, reason = launched, "started by the launcher"
    elif not train.workers and config.has_memory:
        workers, reason = 1, "its segment memory needs the text in order"
    else:
        first = loader.step(0, 0)
        rows = max(1, loader.examples // len(loader.batches(0)))
        tokens = rows * first.all_tokens // first.examples
        workers, reason = choose_workers(train, device.type, cores(), loader.examples, rows, tokens)
    if workers > 1 and config.has_memory:
        raise UserError("train.workers: a model with segment memory is trained by one process")
    return recipe.with_train(workers=workers), reason


def choose_workers(train: Train, device: str, cores: int, examples: int, rows: int, tokens: int) -> tuple[int, str]:
    """The number of processes for batches of this size, and the reason. On CPUs each process has one thread."""
    if train.workers:
        return train.workers, "as requested"
    if device != "cpu":
        return 1, f"on {device}; for several GPUs use torchrun"
    if cores == 1:
        return 1, "one core"
    short = (train.steps or MIN_STEPS) < MIN_STEPS or (train.minutes or MIN_MINUTES) < MIN_MINUTES
    if examples < MIN_EXAMPLES or short:
        return 1, "too little work for more"
    workers = min(cores, max(1, rows // MIN_ROWS, min(rows, tokens // MIN_TOKENS)))
    if workers < cores:
        return workers, f"{cores} cores, but only {rows} examples per batch"
    return workers, "one per core"
