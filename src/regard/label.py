"""Telling the label of a text or an image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.batch import pad
from regard.errors import UserError
from regard.run import Run
from regard.text.example import Example

BATCH_TOKENS = 8192
IMAGES = 256  # at once


@dataclass(frozen=True)
class Labelled:
    """The most probable label, and the probability of every one, most probable first."""

    label: str
    probabilities: dict[str, float]

    @property
    def probability(self) -> float:
        return self.probabilities[self.label]


def labels_of(run: Run) -> tuple[str, ...]:
    """The labels of a run; those of a model from elsewhere may be numbers only."""
    if run.config.classes is None:
        raise UserError(f"{run.path}: its model does not tell labels")
    return run.labels or tuple(map(str, range(run.config.classes)))


def classify(run: Run, texts: Sequence[str], batch_tokens: int = BATCH_TOKENS) -> list[Labelled]:
    """The labels of texts, in order."""
    if run.config.patches is not None:
        raise UserError(f"{run.path}: its model reads images, not text")
    rows = run.codec.encode_source([Example(text) for text in texts])
    encoder = run.config.encoder
    assert encoder is not None
    if encoder.position == "learned":
        for text, row in zip(texts, rows, strict=True):
            if len(row) > encoder.max_length:
                raise UserError(
                    f"a text of {len(row)} symbols is longer than the {encoder.max_length} that the model reads: "
                    f"{text[:60]!r}"
                )
    found: list[Labelled | None] = [None] * len(rows)
    device = next(run.model.parameters()).device
    for part in _alike(rows, batch_tokens):
        source_BS, keep_BS = pad([rows[index] for index in part], run.config.ids.pad)
        told = _told(run, source_BS.to(device), None if keep_BS is None else keep_BS.to(device))
        for index, labelled in zip(part, told, strict=True):
            found[index] = labelled
    return [labelled for labelled in found if labelled is not None]


def classify_images(run: Run, images_NCHW: NDArray[Any]) -> list[Labelled]:
    """The labels of images with numbers as in the file the run was trained on."""
    patches, pixels = run.config.patches, run.pixels
    if patches is None:
        raise UserError(f"{run.path}: its model reads text, not images")
    if images_NCHW.shape[1:] != (patches.channels, patches.height, patches.width):
        ours = (patches.channels, patches.height, patches.width)
        raise UserError(
            f"images of (channels, height, width) {images_NCHW.shape[1:]}, but the model of {run.path} reads {ours}"
        )
    device = next(run.model.parameters()).device
    found: list[Labelled] = []
    for start in range(0, len(images_NCHW), IMAGES):
        part = images_NCHW[start : start + IMAGES]
        scaled = part.astype(np.float32) if pixels is None else pixels(part)
        found += _told(run, torch.from_numpy(scaled).to(device), None)
    return found


def _alike(rows: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of rows of similar length, as many at once as there is room for."""
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    while order:
        count = max(1, batch_tokens // max(1, len(rows[order[0]])))
        yield order[:count]
        order = order[count:]


@torch.inference_mode()
def _told(run: Run, source: Tensor, keep_BS: Tensor | None) -> list[Labelled]:
    names = labels_of(run)
    logits_BC = run.model(source, keep_BS).squeeze(1).float()
    probabilities, order = logits_BC.softmax(-1).sort(descending=True)
    return [
        Labelled(names[numbers[0]], {names[number]: share for number, share in zip(numbers, shares, strict=True)})
        for numbers, shares in zip(order.tolist(), probabilities.tolist(), strict=True)
    ]
