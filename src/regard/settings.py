"""The recipe: everything a training run is told, as frozen values that a TOML file and `--set` can change."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from regard.config import Config, Count, Rate, Stack, Value, parse
from regard.errors import UserError, closest

Column = Literal["source", "features", "target"]
Metric = Literal["loss", "accuracy", "wer", "per", "bleu", "chrf"]
LOWER_IS_BETTER = frozenset({"loss", "wer", "per"})


class Text(Value):
    """How text becomes symbols."""

    source_tokens: str = "auto"  # char | nfd | space | word | byte | bpe:N | unigram:N | auto
    target_tokens: str = "auto"
    shared: bool = False  # one vocabulary for both sides
    min_count: Count = 1  # rarer symbols are unknown (char, space, word)
    feature_separator: str = Field(default=";", min_length=1)


class Data(Value):
    """Where examples come from. Either `train` (a TSV) or `source` and `target` (parallel files); `.gz` of either."""

    train: str | None = None
    source: str | None = None
    target: str | None = None
    valid: str | None = None
    valid_source: str | None = None
    valid_target: str | None = None
    columns: tuple[Column, ...] = ("source", "target")
    max_length: Count = 512  # symbols on either side; a longer example is skipped and counted
    strict: bool = False  # stop at the first bad line

    @field_validator("columns")
    @classmethod
    def _columns(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(columns)) != len(columns) or not {"source", "target"} <= set(columns):
            raise ValueError(f"columns must name source and target once each, not {','.join(columns)}")
        return columns


class Train(Value):
    """How a model is trained. The first budget to run out ends the run; with none set, `minutes` is 10."""

    minutes: Annotated[float, Field(gt=0)] | None = None
    steps: Count | None = None
    epochs: Count | None = None
    batch_tokens: Count = 4096  # padded symbols of the longer side
    batch_examples: Count | None = None
    accumulate: Count = 1
    optimizer: Literal["adam", "adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)  # the peak; a factor for noam
    schedule: Literal["noam", "inverse_sqrt", "cosine", "linear", "constant"] = "cosine"
    warmup: int = Field(default=400, ge=0)
    beta1: Rate = 0.9
    beta2: Rate = 0.98
    eps: float = Field(default=1e-9, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, ge=0)  # 0: never
    label_smoothing: Rate = 0.1
    scheduled_sampling: float = Field(default=0.0, ge=0, le=1)  # how often the model's own prediction is fed back
    average: int = Field(default=0, ge=0)  # at the end, average the last N validated checkpoints
    ema: Rate = 0.0  # validate and keep an exponential moving average of the weights
    metric: Metric = "loss"
    patience: int = Field(default=0, ge=0)  # validations without a better metric before stopping; 0: never
    validate_every: Count | None = None  # steps; None: about once per epoch, at most 40 times in a run
    validate_beam: Count = 1
    log_every: Count = 50
    seed: int = Field(default=1, ge=0)
    precision: Literal["fp32", "bf16"] = "fp32"
    device: str = "auto"
    workers: int = Field(default=0, ge=0)  # processes; 0: one per core on a CPU, one elsewhere

    @field_validator("device")
    @classmethod
    def _device(cls, device: str) -> str:
        if device.split(":")[0] not in ("auto", "cpu", "cuda", "mps"):
            raise ValueError(f"device is auto, cpu, cuda, cuda:N or mps, not {device!r}")
        return device


class Recipe(Value):
    """A complete order: model, text, data, training."""

    preset: str = "auto"
    model: dict[str, Any] = Field(
        default_factory=dict
    )  # keys of Config to change in the preset; checked when the model is made
    text: Text = Text()
    data: Data = Data()
    train: Train = Train()

    @model_validator(mode="after")
    def _one_source(self) -> Recipe:
        data = self.data
        if data.train and (data.source or data.target):
            raise ValueError("data: give either train (a TSV) or source and target, not both")
        if (data.source is None) != (data.target is None):
            raise ValueError("data: source and target belong together")
        if data.valid and (data.valid_source or data.valid_target):
            raise ValueError("data: give either valid (a TSV) or valid_source and valid_target, not both")
        if (data.valid_source is None) != (data.valid_target is None):
            raise ValueError("data: valid_source and valid_target belong together")
        return self


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read a TOML recipe as plain tables; `load_recipe` checks them once the command line has had its say."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: not a readable TOML file: {error}") from None


def load_recipe(tables: dict[str, Any], where: str = "recipe") -> Recipe:
    """Check a recipe given as tables."""
    return parse(Recipe, tables, where)


def assign(tables: dict[str, Any], setting: str) -> None:
    """Apply one `--set key=value` to recipe tables, in place.

    A key is a full path (`train.lr`, `decoder.score`) or a bare name, if only one section has it; a field of Stack
    means both towers. The value is TOML, or a plain word.
    """
    key, equals, raw = setting.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"--set {setting}: write it as key=value, for example --set dropout=0.2")
    for path in _paths(key):
        table = tables
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UserError(f"--set {setting}: {part} is a value, not a table")
        table[path[-1]] = _value(raw.strip())


def _paths(key: str) -> list[list[str]]:
    parts = key.split(".")
    sections: dict[str, type[Value]] = {"text": Text, "data": Data, "train": Train}
    if len(parts) > 1:
        if parts[0] in ("encoder", "decoder", "ids"):
            parts = ["model", *parts]
        if parts[0] not in ("model", *sections):
            raise UserError(f"--set {key}: no such section{closest(parts[0], ['model', *sections])}")
        if parts[0] == "model" and len(parts) == 2 and parts[1] in Stack.model_fields:
            return _both_towers(parts[1])
        return [parts]
    if key == "preset":
        return [[key]]
    homes = [f"{name}.{key}" for name, section in sections.items() if key in section.model_fields]
    if key in {**Stack.model_fields, **Config.model_fields}:
        homes.append(f"model.{key}")
    if not homes:
        known = [*Stack.model_fields, *Config.model_fields, *(f for s in sections.values() for f in s.model_fields)]
        raise UserError(f"--set {key}: no such key{closest(key, known)}")
    if len(homes) > 1:
        raise UserError(f"--set {key}: could mean {' or '.join(homes)}; write which")
    return _both_towers(key) if key in Stack.model_fields else [homes[0].split(".")]


def _both_towers(key: str) -> list[list[str]]:
    return [["model", "encoder", key], ["model", "decoder", key]]


def _value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw
