"""Training from a recipe to a finished run directory: what `regard.train` and `regard train` call.

`python -m regard.training.fit RUN` is one of the further processes that `fit` starts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.config import Config
from regard.data.prepare import Prepared, open_prepared, prepare
from regard.decode.alignment import choose_heads, save_heads
from regard.device import choose_device, cores, tune_allocator, usable_precision
from regard.errors import UserError
from regard.files import write_json
from regard.inspect.prune import gate_heads, prune_closed_gates, restore_unpruned
from regard.model import Model, on_meta
from regard.recipe import Recipe, Train
from regard.run import Run, RunConfig, read_config, saved_recipe
from regard.tasks import TASKS
from regard.text.learn import BaseText
from regard.training.checkpoint import TRAINING, Checkpoints, Progress
from regard.training.distributed import ProcessGroup, Workers, join, leave_with_parent, meet, started_by_others
from regard.training.loader import DataLoader
from regard.training.model_card import write_model_card
from regard.training.plan import check_model, make_loader, make_validation, model_config
from regard.training.report import Reporter, SilentReporter, draw_curve, make_reporter, score
from regard.training.start import (
    BaseRun,
    begun,
    choose_trained,
    fresh_weights,
    load_start,
    open_base,
    plan_start,
    require_free,
    resumed_recipe,
    save_recipe,
)
from regard.training.trainer import DEFAULT_MINUTES, Budget, Trainer, Validate
from regard.training.validation import Validation

DATA = "data"  # in the training directory
UNCUT = "uncut"  # there too: what the run was before heads were cut


class TrainingReport(NamedTuple):
    """What came out of a training run."""

    path: Path
    progress: Progress
    metric: str
    parameters: int

    @property
    def value(self) -> float | None:
        """The metric of the weights that were kept."""
        return None if self.progress.best is None else self.progress.best.value


def fit(recipe: Recipe, out: str | Path, resume: bool = False, talk: Reporter | None = None) -> TrainingReport:
    """Train as a recipe says and write a run directory; with `resume`, continue the one that is there.

    Raises UserError for mistakes. On SIGTERM or SIGINT it saves and raises Stopped, a SystemExit with 128 + signal.
    """
    path = Path(out)
    talk = talk or make_reporter()
    tune_allocator()
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            return (_fit_joined if started_by_others() else _fit)(recipe, path, resume, talk)
    finally:
        torch.set_num_threads(threads)
        talk.close()


def _fit(recipe: Recipe, path: Path, resume: bool, talk: Reporter) -> TrainingReport:
    """Train in this process, or as the first of several that are started here."""
    recipe = _set_up(recipe, path, resume, talk)
    finished = _finished(recipe, path)
    if finished is not None:
        talk.say(f"{path}: this run is finished ({finished.progress.finished}); a larger budget would let it go on")
        return finished
    device, workers = choose_device(recipe.train.device), recipe.train.workers
    if workers == 1:
        return _train(recipe, path, ProcessGroup(device=device), talk)
    with Workers(workers, "regard.training.fit", [str(path)]) as others:
        others.wait()
        with meet(0, workers, device, others.store_file) as world, others.watched():
            return _train(recipe, path, world, talk)


def _fit_joined(recipe: Recipe, path: Path, resume: bool, talk: Reporter) -> TrainingReport:
    """Train as one of several processes that something like torchrun has started."""
    with join(recipe.train.device) as world:
        talk = talk if world.first else SilentReporter()
        problem = None
        if world.first:
            try:
                _set_up(recipe, path, resume, talk, world.size)
            except UserError as error:
                problem = str(error)
        problem = world.share(problem)
        if problem:
            raise UserError(problem)
        recipe = saved_recipe(path)
        return _finished(recipe, path) or _train(recipe, path, world, talk)


def _finished(recipe: Recipe, path: Path) -> TrainingReport | None:
    """The report of a run that has nothing left to do."""
    progress = Checkpoints(path).progress()
    if progress is None or progress.finished is None:
        return None
    done, _ = Budget.of(recipe.train).done(progress.step, progress.epoch, progress.seconds)
    if done < 1 and progress.finished != "patience":
        return None
    model = on_meta(read_config(path).model)
    return TrainingReport(path, progress, recipe.train.metric, model.size)


# Setting up


def _set_up(recipe: Recipe, path: Path, resume: bool, talk: Reporter, processes: int = 1) -> Recipe:
    """Make the run directory ready, or find it so -> the complete recipe."""
    if resume and begun(path):
        saved, wished = saved_recipe(path), recipe.train.precision
        recipe = resumed_recipe(recipe, saved, path)
        if _finished(recipe, path) is None:
            restore_unpruned(path, path / TRAINING / UNCUT)
            if wished != recipe.train.precision == "fp32":
                talk.say("precision: fp32, which the run settled on")
            # It may have come from another machine. To be slow is no reason to go on differently than it began.
            device = choose_device(recipe.train.device)
            usable = usable_precision(recipe.train.precision, device, talk.say, slow=False)
            recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": usable})})
        if recipe != saved:
            save_recipe(recipe, path)
        return recipe
    if resume:
        talk.say(f"{path}: no run to resume, a new one begins")
    else:
        require_free(path)
    base = open_base(recipe)
    choose_device(recipe.train.device)
    check_model(recipe, base and base.config)
    with _tidy(path):
        return _set_up_new(recipe, path, base, talk, processes)


@contextmanager
def _tidy(path: Path) -> Iterator[None]:
    """Leave no empty directories behind that were made for a run which did not come about."""
    made = [place for place in (path / TRAINING, path, *path.parents) if not place.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):  # there is something in it
            for place in made:
                place.rmdir()
        raise


def _set_up_new(recipe: Recipe, path: Path, base: BaseRun | None, talk: Reporter, processes: int) -> Recipe:
    prepared = prepare(recipe, path / TRAINING / DATA, base=base and BaseText(base.codec, base.config.labels))
    for note in prepared.notes:
        talk.say(note)
    recipe = resolve(recipe, prepared, talk)
    config = model_config(recipe, prepared, base and base.config)
    recipe = choose_processes(recipe, make_loader(recipe, prepared, config, ProcessGroup()), config, talk, processes)
    plan_start(recipe, config, prepared.labels, path / TRAINING, talk)
    try:
        codec = prepared.codec
        codec.save(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror or error}") from None
    save_recipe(recipe, path)
    made = RunConfig(model=config, text=codec.config, task=recipe.task, labels=prepared.labels, pixels=prepared.pixels)
    write_json(path / "config.json", made.model_dump(mode="json"))
    return recipe


# Training


def _train(recipe: Recipe, path: Path, world: ProcessGroup, talk: Reporter) -> TrainingReport:
    """Train in this process, with the others if there are any."""
    train = recipe.train
    if world.device.type == "cpu" and world.size > 1:
        torch.set_num_threads(max(1, cores() // world.size))
    prepared = open_prepared(path / TRAINING / DATA)
    torch.manual_seed(train.seed)  # the same weights in every process
    model = Model(read_config(path).model).to(world.device)
    parameters = model.size
    if train.start_from is not None and Checkpoints(path).progress() is None:
        load_start(model, prepared.labels, train.start_from)
    special = choose_trained(model, train, fresh_weights(path / TRAINING))
    if train.l0:
        gate_heads(model)
    validation: Validate = make_validation(recipe, prepared, model.config, world)
    if recipe.task == "pairs":
        validation = Validation(prepared, recipe, model, world)
    sizes = prepared.train.size, prepared.valid.size
    start = {
        "preset": recipe.preset,
        "parameters": parameters,
        "examples": sizes[0],
        "valid_examples": sizes[1],
        "device": world.device.type,
        "workers": world.size,
    }
    feed = make_loader(recipe, prepared, model.config, world)
    talk.say(
        f"model: {recipe.train.start_from or recipe.preset}, {parameters:,} parameters; {world.device.type}, "
        f"{world.size} process{'es' * (world.size > 1)}; {feed.batches_in(0):,} batches per epoch"
    )
    if special:
        talk.say(special)

    def conclude(progress: Progress) -> None:
        talk.close()
        draw_curve(path, train.metric)
        write_model_card(
            path,
            recipe,
            progress,
            parameters=parameters,
            examples=sizes,
            notes=prepared.notes,
            signatures=getattr(validation, "signatures", {}),
        )
        best = progress.best
        if train.l0 and best is not None:
            talk.say(prune_closed_gates(path, path / TRAINING / UNCUT))
        if best is not None and recipe.task == "pairs":
            # Alignments are asked of the heads that align best on examples not trained on.
            save_heads(path, choose_heads(Run.load(path), prepared.valid_examples))
        kept = "" if best is None else f": {score(train.metric, best.value)} on the validation examples"
        talk.say(f"the model is in {path}{kept}")

    progress = Trainer(model, train, feed, validation, path, world, talk, conclude).run(start)
    return TrainingReport(path, progress, train.metric, parameters)


def main() -> None:
    """Be one of the further processes of a run."""
    leave_with_parent()
    tune_allocator()
    path = Path(sys.argv[1])
    try:
        recipe = saved_recipe(path)
        with join(recipe.train.device) as world:
            _train(recipe, path, world, SilentReporter())
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()


def resolve(recipe: Recipe, prepared: Prepared[Any], talk: Reporter) -> Recipe:
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
        if recipe.task == "pairs":
            corpus = prepared.train
            symbols = int(corpus.source_lengths.sum() + corpus.target_lengths.sum())
            name, reason = choose_preset(len(corpus), symbols, device.type)
        else:
            name, reason = TASKS[recipe.task].preset or "", f"for task {recipe.task}"
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


def choose_processes(recipe: Recipe, feed: DataLoader, config: Config, talk: Reporter, processes: int) -> Recipe:
    """Decide how many processes train."""
    train = recipe.train
    if processes > 1:
        chosen = WorkerChoice(str(processes), "as they were started")
    elif config.has_memory and not train.workers:
        chosen = WorkerChoice("1", "the model remembers the text it has read, in order")
    else:
        first, examples = feed.portion(0, 0), sum(map(len, feed.order(0)))
        rows = max(1, examples // feed.batches_in(0))
        symbols = rows * first.symbols // first.examples
        chosen = choose_workers(train, choose_device(train.device).type, cores(), examples, rows, symbols)
    if config.has_memory and int(chosen.value) > 1:
        raise UserError("train.workers: a model that remembers the text it has read is trained by one process")
    if not train.workers:
        talk.say(f"processes: {chosen.value}, {chosen.reason}")
    return recipe.model_copy(update={"train": train.model_copy(update={"workers": int(chosen.value)})})


FEW_SYMBOLS = 50_000  # of both sides, in all training examples
MANY_EXAMPLES = 100_000
WORTH_EXAMPLES = 1_000  # below, starting processes takes longer than they save
WORTH_STEPS = 200
WORTH_MINUTES = 0.5
LEAST_ROWS = 8  # of a batch, per process; fewer will do if they are long
LEAST_SYMBOLS = 256


class WorkerChoice(NamedTuple):
    """What was chosen and why."""

    value: str
    reason: str


def choose_preset(examples: int, symbols: int, device: str) -> WorkerChoice:
    """A model that the data can fill and the machine can train."""
    size = f"{examples:,} training examples, {symbols:,} tokens"
    if symbols < FEW_SYMBOLS:
        return WorkerChoice("transformer-tiny", f"little data ({size})")
    if examples >= MANY_EXAMPLES and device == "cuda":
        return WorkerChoice("transformer-base", f"much data ({size}) and a GPU")
    if examples >= MANY_EXAMPLES:
        return WorkerChoice("transformer-small", f"much data ({size}), but no GPU")
    return WorkerChoice("transformer-small", size)


def choose_workers(train: Train, device: str, cores: int, examples: int, rows: int, symbols: int) -> WorkerChoice:
    """How many processes; several one-thread processes do more on a CPU than one with several threads.

    `rows` and `tokens` are those of a batch.
    """
    if train.workers:
        return WorkerChoice(str(train.workers), "as asked for")
    if device != "cpu":
        return WorkerChoice("1", f"on {device}; for several GPUs use torchrun")
    if cores == 1:
        return WorkerChoice("1", "one core")
    short = (train.steps or WORTH_STEPS) < WORTH_STEPS or (train.minutes or WORTH_MINUTES) < WORTH_MINUTES
    if examples < WORTH_EXAMPLES or short:
        return WorkerChoice("1", "too little to do for more")
    workers = min(cores, max(1, rows // LEAST_ROWS, min(rows, symbols // LEAST_SYMBOLS)))
    if workers < cores:
        return WorkerChoice(str(workers), f"{cores} cores, but only {rows} examples per batch")
    return WorkerChoice(str(workers), "one per core")
