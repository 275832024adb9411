"""What a task asks of a model, and what it feeds to it."""

from __future__ import annotations

from typing import Any

from regard.config import Config, parse
from regard.data.objectives import SENTINELS, TEXT_OBJECTIVES, context_of, first_sentinel
from regard.data.prepare import Prepared
from regard.errors import UserError
from regard.presets import PRESETS, applicable_changes, merge, preset, refuse_unused
from regard.recipe import Recipe
from regard.run import RunConfig
from regard.tasks import TASKS
from regard.training.distributed import ProcessGroup
from regard.training.loader import CorpusLoader, DataLoader, ImageLoader, SegmentLoader, WindowLoader
from regard.training.trainer import Validate
from regard.training.validation import LmValid, corpus_valid, image_valid, text_valid

Table = dict[str, Any]

STACKS = {
    ("encoder", "decoder"): "an encoder and a decoder",
    ("encoder",): "an encoder without a decoder",
    ("decoder",): "a decoder without an encoder",
}
MOST_PATCHES = 64  # that a square size is chosen for


def model_config(recipe: Recipe, prepared: Prepared[Any], base: RunConfig | None) -> Config:
    """The model of a recipe: a preset, or that of the run to start from, made to fit the data."""
    changes = recipe.model
    if base is not None:
        table = base.model.model_dump()
        _check_towers(merge(table, applicable_changes(table, changes)), recipe)
        table = merge(table, _needs(recipe, prepared, base.model))
        config = parse(
            Config, merge(table, applicable_changes(table, changes)), f"model of {recipe.train.start_from}, changed"
        )
    else:
        table = PRESETS.get(recipe.preset) or preset(recipe.preset).model_dump()  # which tells that there is none
        _check_towers(merge(table, applicable_changes(table, changes)), recipe)
        codec = prepared.codec
        sizes = {"source_vocab": codec.source_vocab, "target_vocab": codec.target_vocab}
        needs = _needs(recipe, prepared, None)
        sizes |= {side: needs.pop(side) for side in list(sizes) if side in needs}
        config = preset(recipe.preset, **sizes, changes=merge(needs, changes))
        if longer := _longer(config, recipe, _lengths(recipe, prepared)):
            config = preset(recipe.preset, **sizes, changes=merge(merge(needs, longer), changes))
    _check(config, recipe, prepared)
    return config


def check_model(recipe: Recipe, base: RunConfig | None) -> None:
    """Find mistakes in a model before its data is read; what only the data tells is made up."""
    changes = {key: value for key, value in recipe.model.items() if key != "patches"}  # they depend on the images
    needs: Table = {}
    if recipe.task in ("classify", "image"):
        needs = {"output": "classes", "classes": 2, "output_bias": True}
    if base is not None:
        table = base.model.model_dump()
        _check_towers(merge(table, applicable_changes(table, changes)), recipe)
        refuse_unused(table, changes)
        where = f"model of {recipe.train.start_from}, changed"
        parse(Config, merge(merge(table, needs), applicable_changes(table, changes)), where)
        return
    first: UserError | None = None
    for name in _candidates(recipe):
        try:
            preset(name, vocab=8000, changes=merge(needs, changes))
            _check_towers(merge(PRESETS[name], applicable_changes(PRESETS[name], changes)), recipe)
            refuse_unused(PRESETS[name], changes)
            return
        except UserError as error:
            first = first or error
    assert first is not None
    raise first


def _candidates(recipe: Recipe) -> tuple[str, ...]:
    """The presets that a recipe may come to mean."""
    if recipe.preset != "auto":
        return (recipe.preset,)
    return (name,) if (name := TASKS[recipe.task].preset) else ("transformer-small", "transformer-base")


def _check_towers(table: Table, recipe: Recipe) -> None:
    has = tuple(name for name in ("encoder", "decoder") if isinstance(table.get(name), dict))
    wanted = TASKS[recipe.task].stacks
    if has != wanted:
        raise UserError(f"{_which(recipe)}: training for {recipe.task} needs a model with {STACKS[wanted]}")


def _which(recipe: Recipe) -> str:
    return recipe.train.start_from or f"preset {recipe.preset}"


def _needs(recipe: Recipe, prepared: Prepared[Any], base: Config | None) -> Table:
    """What the task and its data decide about a model."""
    task, codec = recipe.task, prepared.codec
    needs: Table = {} if base is not None else {"ids": codec.ids.model_dump(), "frame": codec.frame}
    if task == "lm" and base is None:
        needs["start"] = "eos"  # a text begins after the end of another
    if task == "span" and first_sentinel(codec, base) is None:
        vocab = max(codec.source_vocab, 0 if base is None else base.source_vocab)
        needs |= {"source_vocab": vocab + SENTINELS, "target_vocab": vocab + SENTINELS}
    if task in ("classify", "image"):
        needs |= {"output": "classes", "classes": len(prepared.labels), "output_bias": True}
    if task == "classify" and base is None:
        needs["pooler"] = True
    if TASKS[recipe.task].reads == "images":
        channels, height, width = prepared.train.shape
        size = _square(height, width)
        if base is None or base.patches is None:
            needs["patches"] = {"height": height, "width": width, "channels": channels, "size": size}
            asked = recipe.model.get("patches", {}).get("size")
            size = asked if isinstance(asked, int) and asked > 0 else size
            needs["encoder"] = {"max_length": 1 + (height // size) * (width // size)}
    return needs


def _square(height: int, width: int) -> int:
    """The side of the patches that an image is cut into: the smallest, from 2, that makes few enough of them."""
    sides = [side for side in range(2, min(height, width) + 1) if height % side == width % side == 0]
    few = [side for side in sides if (height // side) * (width // side) <= MOST_PATCHES]
    return few[0] if few else sides[-1] if sides else 1


def _lengths(recipe: Recipe, prepared: Prepared[Any]) -> dict[str, int]:
    """The longest row that each tower has to read."""
    if TASKS[recipe.task].plain_text:
        return dict.fromkeys(("encoder", "decoder"), context_of(recipe.train))
    if TASKS[recipe.task].reads == "images":
        return {}
    sides = {"encoder": "source_lengths", "decoder": "target_lengths"}
    corpora = prepared.train, prepared.valid
    return {tower: max(int(getattr(corpus, side).max()) for corpus in corpora) for tower, side in sides.items()}


def _longer(config: Config, recipe: Recipe, lengths: dict[str, int]) -> Table:
    """Tables of positions that grow to what is to be read, unless their length is asked for."""
    return {
        name: {"max_length": lengths[name]}
        for name, stack in config.stacks.items()
        if stack.position == "learned"
        and stack.max_length < lengths.get(name, 0)
        and "max_length" not in (recipe.model.get(name) or {})
    }


def _check(config: Config, recipe: Recipe, prepared: Prepared[Any]) -> None:
    """Say what does not fit together, before anything is trained."""
    task, which = recipe.task, _which(recipe)
    if (config.patches is not None) != (task == "image"):
        raise UserError(f"{which}: {'images are read by a model with patches' if task == 'image' else 'reads images'}")
    if task == "masked" and not config.predicts_tokens:
        raise UserError(f"{which}: to predicts masked tokens a model predicts tokens; add --set output=tokens")
    for name, stack in config.stacks.items():
        most, longest = stack.max_positions, _lengths(recipe, prepared).get(name, 0)
        if most is not None and longest > most:
            setting = "train.context" if TASKS[task].plain_text else "data.max_length"
            raise UserError(
                f"{setting}: rows of {longest} tokens are more than the {most} positions of the {name}; "
                f"lower it, or raise model.{name}.max_length"
            )
    if TASKS[recipe.task].reads == "images":
        assert config.patches is not None
        patches = config.patches
        ours = (patches.channels, patches.height, patches.width)
        if ours != prepared.train.shape:
            raise UserError(
                f"model.patches: the model reads images of (channels, height, width) {ours}, the file has "
                f"{prepared.train.shape}"
            )


def make_loader(recipe: Recipe, prepared: Prepared[Any], config: Config, world: ProcessGroup) -> DataLoader:
    """The training data as steps."""
    train, reads = recipe.train, TASKS[recipe.task].reads
    if reads == "text":
        objective = TEXT_OBJECTIVES[recipe.task](prepared.train, prepared.codec, config, train)
        return (SegmentLoader if config.has_memory else WindowLoader)(objective, train, world)
    if reads == "images":
        assert prepared.pixels is not None
        return ImageLoader(prepared.train, prepared.pixels, train, world)
    return CorpusLoader(prepared.train, config, train, world)


def make_validation(recipe: Recipe, prepared: Prepared[Any], config: Config, world: ProcessGroup) -> Validate:
    """The validation data as scores; for pairs the loss alone."""
    train, task = recipe.train, recipe.task
    scores = ("loss", "accuracy") if task in ("classify", "masked") else ("loss",)
    if TASKS[task].reads == "text":
        objective = TEXT_OBJECTIVES[task](prepared.valid, prepared.codec, config, train)
        if task == "lm":
            return LmValid(prepared.valid, objective, config, train, world)
        return text_valid(objective, config, train, world, scores)
    if TASKS[task].reads == "images":
        assert prepared.pixels is not None
        return image_valid(prepared.valid, prepared.pixels, train.batch_examples or 64, world)
    return corpus_valid(prepared.valid, config, train.batch_tokens, world, scores)
