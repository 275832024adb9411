"""The recipe: everything a training run is told, as frozen values that a TOML file and `--set` can change."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from regard.config import Config, Count, Id, Rate, Stack, Value, parse
from regard.errors import UserError, closest
from regard.tasks import TASKS, TaskName

Column = Literal["source", "features", "target"]
Metric = Literal["loss", "accuracy", "wer", "per", "bleu", "chrf"]


class Text(Value):
    """How text becomes tokens."""

    source_tokens: str = "auto"  # char | nfd | space | word | byte | bpe:N | unigram:N | auto
    target_tokens: str = "auto"
    shared: bool = False  # one vocabulary for both sides
    min_count: Count = 1  # rarer tokens are unknown (char, space, word)
    feature_separator: str = Field(default=";", min_length=1)


class Data(Value):
    """Where examples come from. Either `train` or `source` and `target` (parallel files); `.gz` of either."""

    train: str | None = None  # a TSV of pairs, plain text, or an .npz of images, as the task has it
    source: str | None = None
    target: str | None = None
    valid: str | None = None
    valid_source: str | None = None
    valid_target: str | None = None
    columns: tuple[Column, ...] = ("source", "target")
    max_length: Count = 512  # tokens on either side; a longer example is skipped and counted
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
    batch_tokens: Count = 4096  # padded tokens of the longer side
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
    seed: Id = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    device: str = "auto"
    workers: int = Field(default=0, ge=0)  # processes; 0: one per core on a CPU, one elsewhere
    context: Count | None = None  # lm, masked, span: tokens of text in a row of a batch
    mask_rate: float = Field(default=0.15, gt=0, lt=1)  # masked: share of tokens to predict
    span_rate: float = Field(default=0.15, gt=0, lt=1)  # span: share of tokens to hide
    span_mean: float = Field(default=3.0, ge=1)  # span: mean length of what is hidden in one piece
    # How hard heads are pressed to be done without: what all of them cost, in loss per token; 0: they are free.
    l0: float = Field(default=0.0, ge=0)
    start_from: str | None = None  # a run whose weights and text to begin with
    parts: tuple[str, ...] | None = None  # names of weights (or how they begin) that are trained; None: all
    lora: int = Field(default=0, ge=0)  # rank of adapters, which are then all that is trained; 0: none
    lora_alpha: Annotated[float, Field(gt=0)] | None = None  # None: twice the rank
    lora_on: tuple[str, ...] = ("attention", "cross", "feed_forward")  # what gets adapters

    @field_validator("parts", "lora_on", mode="before")
    @classmethod
    def _names(cls, names: Any) -> Any:
        """One name, or several with commas, as they are written on a command line."""
        return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names

    @field_validator("device")
    @classmethod
    def _device(cls, device: str) -> str:
        if device.split(":")[0] not in ("auto", "cpu", "cuda", "mps"):
            raise ValueError(f"device is auto, cpu, cuda, cuda:N or mps, not {device!r}")
        return device


class Recipe(Value):
    """A complete order: task, model, text, data, training."""

    task: TaskName = "pairs"
    preset: str = "auto"
    model: dict[str, Any] = Field(
        default_factory=dict
    )  # keys of Config to change in the preset; checked when the model is made
    text: Text = Text()
    data: Data = Data()
    train: Train = Field(default=Train(), validate_default=True)

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
        if self.task != "pairs" and (data.source or data.valid_source):
            raise ValueError(f"data: task {self.task} takes one file (train, and valid), not source and target")
        return self

    @field_validator("train")
    @classmethod
    def _task_defaults(cls, train: Train, info: ValidationInfo) -> Train:
        """Fill in the defaults of the task. They do not count as given, so that resuming may leave them out."""
        task = TASKS.get(info.data.get("task", ""))
        if task is None:  # refused already
            return train
        given = {name: getattr(train, name) for name in train.model_fields_set}
        defaults = {**dict(train), "metric": task.metrics[0], **task.train}
        return Train.model_construct(train.model_fields_set, **{**defaults, **given})

    @model_validator(mode="after")
    def _fits_task(self) -> Recipe:
        task, train = TASKS[self.task], self.train
        if train.scheduled_sampling and not task.seq2seq:
            raise ValueError(f"train.scheduled_sampling: task {self.task} has no output of its own to be fed back")
        if train.metric not in task.metrics:
            allowed = " or ".join(sorted(task.metrics, key=get_args(Metric).index))
            raise ValueError(f"train.metric: task {self.task} is judged by {allowed}, not {train.metric}")
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
        if parts[0] in ("encoder", "decoder", "ids", "patches"):
            parts = ["model", *parts]
        if parts[0] in ("rotary", "axial", "lsh"):
            return [["model", tower, *parts] for tower in ("encoder", "decoder")]
        if parts[0] not in ("model", *sections):
            raise UserError(f"--set {key}: no such section{closest(parts[0], ['model', *sections])}")
        if parts[0] == "model" and len(parts) == 2 and parts[1] in Stack.model_fields:
            return _both_towers(parts[1])
        return [parts]
    if key in ("preset", "task"):
        return [[key]]
    homes = [f"{name}.{key}" for name, section in sections.items() if key in section.model_fields]
    if key in {**Stack.model_fields, **Config.model_fields}:
        homes.append(f"model.{key}")
    if not homes:
        known = [
            "preset",
            "task",
            *Stack.model_fields,
            *Config.model_fields,
            *(f for s in sections.values() for f in s.model_fields),
        ]
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


FOLDER = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def recipe_tables(recipe: str | Path) -> dict[str, Any]:
    """The tables of a recipe: a TOML file, or a shipped one by its name. A file of that name comes first."""
    path, names = Path(recipe), recipe_names()
    if not path.is_file():
        if str(recipe) in names:
            path = FOLDER / f"{recipe}.toml"
        elif path.suffix != ".toml":
            hint = closest(str(recipe), names)
            raise UserError(f"{recipe}: no such recipe{hint}\n  a TOML file, or one of: {', '.join(names)}")
    return read_recipe(path)


_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def dumps(tables: Mapping[str, Any]) -> str:
    """TOML that `tomllib` reads back as `tables`: text, numbers, booleans, lists and tables of them.

    TOML has no null: a key whose value is None is left out.
    """
    lines: list[str] = []
    _table(tables, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    """A table's own values first: whatever follows a header belongs to that header."""
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in table.items() if key not in inner and value is not None}
    if path and (plain or not inner):
        lines.append(f"\n[{'.'.join(map(_key, path))}]")
    lines.extend(f"{_key(key)} = {_toml(value)}" for key, value in plain.items())
    for key, value in inner.items():
        _table(value, (*path, key), lines)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)  # the shortest that reads back the same; 1e-09, inf and nan are TOML too
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_toml, value)) + "]"
    raise TypeError(f"not a TOML value: {value!r}")


def _string(text: str) -> str:
    return '"' + "".join(_SHORT.get(c) or (c if c.isprintable() else _escape(c)) for c in text) + '"'


def _escape(character: str) -> str:
    """What the eye cannot see is written as its number; half a surrogate pair has no number in TOML."""
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        code = 0xFFFD
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
