"""What a program imports: `regard.load` and `regard.train`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.config import parse
from regard.decode.alignment import load_heads
from regard.decode.generate import Input, generate
from regard.decode.hypothesis import Hypothesis
from regard.decode.options import Options
from regard.decode.score import Pair, Scored, score
from regard.fit import fit
from regard.inspect.trace import Trace, trace
from regard.run import Run
from regard.settings import Recipe, load_recipe
from regard.shipped import recipe_tables
from regard.text.example import Example
from regard.train.talk import Silence, Talk


class LoadedRun(Run):
    """A run that answers: `generate`, `score`, `attention` and `logits`."""

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

    def attention(self, source: str | Example, target: str | None = None, *, beam: int = 5) -> Trace:
        """Every attention map of one example, by name; the output is `target`, or what the model says."""
        example = Example(source) if isinstance(source, str) else source
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
