"""What a program imports: `regard.load` and `regard.train`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.batch import pad
from regard.config import parse
from regard.decode.alignment import load_heads
from regard.decode.batches import by_length
from regard.decode.generate import Input, generate
from regard.decode.hypothesis import Hypothesis
from regard.decode.options import Options
from regard.decode.score import Pair, Scored, score
from regard.errors import UserError
from regard.fit import fit
from regard.inspect.trace import Trace, trace, trace_image, trace_text
from regard.run import Run
from regard.settings import Recipe, load_recipe
from regard.shipped import recipe_tables
from regard.text.example import Example
from regard.train.talk import Silence, Talk


class LoadedRun(Run):
    """A run that answers: `generate`, `score`, `attention`, `embed` and `logits`."""

    def generate(
        self, inputs: Iterable[Input], *, ensemble: Sequence[Run] = (), options: Options | None = None, **settings: Any
    ) -> list[list[Hypothesis]]:
        """The best outputs for every input, a list for each; settings are those of `Options`, such as `beam=5`."""
        return list(generate([self, *ensemble], inputs, _options(options, settings)))

    def score(
        self, pairs: Iterable[Pair], *, ensemble: Sequence[Run] = (), options: Options | None = None, **settings: Any
    ) -> list[Scored]:
        """The log-probability of each target given its source, in total and per symbol."""
        return list(score([self, *ensemble], pairs, _options(options, settings)))

    def attention(
        self, source: str | Example | NDArray[Any], target: str | None = None, *, beam: int = 5, more: int = 0
    ) -> Trace:
        """Every attention map of one example, by name; the output is `target`, or what the model says.

        A language model is given the continuation as `target`, or goes on for `more` symbols; of a model of classes
        `target` is a class. An image is an array as in its file, (channels, height, width).
        """
        if isinstance(source, np.ndarray):
            return trace_image(self, source, target)
        example = Example(source) if isinstance(source, str) else source
        if self.config.encoder is None or self.config.decoder is None:
            return trace_text(self, example.source, target or example.target, more, example.features)
        if target is not None:
            ids = self.codec.encode_target([target])[0]
        else:
            ids = list(self.generate([example], beam=beam)[0][0].ids)
        return trace(self, example, ids, heads=load_heads(self.path))

    @torch.inference_mode()
    def logits(
        self, source_ids: Sequence[Sequence[int]] | Tensor, target_ids: Sequence[Sequence[int]] | Tensor | None = None
    ) -> Tensor:
        """Raw scores over the symbol after each given one; rows are equally long, targets begin with a start symbol."""
        device = next(self.model.parameters()).device
        source_BS = torch.as_tensor(source_ids, dtype=torch.int64, device=device)
        input_BT = None if target_ids is None else torch.as_tensor(target_ids, dtype=torch.int64, device=device)
        out: Tensor = self.model(source_BS, None, input_BT)
        return out

    @torch.inference_mode()
    def embed(self, texts: Sequence[str], *, normalize: bool = True, batch_tokens: int = 4096) -> NDArray[np.float32]:
        """A vector for each text, (texts, width): the mean of what an encoder makes of its symbols, of length one."""
        config = self.config
        if config.decoder is not None or config.encoder is None or config.patches or config.output == "classes":
            raise UserError(f"{self.path}: embed needs an encoder alone that gives a vector for every symbol")
        rows = self.codec.encode_source([Example(text) for text in texts])
        device = next(self.model.parameters()).device
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
    """Open a run directory."""
    run = LoadedRun.load(path, device)
    assert isinstance(run, LoadedRun)
    return run


def train(
    recipe: Recipe | dict[str, Any] | str | Path,
    out: str | Path = "run",
    *,
    resume: bool = False,
    talk: Talk | None = None,
) -> LoadedRun:
    """Train as a recipe says: a `Recipe`, its tables, a TOML file or a shipped name. Silent unless `talk` listens."""
    if isinstance(recipe, str | Path):
        recipe = load_recipe(recipe_tables(recipe), str(recipe))
    elif isinstance(recipe, dict):
        recipe = load_recipe(recipe)
    fit(recipe, out, resume=resume, talk=talk or Silence())
    return load(out)


def _options(options: Options | None, settings: dict[str, Any]) -> Options:
    if options is None:
        return Options.of(**settings)
    return parse(Options, {**options.model_dump(), **settings}, "options") if settings else options
