"""Starting from the weights of a run, and training only a part of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from regard.config import Config
from regard.errors import UserError, closest
from regard.files import read_json, replace_file, to_toml, write_json
from regard.model import Model, on_meta
from regard.nn.lora import adaptable_layers, add_adapters
from regard.recipe import Recipe, Text, Train
from regard.run import RECIPE, WEIGHTS, RunConfig, read_config, weights_of
from regard.text.codec import Codec
from regard.training.report import Reporter

FRESH = "fresh.json"  # in the training directory: names of weights that a run to start from had nothing for
GROWING = ("source_embedding.weight", "target_embedding.weight", "output.weight", "output.bias")  # with a vocabulary


class BaseRun(NamedTuple):
    """The run to start from, without its weights."""

    config: RunConfig
    codec: Codec


def open_base(recipe: Recipe) -> BaseRun | None:
    """Open the run that a recipe starts from, if it does."""
    if recipe.train.start_from is None:
        asked = "lora" if recipe.train.lora else "parts" if recipe.train.parts is not None else None
        if asked:
            raise UserError(
                f"train.{asked}: the rest of the model would stay as random as it begins; name a run to start from "
                "(--from RUN)"
            )
        return None
    if recipe.preset != "auto":
        raise UserError(f"{recipe.train.start_from} brings its own model; leave preset {recipe.preset} out")
    run = Path(recipe.train.start_from)
    config = read_config(run)
    _same_text(recipe, config)
    return BaseRun(config, Codec.load(run, config.text))


def _same_text(recipe: Recipe, base: RunConfig) -> None:
    """Refuse settings of text that would not be followed: text becomes tokens as it does in the run."""
    asked = {key: getattr(recipe.text, key) for key in sorted(recipe.text.model_fields_set)}
    there = {key: getattr(base.text, key, Text.model_fields[key].default) for key in asked}
    other = [
        f"text.{key}: {value} here, {there[key]} there"
        for key, value in asked.items()
        if value not in ("auto", there[key])
    ]
    if other and recipe.task != "image":
        raise UserError(
            f"{recipe.train.start_from} brings its own tokens; leave out what differs\n  " + "\n  ".join(other)
        )


class Started(NamedTuple):
    """How the weights of a run fit a new model."""

    fresh: list[str]  # names that the run has nothing for
    grown: list[str]  # names of which it has the first rows
    left: list[str]  # names that the new model has no use for

    def notes(self) -> list[str]:
        told = (("fresh", self.fresh), ("longer than there, the new rows fresh", self.grown), ("not used", self.left))
        return [f"{what}: {', '.join(_parts(names))}" for what, names in told if names]


def _parts(names: list[str]) -> list[str]:
    """Names without what is told by their beginning."""
    return sorted({".".join(name.split(".")[:3]) if ".blocks." in name else name for name in names})


def compare(config: Config, labels: tuple[str, ...], run: str | Path) -> Started:
    """See whether a run's weights fit; what has another shape is listed in one error.

    The prediction of labels is fresh if the run has other `labels`, or does not say which it has.
    """
    new_labels = config.output == "classes" and read_config(Path(run)).labels != labels
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
    return Started(fresh, grown, [name for name in theirs if name not in ours])


def plan_start(recipe: Recipe, config: Config, labels: tuple[str, ...], training: Path, talk: Reporter) -> None:
    """See what the weights to start from leave fresh, and remember it: that run may be gone when this one resumes."""
    fresh: list[str] = []
    if recipe.train.start_from is not None:
        started = compare(config, labels, recipe.train.start_from)
        fresh = started.fresh
        for note in (f"weights: those of {recipe.train.start_from}", *started.notes()):
            talk.say(note)
    choose_trained(on_meta(config), recipe.train, fresh)  # finds mistakes before anything is written
    if fresh:
        write_json(training / FRESH, fresh)


def fresh_weights(training: Path) -> list[str]:
    """The names that `plan_start` found."""
    names: list[str] = read_json(training / FRESH) if (training / FRESH).is_file() else []
    return names


@torch.no_grad()
def load_start(model: Model, labels: tuple[str, ...], run: str | Path) -> None:
    """Give a model the weights of a run, as far as `compare` found them to fit."""
    started = compare(model.config, labels, run)
    with _weights(run) as file:
        for name, weight in weights_of(model).items():
            if name not in started.fresh:
                theirs = file.get_tensor(name)
                weight[: len(theirs)].copy_(theirs)


def _weights(run: str | Path):  # type: ignore[no-untyped-def]  # the library has no name for it
    path = Path(run) / WEIGHTS
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not readable: {error}") from None


def choose_trained(model: Model, train: Train, fresh: list[str]) -> str | None:
    """Freeze what is not to be trained, and add adapters if asked to -> what to tell, if anything is special.

    What a run to start from had nothing for is trained in any case.
    """
    total = model.size
    names = list(dict(model.named_parameters()))
    for part in train.parts or ():
        if not any(_within(name, part) for name in names):
            prefixes = sorted({".".join(name.split(".")[:n]) for name in names for n in range(1, 6)})
            raise UserError(f"train.parts: the model has no part {part!r}{closest(part, prefixes)}")
    layers = []
    if train.lora:
        _check_rank(model, train)
        layers = add_adapters(model, train.lora, train.lora_alpha or 2.0 * train.lora, train.lora_on)
        if not layers:
            raise UserError(f"train.lora_on: no layer is inside a part named {' or '.join(train.lora_on)}")
    if train.lora or train.parts is not None:
        adapters = {f"{layer}.{part}" for layer in layers for part in ("lora_up", "lora_down")}
        for name, parameter in model.named_parameters():
            wanted = name in fresh or name in adapters or any(_within(name, part) for part in train.parts or ())
            parameter.requires_grad_(wanted)
    if model.pooler is not None and model.config.output != "classes":
        model.pooler.requires_grad_(False)  # nothing that is predicted here comes from it
    if not train.lora and train.parts is None:
        return None
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    what = f", adapters of rank {train.lora} on {len(layers)} layers" if layers else ""
    return f"trained: {trained:,} parameters; the model has {total:,}{what}"


def _check_rank(model: Model, train: Train) -> None:
    """A product of two thin matrices has no higher rank than the matrix that it is added to."""
    for name, layer in adaptable_layers(model, train.lora_on).items():
        if train.lora > (most := min(layer.in_features, layer.out_features)):
            shape = f"{layer.out_features} x {layer.in_features}"
            raise UserError(f"train.lora: a rank of at most {most} fits {name} ({shape}), not {train.lora}")


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


BUDGET = ("minutes", "steps", "epochs")
# What a run is made of. `training` is not among them: data prepared in vain is no run.
OURS = (
    "config.json",
    "model.safetensors",
    "adapters.safetensors",
    RECIPE,
    "log.jsonl",
    "README.md",
    "source.tokenizer.json",
    "target.tokenizer.json",
    "tokenizer.json",
)


def begun(run: Path) -> bool:
    """Whether a directory holds a run that was set up completely; config.json is written last."""
    return (run / "config.json").is_file() and (run / RECIPE).is_file()


def require_free(run: Path) -> None:
    """Refuse to write over a run, or over somebody's files."""
    if run.exists() and not run.is_dir():
        raise UserError(f"{run}: is a file; --out takes a directory")
    if begun(run):
        raise UserError(f"{run}: there is a run already; continue it with --resume, or choose another --out")
    taken = [name for name in OURS if (run / name).exists()]
    if taken:
        raise UserError(f"{run}: has {', '.join(taken)}, which training would overwrite; choose another --out")


def save_recipe(recipe: Recipe, run: Path) -> None:
    """Write the complete recipe; what is not set has no key, for TOML knows no null."""
    text = to_toml(recipe.model_dump(mode="json"))

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    replace_file(run / RECIPE, write)


def resumed_recipe(given: Recipe, saved: Recipe, run: Path) -> Recipe:
    """The recipe to continue with: the saved one, with the budget that is given now, if any.

    Whatever else is given must be as it was; what is not given, or left to choose, is as it was.
    """
    now, then = _flat(given.model_dump(mode="json", exclude_unset=True)), _flat(saved.model_dump(mode="json"))
    budget = {f"train.{key}" for key in BUDGET}
    changed = [
        f"{key}: now {value!r}, then {_then(key, then)}"
        for key, value in now.items()
        if key not in budget and value != then.get(key) and not _open(key, value)
    ]
    if changed:
        raise UserError(
            f"{run}: cannot resume with a changed recipe (only minutes, steps and epochs may change)\n  "
            + "\n  ".join(changed)
            + "\n  leave these out, or start a new run with another --out"
        )
    new = {key: getattr(given.train, key) for key in BUDGET}
    if any(value is not None for value in new.values()):
        return saved.model_copy(update={"train": saved.train.model_copy(update=new)})
    return saved


def _then(key: str, then: dict[str, Any]) -> str:
    return "as the preset has it" if key.startswith("model.") and key not in then else repr(then.get(key))


def _open(key: str, value: Any) -> bool:
    if key == "train.precision" and value == "bf16":  # wished for, where the machine is good at it: that was settled
        return True
    return value == "auto" or value is None or (key == "train.workers" and value == 0)


def _flat(tables: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return flat
