"""Training from a recipe to a finished run directory: what `regard.train` and `regard train` call.

`python -m regard.fit RUN` is one of the further processes that `fit` starts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch

from regard.data.order import batches
from regard.data.prepare import Prepared, open_prepared, prepare
from regard.decode.alignment import choose_heads, save_heads
from regard.decode.generate import generate
from regard.decode.options import Options
from regard.errors import UserError
from regard.files import write_json
from regard.metrics import measure
from regard.model import Model, on_meta
from regard.presets import preset
from regard.run import Run, RunConfig, read_config
from regard.settings import Recipe
from regard.train.budget import DEFAULT_MINUTES, Budget
from regard.train.card import write_card
from regard.train.checkpoint import TRAINING, Checkpoints
from regard.train.choose import choose_preset, choose_workers
from regard.train.curve import draw_curve
from regard.train.feed import Feed
from regard.train.launch import Workers, leave_with_parent
from regard.train.machine import bf16_problem, choose_device, cores, tune_allocator
from regard.train.progress import Progress, Scores
from regard.train.record import begun, require_free, resumed_recipe, save_recipe, saved_recipe
from regard.train.talk import Silence, Talk, make_talk, score
from regard.train.trainer import Trainer
from regard.train.valid import ValidLoss, spread
from regard.train.world import World, join, meet, started_by_others

DATA = "data"  # in the training directory
DECODED_EXAMPLES = 1_000  # validated by decoding, at most


class Report(NamedTuple):
    """What came out of a training run."""

    path: Path
    progress: Progress
    metric: str
    parameters: int

    @property
    def value(self) -> float | None:
        """The metric of the weights that were kept."""
        return None if self.progress.best is None else self.progress.best.value


def fit(recipe: Recipe, out: str | Path, resume: bool = False, talk: Talk | None = None) -> Report:
    """Train as a recipe says and write a run directory; with `resume`, continue the one that is there.

    Raises UserError for mistakes. On SIGTERM or SIGINT it saves and raises Stopped, a SystemExit with 128 + signal.
    """
    path = Path(out)
    talk = talk or make_talk()
    tune_allocator()
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            return (_fit_joined if started_by_others() else _fit)(recipe, path, resume, talk)
    finally:
        torch.set_num_threads(threads)
        talk.close()


def _fit(recipe: Recipe, path: Path, resume: bool, talk: Talk) -> Report:
    """Train in this process, or as the first of several that are started here."""
    recipe = _set_up(recipe, path, resume, talk)
    finished = _finished(recipe, path)
    if finished is not None:
        talk.say(f"{path}: this run is finished ({finished.progress.finished}); a larger budget would let it go on")
        return finished
    device, workers = choose_device(recipe.train.device), recipe.train.workers
    if workers == 1:
        return _train(recipe, path, World(device=device), talk)
    with Workers(workers, "regard.fit", [str(path)]) as others:
        others.wait()
        with meet(0, workers, device, others.store_file) as world, others.watched():
            return _train(recipe, path, world, talk)


def _fit_joined(recipe: Recipe, path: Path, resume: bool, talk: Talk) -> Report:
    """Train as one of several processes that something like torchrun has started."""
    with join(recipe.train.device) as world:
        talk = talk if world.first else Silence()
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


def _finished(recipe: Recipe, path: Path) -> Report | None:
    """The report of a run that has nothing left to do."""
    progress = Checkpoints(path).progress()
    if progress is None or progress.finished is None:
        return None
    done, _ = Budget.of(recipe.train).done(progress.step, progress.epoch, progress.seconds)
    if done < 1 and progress.finished != "patience":
        return None
    model = on_meta(read_config(path).model)
    return Report(path, progress, recipe.train.metric, sum(p.numel() for p in model.parameters()))


# Setting up


def _set_up(recipe: Recipe, path: Path, resume: bool, talk: Talk, processes: int = 1) -> Recipe:
    """Make the run directory ready, or find it so -> the complete recipe."""
    if resume and begun(path):
        saved = saved_recipe(path)
        recipe = resumed_recipe(recipe, saved, path)
        if recipe != saved:
            save_recipe(recipe, path)
        return recipe
    if resume:
        talk.say(f"{path}: no run to resume, a new one begins")
    else:
        require_free(path)
    prepared = prepare(recipe, path / TRAINING / DATA)
    for note in prepared.notes:
        talk.say(note)
    recipe = _resolve(recipe, prepared, talk, processes)
    codec = prepared.codec
    config = preset(
        recipe.preset, source_vocab=codec.source_vocab, target_vocab=codec.target_vocab, changes=recipe.model
    )
    if config.encoder is None or config.decoder is None:
        raise UserError(f"preset {recipe.preset}: training needs a model with an encoder and a decoder")
    try:
        codec.save(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror or error}") from None
    save_recipe(recipe, path)
    write_json(path / "config.json", RunConfig(model=config, text=codec.config).model_dump(mode="json"))
    return recipe


def _resolve(recipe: Recipe, prepared: Prepared, talk: Talk, processes: int) -> Recipe:
    """Fill in what the recipe leaves open, and say so."""
    train, text, corpus = recipe.train, recipe.text, prepared.train
    device = choose_device(train.device)
    changes: dict[str, object] = {"device": device.type} if train.device == "auto" else {}
    if train.minutes is None and train.steps is None and train.epochs is None:
        changes["minutes"] = DEFAULT_MINUTES
        talk.say(f"budget: {DEFAULT_MINUTES:g} minutes, since none is given")
    problem = bf16_problem(device) if train.precision == "bf16" else None
    if problem:
        changes["precision"] = "fp32"
        talk.say(f"precision: fp32 instead of bf16: {problem}")
    if processes > 1:
        changes["workers"] = processes
    else:
        cut = batches(
            corpus.source_lengths, corpus.target_lengths, train.seed, 0, train.batch_tokens, train.batch_examples
        )
        workers = choose_workers(train, device.type, cores(), len(corpus), len(cut))
        changes["workers"] = int(workers.value)
        if not train.workers:
            talk.say(f"processes: {workers.value}, {workers.reason}")
    name = recipe.preset
    if name == "auto":
        symbols = int(corpus.source_lengths.sum() + corpus.target_lengths.sum())
        name, reason = choose_preset(len(corpus), symbols, device.type)
        talk.say(f"preset: {name}, {reason}")
    found = prepared.codec.config
    tokens = {
        side: getattr(found, side) for side in ("source_tokens", "target_tokens") if getattr(text, side) == "auto"
    }
    return recipe.model_copy(
        update={
            "preset": name,
            "text": text.model_copy(update=tokens),
            "train": train.model_copy(update=changes),
        }
    )


# Training


def _train(recipe: Recipe, path: Path, world: World, talk: Talk) -> Report:
    """Train in this process, with the others if there are any."""
    train = recipe.train
    if world.device.type == "cpu" and world.size > 1:
        torch.set_num_threads(max(1, cores() // world.size))
    prepared = open_prepared(path / TRAINING / DATA)
    torch.manual_seed(train.seed)  # the same weights in every process
    model = Model(read_config(path).model).to(world.device)
    parameters = sum(p.numel() for p in model.parameters())
    validation = Validation(prepared, recipe, model, world)
    start = {
        "preset": recipe.preset,
        "parameters": parameters,
        "examples": len(prepared.train),
        "valid_examples": len(prepared.valid),
        "device": world.device.type,
        "workers": world.size,
    }
    feed = Feed(prepared.train, model.config, train, world)
    talk.say(
        f"model: {recipe.preset}, {parameters:,} parameters; {world.device.type}, {world.size} "
        f"process{'es' * (world.size > 1)}; {feed.batches_in(0):,} batches per epoch"
    )

    def conclude(progress: Progress) -> None:
        talk.close()
        draw_curve(path, train.metric)
        write_card(
            path,
            recipe,
            progress,
            parameters=parameters,
            examples=(len(prepared.train), len(prepared.valid)),
            notes=prepared.notes,
            signatures=validation.signatures,
        )
        best = progress.best
        if best is not None:  # alignments are asked of the heads that align best on examples not trained on
            save_heads(path, choose_heads(Run.load(path), prepared.valid_examples))
        kept = "" if best is None else f": {score(train.metric, best.value)} on the validation examples"
        talk.say(f"the model is in {path}{kept}")

    progress = Trainer(model, train, feed, validation, path, world, talk, conclude).run(start)
    return Report(path, progress, train.metric, parameters)


class Validation:
    """Scores a model on the validation examples, each process on its share."""

    def __init__(self, prepared: Prepared, recipe: Recipe, model: Model, world: World) -> None:
        self._codec = prepared.codec
        self._metric = recipe.train.metric
        self._world = world
        # An untrained model never ends; what is longer than any reference by a fifth is wrong whatever follows.
        longest = int(prepared.valid.target_lengths.max()) * 6 // 5 + 5
        self._options = Options(beam=recipe.train.validate_beam, max_length=longest)
        self._loss = ValidLoss(prepared.valid, model.config, recipe.train.batch_tokens, world)
        rows = spread(len(prepared.valid_examples), DECODED_EXAMPLES)
        self._examples = [prepared.valid_examples[row] for row in rows]
        self.signatures: dict[str, str] = {}

    def __call__(self, model: Model) -> Scores:
        scores = {"loss": self._loss(model)}
        if self._metric != "loss":
            result = measure(self._metric, self._decoded(model), [e.target or "" for e in self._examples], samples=0)
            scores[self._metric] = result.score
            if result.signature:
                self.signatures[self._metric] = result.signature
        return scores

    def _decoded(self, model: Model) -> list[str]:
        rank, size = self._world.rank, self._world.size
        run = Run(model.config, self._codec, model, Path())
        mine = [best.text for best, *_ in generate(run, self._examples[rank::size], self._options)]
        texts = [""] * len(self._examples)
        for other, part in enumerate(self._world.gather_json(mine)):
            texts[other::size] = part
        return texts


def main() -> None:
    """Be one of the further processes of a run."""
    leave_with_parent()
    tune_allocator()
    path = Path(sys.argv[1])
    try:
        recipe = saved_recipe(path)
        with join(recipe.train.device) as world:
            _train(recipe, path, world, Silence())
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
