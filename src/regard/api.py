"""The library: `regard.load` opens a run that answers, `regard.train` trains one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar, Unpack, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from regard.answers import EMBED_TOKENS, Answerer, open_engine, truncation, unknown_remark, usable_options
from regard.batch import windows
from regard.config import parse, to_toml
from regard.data.in_memory import in_memory
from regard.data.pairs import read_table
from regard.data.reader import MEMORY, Source
from regard.decode import native
from regard.decode.engine import TokenStream
from regard.decode.hypothesis import Hypothesis
from regard.decode.request import (
    BatchSettings,
    EngineChoice,
    Input,
    Options,
    OptionSettings,
    Request,
    ScoringSettings,
    check_engine,
)
from regard.decode.scoring import Pair, Scored
from regard.device import choose_device
from regard.errors import UserError, plural, shown_value
from regard.evaluate.evaluator import (
    Evaluation,
    EvaluationOptions,
    EvaluationRequest,
    EvaluationSettings,
    evaluate_file,
    parse_columns,
)
from regard.notebook import Results
from regard.presets import changed_recipe
from regard.recipe import Column, Data, Recipe, Text, Train, key_paths, load_recipe
from regard.run import Run
from regard.suggest import closest, one_of
from regard.tasks import TASKS, TaskName
from regard.text.codec import Example

if TYPE_CHECKING:  # torch is imported when a model is loaded: the native engine does not need it
    import torch
    from torch import Tensor

    from regard.decode.encoder_only import Classification
    from regard.inspect.trace import Trace
    from regard.training.report import Reporter

Texts = str | Path | Sequence[str]  # a file with a text per line, or the texts
P = ParamSpec("P")
R = TypeVar("R")


def checked_call(*values: type[BaseModel], names: Iterable[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose `**settings` are fields of `values`: all fields, or those with `names`.

    The fields replace `**settings` in the signature and are listed in the docstring, for completion and help. A call
    that does not match the signature raises a UserError.
    """
    known_fields = {name: field for value in values for name, field in value.model_fields.items()}
    fields = {name: known_fields[name] for name in names or known_fields}
    types = {name: hint for value in values for name, hint in get_type_hints(value).items()}
    descriptions = "\n".join(f"{name}: {field.description}" for name, field in fields.items())

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        plain = signature(function)
        parameters = [each for each in plain.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[name])
            for name, field in fields.items()
        ]
        full = plain.replace(parameters=parameters)
        known = [each.name for each in parameters if each.name != "self"]

        @wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            for name in keywords:
                if name not in known:
                    hint = f"{closest(name, known)} (known: {', '.join(known)})"
                    raise UserError(f"{function.__name__}: no option {name!r:.100}{hint}")
            try:
                full.bind(*args, **keywords)
            except TypeError as error:
                raise UserError(f"{function.__name__}: {error}") from None
            return function(*args, **keywords)

        call.__signature__ = full  # type: ignore[attr-defined]
        call.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\nOptions:\n{indent(descriptions, '    ')}"
        return call

    return decorate


def checked_list(verb: str, noun: str, items: Any, kinds: tuple[type, ...], example: str) -> list[Any]:
    """The items as a checked list. A single text is refused: it would be read as a list of its letters."""
    if isinstance(items, str | bytes | Example | Request | dict) or not isinstance(items, Iterable):
        raise UserError(f"{verb}: takes a list of {noun}, such as {example}, not {shown_value(items)}")
    checked = list(items)
    for index, item in enumerate(checked):
        if not isinstance(item, kinds):
            raise UserError(f"{verb}: takes a list of {noun}, such as {example}; item {index} is {shown_value(item)}")
        check_texts(f"{verb}: item {index}", item)
    return checked


def check_texts(where: str, item: Any) -> None:
    """Check that the fields of an Example are texts. A Request checks itself."""
    for name in Example._fields if isinstance(item, Example) else ():
        value = getattr(item, name)
        if not isinstance(value, str) and (value is not None or name == "source"):
            hint = ", as in its column: 'N;PL'" if name == "features" else ""
            raise UserError(f"{where}: {name} is a text{hint}, not {shown_value(value)}")


def named_texts(name: str, value: Any, texts: dict[str, list[str]]) -> str:
    """The path of a file with a text per line. A list of texts is stored in `texts` under `name`, which is returned."""
    if isinstance(value, str | Path) and os.path.isfile(value):
        return str(value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        items = list(value)
        if all(isinstance(item, str) for item in items):
            texts[name] = items
            return name
    missing = "; there is no such file" if isinstance(value, str | Path) else ""
    run = "a loaded run, such as regard.load(...), " if name == "against" else ""
    raise UserError(
        f"evaluate: {name} is {run}a file with a text per line or a list of texts, not {shown_value(value)}{missing}"
    )


def checked_ids(name: str, ids: Any, vocab: int) -> Tensor:
    """A checked tensor of ids."""
    import torch

    try:
        table = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        table = torch.empty(0)
    if table.ndim != 2 or table.numel() == 0 or table.dtype.is_floating_point or table.dtype == torch.bool:
        raise UserError(f"logits: {name} are equally long rows of whole numbers, not {shown_value(ids)}")
    for index in (int(table.min()), int(table.max())):
        if not 0 <= index < vocab:
            raise UserError(f"logits: {name}: the ids of this vocabulary are 0 to {vocab - 1}, not {index}")
    return table.long()


def changed(recipe: Mapping[str, Any] | str | Path | None, options: dict[str, Any], settings: list[str]) -> Recipe:
    """A recipe with changed options and settings."""
    try:
        tables = changed_recipe(recipe, options, settings)
    except UserError as error:
        raise UserError(str(error).replace("--set ", "settings: ")) from None
    return load_recipe(tables, str(recipe) if isinstance(recipe, str | Path) else "recipe")


def as_settings(settings: Mapping[str, Any] | None) -> list[str]:
    """Settings in the form of a command line, KEY=VALUE."""
    lines = []
    for key, value in (settings or {}).items():
        try:
            toml = to_toml({"": [] if value is None else [value]})
        except TypeError:
            raise UserError(f"train: settings: {key} cannot be {shown_value(value)}") from None
        text = toml.strip().removeprefix('"" = [').removesuffix("]").strip().removesuffix(",")
        lines.append(f"{key}={text or 'none'}")
    return lines


class LoadedRun(Run):
    """A run with methods to answer: `generate`, `score`, `classify`, `evaluate`, `attention` and others."""

    @checked_call(Options)
    def generate(
        self,
        inputs: Iterable[Input],
        *,
        ensemble: Sequence[Run] | None = None,
        engine: EngineChoice = "auto",
        options: Options | None = None,
        **settings: Unpack[OptionSettings],
    ) -> list[list[Hypothesis]]:
        """The best outputs for every input, as one list of hypotheses per input.

        Inputs are texts, `Example` or `Request`. The runs of the `ensemble` decode together with this one. Keywords
        override `options`. A masked language model fills the masks of a text; `top_tokens` has their candidates.
        """
        requests = checked_list("generate", "inputs", inputs, (str, Example, Request), '["abc"]')
        answerer = self._answerer(ensemble, options, settings, engine)
        batches = map(answerer.generate, windows(requests, answerer.options.window))
        rows = (Results(answer.hypotheses) for batch in batches for answer in batch)
        return Results(rows, [item if isinstance(item, str) else item.source for item in requests])

    @checked_call(Options)
    def stream(
        self,
        item: Input,
        *,
        ensemble: Sequence[Run] | None = None,
        engine: EngineChoice = "auto",
        options: Options | None = None,
        **settings: Unpack[OptionSettings],
    ) -> TokenStream:
        """The output for one input, token by token; after the last token `hypothesis` is the complete output."""
        if not isinstance(item, str | Example | Request):
            raise UserError(f"stream: takes one text, regard.Example or regard.Request, not {shown_value(item)}")
        check_texts("stream", item)
        pieces = self._answerer(ensemble, options, settings, engine).stream(item)
        if pieces.problem:
            raise UserError(f"stream: {pieces.problem}")
        return pieces

    @checked_call(Options, names=ScoringSettings.__annotations__)
    def score(
        self,
        pairs: Iterable[Pair],
        *,
        ensemble: Sequence[Run] | None = None,
        engine: EngineChoice = "auto",
        options: Options | None = None,
        **settings: Unpack[ScoringSettings],
    ) -> list[Scored]:
        """The log-probability of each target given its source, in total and per token."""
        checked = checked_list("score", "pairs", pairs, (tuple, list), '[("abc", "AH B K")]')
        for pair in checked:
            texts = pair[:2] if isinstance(pair, Example) else pair
            if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
                raise UserError(f"score: a pair is a source and a target, both texts, not {shown_value(pair)}")
        scored = self._answerer(ensemble, options, settings, engine).score(checked)
        return Results(scored, [f"{pair[0]} → {pair[1]}" for pair in checked])

    @checked_call(Options, names=BatchSettings.__annotations__)
    def classify(
        self, inputs: Iterable[str | Example] | NDArray[Any], **settings: Unpack[BatchSettings]
    ) -> list[Classification]:
        """The label of every text or image, with the probabilities of all labels.

        Images are an array (images, [channels,] height, width) with the value range of the training data.
        """
        if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "biuf":
            return Results(Answerer([self]).classify(inputs[:, None] if inputs.ndim == 3 else inputs))
        answerer = Answerer([self], Options.of(**settings))
        texts = checked_list("classify", "texts", inputs, (str, Example), '["abc"]')
        return Results(answerer.classify(texts), [item if isinstance(item, str) else item.source for item in texts])

    @checked_call(EvaluationOptions, Options)
    def evaluate(
        self,
        data: Any,
        *,
        columns: Sequence[Column] | None = None,
        reference: Sequence[Texts] | None = None,
        outputs: Texts | None = None,
        ensemble: Sequence[Run] | None = None,
        against: Run | Texts | None = None,
        options: Options | None = None,
        **settings: Unpack[EvaluationSettings],
    ) -> Evaluation:
        """Scores on held-out data: a file, or data in memory, as for `train`.

        `reference` has further references, and `outputs` are evaluated instead of the run's own; each is a file with a
        text per line or a list with a text per example. `against` is another run, or outputs, to compare with.
        """
        values = {name: value for name, value in settings.items() if name in EvaluationOptions.model_fields}
        decoding = {name: value for name, value in settings.items() if name not in values}
        set_values = {name: value for name, value in values.items() if value is not None}
        evaluation_options = parse(EvaluationOptions, set_values, "evaluate")
        texts: dict[str, list[str]] = {}
        several = [] if reference is None else reference
        items = checked_list("evaluate: reference", "files or lists of texts", several, (object,), '["test.ref"]')
        references = [named_texts(f"reference[{index}]", each, texts) for index, each in enumerate(items)]
        output_file = None if outputs is None else named_texts("outputs", outputs, texts)
        other = against if against is None or isinstance(against, Run) else named_texts("against", against, texts)
        runs = self._runs(ensemble)
        named: tuple[Column, ...] = () if columns is None else parse_columns(columns, bool(references))
        lines = {"columns": named, "reference": references, "outputs": output_file, "ensemble": runs[1:]}
        engine = evaluation_options.engine or "auto"
        workers = None if engine == "ctranslate2" else 1
        request = EvaluationRequest(
            options=evaluation_options,
            chosen={*decoding, *evaluation_options.chosen, *(name for name, value in lines.items() if value)},
            runs=runs,
            outputs=output_file,
            against=other,
            references=references,
            texts=texts,
            open_engine=partial(open_engine, engine=engine, scores="none", workers=workers, tune=False),
        )
        reads = request.check()
        request = replace(request, decoding=self._options(options, decoding, engine))
        with TemporaryDirectory() as temporary:
            expected = named or self.codec.columns
            if isinstance(data, str | Path):
                table = reads in ("pairs", "labelled")
                source = read_table(str(data), expected) if table else Source((str(data),), expected)
            else:
                source = in_memory(data, reads, columns=expected).write(Path(temporary) / "data")
            evaluation = evaluate_file(request, source)
        if evaluation.skipped:
            warnings.warn(evaluation.remarks[0], stacklevel=3)
        return evaluation

    def attention(
        self, source: str | Example | NDArray[Any], target: str | None = None, *, beam: int = 5, more: int = 0
    ) -> Trace:
        """Every attention map of one example, by name, with `target` or the best output of a beam search.

        For a language model `target` is the continuation; without it the model generates `more` tokens. For a
        classifier it is a label. An image is an array (channels, height, width), with numbers as in its file.
        """
        Options.of(beam=beam)
        if more < 0:
            raise UserError(f"attention: more is a number of tokens, not {more}")
        if isinstance(source, np.ndarray):
            from regard.inspect.trace import trace_image

            return trace_image(self, source, target)
        example = source if isinstance(source, Example) else Example(source)
        example = example._replace(target=target or example.target)
        check_texts("attention", example)
        if remark := unknown_remark(self.codec, example._replace(target=None) if self.task.labels else example):
            warnings.warn(f"attention: {remark}", stacklevel=2)
        return Answerer([self]).trace(example, target, beam, more)

    def _runs(self, others: Sequence[Run] | None) -> list[Run]:
        example = "[regard.load('runs/other')]"
        return [self, *checked_list("ensemble", "loaded runs", () if others is None else others, (Run,), example)]

    def _answerer(
        self, ensemble: Sequence[Run] | None, options: Options | None, settings: Mapping[str, Any], engine: EngineChoice
    ) -> Answerer:
        if not isinstance(engine, str):
            raise UserError(f"engine: takes a name, not {shown_value(engine)}")
        if engine not in get_args(EngineChoice):
            raise one_of("engine", engine, get_args(EngineChoice))
        runs = self._runs(ensemble)
        checked = self._options(options, settings, engine)
        return Answerer(runs, checked, open_engine(runs, checked, engine, workers=1, tune=False))

    def _options(self, options: Options | None, settings: Mapping[str, Any], engine: EngineChoice = "auto") -> Options:
        if options is not None and not isinstance(options, Options):
            raise UserError(f"options: takes a regard.Options, not {shown_value(options)}; or write beam=5 etc.")
        checked = Options.of(**{**({} if options is None else options.model_dump()), **settings})
        check_engine(engine, checked)
        return usable_options(checked, self, lambda message: warnings.warn(message, stacklevel=8))

    def logits(
        self, source_ids: Sequence[Sequence[int]] | Tensor, target_ids: Sequence[Sequence[int]] | Tensor | None = None
    ) -> Tensor:
        """Logits of the next token at every position. Rows have the same length; targets begin with a start token."""
        import torch

        device = self.model.device
        config = self.config
        task = self.task
        if task.reads == "images":
            raise UserError(f"{self.path}: logits reads ids of tokens, but this model reads images")
        if task.seq2seq and target_ids is None:
            raise UserError("logits: this run has an encoder and a decoder; give target_ids, from a start token on")
        if not task.seq2seq and target_ids is not None:
            raise UserError("logits: this run has one stack; give one table of ids")
        vocab = config.target_vocab if task.name == "lm" else config.source_vocab
        source_BS = checked_ids("source_ids", source_ids, vocab).to(device)
        input_BT = None if target_ids is None else checked_ids("target_ids", target_ids, config.target_vocab).to(device)
        if input_BT is not None and len(input_BT) != len(source_BS):
            raise UserError(f"logits: {plural(len(source_BS), 'row')} of source_ids, but {len(input_BT)} of target_ids")
        with torch.inference_mode():
            logits: Tensor = self.model(source_BS, None, input_BT)
        return logits

    def embed(
        self,
        texts: Sequence[str],
        *,
        normalize: bool = True,
        batch_tokens: int = EMBED_TOKENS,
        average_windows: bool = False,
    ) -> NDArray[np.float32]:
        """A vector for each text, (texts, width): the mean of the encoder's token vectors, normalised to length one.

        A text with more tokens than the model has positions is truncated, with a warning; `average_windows` reads all
        its tokens in windows instead.
        """
        if "embed" not in self.task.answers:
            raise UserError(f"{self.path}: embed needs a masked language model, an encoder without a decoder")
        texts = checked_list("embed", "texts", texts, (str,), '["abc"]')
        answerer = Answerer([self], Options.of(batch_tokens=batch_tokens))
        vectors, truncated, limit = answerer.embed(texts, average_windows, normalize)
        if truncated:
            warnings.warn(truncation(truncated, limit), stacklevel=2)
        return vectors


class TrainSettings(TypedDict, total=False):
    """Keys of a recipe as keyword arguments of `train`, for editors and type checkers."""

    task: TaskName
    preset: str
    columns: Sequence[Column]
    source_tokens: str
    target_tokens: str
    minutes: float | None
    steps: int | None
    epochs: int | None
    seed: int
    workers: int
    device: str
    start_from: str | Path | None


def load(path: str | Path, device: str | torch.device = "cpu", *, verify: bool = False) -> LoadedRun:
    """Open a run directory on a device: cpu, cuda, cuda:N, mps, or auto for a GPU if there is one.

    Changed files are refused. Large weights are compared by size only, with `verify` by content.
    """
    run_device = choose_device(device) if isinstance(device, str) and device != "cpu" else device
    run = LoadedRun.load(path, run_device, verify, model=False)
    if native.problem([run], Options()):  # the native engine reads the weights itself; torch may not be needed
        run.load_model()
    return run


@checked_call(Recipe, Text, Data, Train, names=TrainSettings.__annotations__)
def train(
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    out: str | Path = "run",
    *,
    data: Any = None,
    valid: Any = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    reporter: Reporter | None = None,
    **keys: Unpack[TrainSettings],
) -> LoadedRun:
    """Train a model, write the run to `out` and open it. Without a `reporter` nothing is printed.

    The recipe is a `Recipe`, its tables, a TOML file or the name of a shipped recipe. Keywords change it; `settings`
    changes all other keys, as `--set` does: {"lr": 1e-3, "decoder.layers": 2}. Training and validation data are files
    or data in memory: a list of pairs, a data frame, a dataset, or texts for a language model.
    """
    from regard.training.fit import fit
    from regard.training.report import Reporter

    if isinstance(recipe, Recipe):
        recipe = recipe.model_dump(exclude_unset=True)
    options = {}
    for key, value in keys.items():
        if value is not None:
            options[".".join(*key_paths(key))] = str(value) if isinstance(value, Path) else value
    changes = as_settings(settings)
    memory = {}
    # The task of the recipe decides how data in memory is read.
    plain = changed(recipe, options, changes)
    if data is None and plain.data.train is None and plain.data.source is None and not resume:
        raise UserError("train: no training data: give data=, a file or examples in memory")
    fixed = "columns" in plain.data.model_fields_set or data is None or isinstance(data, str | Path)
    expected = plain.data.columns if fixed else None
    for role, name, each in (("train", "data", data), ("valid", "valid", valid)):
        if isinstance(each, str | Path):
            options[f"data.{role}"] = str(each)
        elif each is not None:
            memory[role] = in_memory(each, TASKS[plain.task].reads, name, expected)
            options |= {f"data.{role}": MEMORY, "data.columns": memory[role].columns}
            expected = memory[role].columns
    fit(changed(recipe, options, changes), out, resume, Reporter() if reporter is None else reporter, memory)
    return load(out)
