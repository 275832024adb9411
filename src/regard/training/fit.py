"""Training from a recipe to a finished run directory: what `regard.train` and `regard train` call."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.data.in_memory import InMemory
from regard.data.prepare import NOTHING, Prepared, changed_files, prepare, require_same
from regard.decode.alignment import save_heads
from regard.decode.cross_attention import choose_heads
from regard.device import tune_allocator
from regard.errors import UserError, plural
from regard.inspect.prune import prune_closed_gates
from regard.model import Model, on_meta
from regard.nn.transformer import Transformer
from regard.notebook import table
from regard.parallel import ranks
from regard.parallel.cores import cores
from regard.parallel.messages import Channel
from regard.parallel.ranks import Launch, ProcessGroup, join_local_group, launched_group, local_group
from regard.recipe import Recipe, Train
from regard.run import Generation, Run, saved_recipe
from regard.tasks import TASKS
from regard.training import directory
from regard.training.checkpoint import TRAINING, Progress
from regard.training.directory import DATA, UNCUT, Finished, New, Resumed, Setup
from regard.training.plan import check_model, plan_run
from regard.training.report import Reporter, format_score, make_reporter
from regard.training.summary import find_problems, write_model_card
from regard.training.trainer import Signals, Trainer
from regard.training.validation import Validation, make_validation
from regard.training.weights import check_weights, make_model, open_base, select_trained


class TrainingReport(NamedTuple):
    """The result of training."""

    path: Path
    progress: Progress
    metric: str
    parameters: int

    @property
    def value(self) -> float | None:
        """The metric of the saved weights."""
        return None if self.progress.best is None else self.progress.best.value

    def __repr__(self) -> str:
        return f"TrainingReport({', '.join(f'{name} {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        return table(self._facts().items(), caption=str(self.path))

    def _facts(self) -> dict[str, object]:
        scores = {} if self.value is None else {self.metric: format_score(self.metric, self.value)}
        return {**scores, "steps": self.progress.step, "parameters": f"{self.parameters:,}", "path": self.path}


class _Order(NamedTuple):
    recipe: Recipe
    path: Path
    resume: bool
    reporter: Reporter
    memory: Mapping[str, InMemory]


def fit(
    recipe: Recipe,
    out: str | Path,
    resume: bool = False,
    reporter: Reporter | None = None,
    memory: Mapping[str, InMemory] = NOTHING,
) -> TrainingReport:
    """Train a recipe, or continue the run in `out` with `resume`; a signal saves and raises Stopped (128 + signal)."""
    if not str(out):  # Path("") is the current directory
        raise UserError("out: is empty; name the directory for the run")
    reporter = reporter or make_reporter()
    tune_allocator()
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            return _fit(_Order(recipe, Path(out), resume, reporter, memory))
    finally:
        torch.set_num_threads(threads)
        reporter.close()


def _fit(order: _Order) -> TrainingReport:
    """Train in this process, and in others if a launcher has started them or the plan has several processes."""
    resumes = (order.resume or ranks.was_restarted()) and directory.is_run(order.path)
    train = (saved_recipe(order.path) if resumes else order.recipe).train
    with ExitStack() as stack:
        group, launch = stack.enter_context(launched_group(train.device, train.offload))
        device = group.device
        if not group.first:
            order = order._replace(reporter=Reporter())
        setup = group.run_in_first(lambda: _set_up(order, launch, device, stack)) or directory.open_run(order.path)
        if isinstance(setup, Finished):
            progress = setup.progress
            message = f"this run is finished ({progress.finished}); continue it with a larger budget"
            order.reporter.say(f"{order.path}: {message}")
            return TrainingReport(order.path, progress, setup.recipe.train.metric, on_meta(setup.config).size)
        train = setup.recipe.train
        if group.size == 1 and train.workers > 1:
            job = {"run": str(order.path.absolute())}
            work = f"{__name__}:train_rank"
            group = stack.enter_context(local_group(work, job, train.workers, device, train.offload))
        return _train(setup, group, order.reporter)


def train_rank(channel: Channel, job: dict[str, Any]) -> None:
    """The work of a rank that rank 0 has started."""
    tune_allocator()
    setup = directory.open_run(Path(job["run"]))
    assert not isinstance(setup, Finished)
    train = setup.recipe.train
    device = ranks.process_device(train.device, job["rank"])
    with join_local_group(channel, job, device, train.offload) as group:
        _train(setup, group, Reporter())


def _set_up(order: _Order, launch: Launch, device: torch.device, stack: ExitStack) -> Setup:
    """Claim the run directory until the stack is closed, and begin or continue the run in it."""
    recipe, path, resume, reporter, memory = order
    if launch.problem:
        reporter.say(f"warning: {launch.problem}")
    locked = stack.enter_context(directory.claim_run(path))
    if not locked:
        reporter.say(f"warning: the file system of {path} has no locks; make sure that no other training writes there")
    # After a failure, torchrun starts its processes again with the same command, without --resume.
    resume = resume or (launch.restarted and directory.begun_by(path, launch.launchers))
    if not (resume and directory.is_run(path)):
        if resume:
            reporter.say(f"{path}: no run to resume, a new one begins")
        directory.clear(path, resume)
        return _begin(order, launch, device)
    require_same(path / TRAINING / DATA, memory)
    setup = directory.resume_run(recipe, path, device, reporter, launch.processes)
    directory.remember_launchers(path, launch.launchers)
    for change in dict.fromkeys(changed_files(path / TRAINING / DATA, setup.recipe)):
        reporter.say(f"warning: {change}; the run continues with the data it read before")
    return setup


def _begin(order: _Order, launch: Launch, device: torch.device) -> New:
    """Prepare the data and plan the run; mistakes in the settings are reported before the data is read."""
    recipe, path, _, reporter, memory = order
    if launch.processes > 1 and (workers := recipe.train.workers) not in (0, launch.processes):
        raise UserError(f"train.workers: is {workers}, but {launch.processes} processes were started")
    base = open_base(recipe)
    check_model(recipe, base and base.config)
    prepared = prepare(
        recipe, path / TRAINING / DATA, base=base and base.text, memory=memory, processes=cores(), say=reporter.say
    )
    if prepared.columns not in (None, recipe.data.columns):  # recognised ones belong to the complete recipe
        recipe = recipe.with_data(columns=prepared.columns)
    for note in prepared.notes:
        reporter.say(note)
    plan = plan_run(recipe, base and base.config, prepared, device, launch.processes, reporter)
    fresh = check_weights(plan.recipe, plan.config, prepared.labels, base, reporter)
    new = New(path, plan.recipe, plan.config, prepared, plan.loader, fresh)
    directory.write_run(new, base.config.generation if base else Generation(), launch.launchers)
    return new


def _train(setup: New | Resumed, group: ProcessGroup, reporter: Reporter) -> TrainingReport:
    """Train in this process; all processes of the group call this with the same run directory."""
    recipe = setup.recipe
    prepared = setup.prepared
    train = recipe.train
    if group.device.type == "cpu" and group.size > 1:
        torch.set_num_threads(max(1, cores() // group.size))
    model = make_model(setup, group.device)
    parameters = model.size
    trained = select_trained(model, train, setup.fresh)
    validation = make_validation(recipe, prepared, model.config, group)
    device = group.device.type
    facts = {
        "preset": recipe.preset,
        "parameters": parameters,
        "examples": prepared.train.size,
        "valid_examples": prepared.valid.size,
        "device": device,
        "workers": group.size,
    }
    batches = plural(len(setup.loader.batches(0)), "batch")
    hardware = f"{device}, {plural(group.size, 'process')}"
    reporter.say(
        f"model: {train.start_from or recipe.preset}, {parameters:,} parameters; {hardware}; {batches} per epoch"
    )
    if trained:
        reporter.say(trained)
    for warning in unused_settings(model, train, group):
        reporter.say(f"warning: {warning}")
    with Signals(launched=ranks.has_launcher() or not group.first).caught() as signals:
        trainer = Trainer(model, setup, validation, group, reporter, signals)
        report = TrainingReport(setup.path, trainer.run(facts), train.metric, parameters)
        if group.first:
            _finish(report, recipe, prepared, validation, reporter)
            trainer.mark_finished()
    return report


def unused_settings(model: Model, train: Train, group: ProcessGroup) -> list[str]:
    """Memory settings without effect, each with the reason."""
    fsdp = train.strategy == "fsdp"
    unused = []
    if fsdp and group.size == 1:
        unused.append("train.strategy=fsdp: has no effect with one process; use several (--workers, torchrun)")
    if train.offload and not (fsdp and group.size > 1 and group.device.type == "cuda"):
        unused.append("train.offload: has an effect only with fsdp on several GPUs")
    if train.recompute and not any(isinstance(part, Transformer) and not part.memory for part in model.modules()):
        unused.append("train.recompute: has no effect on the layers of this model")
    return unused


def _finish(
    report: TrainingReport, recipe: Recipe, prepared: Prepared[Any], validation: Validation, reporter: Reporter
) -> None:
    """Write the model card and the learning curve, prune closed head gates, choose alignment heads, and warn."""
    path = report.path
    reporter.close()
    write_model_card(
        path,
        recipe,
        report.progress,
        parameters=report.parameters,
        examples=(prepared.train.size, prepared.valid.size),
        files=prepared.files,
        notes=prepared.notes,
        signatures=validation.signatures,
    )
    best = report.progress.best
    if recipe.train.l0 and best is not None:
        reporter.say(prune_closed_gates(path, path / TRAINING / UNCUT))
    run = None
    if best is not None and TASKS[recipe.task].reads == "pairs":
        # Alignments are read from the heads that align the validation examples best.
        run = Run.load(path)
        save_heads(path, choose_heads(run, prepared.valid_examples))
    for problem in find_problems(path, recipe, prepared, best, run):
        reporter.say(f"warning: {problem}")
    value = "" if best is None else f": {format_score(report.metric, best.value)} on the validation examples"
    reporter.say(f"the model is in {path}{value}")
