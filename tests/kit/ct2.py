"""Small runs with random weights that CTranslate2 supports."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kit.families import build
from regard.config import Config, parse
from regard.run import Run
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

LETTERS = "abcdefgh"
STACK = {"layers": 2, "width": 16, "heads": 4, "ff": 24, "dropout": 0.0, "max_length": 80}
SPECIAL = [0, 1, 2]  # padding, unknown, start: never generated


def tokenizer(scheme: str = "char", text: str = LETTERS) -> Tokenizer:
    return Tokenizer.train(scheme, [" ".join(text) if scheme == "space" else text])


def random_run(
    encoder: dict[str, Any] | None = None,
    decoder: dict[str, Any] | None = None,
    *,
    codec: Codec | None = None,
    spare: int = 0,
    seed: int = 0,
    end: float | None = None,
    special: float = -20.0,
    **settings: Any,
) -> Run:
    """A run with random weights. `end`, if given, is the bias of the end token, and `special` that of SPECIAL."""
    codec = codec or Codec(tokenizer(), tokenizer())
    vocabs = {"source_vocab": codec.source_vocab + spare, "target_vocab": codec.target_vocab + spare}
    stacks = {"encoder": STACK | (encoder or {}), "decoder": STACK | (decoder or encoder or {})}
    settings |= {} if end is None else {"output_bias": True, "tie_output": False}
    config = parse(Config, {**vocabs, **stacks, "frame": codec.frame, **settings}, "test")
    model = build(config, seed)
    if end is not None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:  # for few ties and outputs that depend on the source
                    parameter.normal_(std=1.4 * (2 / sum(parameter.shape)) ** 0.5)
            model.output.weight.normal_(std=0.6)
            model.output.bias[config.ids.eos] += end
            model.output.bias[SPECIAL] = special
    return Run(config, codec, model, Path("random"))


def words(count: int, longest: int = 12, seed: int = 3, letters: str = LETTERS) -> list[str]:
    """Random words."""
    draw = random.Random(seed)
    return ["".join(draw.choices(letters, k=draw.randint(1, longest))) for _ in range(count)]


def ids_of(rows: Sequence[Sequence[Any]]) -> list[list[tuple[int, ...]]]:
    return [[hypothesis.ids for hypothesis in row] for row in rows]
