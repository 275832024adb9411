"""The model config of a recipe: its preset, or the model of the run to start from, made to fit task and data."""

from __future__ import annotations

from typing import Any

from regard.config import Config, parse
from regard.data.objectives import SENTINELS, context_of, first_sentinel
from regard.data.prepare import Prepared
from regard.errors import UserError
from regard.presets import PRESETS, applicable_changes, merge, preset, refuse_unused
from regard.recipe import Recipe
from regard.run import RunConfig
from regard.tasks import TASKS, infer_task

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
