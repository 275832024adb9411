"""A run: the directory with a trained model and everything needed to use it. Nothing in it can execute code."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor, nn

from regard import files
from regard.batch import Pixels
from regard.config import Config, Count, Id, Stack, Value, parse
from regard.data.statistics import STATISTICS, Statistics
from regard.errors import UserError, plural
from regard.model import Model, allocate, on_meta
from regard.nn.primitives import PackedWeights
from regard.notebook import table
from regard.recipe import Recipe, load_recipe, read_recipe
from regard.suggest import nearest
from regard.tasks import TASKS, Task, TaskName, infer_task
from regard.text.codec import TOKENIZERS, Codec, TextConfig

MAX_NAMED_RUNS = 5  # in a message
MAX_DIFFERENCES = 20  # in a message
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


class RunConfig(Value):
    """The contents of config.json."""

    format: Literal[1] = 1
    model: Config
    text: TextConfig
    task: TaskName | None = None  # runs of version 0.4 and older do not name it
    labels: tuple[str, ...] = ()  # of a classifier, by number
    pixels: Pixels | None = None  # of a model that reads images
    generation: Generation = Generation()


@dataclass
class Run:
    """A trained model with its tokenizers."""

    config: Config
    codec: Codec
    model: Model
    path: Path
    labels: tuple[str, ...] = ()
    pixels: Pixels | None = None
    task_name: TaskName | None = None  # None: inferred from the model
    generation: Generation = field(default_factory=Generation)
    statistics: Statistics = field(default_factory=Statistics)  # defaults for a run without the file
    packed: PackedWeights = field(default_factory=PackedWeights, init=False, repr=False, compare=False)

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
        return facts | {"parameters": f"{self.model.size:,}"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, task {self.task.name}, {self.model.size:,} parameters)"

    def _repr_html_(self) -> str:
        facts = {"task": f"{self.task.name}: {self.task.summary}", **self.facts}
        if self.task.reads != "images":
            text = self.codec.config
            facts["tokens"] = " to ".join((text.source_tokens, text.target_tokens)[: 1 + self.task.seq2seq])
        if labels := self.label_names:
            facts["labels"] = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
        return table({**facts, "device": self.model.device}.items(), caption=str(self.path))

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu", verify: bool = False) -> Self:
        """Open a run whose files are unchanged; `verify` also hashes large weights, whose size is always checked."""
        path = Path(path)
        try:
            run = cls._read(path, device)
        except UserError as error:
            changes = files.changed_files(path, READ) if path.is_dir() else []
            raise UserError("\n  ".join([str(error), *changes])) from None
        require_saved(path, READ, verify)
        return run

    @classmethod
    def _read(cls, path: Path, device: str | torch.device) -> Self:
        config = read_config(path)
        with open_weights(path / WEIGHTS) as file:
            require_layers(config.model, len(file.keys()), str(path / WEIGHTS))
        model = on_meta(config.model)
        load_weights(model, path / WEIGHTS, device)
        _require_rows(path, config.model, config.text.sizes or ())
        codec = Codec.load(path, config.text)
        _require_rows(path, config.model, (codec.source_vocab, codec.target_vocab))
        settings = (config.labels, config.pixels, config.task, config.generation, read_statistics(path))
        return cls(config.model, codec, model.eval(), path, *settings)

    def save(self, path: str | Path) -> None:
        """Write the files that are needed to use the run."""
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


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name; shared ones occur once, with their first name."""
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=True)}


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors with default permissions. A failure raises OSError."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: x.detach().contiguous().cpu() for name, x in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error).removeprefix("Error while serializing: ").removeprefix("I/O error: ")) from None
    path.chmod(mode)  # the library creates a file that only its owner can read


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Write tensors atomically. The library's own writer would leave a temporary file if it is killed."""
    tensors = {name: x.contiguous().cpu() for name, x in weights.items()}
    files.replace_file(path, lambda temporary: temporary.write_bytes(save(tensors)))


def require_layers(config: Config, tensors: int, where: str) -> None:
    """Raise UserError for a config with more layers than tensors; called before layers are created."""
    layers = sum(stack.layers for stack in config.stacks.values())
    if layers > tensors:
        message = f"missing: config.json has {layers} layers, the file only {tensors} tensors"
        raise UserError(f"{where}: weights do not fit config.json\n  {message}")


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """Open a safetensors file; failures are UserErrors."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; the run has no weights yet")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None


def load_weights(model: Model, path: Path, device: str | torch.device = "cpu") -> None:
    """Load weights; wrong names and shapes are reported together, before a model on the meta device is allocated."""
    with open_weights(path) as file:
        names = file.keys()
        stored = {name: list(file.get_slice(name).get_shape()) for name in names}
        require_shapes(stored, {name: list(x.shape) for name, x in weights_of(model).items()}, str(path))
        if next(model.parameters()).is_meta:
            allocate(model, device)
        with torch.no_grad():
            for name, parameter in model.named_parameters(remove_duplicate=True):
                parameter.copy_(file.get_tensor(name))


def require_shapes(
    stored: Mapping[str, list[int]], expected: Mapping[str, list[int]], where: str, other: Sequence[str] = ()
) -> None:
    """Raise UserError unless a file has the tensors of a model; all differences are listed, `other` ones first."""
    wrong = [*other, *(f"missing: {name}" for name in sorted(expected.keys() - stored.keys()))]
    wrong += [f"not known: {name} {stored[name]}" for name in sorted(stored.keys() - expected.keys())]
    for name in sorted(expected.keys() & stored.keys()):
        if stored[name] != expected[name]:
            wrong.append(f"{name}: shape {stored[name]} where config.json says {expected[name]}")
    if wrong:
        raise UserError(f"{where}: weights do not fit config.json\n  {list_differences(wrong)}")


def list_differences(lines: Sequence[str]) -> str:
    """Lines of a message, at most MAX_DIFFERENCES."""
    more = [f"and {len(lines) - MAX_DIFFERENCES} more"] if len(lines) > MAX_DIFFERENCES else []
    return "\n  ".join([*lines[:MAX_DIFFERENCES], *more])


def mean_weights(sets: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several sets of weights, summed in double precision."""
    total: dict[str, Tensor] = {}
    count = 0
    for weights in sets:
        count += 1
        for name, x in weights.items():
            total[name] = total[name] + x.double() if name in total else x.double()
    return {name: (x / count).to(weights[name].dtype) for name, x in total.items()}


def require_numbers(run: Run) -> None:
    """Raise UserError if a weight is infinite or NaN."""
    for name, weight in weights_of(run.model).items():
        if not bool(weight.isfinite().all()):
            raise UserError(f"{run.path}: some weights are not finite numbers ({name}); was training stable?")


def average(paths: Sequence[str | Path], out: str | Path) -> Run:
    """Save the mean of several runs with the same model and vocabulary, with the alignment heads of the first."""
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
