"""The recipe: all settings of a training run as frozen values, set by TOML files, options and `--set`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_serializer, field_validator, model_validator

from regard.config import MAX_COUNT, Config, Count, Id, Problem, Rate, Stack, Value, parse
from regard.errors import UserError, plural
from regard.suggest import closest
from regard.tasks import BOTH, TASKS, TaskName

Column = Literal["source", "features", "target"]
Metric = Literal["loss", "accuracy", "wer", "per", "bleu", "chrf"]
Strategy = Literal["ddp", "fsdp"]
Schedule = Literal["noam", "inverse_sqrt", "cosine", "linear", "constant"]
Weight = Annotated[float, Field(gt=0)]
DEVICES = ("auto", "cpu", "cuda", "mps")
FILES = ("train", "source", "target", "valid", "valid_source", "valid_target")  # keys of `data` that name files
FOLDER = Path(__file__).parent / "recipes"
MAX_DEPTH = 8  # of nested tables


def option(default: Any, description: str, metavar: str | None = None, **settings: Any) -> Any:
    """A field; its description is the help of the command-line option that sets it."""
    extra: Any = {"metavar": metavar} if metavar else None
    return Field(default=default, description=description, json_schema_extra=extra, **settings)


class Text(Value):
    """How text is tokenised."""

    source_tokens: str = option("auto", "char, nfd, space, word, byte, bpe:N, unigram:N or auto.")
    target_tokens: str = option("auto", "The same for the targets.")
    shared: bool = option(False, "One vocabulary for both sides.")
    min_count: Count = option(1, "Tokens rarer than this are unknown (char, space, word).")
    feature_separator: str = option(";", "Separator of the features of an example.", min_length=1)


class Data(Value):
    """Where examples come from: either `train`, or `source` and `target` (parallel files); each one file or several.

    A file may be a pattern (`corpus/*.tsv`). Every entry of a list, with all files that match it, is a corpus.
    """

    train: tuple[str, ...] | None = option(
        None, "Tables of pairs, plain text, or an .npz of images, depending on the task. Repeatable.", metavar="FILE"
    )
    source: tuple[str, ...] | None = option(None, "Sources, one per line; needs --target.", metavar="FILE")
    target: tuple[str, ...] | None = option(None, "Targets, one per line.", metavar="FILE")
    valid: tuple[str, ...] | None = option(
        None, "Validation data of the same kind; by default a part of the training data.", metavar="FILE"
    )
    valid_source: tuple[str, ...] | None = option(None, "Validation sources.", metavar="FILE")
    valid_target: tuple[str, ...] | None = option(None, "Validation targets.", metavar="FILE")
    columns: tuple[Column, ...] = option(
        ("source", "target"),
        "The meaning of the columns of a table (source, features, target), or the names of these in the file (de,en).",
        metavar="NAMES",
    )
    column_names: tuple[str, ...] | None = option(None, "The names of these columns in files that name their columns.")
    header: bool | None = option(None, "Whether the first line of a TSV or CSV names its columns; found by default.")
    weights: tuple[Weight, ...] | None = option(None, "Sampling weights of the corpora.")
    temperature: Annotated[float, Field(gt=0)] | None = option(
        None, "Sample each corpus in proportion to its size to the power of 1/temperature."
    )
    max_length: Count = option(512, "Maximum tokens on either side; longer examples are skipped and counted.")
    min_length: Count = option(1, "Minimum tokens on either side; shorter examples are skipped and counted.")
    max_ratio: Annotated[float, Field(ge=1)] | None = option(
        None, "Maximum ratio of the longer to the shorter side in tokens; other examples are skipped and counted."
    )
    deduplicate: bool = option(False, "Skip and count repeated pairs.")
    strict: bool = option(False, "Stop at the first bad line instead of skipping it.")
    cache: str | None = option(
        None, "A directory where runs on the same data share the tokenised data.", metavar="DIR", min_length=1
    )

    @field_validator(*FILES, mode="before")
    @classmethod
    def _files(cls, files: Any) -> Any:
        names = (files,) if isinstance(files, str) else files
        if isinstance(names, list | tuple) and "" in names:
            raise ValueError("a list of files cannot hold an empty name")
        return None if names in ((), []) else names

    @field_serializer(*FILES, when_used="unless-none")
    def _one_or_more(self, files: tuple[str, ...]) -> str | list[str]:
        return files[0] if len(files) == 1 else list(files)

    @model_validator(mode="before")
    @classmethod
    def _names_as_columns(cls, values: Any) -> Any:
        """Accept names of columns in the file in place of their meaning."""
        names = values.get("columns") if isinstance(values, dict) and not values.get("column_names") else ()
        meanings = {1: ["source", "target"], 2: ["source", "target"], 3: ["source", "features", "target"]}
        if not isinstance(names, list | tuple) or any(name in get_args(Column) for name in names):
            return values
        return values | ({"columns": meanings[len(names)], "column_names": names} if len(names) in meanings else {})

    @field_validator("columns")
    @classmethod
    def _columns(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(columns)) != len(columns) or not {"source", "target"} <= set(columns):
            raise ValueError(f"columns must name source and target once each, not {','.join(columns)}")
        return columns

    def problems(self) -> Iterator[Problem]:
        names = self.column_names or ()
        yield len(set(names)) != len(names), f"column_names names a column twice: {', '.join(names)}"
        lengths = f"min_length ({self.min_length}) is more than max_length ({self.max_length})"
        yield self.min_length > self.max_length, lengths
        weights = self.weights
        mixed = self.temperature is not None
        yield weights is not None and mixed, "give either weights or temperature, not both"
        corpora = len(self.train or self.source or ())
        if weights is not None and corpora:
            numbers = plural(len(weights), "number")
            yield len(weights) != corpora, f"weights has {numbers} for {corpora} corpora (entries of the list)"
        yield mixed and corpora == 1, "temperature needs several corpora, but there is one"


class Train(Value):
    """How a model is trained. The run ends when the first limit is reached; without any, `minutes` is 10."""

    minutes: Annotated[float, Field(gt=0)] | None = option(None, "Stop after this many minutes.")
    steps: Count | None = option(None, "Stop after this many steps.")
    epochs: Count | None = option(None, "Stop after this many epochs.")
    batch_tokens: Count = option(4096, "Batch size in padded tokens of the longer side; planned by default.")
    batch_examples: Count | None = option(None, "Batch size in examples instead; planned if neither is given.")
    accumulate: Count = option(1, "Batches per step.")
    optimizer: Literal["adam", "adamw"] = option("adamw", "adam or adamw.")
    lr: float = option(1e-3, "Peak learning rate (a factor for noam); planned by default.", gt=0)
    schedule: Schedule = option("cosine", "Learning rate schedule.")
    warmup: int = option(
        400, "Steps of learning rate warm-up; by default planned, an eighth of the run.", ge=0, le=MAX_COUNT
    )
    beta1: Rate = option(0.9, "First beta of Adam.")
    beta2: Rate = option(0.98, "Second beta of Adam.")
    eps: float = option(1e-9, "Epsilon of Adam.", gt=0)
    weight_decay: float = option(0.0, "Weight decay of matrices.", ge=0)
    clip: float = option(1.0, "Maximum norm of the gradient; 0: no limit.", ge=0)
    label_smoothing: Rate = option(0.1, "Probability mass spread evenly over all tokens.")
    scheduled_sampling: float = option(0.0, "Probability of feeding back the model's own prediction.", ge=0, le=1)
    average: int = option(0, "At the end, average the last N validated checkpoints.", ge=0, le=MAX_COUNT)
    ema: Rate = option(
        0.0, "Decay of an exponential moving average of the weights, which becomes the model; planned by default."
    )
    metric: Metric = option(
        "loss", "Metric that the best checkpoint is chosen by; for pairs it depends on the targets by default."
    )
    patience: int = option(0, "Stop after this many validations without improvement; 0: never.", ge=0, le=MAX_COUNT)
    validate_every: Count | None = option(
        None, "Steps between validations; by default about an epoch, at most 40 validations."
    )
    validate_beam: Count = option(1, "Beam size in validation.")
    log_every: Count = option(50, "Steps between lines of the log.")
    seed: Id = option(1, "Random seed of weights, data order and dropout.")
    precision: Literal["fp32", "bf16"] = option(
        "fp32", "Precision of matrix products; with a budget in minutes planned by default."
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps.")
    workers: int = option(0, "Number of processes; 0: one per core on a CPU, otherwise one.", ge=0, le=MAX_COUNT)
    strategy: Strategy = option("ddp", "Every process holds all weights (ddp) or a shard of them (fsdp).")
    offload: bool = option(False, "fsdp on GPUs: keep shards and moments in CPU memory.")
    recompute: bool = option(False, "Recompute activations in the backward pass to save memory.")
    context: Count | None = option(None, "lm, masked, span: tokens per row of a batch.")
    mask_rate: float = option(0.15, "masked: share of tokens that are predicted.", gt=0, lt=1)
    span_rate: float = option(0.15, "span: share of tokens that are masked.", gt=0, lt=1)
    span_mean: float = option(3.0, "span: mean length of a masked span.", ge=1)
    l0: float = option(0.0, "Penalty on open head gates, for all heads together, in loss per token.", ge=0)
    start_from: str | None = option(None, "Start from the weights and tokenizers of a run.", metavar="RUN")
    parts: tuple[str, ...] | None = option(None, "Names or prefixes of the weights that are trained; by default all.")
    lora: int = option(0, "Rank of adapters (LoRA); only these are trained. 0: no adapters.", ge=0, le=MAX_COUNT)
    lora_alpha: Annotated[float, Field(gt=0)] | None = option(None, "Scale of adapters; by default twice the rank.")
    lora_on: tuple[str, ...] = option(("attention", "cross", "feed_forward"), "Parts that get adapters.")

    @field_validator("parts", "lora_on", mode="before")
    @classmethod
    def _names(cls, names: Any) -> Any:
        """Split names at commas, as given on the command line."""
        return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names

    @field_validator("device")
    @classmethod
    def _device(cls, device: str) -> str:
        kind = device.split(":")[0]
        if kind not in DEVICES:
            raise ValueError(f"device is auto, cpu, cuda, cuda:N or mps, not {device!r:.100}{closest(kind, DEVICES)}")
        return device


class Recipe(Value):
    """All settings of a run: task, model, text, data, training."""

    task: TaskName = option("pairs", "; ".join(f"{task.name}: {task.summary}" for task in TASKS.values()) + ".")
    preset: str = option("auto", "The model to start from; `regard info` lists them.")
    model: dict[str, Any] = Field(default_factory=dict)  # keys of Config to change; checked when the model is made
    text: Text = Text()
    data: Data = Data()
    train: Train = Field(default=Train(), validate_default=True)

    def with_train(self, **changes: Any) -> Recipe:
        """The recipe with other settings in `train`."""
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})

    def with_data(self, **changes: Any) -> Recipe:
        """The recipe with other settings in `data`."""
        return self.model_copy(update={"data": self.data.model_copy(update=changes)})

    @field_validator("train")
    @classmethod
    def _task_defaults(cls, train: Train, info: ValidationInfo) -> Train:
        """Fill in the defaults of the task. They do not count as set, so they can be left out when resuming."""
        task = TASKS.get(info.data.get("task", ""))
        if task is None:  # an error was reported already
            return train
        values = {name: getattr(train, name) for name in train.model_fields_set}
        defaults = {**dict(train), "metric": task.metrics[0], **task.train}
        return Train.model_construct(train.model_fields_set, **{**defaults, **values})

    def problems(self) -> Iterator[Problem]:
        data = self.data
        for table, source, target in (("train", "source", "target"), ("valid", "valid_source", "valid_target")):
            sides = [getattr(data, source), getattr(data, target)]
            both = getattr(data, table) and any(sides)
            yield both, f"data: give either {table} (a TSV) or {source} and {target}, not both"
            yield (sides[0] is None) != (sides[1] is None), f"data: {source} and {target} belong together"
        parallel = data.source or data.valid_source
        message = f"data: task {self.task} takes one file (train, and valid), not source and target"
        yield self.task != "pairs" and parallel, message
        task = TASKS[self.task]
        columns = ("text",) if task.reads == "text" else data.columns
        message = f"data.column_names must name a column for each of {', '.join(columns)}"
        yield data.column_names is not None and len(data.column_names) != len(columns), message
        message = f"train.scheduled_sampling: needs a task with a decoder, not {self.task}"
        yield self.train.scheduled_sampling and not task.seq2seq, message
        metric = self.train.metric
        allowed = " or ".join(sorted(task.metrics, key=get_args(Metric).index))
        yield metric not in task.metrics, f"train.metric: task {self.task} has {allowed}, not {metric}"


def read_toml(text: str, where: str) -> dict[str, Any]:
    """Parse a TOML text; refuse deep nesting and integers of more than 64 bits."""
    wrong = UserError(f"{where}: an integer of more than 64 bits, or tables or lists nested too deeply")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError):  # for example numbers of more than 4,300 digits
        raise wrong from None
    level: list[Any] = [tables]
    for _ in range(MAX_DEPTH):
        inner = [v for table in level for v in (table.values() if isinstance(table, dict) else table)]
        if any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in inner):
            raise wrong
        level = [value for value in inner if isinstance(value, dict | list)]
    if level:
        raise wrong
    return tables


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read a TOML recipe as plain tables; `load_recipe` validates them after options are applied."""
    try:
        return read_toml(Path(path).read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        if Path(path).is_file() and Path(path).suffix != ".toml":
            raise UserError(
                f"{path}: not a recipe (a TOML file); to train on this file, use data.train={path}"
            ) from None
        raise UserError(f"{path}: not a readable TOML file: {error}") from None


def load_recipe(tables: dict[str, Any], where: str = "recipe") -> Recipe:
    return parse(Recipe, tables, where)


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def recipe_summary(name: str) -> str:
    """The description of a shipped recipe: the comment in its first line."""
    with (FOLDER / f"{name}.toml").open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip().rstrip(".")


def recipe_tables(recipe: str | Path) -> dict[str, Any]:
    """The tables of a TOML file, or of a shipped recipe with this name if there is no such file."""
    path = Path(recipe)
    names = recipe_names()
    if not path.is_file():
        if str(recipe) in names:
            path = FOLDER / f"{recipe}.toml"
        elif path.suffix != ".toml":
            hint = closest(str(recipe), names)
            raise UserError(f"{recipe}: no such recipe{hint}\n  a TOML file, or one of: {', '.join(names)}")
    return read_recipe(path)


def assign(tables: dict[str, Any], setting: str) -> None:
    """Apply one `--set key=value` to recipe tables, in place.

    A key is a full path (`train.lr`), or a name that only one section has; a field of Stack applies to both stacks.
    """
    key, raw = split_setting(setting)
    try:
        value = read_toml(f"value = {raw}", f"--set {key}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    if key.count(".") >= MAX_DEPTH:
        raise UserError(f"--set {key[:40]}...: no such section")
    for path in key_paths(key):
        if (part := put(tables, path, value)) is not None:
            raise UserError(f"--set {setting}: {part} is a value, not a table")


def split_setting(setting: str) -> tuple[str, str]:
    """The key and the value of a `--set key=value`."""
    key, equals, raw = setting.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {setting}: write it as key=value, for example --set dropout=0.2")
    return key.strip(), raw.strip()


def put(tables: dict[str, Any], path: Sequence[str], value: Any) -> str | None:
    """Set a nested key -> the part of its path that is not a table, if any."""
    table = tables
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return part
    table[path[-1]] = value
    return None


SECTIONS: dict[str, type[Value]] = {"text": Text, "data": Data, "train": Train}


def setting_names() -> list[str]:
    """The keys that `--set` accepts without a section."""
    tables: list[type[Value]] = [Stack, Config, *SECTIONS.values()]
    return ["preset", "task", *(name for table in tables for name in table.model_fields)]


STACK_KEYS = [f"{stack}.{name}" for stack in BOTH for name in Stack.model_fields]


def setting_keys() -> list[str]:
    """Suggestions for an unknown key of `--set`: keys without a section, and keys of one stack."""
    return [*setting_names(), *STACK_KEYS]


def key_paths(key: str) -> list[list[str]]:
    """The paths that a key of `--set` stands for: one, or one in each stack."""
    parts = key.split(".")
    if len(parts) > 1:
        if parts[0] in (*BOTH, "ids", "patches"):
            parts = ["model", *parts]
        if parts[0] in ("rotary", "axial", "lsh"):
            return _in_both_stacks(*parts)
        if parts[0] not in ("model", *SECTIONS):
            raise UserError(f"--set {key:.100}: no such section{closest(parts[0], ['model', *SECTIONS])}")
        if parts[0] == "model" and len(parts) == 2:
            known = [*Stack.model_fields, *Config.model_fields]
            if parts[1] not in known:
                near = closest(parts[1], [*known, *STACK_KEYS])
                raise UserError(f"--set {key:.100}: the model has no such key{near}")
            return _in_both_stacks(parts[1]) if parts[1] in Stack.model_fields else [parts]
        return [parts]
    if key in ("preset", "task"):
        return [[key]]
    homes = [f"{name}.{key}" for name, section in SECTIONS.items() if key in section.model_fields]
    if key in {**Stack.model_fields, **Config.model_fields}:
        homes.append(f"model.{key}")
    if not homes:
        raise UserError(f"--set {key:.100}: no such key{closest(key, setting_keys())}")
    if len(homes) > 1:
        raise UserError(f"--set {key}: could mean {' or '.join(homes)}; write one of them")
    return _in_both_stacks(key) if key in Stack.model_fields else [homes[0].split(".")]


def _in_both_stacks(*path: str) -> list[list[str]]:
    return [["model", stack, *path] for stack in BOTH]
