"""One example as a model takes it, whatever the model reads: pairs, a text, or an image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.batch import Batch, TokenIds, collate, pad
from regard.config import Config, PatchConfig
from regard.data.images import Pictures, read_images
from regard.data.objectives import image_batch, lm_batch, mask_every, masked_batch, text_ids
from regard.data.plain import read_pieces
from regard.data.reader import LineCounter, Source
from regard.errors import UserError, one_of
from regard.inspect.logit_lens import Pieces
from regard.recipe import Column
from regard.run import Run
from regard.text.codec import Example

CLASS_TOKEN = "<image>"  # stands before the patches of an image


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
        raise UserError("there is nothing to look at: the text has no tokens")
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
        raise UserError("there is nothing to look at: the text has no tokens")
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
        raise UserError(f"{name}: the model cuts it into {patches.count} patches; up to {most} can be shown")
    scaled = image_CHW.astype(np.float32) if run.pixels is None else run.pixels(image_CHW[None])[0]
    across = patches.width // patches.size
    squares = tuple(f"{i // across + 1}·{i % across + 1}" for i in range(patches.count))
    image_1CHW = torch.from_numpy(scaled).unsqueeze(0).to(run.model.device)
    return Given(
        (image_1CHW, None),
        {},
        {"source": (CLASS_TOKEN, *squares)},
        {"image": name} | _answer(label),
        _class(run, label) if run.config.output == "classes" else [],
        class_names(run),
        shot=Shot(_for_eyes(image_CHW, patches), patches.size),
    )


def _for_eyes(image_CHW: np.ndarray, patches: PatchConfig) -> np.ndarray:
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
    return torch.tensor([list(ids)], device=run.model.device)


def _cut_note(side: str, ids: Sequence[int], most: int) -> list[str]:
    note = f"The {side} has {len(ids):,} tokens; the model was shown, and you see, the first {most}."
    return [note] if len(ids) > most else []


BATCH_TOKENS = 4096
STRETCH = 128  # tokens of a text that are read at once
MASK_EVERY = 7  # tokens, in masked language models
MOST_IMAGES = 64  # at once

Material = Sequence[Example] | str | Pictures  # pairs or texts with labels, plain text, images with labels


def reads_text(config: Config) -> bool:
    """Whether a model is judged by plain text: one that says the next token, or hidden ones."""
    return config.patches is None and config.output != "classes" and (config.encoder is None or config.decoder is None)


def read_material(
    run: Run, paths: tuple[str, ...], columns: tuple[Column, ...], account: LineCounter, most: int | None = None
) -> Material:
    """What a file holds for a run's model; at most so many pairs, images, or windows of text."""
    config = run.config
    if config.patches is not None:
        found = read_images(paths[0])
        return Pictures(found.images_NCHW[:most], None if found.labels is None else found.labels[:most])
    if reads_text(config):
        pieces, count = [], 0
        for piece in read_pieces(Source(paths[:1]), account):
            pieces.append(piece)
            count += len(_symbols(run, piece))
            if most is not None and count > most * STRETCH:
                break
        return "".join(pieces)
    return [item.example for item in islice(Source(paths, columns).read(account), most)]


def batches_of(run: Run, material: Material, tokens: int = BATCH_TOKENS) -> list[Batch]:
    """Material as batches of about so many tokens."""
    config = run.config
    if isinstance(material, Pictures):
        return _image_batches(run, material)
    if isinstance(material, str):
        return _text_batches(run, material, tokens)
    if config.output == "classes":
        return _class_batches(run, material, tokens)
    return make_batches(encode_pairs(run, material), config, tokens)


def count_of(material: Material) -> str:
    """How much there is, in words."""
    if isinstance(material, str):
        return f"{len(material):,} characters"
    if isinstance(material, Pictures):
        return f"{len(material.images_NCHW):,} images"
    return f"{len(material):,} pairs"


# Pairs


def encode_pairs(run: Run, examples: Iterable[Example]) -> list[tuple[TokenIds, TokenIds]]:
    """Sources and targets as ids; an example without a target is left out."""
    whole = [example for example in examples if example.target]
    if not whole:
        raise UserError("heads are judged on pairs, and there is none with a source and a target")
    sources = run.codec.encode_source(whole)
    targets = run.codec.encode_target([example.target or "" for example in whole])
    return list(zip(sources, targets, strict=True))


def make_batches(pairs: Sequence[tuple[TokenIds, TokenIds]], config: Config, tokens: int = BATCH_TOKENS) -> list[Batch]:
    """Pairs in batches of about so many padded tokens, those of like length together."""
    batches: list[Batch] = []
    current: list[tuple[TokenIds, TokenIds]] = []
    longest = 0
    for pair in sorted(pairs, key=lambda pair: (len(pair[0]), len(pair[1]))):
        length = max(len(pair[0]), len(pair[1]))
        if current and max(longest, length) * (len(current) + 1) > tokens:
            batches.append(_collate(current, config))
            current, longest = [], 0
        current.append(pair)
        longest = max(longest, length)
    return [*batches, _collate(current, config)] if current else batches


def _collate(pairs: Sequence[tuple[TokenIds, TokenIds]], config: Config) -> Batch:
    return collate([source for source, _ in pairs], [target for _, target in pairs], config)


def _class_batches(run: Run, examples: Sequence[Example], tokens: int) -> list[Batch]:
    known = {name: number for number, name in enumerate(run.labels)}
    for example in examples:
        if example.target not in known:
            raise one_of("label", example.target or "", known)
    rows = run.codec.encode_source(examples)
    pairs = [(row, [known[example.target or ""]]) for row, example in zip(rows, examples, strict=True)]
    return [batch._replace(input_BT=batch.label_BT[:, :0]) for batch in make_batches(pairs, run.config, tokens)]


# Text


def _symbols(run: Run, text: str) -> list[int]:
    return (run.codec.target if run.config.encoder is None else run.codec.source).encode([text])[0]


def _text_batches(run: Run, text: str, tokens: int) -> list[Batch]:
    config, ids = run.config, _symbols(run, text)
    if len(ids) < 2:
        raise UserError("heads of this model are judged by plain text, and there is none")
    limits = [stack.max_length for stack in config.stacks.values() if stack.position == "learned"]
    if config.encoder is None:
        length = min([STRETCH, len(ids), *limits])
        row = torch.tensor([config.start_id, *ids])
        return [lm_batch(part_BW) for part_BW in row.unfold(0, length + 1, length).split(max(1, tokens // length))]
    if config.ids.mask is None:
        raise UserError("this vocabulary has no token for what is hidden, by which heads of this model are judged")
    before, after = config.ids.around(config.frame)
    length = min([STRETCH, len(ids), *(limit - len(before + after) for limit in limits)])
    starts = range(0, len(ids) - length + 1, length)
    label_NW, _ = pad([[*before, *ids[start : start + length], *after] for start in starts], config.ids.pad)
    known = text_ids(run.codec.source.size, run.codec.source.special)
    parts = [part_BW.numpy() for part_BW in label_NW.split(max(1, tokens // label_NW.shape[1]))]
    masked = [mask_every(part_BW, MASK_EVERY, config.ids, known) for part_BW in parts]
    return [masked_batch(read, part, chosen) for part, (read, chosen) in zip(parts, masked, strict=True)]


# Images


def _image_batches(run: Run, pictures: Pictures) -> list[Batch]:
    if pictures.labels is None:
        raise UserError("heads are judged by images with labels, and these have none")
    known = {name: number for number, name in enumerate(run.labels)}
    for label in pictures.labels:
        if label not in known:
            raise one_of("label", label, known)
    scaled = pictures.images_NCHW if run.pixels is None else run.pixels(pictures.images_NCHW)
    labels = np.asarray([known[label] for label in pictures.labels])
    starts = range(0, len(labels), MOST_IMAGES)
    return [image_batch(scaled[at : at + MOST_IMAGES], labels[at : at + MOST_IMAGES]) for at in starts]
