"""Inputs of inspection: one example as the input of a model, and batches of data to measure heads on."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.batch import Batch, TokenIds, collate
from regard.config import Config, PatchConfig
from regard.data.images import LabelledImages, read_images
from regard.data.objectives import image_batch, lm_batch, mask_every, masked_batch, text_ids
from regard.data.plain_text import read_pieces
from regard.data.reader import LineCounter, Source
from regard.errors import UserError, plural
from regard.inspect.logit_lens import OutputNames
from regard.run import Run
from regard.suggest import one_of
from regard.text.codec import Direction, Example, direction

CLASS_TOKEN = "<cls>"  # display name of the class token of an image
BATCH_TOKENS = 4096
BATCH_IMAGES = 64
WINDOW = 128  # tokens of a text in one row
MASK_EVERY = 7  # tokens of a masked language model
TaskData = Sequence[Example] | str | LabelledImages  # pairs or labelled texts, plain text, labelled images
Pair = tuple[TokenIds, TokenIds]

NOTE_TEXTS = {  # of notes that the script of the page also writes
    "shortened": "The {side} has {count} tokens; only the first {limit} were traced and are shown.",
    "limit": "The output reached the length limit before its end token.",
}


class Note(NamedTuple):
    """A remark on a trace. A live page keeps the notes on the method for its next traces."""

    kind: Literal["shortened", "method", "unmeasured", "limit"]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ImageInput:
    """An image as the page shows it, with its patch size."""

    pixels_HWC: np.ndarray  # bytes; one or three channels
    size: int  # side of a patch in pixels

    def page_data(self) -> dict[str, Any]:
        height, width, channels = self.pixels_HWC.shape
        pixels = base64.b64encode(self.pixels_HWC.tobytes()).decode("ascii")
        return {"height": height, "width": width, "channels": channels, "size": self.size, "pixels": pixels}


@dataclass(frozen=True)
class InspectionInput:
    """One example as the input of a model, with the names of its tokens."""

    arguments: tuple[Tensor | None, ...]  # of the forward call
    ids: dict[str, list[int]]  # by stack; none for images
    tokens: dict[str, tuple[str, ...]]  # token rows by name: source, input, output
    directions: dict[str, Direction]  # by token row
    texts: dict[str, str]
    labels: list[int] | None  # outputs to score; None: the most probable outputs
    names: OutputNames
    notes: list[Note] = field(default_factory=list)
    image: ImageInput | None = None


def text_input(run: Run, example: Example, target: Sequence[int], limit: int) -> InspectionInput:
    """A text and the ids of its output or continuation, cut to `limit` tokens each."""
    if run.task.reads == "images":
        raise UserError(f"{run.path}: this model reads images, not text")
    return _INPUTS[run.task.name](run, example, target, limit)


def _pair_input(run: Run, example: Example, target: Sequence[int], limit: int) -> InspectionInput:
    source = run.codec.encode_source([example])[0]
    output = [*target] or [run.config.ids.eos]
    notes = [*_truncation_note("source", source, limit), *_truncation_note("output", output, limit)]
    labels = output[:limit]
    rows = {"source": source[:limit], "input": [run.config.start_id, *labels[:-1]], "output": labels}
    texts = {"source": example.source, "features": example.features or None, "output": run.codec.decode_target(labels)}
    return _token_input(run, rows, texts, labels, notes)


def _lm_input(run: Run, example: Example, continuation: Sequence[int], limit: int) -> InspectionInput:
    ids = [*run.codec.target.encode([example.source])[0], *continuation]
    labels = ids[:limit]
    rows = {"input": [run.config.start_id, *labels[:-1]], "output": labels}
    texts = {"text": example.source, "continuation": run.codec.decode_target(continuation) if continuation else None}
    return _token_input(run, rows, texts, labels, _truncation_note("text", ids, limit))


def _encoder_input(run: Run, example: Example, target: Sequence[int], limit: int) -> InspectionInput:
    ids = run.codec.encode_source([example])[0]
    rows = {"source": ids[:limit]}
    notes = _truncation_note("text", ids, limit)
    texts = {"text": example.source, "features": example.features or None}
    if run.task.labels:
        texts["label"] = example.target
        return _token_input(run, rows, texts, _label_ids(run, example.target), notes)
    if run.config.predicts_tokens and run.config.ids.mask is None:
        notes.append(Note("method", "This vocabulary has no mask token: each token was visible when it was predicted."))
    elif run.config.predicts_tokens:
        notes.append(Note("method", "Output and logit lens: each token was masked in turn, then predicted."))
    return _token_input(run, rows, texts, rows["source"], notes)


def _token_input(
    run: Run, rows: dict[str, list[int]], texts: Mapping[str, str | None], labels: list[int] | None, notes: list[Note]
) -> InspectionInput:
    """The input of a text model from the ids of its token rows."""
    if not all(rows.values()):
        raise UserError("nothing to inspect: the text has no tokens")
    pieces = {"source": run.codec.source_pieces, "input": run.codec.target_pieces, "output": run.codec.target_pieces}
    names = _class_names(run) if run.task.labels else pieces["output" if "output" in rows else "source"]
    ids = {stack: rows[name] for stack, name in (("encoder", "source"), ("decoder", "input")) if name in rows}
    first, *others = (torch.tensor([row], device=run.model.device) for row in ids.values())
    tokens = {name: tuple(pieces[name](row)) for name, row in rows.items()}
    # The direction is that of the text: features precede it in the tokens, and may be written in another script.
    text_names = {"input": "output"}
    by_name = {name: text for name, text in texts.items() if text is not None}
    directions = {name: direction(by_name.get(text_names.get(name, name)) or by_name.get("text", "")) for name in rows}
    return InspectionInput((first, None, *others), ids, tokens, directions, by_name, labels, names, notes)


_INPUTS: dict[str, Callable[[Run, Example, Sequence[int], int], InspectionInput]] = {
    "pairs": _pair_input,
    "span": _pair_input,
    "lm": _lm_input,
    "masked": _encoder_input,
    "classify": _encoder_input,
}


def image_input(run: Run, image_CHW: np.ndarray, label: str | None, name: str, limit: int) -> InspectionInput:
    """An image with the numbers of its file; at most `limit` patches."""
    if run.task.reads != "images":
        raise UserError(f"{run.path}: this model reads text, not images")
    patches = run.config.image_patches
    expected = (patches.channels, patches.height, patches.width)
    if image_CHW.shape != expected:
        raise UserError(f"{name}: its (channels, height, width) are {image_CHW.shape}; the model reads {expected}")
    if patches.count > limit:
        raise UserError(f"{name}: it has {patches.count} patches; at most {limit} can be shown")
    scaled_CHW = image_CHW.astype(np.float32) if run.pixels is None else run.pixels(image_CHW[None])[0]
    columns = patches.width // patches.size
    patch_names = tuple(f"{i // columns + 1}·{i % columns + 1}" for i in range(patches.count))
    return InspectionInput(
        arguments=(torch.from_numpy(scaled_CHW).unsqueeze(0).to(run.model.device), None),
        ids={},
        tokens={"source": (CLASS_TOKEN, *patch_names)},
        directions={"source": "ltr"},
        texts={"image": name} if label is None else {"image": name, "label": label},
        labels=_label_ids(run, label) if run.model.classifies else [],
        names=_class_names(run),
        image=ImageInput(_displayed_pixels(image_CHW, patches), patches.size),
    )


def _displayed_pixels(image_CHW: np.ndarray, patches: PatchConfig) -> np.ndarray:
    """Pixels as bytes (H, W, C), stretched to the range of a byte unless they already fill it."""
    pixels_CHW = image_CHW[:3] if patches.channels >= 3 else image_CHW[:1]
    if pixels_CHW.dtype != np.uint8 or pixels_CHW.max() < 128:
        low = float(pixels_CHW.min())
        high = float(pixels_CHW.max())
        scaled_CHW = (pixels_CHW.astype(np.float64) - low) * (255 / ((high - low) or 1.0))
        pixels_CHW = np.rint(scaled_CHW).astype(np.uint8)
    return pixels_CHW.transpose(1, 2, 0)


def _class_names(run: Run) -> OutputNames:
    names = run.label_names if run.model.classifies else ()
    return lambda ids: [names[i] for i in ids]


def _class_ids(run: Run, labels: Iterable[str]) -> list[int]:
    ids = {name: i for i, name in enumerate(run.label_names)}
    unknown = next((label for label in labels if label not in ids), None)
    if unknown is not None:
        raise one_of("label", unknown, ids)
    return [ids[label] for label in labels]


def _label_ids(run: Run, label: str | None) -> list[int] | None:
    return None if label is None else _class_ids(run, [label])


def _truncation_note(side: str, ids: Sequence[int], limit: int) -> list[Note]:
    if len(ids) <= limit:
        return []
    return [Note("shortened", NOTE_TEXTS["shortened"].format(side=side, count=f"{len(ids):,}", limit=limit))]


def read_task_data(run: Run, source: Source, counter: LineCounter, limit: int | None = None) -> TaskData:
    """The data of a file for the run's task, at most `limit` pairs, images or windows of text."""
    if run.task.reads == "images":
        images = read_images(source.paths[0])
        return LabelledImages(images.images_NCHW[:limit], images.labels[:limit])
    if run.task.reads != "text" or run.task.seq2seq:
        examples = [item.example for item in islice(source.read(counter), limit)]
        source.require(counter)
        return examples
    pieces = []
    tokens = 0
    for piece in read_pieces(Source(source.paths[:1]), counter):
        pieces.append(piece)
        tokens += len(run.codec.target.encode([piece])[0])
        if limit is not None and tokens > limit * WINDOW:
            break
    return "".join(pieces)


def describe_size(data: TaskData) -> str:
    """The amount of data, in words."""
    if isinstance(data, LabelledImages):
        return plural(len(data.images_NCHW), "image")
    return plural(len(data), "character" if isinstance(data, str) else "pair")


def task_batches(run: Run, data: TaskData, tokens: int = BATCH_TOKENS) -> list[Batch]:
    """Batches of about `tokens` tokens of data of the run's task."""
    return _BATCHES[run.task.name](run, data, tokens)


def encode_pairs(run: Run, examples: Iterable[Example]) -> list[Pair]:
    """The ids of sources and targets; examples without a target are left out."""
    pairs = [example for example in examples if example.target]
    if not pairs:
        raise UserError("heads are measured on pairs, and no pair has a source and a target")
    sources = run.codec.encode_source(pairs)
    targets = run.codec.encode_target([example.target or "" for example in pairs])
    return list(zip(sources, targets, strict=True))


def pair_batches(pairs: Sequence[Pair], config: Config, tokens: int = BATCH_TOKENS) -> list[Batch]:
    """Batches of about `tokens` padded tokens of pairs, sorted by length."""
    groups: list[list[Pair]] = []
    longest = 0
    for pair in sorted(pairs, key=lambda pair: (len(pair[0]), len(pair[1]))):
        length = max(len(pair[0]), len(pair[1]))
        longest = max(longest, length)
        if not groups or longest * (len(groups[-1]) + 1) > tokens:
            groups.append([])
            longest = length
        groups[-1].append(pair)
    return [collate([source for source, _ in group], [target for _, target in group], config) for group in groups]


def _label_batches(run: Run, examples: Sequence[Example], tokens: int) -> list[Batch]:
    labels = _class_ids(run, [example.target or "" for example in examples])
    pairs = [(source, [label]) for source, label in zip(run.codec.encode_source(examples), labels, strict=True)]
    return [batch._replace(input_BT=batch.label_BT[:, :0]) for batch in pair_batches(pairs, run.config, tokens)]


def _lm_batches(run: Run, text: str, tokens: int) -> list[Batch]:
    ids, length = _window_length(run, text, 0)
    windows_NW = torch.tensor([run.config.start_id, *ids]).unfold(0, length + 1, length)
    return [lm_batch(part_BW) for part_BW in windows_NW.split(max(1, tokens // length))]


def _masked_batches(run: Run, text: str, tokens: int) -> list[Batch]:
    """Every MASK_EVERY-th token is masked, from a different position in each row, but no special token."""
    if run.config.ids.mask is None:
        raise UserError("the heads of this model are measured with a mask token, which its vocabulary lacks")
    before, after = run.config.ids.around(run.config.frame)
    ids, length = _window_length(run, text, len(before + after))
    starts = range(0, len(ids) - length + 1, length)
    label_NW = np.array([[*before, *ids[start : start + length], *after] for start in starts])
    maskable = text_ids(run.codec.source.size, run.codec.source.special)
    batches = []
    for start in range(0, len(label_NW), rows := max(1, tokens // label_NW.shape[1])):
        label_BW = label_NW[start : start + rows]
        read_BW, chosen_BW = mask_every(label_BW, MASK_EVERY, run.config.ids, maskable)
        batches.append(masked_batch(read_BW, label_BW, chosen_BW))
    return batches


def _window_length(run: Run, text: str, special: int) -> tuple[list[int], int]:
    """The ids of a text, and the length of a window that leaves room for `special` special tokens."""
    ids = run.codec.target.encode([text])[0]
    if len(ids) < 2:
        raise UserError("the heads of this model are measured on plain text, and the text is empty")
    limits = [stack.max_positions - special for stack in run.config.stacks.values() if stack.max_positions]
    return ids, min([WINDOW, len(ids), *limits])


def _image_batches(run: Run, images: LabelledImages, tokens: int) -> list[Batch]:
    if not images.labels:
        raise UserError("heads are measured on labelled images, and these have no labels")
    scaled_NCHW = images.images_NCHW if run.pixels is None else run.pixels(images.images_NCHW)
    labels = np.asarray(_class_ids(run, images.labels))
    starts = range(0, len(labels), BATCH_IMAGES)
    return [image_batch(scaled_NCHW[i : i + BATCH_IMAGES], labels[i : i + BATCH_IMAGES]) for i in starts]


def _pair_batches(run: Run, examples: Sequence[Example], tokens: int) -> list[Batch]:
    return pair_batches(encode_pairs(run, examples), run.config, tokens)


_BATCHES: dict[str, Callable[[Run, Any, int], list[Batch]]] = {
    "pairs": _pair_batches,
    "span": _pair_batches,
    "lm": _lm_batches,
    "masked": _masked_batches,
    "classify": _label_batches,
    "image": _image_batches,
}
