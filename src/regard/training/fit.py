"""Training from a recipe to a finished run directory: what `regard.train` and `regard train` call.

The order is data -> tokenizers -> task -> model config -> processes -> weights -> trainer: `plan` decides, `start`
writes the run directory and makes the model, `trainer` trains. `python -m regard.training.fit RUN` is a worker process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.data.in_memory import InMemory
from regard.data.prepare import NOTHING, Prepared, changed_files, open_prepared, prepare, require_same
from regard.decode.alignment import choose_heads, save_heads
from regard.device import tune_allocator
from regard.errors import UserError, plural
from regard.inspect.prune import prune_closed_gates
from regard.model import on_meta
from regard.notebook import table
from regard.parallel.cores import cores
from regard.recipe import Recipe, Train
from regard.run import Run, read_config, saved_recipe
from regard.tasks import TASKS
from regard.training.checkpoint import TRAINING, Progress
from regard.training.directory import (
    DATA,
    UNCUT,
    add_trained_parts,
    begun_by,
    claim_run,
    finished_progress,
    is_run,
    make_model,
    open_base,
    plan_weights,
    remember_launchers,
    remove_remains,
    require_new,
    resume_run,
    write_run,
)
from regard.training.distributed import ProcessGroup, Workers, exit_with_parent, form_group
from regard.training.launch import (
    Launch,
    has_launcher,
    join_group,
    name_lost_connection,
    process_device,
    restart_problem,
    was_restarted,
)
from regard.training.loader import DataLoader, make_loader
from regard.training.plan import check_model, plan_run
from regard.training.report import LOG, Reporter, draw_curve, format_score, make_reporter, read_log
from regard.training.step import unused_settings
from regard.training.summary import (
    at_chance,
    judge_outputs,
    no_better_than_frequencies,
    still_improving,
    write_model_card,
)
from regard.training.trainer import CAUGHT, Signals, Trainer
from regard.training.validation import Validation, make_validation


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

    def __repr__(self) -> str:
        return f"TrainingReport({', '.join(f'{name} {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        return table(self._facts().items(), caption=str(self.path))

    def _facts(self) -> dict[str, object]:
        scores = {} if self.value is None else {self.metric: format_score(self.metric, self.value)}
        return {**scores, "steps": self.progress.step, "parameters": f"{self.parameters:,}", "path": self.path}


class _Setup(NamedTuple):
    """A run directory that is set up, with its data, which each process opens once."""

    path: Path
    recipe: Recipe
    prepared: Prepared[Any]
    loader: DataLoader


def _open_setup(path: Path) -> _Setup:
    """What another process, or an earlier session, has set up."""
    recipe, prepared = saved_recipe(path), open_prepared(path / TRAINING / DATA)
    return _Setup(path, recipe, prepared, make_loader(recipe, prepared, read_config(path).model))


def fit(
    recipe: Recipe,
    out: str | Path,
    resume: bool = False,
    reporter: Reporter | None = None,
    memory: Mapping[str, InMemory] = NOTHING,
) -> TrainingReport:
    """Train as a recipe says and write a run directory; with `resume`, continue the one that is there.

    `memory` is the data that the recipe says is in memory.
    Raises UserError for mistakes. On SIGTERM, SIGINT or SIGHUP it saves and raises Stopped, a SystemExit with 128 +
    signal.
    """
    if not str(out):  # as a path it would be the current directory
        raise UserError("--out: is empty; name the directory that the run is written to")
    path = Path(out)
    reporter = reporter or make_reporter()
    tune_allocator()
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            return (_fit_launched if has_launcher() else _fit)(recipe, path, resume, reporter, memory)
    finally:
        torch.set_num_threads(threads)
        reporter.close()


def _fit(
    recipe: Recipe, path: Path, resume: bool, reporter: Reporter, memory: Mapping[str, InMemory]
) -> TrainingReport:
    """Train in this process, or as the first of several that are started here."""
    device = process_device(_train_settings(recipe, path, resume).device)
    launch = Launch.of(ProcessGroup())  # torchrun may have started a single process
    with claim_run(path) as locked:
        setup = _set_up(recipe, path, resume, device, reporter, memory, locked, launch)
        if report := _finished(path):
            finished = f"this run is finished ({report.progress.finished})"
            reporter.say(f"{path}: {finished}; a larger budget would let it go on")
            return report
        setup = setup or _open_setup(path)
        size = setup.recipe.train.workers
        if size == 1:
            return _train(setup, ProcessGroup(device=device), reporter)
        with Workers(size, "regard.training.fit", [str(path)]) as workers:
            workers.wait()
            group = form_group(0, size, device, workers.store_file, setup.recipe.train.offload)
            with group, workers.name_failures(), workers.continued_by(CAUGHT):
                return _train(setup, group, reporter)


def _fit_launched(
    recipe: Recipe, path: Path, resume: bool, reporter: Reporter, memory: Mapping[str, InMemory]
) -> TrainingReport:
    """Train as one of several processes that a launcher such as torchrun has started."""
    train = _train_settings(recipe, path, resume)
    device = process_device(train.device)
    with join_group(device, train.offload) as group, name_lost_connection(), ExitStack() as stack:
        launch = Launch.of(group)
        reporter = reporter if group.first else Reporter()
        if warning := restart_problem():
            reporter.say(f"warning: {warning}")
        setup, problem = None, None
        if group.first:
            try:
                locked = stack.enter_context(claim_run(path))
                setup = _set_up(recipe, path, resume, device, reporter, memory, locked, launch)
            except UserError as error:
                problem = error
        group.wait_for_first()
        failed = group.broadcast(problem is not None)
        if problem is not None:
            raise problem
        if failed:  # which the first process reports
            raise SystemExit(2)
        return _finished(path) or _train(setup or _open_setup(path), group, reporter)


def _train_settings(recipe: Recipe, path: Path, resume: bool) -> Train:
    """How to train: as the recipe says, or as a resumed run began."""
    resume = (resume or was_restarted()) and is_run(path)
    return (saved_recipe(path) if resume else recipe).train


def _finished(path: Path) -> TrainingReport | None:
    """The report of a run that has nothing left to do."""
    recipe = saved_recipe(path)
    progress = finished_progress(recipe, path)
    if progress is None:
        return None
    return TrainingReport(path, progress, recipe.train.metric, on_meta(read_config(path).model).size)


def _set_up(
    recipe: Recipe,
    path: Path,
    resume: bool,
    device: torch.device,
    reporter: Reporter,
    memory: Mapping[str, InMemory],
    locked: bool,
    launch: Launch,
) -> _Setup | None:
    """Make the run directory ready; None for a resumed run, whose data is opened when it has anything left to do.

    If a launcher has restarted its processes, a run that it had begun is resumed.
    """
    if not locked:
        reporter.say(f"warning: the file system of {path} has no locks; see to it that nothing else trains there")
    resume = resume or (launch.restarted and begun_by(path, launch.launchers))
    if resume and is_run(path):
        require_same(path / TRAINING / DATA, memory)
        resume_run(recipe, path, device, reporter, launch.processes)
        remember_launchers(path, launch.launchers)
        for change in dict.fromkeys(changed_files(path / TRAINING / DATA, saved_recipe(path))):
            reporter.say(f"warning: {change}; the run goes on with what it read then")
        return None
    if resume:
        reporter.say(f"{path}: no run to resume, a new one begins")
    else:
        require_new(path)
    remove_remains(path)
    # Mistakes in the settings are found before the data is read.
    if launch.processes > 1 and (workers := recipe.train.workers) not in (0, launch.processes):
        raise UserError(f"train.workers: {workers} asked for, but {launch.processes} processes were started")
    base, base_text = open_base(recipe)
    check_model(recipe, base)
    prepared = prepare(
        recipe, path / TRAINING / DATA, base=base_text, memory=memory, processes=cores(), say=reporter.say
    )
    if prepared.columns is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"columns": prepared.columns})})
    for note in prepared.notes:
        reporter.say(note)
    plan = plan_run(recipe, base, prepared, device, launch.processes, reporter)
    fresh = plan_weights(plan.recipe, plan.config, prepared.labels, reporter)
    remember_launchers(path, launch.launchers)
    write_run(path, plan.recipe, plan.config, prepared, fresh)
    return _Setup(path, plan.recipe, prepared, plan.loader)


def _train(setup: _Setup, group: ProcessGroup, reporter: Reporter) -> TrainingReport:
    """Train in this process, with the others of its group: every process calls this on the same run directory."""
    path, recipe, prepared, loader = setup
    train = recipe.train
    if group.device.type == "cpu" and group.size > 1:
        torch.set_num_threads(max(1, cores() // group.size))
    model = make_model(recipe, prepared.labels, path, group.device)
    parameters = model.size
    trained = add_trained_parts(model, train, path)
    validation = make_validation(recipe, prepared, model.config, group)
    start = {
        "preset": recipe.preset,
        "parameters": parameters,
        "examples": prepared.train.size,
        "valid_examples": prepared.valid.size,
        "device": group.device.type,
        "workers": group.size,
    }
    reporter.say(
        f"model: {train.start_from or recipe.preset}, {parameters:,} parameters; {group.device.type}, "
        f"{plural(group.size, 'process')}; {plural(loader.batches_in(0), 'batch')} per epoch"
    )
    if trained:
        reporter.say(trained)
    for warning in unused_settings(model, train, group):
        reporter.say(f"warning: {warning}")
    with Signals(launched=has_launcher()) as signals:
        trainer = Trainer(model, train, loader, validation, path, group, reporter, signals)
        report = TrainingReport(path, trainer.run(start), train.metric, parameters)
        if group.first:
            _finish(report, recipe, prepared, validation, reporter)
            trainer.mark_finished()
    return report


def _finish(
    report: TrainingReport, recipe: Recipe, prepared: Prepared[Any], validation: Validation, reporter: Reporter
) -> None:
    """After training: the curve, the model card, the cut of closed head gates, the alignment heads."""
    path, progress, train = report.path, report.progress, recipe.train
    reporter.close()
    draw_curve(path, train.metric)
    write_model_card(
        path,
        recipe,
        progress,
        parameters=report.parameters,
        examples=(prepared.train.size, prepared.valid.size),
        files=prepared.files,
        notes=prepared.notes,
        signatures=validation.signatures,
    )
    best = progress.best
    if train.l0 and best is not None:
        reporter.say(prune_closed_gates(path, path / TRAINING / UNCUT))
    remarks = [still_improving(read_log(path / LOG), train)]
    if best is not None and TASKS[recipe.task].reads == "pairs":
        # Alignments are read off the heads that align best on examples not trained on.
        run = Run.load(path)
        save_heads(path, choose_heads(run, prepared.valid_examples))
        remarks.append(judge_outputs(run, prepared.valid_examples, 2 * prepared.valid.target_lengths.longest))
    if best is not None and TASKS[recipe.task].labels:
        labels = [example.target for example in prepared.valid_examples] or prepared.valid.labels.tolist()
        remarks.append(at_chance(best.scores["accuracy"], labels))
    if best is not None and TASKS[recipe.task].reads == "text" and not TASKS[recipe.task].seq2seq:
        remarks.append(no_better_than_frequencies(best.scores["loss"], prepared.train, prepared.valid))
    for remark in filter(None, remarks):
        reporter.say(f"warning: {remark}")
    value = "" if best is None else f": {format_score(train.metric, best.value)} on the validation examples"
    reporter.say(f"the model is in {path}{value}")


def main() -> None:
    """Run a worker process: one of the ranks above 0."""
    exit_with_parent()
    tune_allocator()
    path = Path(sys.argv[1])
    try:
        setup = _open_setup(path)
        train = setup.recipe.train
        with join_group(process_device(train.device), train.offload) as group:
            _train(setup, group, Reporter())
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
