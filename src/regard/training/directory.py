"""The beginning of training: a new run directory, a run that is resumed, weights of a base run, what is trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from regard.config import Config, to_toml
from regard.data.prepare import Prepared, is_prepared
from regard.device import usable_precision
from regard.errors import UserError, plural
from regard.files import (
    MANIFEST,
    hold_lock,
    read_json,
    remove,
    replace_file,
    rewriting,
    update_manifest,
    write_json,
)
from regard.inspect.prune import gate_heads, restore_unpruned
from regard.model import Model, on_meta
from regard.nn.adapters import adaptable_layers, add_adapters
from regard.recipe import Recipe, Text, Train
from regard.run import CONFIG, HEADS, RECIPE, WEIGHTS, RunConfig, read_config, require_saved, saved_recipe, weights_of
from regard.suggest import closest
from regard.tasks import TASKS, infer_task
from regard.text.codec import TOKENIZERS, Codec
from regard.text.learn import BaseText
from regard.training.checkpoint import ADAPTERS, TRAINING, Checkpoints, Progress
from regard.training.plan import Budget
from regard.training.report import CURVE, LOG, MODEL_CARD, Reporter

DATA = "data"  # in the training directory
UNCUT = "uncut"  # there too: config and weights from before closed heads were cut
FRESH = "fresh.json"  # in the training directory: names of weights that the base run does not have
GROWING = ("source_embedding.weight", "target_embedding.weight", "output.weight", "output.bias")  # with a vocabulary
BUDGET = ("minutes", "steps", "epochs")
# When a run is resumed; it has its data.
CHANGEABLE = ("train.workers", "data.cache", *(f"train.{name}" for name in BUDGET))
# What a run is made of. `training` is not among them: prepared data alone is no run.
FILES = (CONFIG, WEIGHTS, ADAPTERS, RECIPE, LOG, MODEL_CARD, CURVE, HEADS, MANIFEST, *TOKENIZERS)
LOCK = "lock"  # in the training directory
LAUNCHERS = "launchers.json"  # there too: the torchrun processes that have begun or resumed the run
# In the training directory, too; `prepare` and the checkpoints would replace or remove them.
STATE = (DATA, UNCUT, FRESH, "step-*", "weights-*.safetensors")
BEFORE_CONFIG = {
    RECIPE,
    MANIFEST,
    f"{TRAINING}/{DATA}",
    f"{TRAINING}/{FRESH}",
    *TOKENIZERS,
}  # written before config.json


# The run directory


@contextmanager
def claim_run(path: Path) -> Iterator[bool]:
    """Become the only writer of a run directory -> whether its file system has locks.

    Somebody else's files are refused, and nothing is left of a new directory if an error occurs while it is empty.
    """
    require_ours(path)
    with _removed_if_empty(path):
        try:
            (path / TRAINING).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot make this directory: {error.strerror or error}") from None
        with hold_lock(path / TRAINING / LOCK, str(path)) as held:
            if is_run(path) or stopped_in_setup(path):
                Checkpoints(path).remove_temporary()
            yield held


@contextmanager
def _removed_if_empty(path: Path) -> Iterator[None]:
    """If an error occurs, remove the directories that were made for the run and are still empty."""
    missing = [directory for directory in (path / TRAINING, path, *path.parents) if not directory.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):  # not empty
            for directory in missing:
                directory.rmdir()
        raise


def write_run(path: Path, recipe: Recipe, config: Config, prepared: Prepared[Any], fresh: list[str]) -> None:
    """Write everything of a new run that is known before training; config.json last, for it makes a run of it."""
    if fresh:  # written down here, for the base run may be gone when this one resumes
        write_json(path / TRAINING / FRESH, fresh)
    codec = prepared.codec
    try:
        codec.save(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror or error}") from None
    save_recipe(recipe, path)
    run = RunConfig(model=config, text=codec.config, task=recipe.task, labels=prepared.labels, pixels=prepared.pixels)
    if recipe.train.start_from:
        run = run.model_copy(update={"generation": read_config(Path(recipe.train.start_from)).generation})
    write_json(path / CONFIG, run.model_dump(mode="json"))
    update_manifest(path, [CONFIG, RECIPE, *TOKENIZERS])


def finished_progress(recipe: Recipe, path: Path) -> Progress | None:
    """The progress of a run that is finished, unless the budget of the recipe lets it go on."""
    progress = Checkpoints(path).progress()
    if progress is None or progress.finished is None:
        return None
    done, _ = Budget.of(recipe.train).done(progress.step, progress.epoch, progress.seconds)
    return progress if done >= 1 or progress.finished == "patience" else None


def resume_run(requested: Recipe, path: Path, device: torch.device, reporter: Reporter, launched: int) -> None:
    """Make a run ready to go on, with the requested budget, in the processes that were `launched` if several were."""
    if not is_prepared(path / TRAINING / DATA):
        raise UserError(
            f"{path}: cannot be resumed, for its prepared data is not there ({TRAINING}/{DATA}); "
            f"train it further with --from {path} --out NEW"
        )
    saved = saved_recipe(path)
    require_saved(path, (CONFIG, RECIPE, *TOKENIZERS))
    recipe = resumed_recipe(requested, saved, path)
    before, now = saved.train.workers, launched if launched > 1 else recipe.train.workers
    if now != before:
        if now > 1 and read_config(path).model.has_memory:
            raise UserError("train.workers: a model with segment memory is trained by one process")
        reporter.say(
            f"processes: {now}, {before} before; the examples of a step stay the same, random numbers (dropout) do not"
        )
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"workers": now})})
    if finished_progress(recipe, path) is None:
        restore_unpruned(path, path / TRAINING / UNCUT)
        if requested.train.precision != recipe.train.precision == "fp32":
            reporter.say("precision: fp32, which the run settled on")
        # The run may have come from another machine. Being slow is no reason to go on differently than it began.
        usable = usable_precision(recipe.train.precision, device, reporter.say, slow=False)
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": usable})})
    if recipe != saved:
        save_recipe(recipe, path)


def is_run(run: Path) -> bool:
    """Whether a directory holds a run that was set up completely by training; config.json is written last."""
    return (run / CONFIG).is_file() and (run / RECIPE).is_file()


def require_ours(run: Path) -> None:
    """Refuse a directory in which training would overwrite files that are not those of a training."""
    if run.exists() and not run.is_dir():
        raise UserError(f"{run}: is a file; --out takes a directory")
    taken = _taken(run)
    if is_run(run) or stopped_in_setup(run) or not taken:
        return
    hint = "choose another --out"
    with suppress(UserError):
        read_config(run)
        hint = f"it is a run, but not of a training that could be resumed; train it further with --from {run} --out NEW"
    raise UserError(f"{run}: has {', '.join(taken)}, which training would overwrite; {hint}")


def stopped_in_setup(run: Path) -> bool:
    """Whether a training was stopped here after its data was prepared and before it had written a run."""
    return is_prepared(run / TRAINING / DATA) and BEFORE_CONFIG.issuperset(_taken(run))


def _taken(run: Path) -> list[str]:
    """What there is in a directory of that which training writes; an empty directory is nothing."""
    there = [name for name in FILES if (run / name).exists()]
    for pattern in STATE:
        for path in sorted((run / TRAINING).glob(pattern)):
            if not path.is_dir() or any(path.iterdir()):
                there.append(str(path.relative_to(run)))
    return there


def require_new(run: Path) -> None:
    """Refuse to begin a run where one is."""
    if is_run(run):
        raise UserError(f"{run}: there is a run already; continue it with --resume, or choose another --out")
    if stopped_in_setup(run) and len(_taken(run)) > 1:  # prepared data alone is used again
        raise UserError(
            f"{run}: a training was stopped here before its first step; "
            "the same command with --resume begins it again, or choose another --out"
        )


def begun_by(run: Path, launchers: Collection[str]) -> bool:
    """Whether one of these launchers has begun the run, or resumed it."""
    file = run / TRAINING / LAUNCHERS
    known = read_json(file) if launchers and file.is_file() else None
    return isinstance(known, list) and any(name in known for name in launchers)


def remember_launchers(run: Path, launchers: Collection[str]) -> None:
    """Note who may go on with the run without being asked to, when its processes have died."""
    if launchers:
        write_json(run / TRAINING / LAUNCHERS, sorted(launchers))
    else:
        remove(run / TRAINING / LAUNCHERS)


def remove_remains(run: Path) -> None:
    """Remove what a training that was stopped in its set-up has left, except for the data."""
    for name in BEFORE_CONFIG - {f"{TRAINING}/{DATA}"}:
        remove(run / name)


def save_recipe(recipe: Recipe, run: Path) -> None:
    """Write the complete recipe; what is not set has no key, for TOML knows no null."""
    text = to_toml(recipe.model_dump(mode="json"))
    with rewriting(run, RECIPE):
        replace_file(run / RECIPE, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def resumed_recipe(requested: Recipe, saved: Recipe, run: Path) -> Recipe:
    """The recipe to continue with: the saved one, with the requested budget, if any.

    All other settings that are requested must equal the saved ones, unless they leave the choice open.
    """
    now, then = _flat(requested.model_dump(mode="json", exclude_unset=True)), _flat(saved.model_dump(mode="json"))
    # bf16 means: if the machine is good at it, which was found out then
    open_choices = [("train.workers", 0), ("train.precision", "bf16")]
    changed = []
    for key, value in now.items():
        left_open = value in ("auto", None) or (key, value) in open_choices or key in CHANGEABLE
        if value != then.get(key) and not left_open:
            preset_value = key.startswith("model.") and key not in then
            changed.append(
                f"{key}: now {value!r}, then {'as the preset has it' if preset_value else repr(then.get(key))}"
            )
    if changed:
        raise UserError(
            f"{run}: cannot resume with a changed recipe (only minutes, steps, epochs and workers may change)\n  "
            + "\n  ".join(changed)
            + "\n  leave these out, or start a new run with another --out"
        )
    changes = requested.train.model_dump(include=set(BUDGET))
    if all(value is None for value in changes.values()):
        changes = {}
    if requested.train.workers:
        changes["workers"] = requested.train.workers
    return saved.model_copy(update={"train": saved.train.model_copy(update=changes)}) if changes else saved


def _flat(tables: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return flat


# The base run and its weights


def open_base(recipe: Recipe) -> tuple[RunConfig, BaseText] | tuple[None, None]:
    """The config and the text of the run that a recipe starts from (train.start_from), if it does."""
    if recipe.train.start_from is None:
        if setting := "lora" if recipe.train.lora else "parts" if recipe.train.parts is not None else None:
            rest = "the rest of the model would stay as random as it begins"
            raise UserError(f"train.{setting}: {rest}; name a run to start from (--from RUN)")
        return None, None
    if recipe.preset != "auto":
        raise UserError(f"{recipe.train.start_from} brings its own model; leave preset {recipe.preset} out")
    run = Path(recipe.train.start_from)
    config = read_config(run)
    require_saved(run, verify=True)
    different = []  # settings that would be ignored, for the tokenizers are those of the base run
    for key in sorted(recipe.text.model_fields_set):
        here, there = getattr(recipe.text, key), getattr(config.text, key, Text.model_fields[key].default)
        if here not in ("auto", there):
            different.append(f"\n  text.{key}: {here} here, {there} there")
    if different and TASKS[recipe.task].reads != "images":
        raise UserError(f"{run} brings its own tokens; leave out what differs{''.join(different)}")
    return config, BaseText(Codec.load(run, config.text), config.labels)


class WeightMatch(NamedTuple):
    """How the weights of a run fit a new model, by name."""

    fresh: list[str]  # not in the run
    grown: list[str]  # of which the run has the first rows
    unused: list[str]  # not in the new model


def match_weights(config: Config, labels: tuple[str, ...], run: str | Path) -> WeightMatch:
    """See whether a run's weights fit; all weights of another shape are listed in one error.

    The classifier is fresh if the run has other `labels`, or does not say which it has.
    """
    new_labels = TASKS[infer_task(config)].labels and read_config(Path(run)).labels != labels
    with _weights(run) as file:
        theirs = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  not a dict
    ours = {name: list(x.shape) for name, x in weights_of(on_meta(config)).items()}
    fresh = [name for name in ours if name not in theirs]
    grown, wrong = [], []
    for name in sorted(ours.keys() & theirs.keys()):
        here, there = ours[name], theirs[name]
        if new_labels and name.startswith("output."):
            fresh.append(name)
        elif here == there:
            continue
        elif name in GROWING and here[1:] == there[1:] and here[0] > there[0]:
            grown.append(name)
        else:
            wrong.append(f"{name}: {there} there, {here} here")
    if wrong:
        more = [f"and {len(wrong) - 20} more"] if len(wrong) > 20 else []
        raise UserError(f"{run}: its weights do not fit the model\n  " + "\n  ".join([*wrong[:20], *more]))
    return WeightMatch(fresh, grown, [name for name in theirs if name not in ours])


def plan_weights(recipe: Recipe, config: Config, labels: tuple[str, ...], reporter: Reporter) -> list[str]:
    """Check the weights to start from and the parts to train -> names of weights that the base run does not have."""
    fresh: list[str] = []
    if recipe.train.start_from is not None:
        match = match_weights(config, labels, recipe.train.start_from)
        fresh = match.fresh
        reporter.say(f"weights: those of {recipe.train.start_from}")
        for meaning, names in zip(("fresh", "longer than there, the new rows fresh", "not used"), match, strict=True):
            short = {".".join(name.split(".")[:3]) if ".blocks." in name else name for name in names}
            if short:
                reporter.say(f"{meaning}: {', '.join(sorted(short))}")
    choose_trained(on_meta(config), recipe.train, fresh)  # finds mistakes before anything is written
    return fresh


def make_model(recipe: Recipe, labels: tuple[str, ...], path: Path, device: torch.device) -> Model:
    """The model of a run with its first weights; a later checkpoint is loaded by the trainer."""
    torch.manual_seed(recipe.train.seed)  # the same weights in every process
    model = Model(read_config(path).model).to(device)
    if recipe.train.start_from is not None and Checkpoints(path).progress() is None:
        load_weights_of(recipe.train.start_from, model, labels)
    return model


def add_trained_parts(model: Model, train: Train, path: Path) -> str | None:
    """Freeze what is not trained, add adapters and head gates -> a message, unless everything is trained."""
    fresh = path / TRAINING / FRESH
    message = choose_trained(model, train, read_json(fresh) if fresh.is_file() else [])
    if train.l0:
        gate_heads(model)
    return message


@torch.no_grad()
def load_weights_of(run: str | Path, model: Model, labels: tuple[str, ...]) -> None:
    """Give a model the weights of a run, as far as they fit."""
    match = match_weights(model.config, labels, run)
    with _weights(run) as file:
        for name, weight in weights_of(model).items():
            if name not in match.fresh:
                theirs = file.get_tensor(name)
                weight[: len(theirs)].copy_(theirs)


def _weights(run: str | Path):  # type: ignore[no-untyped-def]  # the library has no name for it
    path = Path(run) / WEIGHTS
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not readable: {error}") from None


def choose_trained(model: Model, train: Train, fresh: list[str]) -> str | None:
    """Freeze what is not to be trained, and add adapters if asked to -> a message, unless everything is trained.

    Fresh weights, which the base run does not have, are trained in any case.
    """
    total = model.size
    names = list(dict(model.named_parameters()))
    for part in train.parts or ():
        if not any(_within(name, part) for name in names):
            prefixes = sorted({".".join(name.split(".")[:n]) for name in names for n in range(1, 6)})
            raise UserError(f"train.parts: the model has no part {part!r}{closest(part, prefixes)}")
    layers = []
    if train.lora:
        for name, layer in adaptable_layers(model, train.lora_on).items():
            # a product of two thin matrices has no higher rank than the matrix that it is added to
            if train.lora > (most := min(layer.in_features, layer.out_features)):
                shape = f"{layer.out_features} x {layer.in_features}"
                raise UserError(f"train.lora: a rank of at most {most} fits {name} ({shape}), not {train.lora}")
        layers = add_adapters(model, train.lora, train.lora_alpha or 2.0 * train.lora, train.lora_on)
        if not layers:
            raise UserError(f"train.lora_on: no layer is inside a part named {' or '.join(train.lora_on)}")
    if train.lora or train.parts is not None:
        adapters = {f"{layer}.{part}" for layer in layers for part in ("lora_up", "lora_down")}
        for name, parameter in model.named_parameters():
            wanted = name in fresh or name in adapters or any(_within(name, part) for part in train.parts or ())
            parameter.requires_grad_(wanted)
    if model.pooler is not None and not model.classifies:
        model.pooler.requires_grad_(False)  # only a classifier reads it
    if not train.lora and train.parts is None:
        return None
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    what = f", adapters of rank {train.lora} on {plural(len(layers), 'layer')}" if layers else ""
    return f"trained: {trained:,} parameters; the model has {total:,}{what}"


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")
