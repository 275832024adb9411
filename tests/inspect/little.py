"""Tiny models and a run of letters, made in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from regard.model import Model
from regard.presets import preset
from regard.run import Run
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

TINY: dict[str, dict[str, Any]] = {
    "transformer-tiny": {"layers": 2, "width": 16, "heads": 4, "ff": 32},
    "rnn-bahdanau": {"width": 16},
    "rnn-luong": {"width": 16},
}
WORDS = ["abc", "bcd", "cabba", "dab", "ab ba"]


def tiny(name: str = "transformer-tiny", vocab: int = 12, **stack: Any) -> Model:
    """A small model with random weights, the same every time."""
    torch.manual_seed(0)
    changes = {tower: TINY[name] | stack for tower in ("encoder", "decoder")}
    return Model(preset(name, vocab, changes=changes)).eval()


def letters(model_name: str = "transformer-tiny", path: str = "runs/letters", **stack: Any) -> Run:
    """A run over letters that was never trained."""
    tokenizer = Tokenizer.train("char", WORDS)
    codec = Codec(tokenizer, tokenizer)
    model = tiny(model_name, codec.target_vocab, **stack)
    return Run(model.config, codec, model, Path(path))
