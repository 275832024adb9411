"""What a program imports: `regard.load` and `regard.train`."""

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
from regard.config import parse
from regard.decode.alignment import load_heads
from regard.decode.classify import Classification, classify, classify_images
from regard.decode.generate import Piece, generate, stream
from regard.decode.hypothesis import Hypothesis
from regard.decode.options import Options
from regard.decode.request import Input, Request
from regard.decode.score import Pair, Scored, score
from regard.device import choose_device, usable_precision
from regard.errors import UserError
from regard.inspect.trace import Trace, trace, trace_image, trace_text
from regard.recipe import Recipe, load_recipe, recipe_tables
from regard.run import Run
from regard.text.codec import Example
from regard.training.fit import fit
from regard.training.report import Reporter, SilentReporter


class LoadedRun(Run):
    """A run that answers: `generate`, `stream`, `score`, `classify`, `attention`, `embed` and `logits`."""

    def generate(
        self, inputs: Iterable[Input], *, ensemble: Sequence[Run] = (), options: Options | None = None, **settings: Any
    ) -> list[list[Hypothesis]]:
        """The best outputs for every input, a list for each; settings are those of `Options`, such as `beam=5`."""
        asked = _checked("generate", "inputs", inputs, (str, Example, Request), '["abc"]')
        return list(generate([self, *ensemble], asked, self._options(options, settings)))

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
        asked = _checked("score", "pairs", pairs, (tuple, list), '[("abc", "AH B K")]')
        for pair in asked:
            texts = pair[:2] if isinstance(pair, Example) else pair
            if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
                raise UserError(f"score: a pair is a source and a target, both texts, not {_shown(pair)}")
        return list(score([self, *ensemble], asked, self._options(options, settings)))

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
        """Every attention map of one example, by name; the output is `target`, or what the model says.

        A language model is given the continuation as `target`, or goes on for `more` tokens; of a model of classes
        `target` is a class. An image is an array as in its file, (channels, height, width).
        """
        if isinstance(source, np.ndarray):
            return trace_image(self, source, target)
        if not isinstance(source, str | Example):
            raise UserError(f"attention: takes one text, regard.Example or image, not {_shown(source)}")
        example = Example(source) if isinstance(source, str) else source
        if self.config.encoder is None or self.config.decoder is None:
            return trace_text(self, example.source, target or example.target, more, example.features)
        if target is not None:
            ids = self.codec.encode_target([target])[0]
        else:
            ids = list(self.generate([example], beam=beam)[0][0].ids)
        return trace(self, example, ids, heads=load_heads(self.path))

    def _options(self, options: Options | None, settings: dict[str, Any]) -> Options:
        if options is not None and not isinstance(options, Options):
            raise UserError(f"options: takes a regard.Options, not {_shown(options)}; or write beam=5 and the like")
        asked = Options.of(**settings) if options is None else options
        if options is not None and settings:
            asked = parse(Options, {**options.model_dump(), **settings}, "options")
        device = self.model.device
        usable = usable_precision(asked.precision, device, lambda told: warnings.warn(told, stacklevel=5))
        return asked.model_copy(update={"precision": usable})

    @torch.inference_mode()
    def logits(
        self, source_ids: Sequence[Sequence[int]] | Tensor, target_ids: Sequence[Sequence[int]] | Tensor | None = None
    ) -> Tensor:
        """Raw scores over the token after each given one; rows are equally long, targets begin with a start token."""
        device, config = self.model.device, self.config
        if config.patches is not None:
            raise UserError(f"{self.path}: logits reads ids of tokens, but this model reads images")
        both = config.encoder is not None and config.decoder is not None
        if both and target_ids is None:
            raise UserError("logits: this run has an encoder and a decoder; give target_ids, from a start token on")
        if not both and target_ids is not None:
            raise UserError("logits: this run has one tower; give one table of ids")
        vocab = config.target_vocab if config.encoder is None else config.source_vocab
        source_BS = _ids("source_ids", source_ids, vocab).to(device)
        input_BT = None if target_ids is None else _ids("target_ids", target_ids, config.target_vocab).to(device)
        if input_BT is not None and len(input_BT) != len(source_BS):
            raise UserError(f"logits: {len(source_BS)} rows of source_ids, but {len(input_BT)} of target_ids")
        out: Tensor = self.model(source_BS, None, input_BT)
        return out

    @torch.inference_mode()
    def embed(self, texts: Sequence[str], *, normalize: bool = True, batch_tokens: int = 4096) -> NDArray[np.float32]:
        """A vector for each text, (texts, width): the mean of what an encoder makes of its tokens, of length one."""
        config = self.config
        if config.decoder is not None or config.encoder is None or config.patches or config.output == "classes":
            raise UserError(f"{self.path}: embed needs an encoder alone that gives a vector for every token")
        texts = _checked("embed", "texts", texts, (str,), '["abc"]')
        rows = self.codec.encode_source([Example(text) for text in texts])
        device = self.model.device
        found = np.zeros((len(rows), config.encoder.out_width), np.float32)
        for batch in by_length([len(row) for row in rows], batch_tokens):
            ids_BS, keep_BS = (x if x is None else x.to(device) for x in pad([rows[i] for i in batch], config.ids.pad))
            assert ids_BS is not None
            x_BSD = self.model.hidden(ids_BS, keep_BS)
            kept_BS1 = torch.ones_like(ids_BS).unsqueeze(-1) if keep_BS is None else keep_BS.unsqueeze(-1)
            mean_BD = (x_BSD * kept_BS1).sum(1) / kept_BS1.sum(1).clamp(min=1)
            found[batch] = (torch.nn.functional.normalize(mean_BD, dim=-1) if normalize else mean_BD).float().cpu()
        return found


def load(path: str | Path, device: str | torch.device = "cpu") -> LoadedRun:
    """Open a run directory; the device is cpu, cuda, cuda:N, mps, or auto for a GPU if there is one."""
    run = LoadedRun.load(path, choose_device(device) if isinstance(device, str) else device)
    assert isinstance(run, LoadedRun)
    return run


def train(
    recipe: Recipe | dict[str, Any] | str | Path,
    out: str | Path = "run",
    *,
    resume: bool = False,
    talk: Reporter | None = None,
) -> LoadedRun:
    """Train as a recipe says: a `Recipe`, its tables, a TOML file or a shipped name. Silent unless `talk` listens."""
    if isinstance(recipe, str | Path):
        recipe = load_recipe(recipe_tables(recipe), str(recipe))
    elif isinstance(recipe, dict):
        recipe = load_recipe(recipe)
    elif not isinstance(recipe, Recipe):
        raise UserError(f"train: takes a recipe as tables, a Recipe, a file or a shipped name, not {_shown(recipe)}")
    fit(recipe, out, resume=resume, talk=talk or SilentReporter())
    return load(out)


def _checked(verb: str, what: str, items: Any, kinds: tuple[type, ...], example: str) -> list[Any]:
    """A list of what a verb takes; one text alone would be taken for a list of its letters."""
    if isinstance(items, str | bytes | Example | Request | dict) or not isinstance(items, Iterable):
        raise UserError(f"{verb}: takes a list of {what}, such as {example}, not {_shown(items)}")
    found = list(items)
    for place, item in enumerate(found):
        if not isinstance(item, kinds):
            raise UserError(f"{verb}: takes a list of {what}, such as {example}; item {place} is {_shown(item)}")
    return found


def _ids(name: str, ids: Any, vocab: int) -> Tensor:
    try:
        found = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UserError(f"logits: {name} are equally long rows of whole numbers, not {_shown(ids)}") from None
    if found.ndim != 2 or found.numel() == 0 or found.dtype.is_floating_point or found.dtype == torch.bool:
        raise UserError(f"logits: {name} are equally long rows of whole numbers, not {_shown(ids)}")
    if int(found.min()) < 0 or int(found.max()) >= vocab:
        worst = int(found.min()) if int(found.min()) < 0 else int(found.max())
        raise UserError(f"logits: {name}: the ids of this vocabulary are 0 to {vocab - 1}, not {worst}")
    return found.long()


def _shown(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else f"{text[:77]}..."
