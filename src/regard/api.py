"""The library: `regard.load` opens a run that answers, `regard.train` trains one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.batch import by_length, pad
from regard.decode.classify import Classification, classify, classify_images
from regard.decode.generate import Piece, generate, stream
from regard.decode.hypothesis import Hypothesis
from regard.decode.options import Options
from regard.decode.request import Input, Request
from regard.decode.scoring import Pair, Scored, score
from regard.device import choose_device, usable_precision
from regard.errors import UserError
from regard.inspect.trace import Trace, trace_image, trace_pair, trace_text
from regard.recipe import Recipe, load_recipe, recipe_tables
from regard.run import Run
from regard.text.codec import Example
from regard.training.fit import fit
from regard.training.report import Reporter


class LoadedRun(Run):
    """A run that answers: `generate`, `stream`, `score`, `classify`, `attention`, `embed` and `logits`."""

    def generate(
        self, inputs: Iterable[Input], *, ensemble: Sequence[Run] = (), options: Options | None = None, **settings: Any
    ) -> list[list[Hypothesis]]:
        """The best outputs for every input, a list for each; settings are those of `Options`, such as `beam=5`."""
        requests = _checked("generate", "inputs", inputs, (str, Example, Request), '["abc"]')
        return list(generate([self, *ensemble], requests, self._options(options, settings)))

    def stream(
        self, item: Input, *, ensemble: Sequence[Run] = (), options: Options | None = None, **settings: Any
    ) -> Iterator[Piece]:
        """The output for one input as it is decided, token by token; greedy unless `sample` is set."""
        if not isinstance(item, str | Example | Request):
            raise UserError(f"stream: takes one text or regard.Example, not {_shown(item)}")
        return stream([self, *ensemble], item, self._options(options, settings))

    def score(
        self, pairs: Iterable[Pair], *, ensemble: Sequence[Run] = (), options: Options | None = None, **settings: Any
    ) -> list[Scored]:
        """The log-probability of each target given its source, in total and per token."""
        checked = _checked("score", "pairs", pairs, (tuple, list), '[("abc", "AH B K")]')
        for pair in checked:
            texts = pair[:2] if isinstance(pair, Example) else pair
            if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
                raise UserError(f"score: a pair is a source and a target, both texts, not {_shown(pair)}")
        return list(score([self, *ensemble], checked, self._options(options, settings)))

    def classify(self, inputs: Iterable[str] | NDArray[Any]) -> list[Classification]:
        """The label of every text, or image, with the probabilities of all labels.

        Images are an array (images, [channels,] height, width) with numbers as in the file of the training.
        """
        if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "biuf":
            if inputs.ndim not in (3, 4):
                raise UserError(
                    f"classify: images are an array (images, [channels,] height, width), not {inputs.shape}"
                )
            return classify_images(self, inputs[:, None] if inputs.ndim == 3 else inputs)
        return classify(self, _checked("classify", "texts", inputs, (str,), '["abc"]'))

    def attention(
        self, source: str | Example | NDArray[Any], target: str | None = None, *, beam: int = 5, more: int = 0
    ) -> Trace:
        """Every attention map of one example, by name; the output is `target`, or the best that a search finds.

        For a language model `target` is the continuation, without it the model continues for `more` tokens; for a
        classifier it is a label. An image is an array as in its file, (channels, height, width).
        """
        if isinstance(source, np.ndarray):
            return trace_image(self, source, target)
        if not isinstance(source, str | Example):
            raise UserError(f"attention: takes one text, regard.Example or image, not {_shown(source)}")
        example = Example(source) if isinstance(source, str) else source
        if self.task.seq2seq:
            return trace_pair(self, example, target, beam)
        return trace_text(self, example.source, target or example.target, more, example.features)

    def _options(self, options: Options | None, settings: dict[str, Any]) -> Options:
        if options is not None and not isinstance(options, Options):
            raise UserError(f"options: takes a regard.Options, not {_shown(options)}; or write beam=5 and the like")
        checked = options or Options.of(**settings)
        if options is not None and settings:
            checked = Options.of(**{**options.model_dump(), **settings})
        precision = usable_precision(
            checked.precision, self.model.device, lambda message: warnings.warn(message, stacklevel=5)
        )
        return checked.model_copy(update={"precision": precision})

    @torch.inference_mode()
    def logits(
        self, source_ids: Sequence[Sequence[int]] | Tensor, target_ids: Sequence[Sequence[int]] | Tensor | None = None
    ) -> Tensor:
        """Logits of the token after each given one; rows are equally long, targets begin with a start token."""
        device, config, task = self.model.device, self.config, self.task
        if task.reads == "images":
            raise UserError(f"{self.path}: logits reads ids of tokens, but this model reads images")
        if task.seq2seq and target_ids is None:
            raise UserError("logits: this run has an encoder and a decoder; give target_ids, from a start token on")
        if not task.seq2seq and target_ids is not None:
            raise UserError("logits: this run has one stack; give one table of ids")
        vocab = config.target_vocab if task.name == "lm" else config.source_vocab
        source_BS = _ids("source_ids", source_ids, vocab).to(device)
        input_BT = None if target_ids is None else _ids("target_ids", target_ids, config.target_vocab).to(device)
        if input_BT is not None and len(input_BT) != len(source_BS):
            raise UserError(f"logits: {len(source_BS)} rows of source_ids, but {len(input_BT)} of target_ids")
        logits: Tensor = self.model(source_BS, None, input_BT)
        return logits

    @torch.inference_mode()
    def embed(self, texts: Sequence[str], *, normalize: bool = True, batch_tokens: int = 4096) -> NDArray[np.float32]:
        """A vector for each text, (texts, width): the mean of an encoder's vectors of its tokens, of length one."""
        config = self.config
        if self.task.name != "masked":
            raise UserError(f"{self.path}: embed needs an encoder alone that gives a vector for every token")
        texts = _checked("embed", "texts", texts, (str,), '["abc"]')
        rows = self.codec.encode_source([Example(text) for text in texts])
        device = self.model.device
        vectors = np.zeros((len(rows), config.top.out_width), np.float32)
        for batch in by_length([len(row) for row in rows], batch_tokens):
            ids_BS, keep_BS = pad([rows[i] for i in batch], config.ids.pad, device)
            assert ids_BS is not None
            x_BSD = self.model.hidden(ids_BS, keep_BS)
            kept_BS1 = torch.ones_like(ids_BS).unsqueeze(-1) if keep_BS is None else keep_BS.unsqueeze(-1)
            mean_BD = (x_BSD * kept_BS1).sum(1) / kept_BS1.sum(1).clamp(min=1)
            vectors[batch] = (torch.nn.functional.normalize(mean_BD, dim=-1) if normalize else mean_BD).float().cpu()
        return vectors


def load(path: str | Path, device: str | torch.device = "cpu") -> LoadedRun:
    """Open a run directory; the device is cpu, cuda, cuda:N, mps, or auto for a GPU if there is one."""
    return LoadedRun.load(path, choose_device(device) if isinstance(device, str) else device)


def train(
    recipe: Recipe | dict[str, Any] | str | Path,
    out: str | Path = "run",
    *,
    resume: bool = False,
    reporter: Reporter | None = None,
    talk: Reporter | None = None,
) -> LoadedRun:
    """Train as a recipe says: a `Recipe`, its tables, a TOML file or a shipped name. Silent without a `reporter`.

    `talk` is the name that `reporter` had in version 0.4.
    """
    if talk is not None:
        warnings.warn("regard.train: talk= is now called reporter=", DeprecationWarning, stacklevel=2)
    if isinstance(recipe, str | Path):
        recipe = load_recipe(recipe_tables(recipe), str(recipe))
    elif isinstance(recipe, dict):
        recipe = load_recipe(recipe)
    elif not isinstance(recipe, Recipe):
        raise UserError(f"train: takes a recipe as tables, a Recipe, a file or a shipped name, not {_shown(recipe)}")
    fit(recipe, out, resume, reporter or talk or Reporter())
    return load(out)


def _checked(verb: str, what: str, items: Any, kinds: tuple[type, ...], example: str) -> list[Any]:
    """A list of what a verb takes; one text alone would be taken for a list of its letters."""
    if isinstance(items, str | bytes | Example | Request | dict) or not isinstance(items, Iterable):
        raise UserError(f"{verb}: takes a list of {what}, such as {example}, not {_shown(items)}")
    checked = list(items)
    for index, item in enumerate(checked):
        if not isinstance(item, kinds):
            raise UserError(f"{verb}: takes a list of {what}, such as {example}; item {index} is {_shown(item)}")
    return checked


def _ids(name: str, ids: Any, vocab: int) -> Tensor:
    """A table of ids as a tensor, checked."""
    try:
        table = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        table = torch.empty(0)
    if table.ndim != 2 or table.numel() == 0 or table.dtype.is_floating_point or table.dtype == torch.bool:
        raise UserError(f"logits: {name} are equally long rows of whole numbers, not {_shown(ids)}")
    least, most = int(table.min()), int(table.max())
    if least < 0 or most >= vocab:
        wrong = least if least < 0 else most
        raise UserError(f"logits: {name}: the ids of this vocabulary are 0 to {vocab - 1}, not {wrong}")
    return table.long()


def _shown(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else f"{text[:77]}..."
