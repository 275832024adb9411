"""Telling the label of a text or an image."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.batch import pad
from regard.errors import UserError
from regard.run import Run
from regard.text.codec import Example

BATCH_TOKENS = 8192
MAX_SOURCE = 2048  # tokens of a text
IMAGES = 256  # at once


@dataclass(frozen=True)
class Classification:
    """The most probable label, and the probability of every one, most probable first."""

    label: str  # empty if there is none
    probabilities: dict[str, float]
    flags: dict[str, str] = field(default_factory=dict)  # why there is none: name -> reason

    @property
    def probability(self) -> float:
        return self.probabilities.get(self.label, math.nan)

    def as_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on; flags only where there are any, and then no label."""
        out: dict[str, Any] = {"label": None if self.flags else self.label, "probabilities": self.probabilities}
        return {**out, "flags": dict(self.flags)} if self.flags else out


def labels_of(run: Run) -> tuple[str, ...]:
    """The labels of a run; those of a model from elsewhere may be numbers only."""
    if run.config.classes is None:
        raise UserError(f"{run.path}: its model does not tell labels")
    return run.labels or tuple(map(str, range(run.config.classes)))


def classify(
    run: Run, texts: Sequence[str | Example], batch_tokens: int = BATCH_TOKENS, max_source: int = MAX_SOURCE
) -> list[Classification]:
    """The labels of texts, in order; one that is too long has none, and a flag."""
    if run.config.patches is not None:
        raise UserError(f"{run.path}: its model reads images, not text")
    labels_of(run)
    rows = run.codec.encode_source([Example(text) if isinstance(text, str) else text for text in texts])
    found = [Classification("", {}, _too_long(run, len(row), max_source)) for row in rows]
    device = run.model.device
    for part in _alike(rows, [index for index, labelled in enumerate(found) if not labelled.flags], batch_tokens):
        source_BS, keep_BS = pad([rows[index] for index in part], run.config.ids.pad)
        told = _told(run, source_BS.to(device), None if keep_BS is None else keep_BS.to(device))
        for index, labelled in zip(part, told, strict=True):
            found[index] = labelled
    return found


def _too_long(run: Run, symbols: int, most: int) -> dict[str, str]:
    positions = run.config.top.max_positions
    if positions is not None and symbols > positions:
        room = f"the {positions} positions of the model"
    elif symbols > most:
        room = f"{most} (max_source)"
    else:
        return {}
    return {"too_long": f"the text has {symbols} tokens with the marks around it, more than {room}"}


def classify_images(run: Run, images_NCHW: NDArray[Any]) -> list[Classification]:
    """The labels of images with numbers as in the file the run was trained on."""
    patches, pixels = run.config.patches, run.pixels
    if patches is None:
        raise UserError(f"{run.path}: its model reads text, not images")
    if images_NCHW.shape[1:] != (patches.channels, patches.height, patches.width):
        ours = (patches.channels, patches.height, patches.width)
        raise UserError(
            f"images of (channels, height, width) {images_NCHW.shape[1:]}, but the model of {run.path} reads {ours}"
        )
    device = run.model.device
    found: list[Classification] = []
    for start in range(0, len(images_NCHW), IMAGES):
        part = images_NCHW[start : start + IMAGES]
        scaled = part.astype(np.float32) if pixels is None else pixels(part)
        found += _told(run, torch.from_numpy(scaled).to(device), None)
    return found


def _alike(rows: Sequence[Sequence[int]], chosen: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Some rows by their numbers: those of similar length together, as many at once as there is room for."""
    order = sorted(chosen, key=lambda index: -len(rows[index]))
    while order:
        count = max(1, batch_tokens // max(1, len(rows[order[0]])))
        yield order[:count]
        order = order[count:]


@torch.inference_mode()
def _told(run: Run, source: Tensor, keep_BS: Tensor | None) -> list[Classification]:
    names = labels_of(run)
    logits_BC = run.model(source, keep_BS).squeeze(1).float()
    probabilities, order = logits_BC.softmax(-1).sort(descending=True)
    return [
        Classification(names[numbers[0]], {names[number]: share for number, share in zip(numbers, shares, strict=True)})
        for numbers, shares in zip(order.tolist(), probabilities.tolist(), strict=True)
    ]
