"""Classification: the labels of texts and images with their probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.batch import TokenIds, by_length, in_parts, pad
from regard.decode.hypothesis import unknown_flags
from regard.decode.preparer import out_of_memory
from regard.decode.scorer import check_numbers
from regard.errors import UserError
from regard.notebook import result_cells, table
from regard.run import Run
from regard.text.codec import Example

BATCH_TOKENS = 8192
MAX_SOURCE = 2048  # tokens of a text
BATCH_IMAGES = 256


@dataclass(frozen=True)
class Classification:
    """The most probable label, and the probabilities of all labels, most probable first."""

    label: str  # empty if there is none
    probabilities: dict[str, float]
    flags: dict[str, str] = field(default_factory=dict)  # why there is none, or what is unknown: name -> reason

    @property
    def probability(self) -> float:
        return self.probabilities.get(self.label, math.nan)

    def __repr__(self) -> str:
        return f"Classification({self.label!r}, probability {self.probability:.3f})"

    def cells(self) -> dict[str, object]:
        """The row of a table in a notebook."""
        return result_cells({"label": self.label, "probability": self.probability}, (), (), self.flags)

    def _repr_html_(self) -> str:
        return table(self.probabilities.items(), ("label", "probability"))

    def as_dict(self) -> dict[str, Any]:
        """The JSON shape; flags only where there are any, and no label where they say why."""
        out: dict[str, Any] = {"label": self.label if self.probabilities else None, "probabilities": self.probabilities}
        return {**out, "flags": dict(self.flags)} if self.flags else out


def classify(
    run: Run, texts: Sequence[str | Example], batch_tokens: int = BATCH_TOKENS, max_source: int = MAX_SOURCE
) -> list[Classification]:
    """The labels of texts, in order; one that is too long has none, and a flag."""
    if run.task.reads == "images":
        raise UserError(f"{run.path}: its model reads images, not text")
    examples = [Example(text) if isinstance(text, str) else text for text in texts]
    rows = run.codec.encode_source(examples)
    results = classify_ids(run, rows, batch_tokens, max_source)
    for i, (example, row) in enumerate(zip(examples, rows, strict=True)):
        if problem := run.codec.features_problem(example):
            results[i] = Classification("", {}, {"error": problem})
        elif not results[i].flags and (unknown := run.codec.unknown_tokens(example, row)):
            results[i] = replace(results[i], flags=unknown_flags(unknown))
    return results


def classify_ids(
    run: Run, rows: Sequence[TokenIds], batch_tokens: int = BATCH_TOKENS, max_source: int = MAX_SOURCE
) -> list[Classification]:
    """The labels of texts given as token ids, the special tokens around them included."""
    if not run.task.labels:
        raise UserError(f"{run.path}: its model does not tell labels")
    results = [Classification("", {}, _too_long(run, len(row), max_source)) for row in rows]
    fit = [i for i, result in enumerate(results) if not result.flags]
    for batch in by_length([len(rows[i]) for i in fit], batch_tokens):
        indices = [fit[j] for j in batch]
        for part, answers in in_parts(lambda part: _classify_rows(run, [rows[i] for i in indices[part]]), len(indices)):  # noqa: B023
            unfit = Classification("", {}, out_of_memory("text", len(rows[indices[part.start]])))
            for i, answer in zip(indices[part], answers or [unfit], strict=True):
                results[i] = answer
    return results


def _too_long(run: Run, tokens: int, most: int) -> dict[str, str]:
    positions = run.config.top.max_positions
    if positions is not None and tokens > positions:
        bound = f"the {positions} positions of the model"
    elif tokens > most:
        bound = f"{most} (max_source)"
    else:
        return {}
    return {"too_long": f"the text has {tokens} tokens with the special tokens around it, more than {bound}"}


def classify_images(run: Run, images_NCHW: NDArray[Any]) -> list[Classification]:
    """The labels of images, whose numbers are as in the file that the run was trained on."""
    if run.task.reads != "images":
        raise UserError(f"{run.path}: its model reads text, not images")
    patches, pixels = run.config.image_patches, run.pixels
    shape = (patches.channels, patches.height, patches.width)
    if (actual := images_NCHW.shape[1:]) != shape:
        raise UserError(f"images of (channels, height, width) {actual}, but the model of {run.path} reads {shape}")
    results: list[Classification] = []
    for start in range(0, len(images_NCHW), BATCH_IMAGES):
        images = images_NCHW[start : start + BATCH_IMAGES]
        scaled = images.astype(np.float32) if pixels is None else pixels(images)
        results += _classify(run, torch.from_numpy(scaled).to(run.model.device), None)
    return results


def _classify_rows(run: Run, rows: Sequence[TokenIds]) -> list[Classification]:
    return _classify(run, *pad(rows, run.config.ids.pad, run.model.device))


@torch.inference_mode()
def _classify(run: Run, source: Tensor, keep_BS: Tensor | None) -> list[Classification]:
    labels = run.label_names
    logits_BC = run.model(source, keep_BS).squeeze(1).float()
    check_numbers(logits_BC)
    probabilities_BC, order_BC = logits_BC.softmax(-1).sort(descending=True)
    return [
        Classification(labels[order[0]], {labels[i]: p for i, p in zip(order, probabilities, strict=True)})
        for order, probabilities in zip(order_BC.tolist(), probabilities_BC.tolist(), strict=True)
    ]
