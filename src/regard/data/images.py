"""Images with labels, from one .npz file: `images` (N, H, W), (N, H, W, C) or (N, C, H, W), and `labels` (N,)."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.batch import Pixels
from regard.data.pairs import few
from regard.data.reader import open_raw
from regard.data.tables import Corpora, Splitter
from regard.errors import UserError, plural
from regard.files import require_own_files
from regard.recipe import Recipe
from regard.suggest import closest
from regard.text.learn import BaseText

CHANNELS = (1, 3, 4)


class LabelledImages(NamedTuple):
    """Images and the names of their labels, if they have labels."""

    images_NCHW: NDArray[Any]
    labels: list[str]

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> LabelledImages:
        return LabelledImages(self.images_NCHW[rows], [self.labels[row] for row in rows] if self.labels else [])


def read_images(path: str, labelled: bool = True, name: str | None = None) -> LabelledImages:
    """Read an .npz file. All errors are UserErrors; `name` is the name of the file in messages."""
    with open_raw(path) as file:
        path = name or path
        if not file.peek(8).startswith((b"PK", b"\x93NUMPY")):  # type: ignore[attr-defined]
            raise UserError(f"{path}: not an .npz file, as numpy.savez writes it")
        try:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise UserError(f"{path}: one array; an .npz with the arrays images and labels is needed (numpy.savez)")
            names = list(arrays.files)
            for name in ("images", "labels")[: 1 + labelled]:
                if name not in names:
                    known = ", ".join(names) or "nothing"
                    raise UserError(f"{path}: has no array {name!r}{closest(name, names)}; it has: {known}")
            images = arrays["images"]
            labels = arrays["labels"] if "labels" in names else None
        except (ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile) as error:
            reason = "it holds Python objects" if "pickle" in str(error) else str(error)
            raise UserError(f"{path}: not a readable .npz file: {reason}") from None
    images_NCHW = _channels_first(images, path)
    if labels is None:
        return LabelledImages(images_NCHW, [])
    if labels.shape != images.shape[:1]:
        raise UserError(f"{path}: labels has shape {labels.shape}, which does not fit {plural(len(images), 'image')}")
    if labels.dtype.kind not in "iuU":
        raise UserError(f"{path}: labels must be whole numbers or text, not {labels.dtype}")
    return LabelledImages(images_NCHW, [str(label) for label in labels])


def _channels_first(images: NDArray[Any], path: str) -> NDArray[Any]:
    """Images as (N, C, H, W)."""
    if images.dtype.kind not in "iuf":
        raise UserError(f"{path}: images must be numbers, not {images.dtype}")
    if not len(images):
        raise UserError(f"{path}: contains no images")
    if images.dtype.kind == "f" and not np.isfinite(images).all():
        raise UserError(f"{path}: images holds numbers that are not finite")
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[3] in CHANNELS:
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    if images.ndim == 4 and images.shape[1] in CHANNELS:
        return images
    raise UserError(
        f"{path}: images has shape {images.shape}; allowed are (N, height, width), (N, height, width, channels) and "
        "(N, channels, height, width), with 1, 3 or 4 channels"
    )


class Images:
    """Prepared images on disk: unscaled pixels, and the numbers of the labels."""

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory)
        require_own_files(path, ("images.npy", "labels.npy"))
        try:
            self.images_NCHW: NDArray[Any] = np.load(path / "images.npy", mmap_mode="r", allow_pickle=False)
            self.labels: NDArray[np.int64] = np.load(path / "labels.npy", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: not readable images: {error}") from None
        self.size = len(self.labels)  # reported as the amount of data

    def __len__(self) -> int:
        return self.size

    def read(self, rows: NDArray[np.int64], pixels: Pixels) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scaled images and the numbers of their labels."""
        return pixels(np.asarray(self.images_NCHW[rows])), self.labels[rows]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.images_NCHW.shape[1:]
        return channels, height, width


def make_images(
    recipe: Recipe, train: Corpora, valid: Corpora | None, path: Path, base: BaseText | None, processes: int = 1
) -> dict[str, Any]:
    """Write images into `path` -> the record of the data. `base` and `processes` are not used."""
    training = read_images(train.paths[0], name=train.name)
    labels = label_names(training.labels)
    if len(labels) < 2:
        raise UserError(f"{train.name}: every image has the same label, {labels[0]!r}; there is nothing to learn")
    if valid:
        held_out = read_images(valid.paths[0], name=valid.name)
        shape = held_out.images_NCHW.shape[1:]
        if shape != (expected := training.images_NCHW.shape[1:]):
            sizes = f"(channels, height, width) {shape}, but {train.name} {expected}"
            raise UserError(f"{valid.name}: its images have {sizes}")
        if unknown := sorted(set(held_out.labels) - set(labels)):
            raise UserError(f"{valid.name}: labels that the training images do not have: {', '.join(unknown[:10])}")
    else:
        held_out, training = _split(training)
    _write(path / "train", training, labels)
    _write(path / "valid", held_out, labels)
    images = training.images_NCHW
    count, channels, height, width = images.shape
    spread = float(images.max()) - float(images.min()) or 1.0
    mean = tuple(float(images[:, channel].mean(dtype=np.float64)) for channel in range(channels))
    pixels = Pixels(mean=mean, scale=(spread,) * channels)
    notes = [
        f"labels: {few(labels, 10)}",
        f"training: {plural(count, 'image')} of {height} x {width}, {plural(channels, 'channel')}, from {train.name}",
        f"validation: {plural(len(held_out.labels), 'image')} " + (f"from {valid.name}" if valid else "split off"),
        f"pixels: minus their mean ({', '.join(f'{x:.4g}' for x in mean)}), divided by their range ({spread:g})",
    ]
    return {"labels": labels, "pixels": pixels.model_dump(), "notes": notes}


def _split(images: LabelledImages) -> tuple[LabelledImages, LabelledImages]:
    """Split into validation and training images; equal images stay together."""
    splitter = Splitter()
    for image_CHW in images.images_NCHW:
        splitter.see(image_CHW.tobytes())
    if not splitter.choose():  # all images are equal
        return images, images
    held_out = np.array([splitter.held_out(image_CHW.tobytes()) for image_CHW in images.images_NCHW])
    return images.take(np.flatnonzero(held_out)), images.take(np.flatnonzero(~held_out))


def label_names(labels: list[str]) -> list[str]:
    """The distinct labels, sorted as numbers or as text."""
    distinct = set(labels)
    return sorted(distinct, key=int) if all(x.lstrip("-").isdigit() for x in distinct) else sorted(distinct)


def _write(path: Path, images: LabelledImages, labels: list[str]) -> None:
    path.mkdir()
    numbers = {label: number for number, label in enumerate(labels)}
    np.save(path / "images.npy", images.images_NCHW, allow_pickle=False)
    np.save(path / "labels.npy", np.asarray([numbers[label] for label in images.labels], np.int64), allow_pickle=False)
