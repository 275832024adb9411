"""A run: the directory with a trained model and everything needed to use it. Nothing in it can execute code."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from regard import files
from regard.batch import Pixels
from regard.config import Config, Count, Id, Stack, Value, parse
from regard.data.statistics import STATISTICS, Statistics
from regard.errors import NO_TORCH, UserError, lacks_torch, plural
from regard.notebook import table
from regard.recipe import Recipe, load_recipe, read_recipe
from regard.suggest import nearest
from regard.tasks import TASKS, Task, TaskName, infer_task
from regard.text.chat import Chat
from regard.text.codec import TOKENIZERS, Codec, TextConfig

if TYPE_CHECKING:  # torch is imported when weights are loaded: other engines do not need it
    import torch
    from torch import Tensor

    from regard.model import Model

MAX_NAMED_RUNS = 5  # in a message
FORMAT = 1
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
HEADS = "alignment.json"  # the attention heads that give alignments
RECIPE = "recipe.toml"
CHAT_TEMPLATE = "chat_template.jinja"  # of a converted model, for other programs
READ = (CONFIG, WEIGHTS, HEADS, STATISTICS, *TOKENIZERS)  # files that loading and decoding read


class Generation(Value):
    """Settings for decoding that came with a converted model."""

    suppressed: tuple[Id, ...] = ()  # ids that are never produced, in addition to special tokens
    max_length: Count | None = None  # default limit of output tokens, without the end
    chat: Chat | None = None  # the chat template as data


class RunConfig(Value):
    """The contents of config.json."""

    format: Literal[1] = 1
    model: Config
    text: TextConfig
    task: TaskName | None = None  # runs of version 0.4 and older do not name it
    labels: tuple[str, ...] = ()  # of a classifier, by number
    pixels: Pixels | None = None  # of a model that reads images
    generation: Generation = Generation()


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a run in its directory."""

    config: Config
    path: Path
    device: str | torch.device = "cpu"

    @cached_property
    def size(self) -> int:
        """The number of parameters."""
        with files.open_weights(self.path, "np") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  not a dict

    def arrays(self) -> dict[str, np.ndarray]:
        """The weights by name."""
        with files.open_weights(self.path, "np") as file:
            if types := {file.get_slice(name).get_dtype() for name in file.keys()} - {"F16", "F32", "F64"}:  # noqa: SIM118
                raise UserError(f"{self.path}: only torch reads weights of the type {min(types)}")
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict

    def load(self) -> Model:
        """The model with these weights."""
        try:
            from regard.weight_files import load_model
        except ModuleNotFoundError as error:
            if not lacks_torch(error):
                raise
            raise UserError(f"{self.path.parent}: this run {NO_TORCH}") from None
        return load_model(self.config, self.path, self.device)


@dataclass
class Run:
    """A trained model with its tokenizers."""

    config: Config
    codec: Codec
    weights: Model | StoredWeights  # `model` loads stored weights on first use
    path: Path
    labels: tuple[str, ...] = ()
    pixels: Pixels | None = None
    task_name: TaskName | None = None  # None: inferred from the model
    generation: Generation = field(default_factory=Generation)
    statistics: Statistics = field(default_factory=Statistics)  # defaults for a run without the file
    # The weights in other layouts, which the engines of this run share.
    layouts: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def model(self) -> Model:
        """The model, which needs torch."""
        if isinstance(self.weights, StoredWeights):
            self.weights = self.weights.load()
        return self.weights

    @model.setter
    def model(self, model: Model) -> None:
        self.weights = model

    def load_model(self) -> None:
        """Load stored weights."""
        self.weights = self.model

    @property
    def device(self) -> str | torch.device:
        """The device of the model, which need not be loaded."""
        return self.weights.device

    def arrays(self) -> dict[str, np.ndarray]:
        """The weights by name, for engines without torch."""
        if isinstance(self.weights, StoredWeights):
            return self.weights.arrays()
        from regard.weight_files import weights_of

        return {name: x.float().numpy(force=True) for name, x in weights_of(self.weights).items()}

    @property
    def loaded(self) -> bool:
        """Whether the model is in memory, where it may have been changed."""
        return not isinstance(self.weights, StoredWeights)

    def __getstate__(self) -> dict[str, Any]:
        """Copies make their own layouts of the weights; those of the native engine cannot be copied."""
        return {**vars(self), "layouts": {}}

    @property
    def task(self) -> Task:
        """The task that the run was trained for."""
        return TASKS[self.task_name or infer_task(self.config)]

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels by class; a converted model may have only numbers."""
        return self.labels or tuple(map(str, range(self.config.classes or 0)))

    def never_produced(self, unknown: bool = False) -> list[int]:
        """Ids excluded from outputs: special tokens except the end and, on request, `unknown`; ids without a token."""
        ids = self.config.ids
        vocab = self.config.target_vocab
        excluded = {ids.pad, ids.sos, ids.mask, *([] if unknown else [ids.unk]), *self.generation.suppressed}
        excluded |= set(range(self.codec.target.size, vocab))
        return sorted(index for index in excluded - {ids.eos} if index is not None and index < vocab)

    @property
    def facts(self) -> dict[str, str]:
        """The architecture, as text by name."""
        config = self.config
        facts = {name: _describe(stack) for name, stack in config.stacks.items()}
        if self.task.reads == "images":
            p = config.image_patches
            facts["image"] = f"{p.height} × {p.width}, {plural(p.count, 'patch')} of {p.size} × {p.size}"
        elif len(config.stacks) == 2:
            facts["vocabulary"] = f"{config.source_vocab:,} source, {config.target_vocab:,} target tokens"
        else:
            facts["vocabulary"] = f"{config.output_vocab:,} tokens"
        if config.classes is not None:
            facts["classes"] = str(config.classes)
        return facts | {"parameters": f"{self.weights.size:,}"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, task {self.task.name}, {self.weights.size:,} parameters)"

    def _repr_html_(self) -> str:
        facts = {"task": f"{self.task.name}: {self.task.summary}", **self.facts}
        if self.task.reads != "images":
            text = self.codec.config
            facts["tokens"] = " to ".join((text.source_tokens, text.target_tokens)[: 1 + self.task.seq2seq])
        if labels := self.label_names:
            facts["labels"] = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
        return table({**facts, "device": self.weights.device}.items(), caption=str(self.path))

    @classmethod
    def load(
        cls, path: str | Path, device: str | torch.device = "cpu", verify: bool = False, model: bool = True
    ) -> Self:
        """Open a run whose files are unchanged; `verify` also hashes large weights, whose size is always checked.

        Without `model`, weights are loaded on first use.
        """
        path = Path(path)
        try:
            run = cls._read(path, device)
            if model:
                run.load_model()
        except UserError as error:
            changes = files.changed_files(path, READ) if path.is_dir() else []
            raise UserError("\n  ".join([str(error), *changes])) from None
        require_saved(path, READ, verify)
        return run

    @classmethod
    def _read(cls, path: Path, device: str | torch.device) -> Self:
        config = read_config(path)
        _require_rows(path, config.model, config.text.sizes or ())
        codec = Codec.load(path, config.text)
        _require_rows(path, config.model, (codec.source_vocab, codec.target_vocab))
        settings = (config.labels, config.pixels, config.task, config.generation, read_statistics(path))
        return cls(config.model, codec, StoredWeights(config.model, path / WEIGHTS, device), path, *settings)

    def save(self, path: str | Path) -> None:
        """Write the files that are needed to use the run."""
        from regard.weight_files import save_weights, weights_of

        path = Path(path)
        files.make_directory(path, str(path))
        config = RunConfig(
            model=self.config,
            text=self.codec.config,
            task=self.task.name,
            labels=self.labels,
            pixels=self.pixels,
            generation=self.generation,
        )
        with files.rewriting(path, CONFIG, WEIGHTS, STATISTICS, *TOKENIZERS):
            files.write_json(path / CONFIG, config.model_dump(mode="json"))
            if self.statistics != Statistics():
                files.write_json(path / STATISTICS, self.statistics.model_dump(mode="json"))
            self.codec.save(path)
            save_weights(weights_of(self.model), path / WEIGHTS)


def require_saved(path: Path, names: Collection[str] | None = None, verify: bool = False) -> None:
    """Raise UserError if files of a run have changed since they were saved."""
    accept = f"regard info {shlex.quote(str(path))} --accept"
    files.require_unchanged(path, f"if this was intended, accept the files as they are: {accept}", names, verify)


def verify_run(path: Path) -> str:
    """Compare every file of a run with its manifest, checkpoints included -> a message."""
    require_saved(path, verify=True)
    directories = [manifest.parent for manifest in sorted(path.rglob(files.MANIFEST))]
    for directory in directories:
        if directory != path:
            advice = "the run can be used, but training cannot be resumed from it"
            files.require_unchanged(directory, advice, verify=True)
    count = sum(len(files.read_manifest(directory).files) for directory in directories)
    if not count:
        return f"{path}: has no {files.MANIFEST} to compare its files with; --accept writes one"
    return f"{path}: {plural(count, 'file')} as saved, by size and SHA-256"


def accept_run(path: Path) -> str:
    """Record the files of a run as they are now -> a message."""
    read_config(path)
    names = [*READ, RECIPE, CHAT_TEMPLATE]
    try:
        names += files.read_manifest(path).files
        changes = files.changed_files(path, verify=True)
    except UserError as error:
        changes = [str(error)]
    files.update_manifest(path, names)
    return "\n  ".join([f"{path}: its files are accepted as they are", *changes])


def _require_rows(path: Path, model: Config, sizes: Sequence[int]) -> None:
    """Raise UserError if a tokenizer has more tokens than the model."""
    for side, tokens in zip(("source", "target"), sizes, strict=False):
        rows = getattr(model, f"{side}_vocab")
        if tokens > rows:
            raise UserError(f"{path}: its {side} tokenizer has {tokens} tokens, its model {rows} ({side}_vocab)")


def _describe(stack: Stack) -> str:
    layers = f"{plural(stack.layers, 'layer')}, width {stack.width}"
    if stack.recurrent:
        return f"{stack.mixer.upper()}, {layers}, {stack.score.replace('_', ' ')} score"
    heads = f"{plural(stack.heads, 'head')} of {stack.head}" + (", hashed" if stack.mixer == "lsh" else "")
    return f"{layers}, {heads}, feed-forward {stack.ff}, {stack.position} positions, {stack.norm_at}-norm"


def read_config(path: Path) -> RunConfig:
    """The checked config.json of a run."""
    if path.is_file():
        raise UserError(f"{path}: is a file, not a run directory; a run is named first, files after it")
    if not path.is_dir():
        raise UserError(f"{path}: no such run directory{closest_run(path)}")
    files.require_own_files(path, (*READ, RECIPE, CHAT_TEMPLATE))
    if not (path / CONFIG).is_file():
        hint = " (was the training stopped before its start?)"
        if inside := [str(path / name) for name in _runs_in(path)]:
            more = f" and {len(inside) - MAX_NAMED_RUNS:,} more" if len(inside) > MAX_NAMED_RUNS else ""
            hint = f"; there are runs in it: {', '.join(inside[:MAX_NAMED_RUNS])}{more}"
        raise UserError(f"{path}: not a run directory: it has no {CONFIG}{hint}")
    data = files.read_json(path / CONFIG)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        number = data.get("format") if isinstance(data, dict) else None
        raise UserError(f"{path / CONFIG}: format {number!r} is not {FORMAT}, the one this version reads")
    config = parse(RunConfig, data, str(path / CONFIG))
    task = config.task or infer_task(config.model)
    if config.task is None and task == "pairs":  # or span, whose models look alike
        with suppress(UserError):
            task = saved_recipe(path).task
    return config.model_copy(update={"task": task})


def read_statistics(path: Path) -> Statistics:
    """The statistics of a run; the defaults if it has none."""
    file = path / STATISTICS
    return parse(Statistics, files.read_json(file), str(file)) if file.is_file() else Statistics()


def closest_run(path: Path) -> str:
    """`; did you mean x?` with a run of a similar name in the same directory, or an empty string."""
    near = nearest(path.name, _runs_in(path.parent))
    return f"; did you mean {path.parent / near}?" if near else ""


def _runs_in(directory: Path) -> list[str]:
    """The names of the runs in a directory that can be read."""
    names = []
    with suppress(OSError):
        for file in sorted(directory.glob(f"[!.]*/{CONFIG}")):
            with suppress(UserError):
                data = files.read_json(file)
                if isinstance(data, dict) and data.get("format") == FORMAT:  # other libraries use this file name, too
                    names.append(file.parent.name)
    return names


def saved_recipe(run: Path) -> Recipe:
    """The complete recipe of a run."""
    files.require_own_files(run, [RECIPE])
    return load_recipe(read_recipe(run / RECIPE), str(run / RECIPE))


def require_numbers(run: Run) -> None:
    """Raise UserError if a weight is infinite or NaN."""
    from regard.weight_files import weights_of

    for name, weight in weights_of(run.model).items():
        if not bool(weight.isfinite().all()):
            raise UserError(f"{run.path}: some weights are not finite numbers ({name}); was training stable?")


def average(paths: Sequence[str | Path], out: str | Path) -> Run:
    """Save the mean of several runs with the same model and vocabulary, with the alignment heads of the first."""
    from regard.weight_files import mean_weights, weights_of

    if not paths:
        raise UserError("average needs at least one run")
    if Path(out).exists():
        raise UserError(f"{out}: exists already; name a new directory for the averaged run")
    first = Run.load(paths[0])
    require_numbers(first)

    def weights(path: str | Path) -> dict[str, Tensor]:
        run = Run.load(path)
        require_numbers(run)
        if run.config != first.config or run.codec != first.codec:
            raise UserError(f"{path}: not the same model and vocabulary as {paths[0]}, so they cannot be averaged")
        return weights_of(run.model)

    mean = mean_weights(chain([weights_of(first.model)], map(weights, paths[1:])))
    for name, parameter in weights_of(first.model).items():
        parameter.copy_(mean[name])

    def write(temporary: Path) -> None:
        first.save(temporary)
        if (first.path / HEADS).is_file():
            shutil.copyfile(first.path / HEADS, temporary / HEADS)
            files.update_manifest(temporary, [HEADS])

    files.replace_directory(Path(out), write)
    return replace(first, path=Path(out))
