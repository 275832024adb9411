"""What heads are judged by, and tuned on: pairs, plain text, texts with labels, or images, as batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from regard.batch import Batch, Ids, collate, pad
from regard.config import Config
from regard.data.account import Account
from regard.data.images import Pictures, read_images
from regard.data.source import Source
from regard.data.stream import read_pieces
from regard.data.vocabulary import marks
from regard.errors import UserError, one_of
from regard.model import stacks
from regard.run import Run
from regard.settings import Column
from regard.text.example import Example

BATCH_TOKENS = 4096
STRETCH = 128  # symbols of a text that are read at once
HIDE_EVERY = 7  # symbols, in models that guess hidden ones
MOST_IMAGES = 64  # at once

Material = Sequence[Example] | str | Pictures  # pairs or texts with labels, plain text, images with labels


def reads_text(config: Config) -> bool:
    """Whether a model is judged by plain text: one that says the next symbol, or hidden ones."""
    return config.patches is None and config.output != "classes" and (config.encoder is None or config.decoder is None)


def read_material(
    run: Run, paths: tuple[str, ...], columns: tuple[Column, ...], account: Account, most: int | None = None
) -> Material:
    """What a file holds for a run's model; at most so many pairs, images, or stretches of text."""
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
    """Material as batches of about so many symbols."""
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


def encode_pairs(run: Run, examples: Iterable[Example]) -> list[tuple[Ids, Ids]]:
    """Sources and targets as ids; an example without a target is left out."""
    whole = [example for example in examples if example.target]
    if not whole:
        raise UserError("heads are judged on pairs, and there is none with a source and a target")
    sources = run.codec.encode_source(whole)
    targets = run.codec.encode_target([example.target or "" for example in whole])
    return list(zip(sources, targets, strict=True))


def make_batches(pairs: Sequence[tuple[Ids, Ids]], config: Config, tokens: int = BATCH_TOKENS) -> list[Batch]:
    """Pairs in batches of about so many padded symbols, those of like length together."""
    batches: list[Batch] = []
    current: list[tuple[Ids, Ids]] = []
    longest = 0
    for pair in sorted(pairs, key=lambda pair: (len(pair[0]), len(pair[1]))):
        length = max(len(pair[0]), len(pair[1]))
        if current and max(longest, length) * (len(current) + 1) > tokens:
            batches.append(_collate(current, config))
            current, longest = [], 0
        current.append(pair)
        longest = max(longest, length)
    return [*batches, _collate(current, config)] if current else batches


def _collate(pairs: Sequence[tuple[Ids, Ids]], config: Config) -> Batch:
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
    limits = [stack.max_length for stack in stacks(config).values() if stack.position == "learned"]
    if config.encoder is None:
        length = min([STRETCH, len(ids), *limits])
        row = torch.tensor([config.start_id, *ids])
        return [_next_symbols(part_BW) for part_BW in row.unfold(0, length + 1, length).split(max(1, tokens // length))]
    if config.ids.mask is None:
        raise UserError("this vocabulary has no symbol for what is hidden, by which heads of this model are judged")
    before, after = marks(config.frame, config.ids)
    length = min([STRETCH, len(ids), *(limit - len(before + after) for limit in limits)])
    starts = range(0, len(ids) - length + 1, length)
    label_NW, _ = pad([[*before, *ids[start : start + length], *after] for start in starts], config.ids.pad)
    return [_hidden_symbols(part_BW, run) for part_BW in label_NW.split(max(1, tokens // label_NW.shape[1]))]


def _next_symbols(rows_BW: torch.Tensor) -> Batch:
    label_BT = rows_BW[:, 1:].contiguous()
    nothing_B0 = label_BT[:, :0]
    return Batch(nothing_B0, None, rows_BW[:, :-1].contiguous(), label_BT, None, label_BT.numel(), label_BT.numel())


def _hidden_symbols(label_BS: torch.Tensor, run: Run) -> Batch:
    """Every so manieth symbol is hidden, in each row from another place; marks stay in sight."""
    place_BS = torch.arange(label_BS.shape[1]) + torch.arange(len(label_BS)).unsqueeze(1)
    special = torch.tensor(sorted(run.codec.source.special))
    hide_BS = (place_BS % HIDE_EVERY == HIDE_EVERY // 2) & ~torch.isin(label_BS, special)
    source_BS = label_BS.masked_fill(hide_BS, run.config.ids.mask or 0)
    count = int(hide_BS.sum())
    return Batch(source_BS, None, source_BS[:, :0], label_BS, hide_BS, count, count)


# Images


def _image_batches(run: Run, pictures: Pictures) -> list[Batch]:
    if pictures.labels is None:
        raise UserError("heads are judged by images with labels, and these have none")
    known = {name: number for number, name in enumerate(run.labels)}
    for label in pictures.labels:
        if label not in known:
            raise one_of("label", label, known)
    pixels = pictures.images_NCHW if run.pixels is None else run.pixels(pictures.images_NCHW)
    images, labels = torch.from_numpy(pixels).float(), torch.tensor([[known[label]] for label in pictures.labels])
    parts = zip(images.split(MOST_IMAGES), labels.split(MOST_IMAGES), strict=True)
    return [Batch(x, None, y[:, :0], y, None, len(y), len(y)) for x, y in parts]
