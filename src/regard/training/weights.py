"""The initial weights of training, and the selection of the trained ones."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from regard.config import Config
from regard.errors import UserError, plural
from regard.files import open_weights
from regard.inspect.prune import gate_heads
from regard.model import Model, on_meta
from regard.nn.adapters import adaptable_layers, add_adapters
from regard.recipe import Recipe, Text, Train
from regard.run import WEIGHTS, RunConfig, read_config, require_saved
from regard.suggest import closest
from regard.tasks import TASKS, infer_task
from regard.text.codec import Codec
from regard.text.learn import BaseText
from regard.training.directory import New, Resumed
from regard.training.report import Reporter
from regard.weight_files import list_differences, weights_of

VOCABULARY_WEIGHTS = ("source_embedding.weight", "target_embedding.weight", "output.weight", "output.bias")


class Base(NamedTuple):
    """The run that training starts from (train.start_from)."""

    path: Path
    config: RunConfig
    text: BaseText


def open_base(recipe: Recipe) -> Base | None:
    """Open the run that a recipe starts from, if any."""
    if recipe.train.start_from is None:
        if setting := "lora" if recipe.train.lora else "parts" if recipe.train.parts is not None else None:
            rest = "the rest of the model would keep its random weights"
            raise UserError(f"train.{setting}: {rest}; name a run to start from (train.start_from=RUN)")
        return None
    if recipe.preset != "auto":
        raise UserError(f"{recipe.train.start_from} brings its own model; leave preset {recipe.preset} out")
    run = Path(recipe.train.start_from)
    config = read_config(run)
    require_saved(run, verify=True)
    different = []  # settings without effect: the tokenizers are those of the base run
    for key in sorted(recipe.text.model_fields_set):
        here = getattr(recipe.text, key)
        there = getattr(config.text, key, Text.model_fields[key].default)
        if here not in ("auto", there):
            different.append(f"\n  text.{key}: {here} here, {there} there")
    if different and TASKS[recipe.task].reads != "images":
        raise UserError(f"{run} brings its own tokenizers; leave out the settings that differ{''.join(different)}")
    return Base(run, config, BaseText(Codec.load(run, config.text), config.labels))


class WeightMatch(NamedTuple):
    """A comparison of the weights of a base run with those of a new model, by name."""

    fresh: tuple[str, ...]  # only in the new model
    grown: tuple[str, ...]  # with more rows in the new model
    unused: tuple[str, ...]  # only in the base run


def match_weights(config: Config, labels: tuple[str, ...], base: Base) -> WeightMatch:
    """Compare names and shapes; one error lists all differences. With other labels, the classifier is fresh."""
    new_labels = TASKS[infer_task(config)].labels and base.config.labels != labels
    with open_weights(base.path / WEIGHTS) as file:
        theirs = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  not a dict
    ours = {name: list(x.shape) for name, x in weights_of(on_meta(config)).items()}
    fresh = [name for name in ours if name not in theirs]
    grown = []
    wrong = []
    for name in sorted(ours.keys() & theirs.keys()):
        here = ours[name]
        there = theirs[name]
        if new_labels and name.startswith("output."):
            fresh.append(name)
        elif here == there:
            continue
        elif name in VOCABULARY_WEIGHTS and here[1:] == there[1:] and here[0] > there[0]:
            grown.append(name)
        else:
            wrong.append(f"{name}: {there} there, {here} here")
    if wrong:
        raise UserError(f"{base.path}: its weights do not fit the model\n  {list_differences(wrong)}")
    return WeightMatch(tuple(fresh), tuple(grown), tuple(name for name in theirs if name not in ours))


def check_weights(
    recipe: Recipe, config: Config, labels: tuple[str, ...], base: Base | None, reporter: Reporter
) -> tuple[str, ...]:
    """Check the weights of the base run and the trained parts -> names of weights that the base run does not have."""
    fresh: tuple[str, ...] = ()
    if base is not None:
        match = match_weights(config, labels, base)
        fresh = match.fresh
        reporter.say(f"weights: those of {base.path}")
        for meaning, names in zip(("new weights", "weights with new rows", "unused weights"), match, strict=True):
            short = {".".join(name.split(".")[:3]) if ".blocks." in name else name for name in names}
            if short:
                reporter.say(f"{meaning}: {', '.join(sorted(short))}")
    select_trained(on_meta(config), recipe.train, fresh)  # reports mistakes before anything is written
    return fresh


def make_model(setup: New | Resumed, device: torch.device) -> Model:
    """The model with initial weights; the trainer replaces them by those of a checkpoint."""
    train = setup.recipe.train
    torch.manual_seed(train.seed)  # the same weights in every process
    model = Model(setup.config).to(device)
    if train.start_from is not None and isinstance(setup, New):
        with open_weights(Path(train.start_from) / WEIGHTS) as file:
            for name, weight in weights_of(model).items():
                if name not in setup.fresh:
                    theirs = file.get_tensor(name)
                    weight[: len(theirs)].copy_(theirs)
    return model


def select_trained(model: Model, train: Train, fresh: tuple[str, ...]) -> str | None:
    """Add adapters and head gates, and freeze the other weights -> a message, unless everything is trained."""
    total = model.size
    names = [name for name, _ in model.named_parameters()]
    for part in train.parts or ():
        if not any(_within(name, part) for name in names):
            prefixes = sorted({".".join(name.split(".")[:n]) for name in names for n in range(1, 6)})
            raise UserError(f"train.parts: the model has no part {part!r:.100}{closest(part, prefixes)}")
    adapters = _add_adapters(model, train) if train.lora else []
    partial = bool(train.lora) or train.parts is not None
    if partial:
        parts = (*adapters, *(train.parts or ()))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in fresh or any(_within(name, part) for part in parts))
    if model.pooler is not None and not model.classifies:
        model.pooler.requires_grad_(False)  # only classifiers use it
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if train.l0:
        gate_heads(model)
    if not partial:
        return None
    layers = f", adapters of rank {train.lora} on {plural(len(adapters) // 2, 'layer')}" if adapters else ""
    return f"trained: {trained:,} parameters; the model has {total:,}{layers}"


def _add_adapters(model: Model, train: Train) -> list[str]:
    """Add the adapters (LoRA) -> the names of their weights, two for each layer."""
    for name, layer in adaptable_layers(model, train.lora_on).items():
        # the rank of a matrix is at most its smaller side
        if train.lora > (limit := min(layer.in_features, layer.out_features)):
            shape = f"{layer.out_features} x {layer.in_features}"
            raise UserError(f"train.lora: a rank of at most {limit} fits {name} ({shape}), not {train.lora}")
    layers = add_adapters(model, train.lora, train.lora_alpha or 2.0 * train.lora, train.lora_on)
    if not layers:
        raise UserError(f"train.lora_on: no layer is inside a part named {' or '.join(train.lora_on)}")
    return [f"{layer}.{part}" for layer in layers for part in ("lora_up", "lora_down")]


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")
