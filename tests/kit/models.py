"""Tiny untrained models and runs, made in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.batch import Pixels
from regard.inspect.trace import Trace
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
    """A small model with reproducible random weights."""
    torch.manual_seed(0)
    changes = {tower: TINY[name] | stack for tower in ("encoder", "decoder")}
    return Model(preset(name, vocab, changes=changes)).eval()


def letters(model_name: str = "transformer-tiny", path: str = "runs/letters", **stack: Any) -> Run:
    """An untrained run over letters."""
    tokenizer = Tokenizer.train("char", WORDS)
    codec = Codec(tokenizer, tokenizer)
    model = tiny(model_name, codec.target_vocab, **stack)
    return Run(model.config, codec, model, Path(path))


LITTLE = {"layers": 2, "width": 16, "heads": 4, "ff": 32, "dropout": 0.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lm": ("gpt-tiny", {"decoder": LITTLE}),
    "lm-grouped": ("llama-tiny", {"decoder": LITTLE | {"kv_heads": 2}}),
    "lm-distances": ("xl-tiny", {"decoder": LITTLE | {"memory": 256}}),
    "lm-hashed": (
        "reformer-tiny",
        {"decoder": LITTLE | {"lsh": {"chunk": 4}, "axial": {"rows": 16, "columns": 8, "row_width": 8}}},
    ),
    "masked": ("bert-tiny", {"encoder": LITTLE}),
    "classes": ("bert-tiny", {"encoder": LITTLE, "output": "classes", "classes": 3, "pooler": True}),
    "vectors": ("bert-tiny", {"encoder": LITTLE, "output": "none"}),
    "image": ("vit-tiny", {"encoder": LITTLE | {"max_length": 17}, "classes": 3}),
}
LABELS = ("one", "two", "three")
LANGUAGE = [name for name in FAMILIES if name.startswith("lm")]
TEXT_ALONE = [name for name in FAMILIES if name != "image"]


def family(kind: str, path: str = "runs/little") -> Run:
    """An untrained run of a model with a single stack."""
    name, changes = FAMILIES[kind]
    masks = kind in ("masked", "classes", "vectors")
    tokenizer = Tokenizer.train("char", WORDS, mask=masks)
    changes = changes | {"ids": tokenizer.ids.model_dump()}
    torch.manual_seed(1)
    model = Model(preset(name, tokenizer.size, changes=changes)).eval()
    codec = Codec(tokenizer, frame=model.config.frame)
    labels = LABELS if model.config.classes else ()
    pixels = Pixels(mean=(4.0,), scale=(8.0,)) if kind == "image" else None
    return Run(model.config, codec, model, Path(path), labels, pixels)


def picture(seed: int = 0) -> np.ndarray:
    """An image for the image model: shape (1, 8, 8), values from 0 to 16."""
    return np.random.default_rng(seed).integers(0, 17, (1, 8, 8)).astype(np.uint8)


def scores_of(trace: Trace) -> Iterator[Any]:
    """The attention scores of every `scores` card in a trace."""
    for walk in trace.walks:
        for cards in walk.layers:
            for card in cards:
                if card.show == "scores":
                    yield card.scores


def check_scores(trace: Trace) -> None:
    """The softmax of the attention scores in the walks equals the recorded weights of every map."""
    maps = {m.name: m.weights_HTS for m in trace.maps}
    checked = set()
    for scores in scores_of(trace):
        logits_HTS = scores.raw_HTS * scores.scale
        if scores.bias_HTS is not None:
            logits_HTS = logits_HTS + scores.bias_HTS
        if scores.mask_TS is not None:
            logits_HTS = np.where(scores.mask_TS, logits_HTS, -np.inf)
        shifted = np.exp(logits_HTS - logits_HTS.max(-1, keepdims=True))
        assert np.allclose(shifted / shifted.sum(-1, keepdims=True), maps[scores.map], atol=1e-5)
        checked.add(scores.map)
    assert checked == set(maps)
