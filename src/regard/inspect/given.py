"""One example as a model takes it, whatever the model reads: pairs, a text, or an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.config import Patches
from regard.errors import UserError, one_of
from regard.inspect.says import Pieces
from regard.run import Run
from regard.text.example import Example

CLASS_TOKEN = "<image>"  # stands before the squares of an image


@dataclass(frozen=True)
class Shot:
    """An image that was looked at: its pixels for showing, and how it was cut."""

    pixels_HWC: np.ndarray  # bytes, one channel or three
    size: int  # of a square's side

    @property
    def rows(self) -> int:
        return int(self.pixels_HWC.shape[0] // self.size)

    @property
    def columns(self) -> int:
        return int(self.pixels_HWC.shape[1] // self.size)


@dataclass(frozen=True)
class Given:
    """What goes into a model, how it is named, and what the answers are compared with."""

    inputs: tuple[Tensor | None, ...]  # the model's arguments
    ids: dict[str, Sequence[int]]  # by tower
    tokens: dict[str, tuple[str, ...]]
    texts: dict[str, str]
    labels: list[int] | None  # what is said, or should be; None: whatever is most probable
    pieces: Pieces
    notes: list[str] = field(default_factory=list)
    shot: Shot | None = None


def give(run: Run, example: Example, target: Sequence[int] | None, most: int) -> Given:
    """A text, and with an encoder and a decoder, its output; a language model reads the text and its continuation."""
    if run.config.patches is not None:
        raise UserError(f"{run.path}: this model reads images, not text")
    if run.config.encoder is None:
        return _text(run, example, target or (), most)
    if run.config.decoder is None:
        return _source(run, example, most)
    return _pair(run, example, target or (), most)


def _pair(run: Run, example: Example, target: Sequence[int], most: int) -> Given:
    codec, config = run.codec, run.config
    source = codec.encode_source([example])[0]
    labels = [*target] if target and target[-1] == config.ids.eos else [*target, config.ids.eos]
    notes = [*_cut_note("source", source, most), *_cut_note("output", labels, most)]
    source, labels = source[:most], labels[:most]
    inputs = [config.start_id, *labels[:-1]]
    return Given(
        (_row(run, source), None, _row(run, inputs)),
        {"encoder": source, "decoder": inputs},
        {
            "source": tuple(codec.source_pieces(source)),
            "input": tuple(codec.target_pieces(inputs)),
            "output": tuple(codec.target_pieces(labels)),
        },
        {"source": example.source, "output": codec.decode_target(labels)},
        labels,
        codec.target_pieces,
        notes,
    )


def _text(run: Run, example: Example, continuation: Sequence[int], most: int) -> Given:
    codec = run.codec
    prompt = codec.target.encode([example.source])[0]
    labels = [*prompt, *continuation]
    if not labels:
        raise UserError("there is nothing to look at: the text has no symbols")
    notes = _cut_note("text", labels, most)
    labels = labels[:most]
    inputs = [run.config.start_id, *labels[:-1]]
    texts = {"text": example.source}
    if continuation:
        texts["continuation"] = codec.decode_target(continuation)
    tokens = {"input": tuple(codec.target_pieces(inputs)), "output": tuple(codec.target_pieces(labels))}
    return Given((_row(run, inputs), None), {"decoder": inputs}, tokens, texts, labels, codec.target_pieces, notes)


def _source(run: Run, example: Example, most: int) -> Given:
    codec, config = run.codec, run.config
    source = codec.encode_source([example])[0]
    if not source:
        raise UserError("there is nothing to look at: the text has no symbols")
    notes = _cut_note("text", source, most)
    source = source[:most]
    tokens = {"source": tuple(codec.source_pieces(source))}
    texts, labels, pieces = {"text": example.source}, list(source), codec.source_pieces
    if config.output == "classes":
        return Given(
            (_row(run, source), None),
            {"encoder": source},
            tokens,
            texts | _answer(example.target),
            _class(run, example.target),
            class_names(run),
            notes,
        )
    return Given((_row(run, source), None), {"encoder": source}, tokens, texts, labels, pieces, notes)


def give_image(run: Run, image_CHW: np.ndarray, label: str | None, name: str, most: int) -> Given:
    """An image as it stands in its file."""
    patches = run.config.patches
    if patches is None:
        raise UserError(f"{run.path}: this model reads text, not images")
    wanted = (patches.channels, patches.height, patches.width)
    if image_CHW.shape != wanted:
        raise UserError(f"{name}: its (channels, height, width) are {image_CHW.shape}, the model reads {wanted}")
    if patches.count > most:
        raise UserError(f"{name}: the model cuts it into {patches.count} squares; up to {most} can be shown")
    scaled = image_CHW.astype(np.float32) if run.pixels is None else run.pixels(image_CHW[None])[0]
    across = patches.width // patches.size
    squares = tuple(f"{i // across + 1}·{i % across + 1}" for i in range(patches.count))
    image_1CHW = torch.from_numpy(scaled).unsqueeze(0).to(next(run.model.parameters()).device)
    return Given(
        (image_1CHW, None),
        {},
        {"source": (CLASS_TOKEN, *squares)},
        {"image": name} | _answer(label),
        _class(run, label) if run.config.output == "classes" else [],
        class_names(run),
        shot=Shot(_for_eyes(image_CHW, patches), patches.size),
    )


def _for_eyes(image_CHW: np.ndarray, patches: Patches) -> np.ndarray:
    """Pixels as bytes: as they are if they fill a byte, else stretched between the smallest and the largest."""
    shown = image_CHW[:3] if patches.channels >= 3 else image_CHW[:1]
    if shown.dtype != np.uint8 or shown.max() < 128:
        low, high = float(shown.min()), float(shown.max())
        shown = np.rint((shown.astype(np.float64) - low) * (255 / ((high - low) or 1.0))).astype(np.uint8)
    return np.ascontiguousarray(shown.transpose(1, 2, 0))


def class_names(run: Run) -> Pieces:
    """Names for numbers of classes."""
    return lambda numbers: [run.labels[n] if n < len(run.labels) else str(n) for n in numbers]


def _class(run: Run, label: str | None) -> list[int] | None:
    if label is None:
        return None
    known = class_names(run)(range(run.config.classes or 0))
    if label not in known:
        raise one_of("label", label, known)
    return [known.index(label)]


def _answer(label: str | None) -> dict[str, Any]:
    return {} if label is None else {"label": label}


def _row(run: Run, ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], device=next(run.model.parameters()).device)


def _cut_note(side: str, ids: Sequence[int], most: int) -> list[str]:
    note = f"The {side} has {len(ids):,} symbols; the model was shown, and you see, the first {most}."
    return [note] if len(ids) > most else []
