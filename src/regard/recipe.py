"""The recipe: everything that defines a training run, as frozen values; TOML files, options and `--set` change them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_serializer, field_validator

from regard.config import MAX_COUNT, Config, Count, Id, Problem, Rate, Stack, Value, parse
from regard.errors import UserError, plural
from regard.suggest import closest
from regard.tasks import BOTH, TASKS, TaskName

Column = Literal["source", "features", "target"]
Metric = Literal["loss", "accuracy", "wer", "per", "bleu", "chrf"]
Strategy = Literal["ddp", "fsdp"]
Schedule = Literal["noam", "inverse_sqrt", "cosine", "linear", "constant"]
Weight = Annotated[float, Field(gt=0)]
FILES = ("train", "source", "target", "valid", "valid_source", "valid_target")  # of the data
FOLDER = Path(__file__).parent / "recipes"
DEEPEST = 8  # tables inside tables


def option(default: Any, description: str, metavar: str | None = None, **settings: Any) -> Any:
    """A field whose description is the help of the command line's option that sets it."""
    extra: Any = {"metavar": metavar} if metavar else None
    return Field(default=default, description=description, json_schema_extra=extra, **settings)


class Text(Value):
    """How text becomes tokens."""

    source_tokens: str = option("auto", "char, nfd, space, word, byte, bpe:N, unigram:N or auto.")
    target_tokens: str = option("auto", "The same for the targets.")
    shared: bool = option(False, "One vocabulary for both sides.")
    min_count: Count = option(1, "Rarer tokens are unknown (char, space, word).")
    feature_separator: str = option(";", "Between the features of an example.", min_length=1)


class Data(Value):
    """Where examples come from. Either `train` or `source` and `target` (parallel files), each one file or several.

    A file may be a pattern (`corpus/*.tsv`); every entry of a list, with all files that it matches, is a corpus.
    """

    train: tuple[str, ...] | None = option(
        None, "Tables of pairs, plain text, or an .npz of images, as the task has it. Repeatable.", metavar="FILE"
    )
    source: tuple[str, ...] | None = option(None, "Sources, one per line; goes with --target.", metavar="FILE")
    target: tuple[str, ...] | None = option(None, "Targets, one per line.", metavar="FILE")
    valid: tuple[str, ...] | None = option(
        None, "Validation data of the same kind; without it some is set apart.", metavar="FILE"
    )
    valid_source: tuple[str, ...] | None = option(None, "Validation sources.", metavar="FILE")
    valid_target: tuple[str, ...] | None = option(None, "Validation targets.", metavar="FILE")
    columns: tuple[Column, ...] = option(
        ("source", "target"), "What the columns of a table are: source, features, target.", metavar="NAMES"
    )
    column_names: tuple[str, ...] | None = option(None, "What JSONL and Parquet files call these columns.")
    weights: tuple[Weight, ...] | None = option(None, "Of the corpora: how often each is drawn from.")
    temperature: Annotated[float, Field(gt=0)] | None = option(
        None, "Draw from each corpus in proportion to its size to the power of 1/temperature."
    )
    max_length: Count = option(512, "Tokens on either side; a longer example is skipped and counted.")
    min_length: Count = option(1, "Tokens on either side; a shorter example is skipped and counted.")
    max_ratio: Annotated[float, Field(ge=1)] | None = option(
        None, "Tokens of the longer side per token of the shorter; an example beyond is skipped and counted."
    )
    deduplicate: bool = option(False, "Skip and count pairs that came before.")
    strict: bool = option(False, "Stop at the first bad line instead of skipping it.")
    cache: str | None = option(
        None, "A directory that keeps tokenised data for other runs on the same data.", metavar="DIR", min_length=1
    )

    @field_validator(*FILES, mode="before")
    @classmethod
    def _files(cls, files: Any) -> Any:
        return (files,) if isinstance(files, str) else files

    @field_serializer(*FILES, when_used="unless-none")
    def _one_or_more(self, files: tuple[str, ...]) -> str | list[str]:
        return files[0] if len(files) == 1 else list(files)

    @field_validator(*FILES)
    @classmethod
    def _named(cls, files: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if files is not None and not all(files):
            raise ValueError("a list of files cannot hold an empty name")
        return files or None

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
        yield mixed and corpora == 1, "temperature is between corpora, and there is one; list several"


class Train(Value):
    """How a model is trained. The first budget to run out ends the run; with none set, `minutes` is 10."""

    minutes: Annotated[float, Field(gt=0)] | None = option(None, "Stop after so many minutes.")
    steps: Count | None = option(None, "Stop after so many steps.")
    epochs: Count | None = option(None, "Stop after so many epochs.")
    batch_tokens: Count = option(4096, "Padded tokens of a batch, of the longer side; planned if not given.")
    batch_examples: Count | None = option(None, "Examples of a batch, instead of tokens; planned if neither is given.")
    accumulate: Count = option(1, "Batches per step.")
    optimizer: Literal["adam", "adamw"] = option("adamw", "adam or adamw.")
    lr: float = option(1e-3, "Peak of the learning rate, a factor for noam; planned if not given.", gt=0)
    schedule: Schedule = option("cosine", "Of the learning rate.")
    warmup: int = option(
        400, "Steps in which the learning rate rises; planned if not given: an eighth of the run.", ge=0, le=MAX_COUNT
    )
    beta1: Rate = option(0.9, "Of Adam.")
    beta2: Rate = option(0.98, "Of Adam.")
    eps: float = option(1e-9, "Of Adam.", gt=0)
    weight_decay: float = option(0.0, "Of matrices.", ge=0)
    clip: float = option(1.0, "Largest norm of the gradient; 0: any.", ge=0)
    label_smoothing: Rate = option(0.1, "Share of the probability that goes to all tokens alike.")
    scheduled_sampling: float = option(0.0, "How often the model's own prediction is fed back.", ge=0, le=1)
    average: int = option(0, "At the end, average the last N validated checkpoints.", ge=0, le=MAX_COUNT)
    ema: Rate = option(
        0.0, "Validate and keep an exponential moving average of the weights, with this decay; planned if not given."
    )
    metric: Metric = option(
        "loss", "What the best checkpoint is chosen by; for pairs planned by the targets if not given."
    )
    patience: int = option(0, "Validations without a better metric before stopping; 0: never.", ge=0, le=MAX_COUNT)
    validate_every: Count | None = option(None, "Steps; by default about once per epoch, at most 40 times in a run.")
    validate_beam: Count = option(1, "Beam of the decoding that validates.")
    log_every: Count = option(50, "Steps.")
    seed: Id = option(1, "Of weights, order and dropout.")
    precision: Literal["fp32", "bf16"] = option(
        "fp32", "Of matrix products; with a budget in minutes planned if not given."
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps.")
    workers: int = option(0, "Processes; 0: one per core on a CPU, one elsewhere.", ge=0, le=MAX_COUNT)
    strategy: Strategy = option(
        "ddp", "How processes share a model: all weights in each (ddp), or a shard in each (fsdp)."
    )
    offload: bool = option(False, "fsdp on GPUs: keep shards and moments in the memory of the CPU.")
    recompute: bool = option(False, "Compute the activations inside layers again in the backward pass: less memory.")
    context: Count | None = option(None, "lm, masked, span: tokens of text in a row of a batch.")
    mask_rate: float = option(0.15, "masked: share of tokens to predict.", gt=0, lt=1)
    span_rate: float = option(0.15, "span: share of tokens that are masked.", gt=0, lt=1)
    span_mean: float = option(3.0, "span: mean length of a masked span.", ge=1)
    l0: float = option(0.0, "Penalty on open head gates: loss per token that all heads together cost.", ge=0)
    start_from: str | None = option(None, "Start from a run's weights and text.", metavar="RUN")
    parts: tuple[str, ...] | None = option(None, "Names of weights (or how they begin) that are trained; else all.")
    lora: int = option(0, "Rank of adapters, which are then all that is trained; 0: none.", ge=0, le=MAX_COUNT)
    lora_alpha: Annotated[float, Field(gt=0)] | None = option(None, "Scale of the adapters; by default twice the rank.")
    lora_on: tuple[str, ...] = option(("attention", "cross", "feed_forward"), "What gets adapters.")

    @field_validator("parts", "lora_on", mode="before")
    @classmethod
    def _names(cls, names: Any) -> Any:
        """One name, or several with commas, as they are written on a command line."""
        return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names

    @field_validator("device")
    @classmethod
    def _device(cls, device: str) -> str:
        kind, known = device.split(":")[0], ("auto", "cpu", "cuda", "mps")
        if kind not in known:
            raise ValueError(f"device is auto, cpu, cuda, cuda:N or mps, not {device!r}{closest(kind, known)}")
        return device


class Recipe(Value):
    """A complete order: task, model, text, data, training."""

    task: TaskName = option("pairs", "; ".join(f"{task.name}: {task.summary}" for task in TASKS.values()) + ".")
    preset: str = option("auto", "The model to start from; `regard info` lists them.")
    model: dict[str, Any] = Field(default_factory=dict)  # keys of Config to change; checked when the model is made
    text: Text = Text()
    data: Data = Data()
    train: Train = Field(default=Train(), validate_default=True)

    @field_validator("train")
    @classmethod
    def _task_defaults(cls, train: Train, info: ValidationInfo) -> Train:
        """Fill in the defaults of the task. They do not count as given, so that resuming may leave them out."""
        task = TASKS.get(info.data.get("task", ""))
        if task is None:  # refused already
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
        names = data.column_names
        message = f"data.column_names must name a column for each of {', '.join(columns)}"
        yield names is not None and len(names) != len(columns), message
        message = f"train.scheduled_sampling: task {self.task} has no output of its own to be fed back"
        yield self.train.scheduled_sampling and not task.seq2seq, message
        metric = self.train.metric
        allowed = " or ".join(sorted(task.metrics, key=get_args(Metric).index))
        yield metric not in task.metrics, f"train.metric: task {self.task} is judged by {allowed}, not {metric}"


def read_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text; what no setting can be is refused: deep nesting, integers of more than 64 bits."""
    wrong = UserError(f"{where}: an integer of more than 64 bits, or tables or lists nested too deeply")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError):  # Python reads no number of more than 4,300 digits
        raise wrong from None
    level: list[Any] = [tables]
    for _ in range(DEEPEST):
        inner = [v for table in level for v in (table.values() if isinstance(table, dict) else table)]
        if any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in inner):
            raise wrong
        level = [value for value in inner if isinstance(value, dict | list)]
    if level:
        raise wrong
    return tables


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read a TOML recipe as plain tables; `load_recipe` checks them once options have changed them."""
    try:
        return read_toml(Path(path).read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        if Path(path).is_file() and Path(path).suffix != ".toml":
            raise UserError(f"{path}: is not a recipe (a TOML file); to train on it, write --data {path}") from None
        raise UserError(f"{path}: not a readable TOML file: {error}") from None


def load_recipe(tables: dict[str, Any], where: str = "recipe") -> Recipe:
    """Check a recipe given as tables."""
    return parse(Recipe, tables, where)


def recipe_names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def recipe_summary(name: str) -> str:
    """What a shipped recipe is for: its first line, a comment."""
    with (FOLDER / f"{name}.toml").open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip().rstrip(".")


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


def assign(tables: dict[str, Any], setting: str) -> None:
    """Apply one `--set key=value` to recipe tables, in place.

    A key is a full path (`train.lr`, `decoder.score`) or a bare name, if only one section has it; a field of Stack
    means both stacks. The value is TOML, or a plain word.
    """
    key, raw = split_setting(setting)
    try:
        value = read_toml(f"value = {raw}", f"--set {key}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    if key.count(".") >= DEEPEST:
        raise UserError(f"--set {key[:40]}...: no such section")
    for path in _paths(key):
        if (part := put(tables, path, value)) is not None:
            raise UserError(f"--set {setting}: {part} is a value, not a table")


def split_setting(setting: str) -> tuple[str, str]:
    """The key and the value of a `--set key=value`."""
    key, equals, raw = setting.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {setting}: write it as key=value, for example --set dropout=0.2")
    return key.strip(), raw.strip()


def put(tables: dict[str, Any], path: Sequence[str], value: Any) -> str | None:
    """Set a nested key -> the part of its path that is no table, if there is one."""
    table = tables
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return part
    table[path[-1]] = value
    return None


SECTIONS: dict[str, type[Value]] = {"text": Text, "data": Data, "train": Train}


def setting_names() -> list[str]:
    """The keys that `--set` knows by their bare names."""
    tables: list[type[Value]] = [Stack, Config, *SECTIONS.values()]
    return ["preset", "task", *(name for table in tables for name in table.model_fields)]


def setting_keys() -> list[str]:
    """The keys that a mistaken key of `--set` may mean: bare names, and those of one stack."""
    return [*setting_names(), *_keys_of_stacks()]


def _keys_of_stacks() -> list[str]:
    return [f"{stack}.{name}" for stack in BOTH for name in Stack.model_fields]


def _paths(key: str) -> list[list[str]]:
    """Where a key of `--set` belongs: one path, or one in each stack."""
    parts = key.split(".")
    if len(parts) > 1:
        if parts[0] in (*BOTH, "ids", "patches"):
            parts = ["model", *parts]
        if parts[0] in ("rotary", "axial", "lsh"):
            return _in_both_stacks(*parts)
        if parts[0] not in ("model", *SECTIONS):
            raise UserError(f"--set {key}: no such section{closest(parts[0], ['model', *SECTIONS])}")
        if parts[0] == "model" and len(parts) == 2:
            if parts[1] not in {**Stack.model_fields, **Config.model_fields}:
                hint = closest(parts[1], [*Stack.model_fields, *Config.model_fields, *_keys_of_stacks()])
                raise UserError(f"--set {key}: the model has no such key{hint}")
            return _in_both_stacks(parts[1]) if parts[1] in Stack.model_fields else [parts]
        return [parts]
    if key in ("preset", "task"):
        return [[key]]
    homes = [f"{name}.{key}" for name, section in SECTIONS.items() if key in section.model_fields]
    if key in {**Stack.model_fields, **Config.model_fields}:
        homes.append(f"model.{key}")
    if not homes:
        raise UserError(f"--set {key}: no such key{closest(key, setting_keys())}")
    if len(homes) > 1:
        raise UserError(f"--set {key}: could mean {' or '.join(homes)}; write which")
    return _in_both_stacks(key) if key in Stack.model_fields else [homes[0].split(".")]


def _in_both_stacks(*path: str) -> list[list[str]]:
    return [["model", stack, *path] for stack in BOTH]
