"""Images from .npz files: layouts, scaling, splits, and errors for invalid files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.batch import Pixels
from regard.data.images import Images, label_names, read_images
from regard.data.prepare import Prepared, open_prepared, prepare
from regard.errors import UserError
from regard.recipe import load_recipe

DRAW = np.random.default_rng(1)
GREY = DRAW.integers(0, 256, (60, 4, 6), np.uint8)
COLOUR = DRAW.random((60, 4, 6, 3)).astype(np.float32)
LABELS = np.arange(60) % 12


def save(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def prepare_images(path: Path, **data: str) -> Prepared[Images]:
    return prepare(load_recipe({"task": "image", "data": data}), path / "data")


@pytest.mark.parametrize(
    ("images", "shape"),
    [(GREY, (1, 4, 6)), (GREY[..., None], (1, 4, 6)), (COLOUR, (3, 4, 6)), (COLOUR.transpose(0, 3, 1, 2), (3, 4, 6))],
)
def test_image_layouts_are_converted_to_channels_first(
    images: np.ndarray, shape: tuple[int, ...], tmp_path: Path
) -> None:
    pictures = read_images(save(tmp_path / "a.npz", images=images, labels=LABELS))
    assert pictures.images_NCHW.shape == (60, *shape)
    same = COLOUR.transpose(0, 3, 1, 2) if shape[0] == 3 else GREY[:, None]
    assert np.array_equal(pictures.images_NCHW, same)


def test_prepared_images_are_split_labelled_and_scaled(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", images=COLOUR, labels=LABELS)
    prepared = prepare_images(tmp_path, train=path)
    assert prepared.labels == tuple(map(str, range(12)))  # ordered by value: not 0 1 10 11 2
    assert prepared.train.shape == (3, 4, 6) and len(prepared.train) + len(prepared.valid) == 60
    rows = {image.tobytes(): str(label) for image, label in zip(COLOUR.transpose(0, 3, 1, 2), LABELS, strict=True)}
    for part in (prepared.train, prepared.valid):
        for image, number in zip(part.images_NCHW, part.labels, strict=True):
            assert rows.pop(np.ascontiguousarray(image).tobytes()) == prepared.labels[number]
    assert not rows
    scaled = prepared.pixels(np.asarray(prepared.train.images_NCHW))
    assert scaled.mean((0, 2, 3)) == pytest.approx(np.zeros(3), abs=1e-5)
    assert scaled.max() - scaled.min() == pytest.approx(1, abs=0.2)
    assert open_prepared(tmp_path / "data").pixels == prepared.pixels


def test_image_split_depends_only_on_the_images(tmp_path: Path) -> None:
    images, labels = np.concatenate([GREY, GREY[::3]]), np.concatenate([LABELS, LABELS[::3] + 1])
    splits = []
    for seed in (1, 2):
        order = np.random.default_rng(seed).permutation(len(images))
        path = save(tmp_path / f"{seed}.npz", images=images[order], labels=labels[order])
        recipe = load_recipe({"task": "image", "data": {"train": path}, "train": {"seed": seed}})
        prepared = prepare(recipe, tmp_path / str(seed))
        train, valid = ([image.tobytes() for image in part.images_NCHW] for part in (prepared.train, prepared.valid))
        assert len(train) + len(valid) == len(images) and not set(train) & set(valid)
        splits.append((sorted(train), sorted(valid)))
    assert splits[0] == splits[1]
    same = save(tmp_path / "same.npz", images=GREY[[0, 0, 0]], labels=[1, 2, 1])
    assert [
        len(part) for part in (prepare_images(tmp_path, train=same).train, prepare_images(tmp_path, train=same).valid)
    ] == [3, 3]


def test_separate_validation_images_must_match_the_training_images(tmp_path: Path) -> None:
    train = save(tmp_path / "a.npz", images=GREY, labels=[f"{n % 3} x" for n in range(60)])
    valid = save(tmp_path / "b.npz", images=GREY[:5], labels=["2 x"] * 5)
    prepared = prepare_images(tmp_path, train=train, valid=valid)
    assert (len(prepared.train), prepared.valid.labels.tolist()) == (60, [2] * 5)
    with pytest.raises(UserError, match="training images do not have: 7"):
        prepare_images(tmp_path, train=train, valid=save(tmp_path / "c.npz", images=GREY[:1], labels=[7]))
    with pytest.raises(UserError, match=r"\(1, 3, 6\)"):
        prepare_images(tmp_path, train=train, valid=save(tmp_path / "d.npz", images=GREY[:1, :3], labels=["2 x"]))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": LABELS}, "no array 'images'"),
        ({"image": GREY, "labels": LABELS}, "did you mean 'image'"),
        ({"images": GREY}, "no array 'labels'"),
        ({"images": GREY, "labels": LABELS[:9]}, r"shape \(9,\)"),
        ({"images": GREY, "labels": LABELS / 2}, "whole numbers or text"),
        ({"images": GREY[0], "labels": LABELS[:4]}, "allowed are"),
        ({"images": DRAW.random((60, 5, 5, 5)), "labels": LABELS}, "allowed are"),
        ({"images": GREY.astype(str), "labels": LABELS}, "must be numbers"),
        ({"images": GREY[:0], "labels": LABELS[:0]}, "no images"),
        ({"images": np.full_like(COLOUR, np.nan), "labels": LABELS}, "not finite"),
        ({"images": GREY, "labels": LABELS * 0}, "same label, '0'"),
        ({"images": GREY, "labels": np.asarray([{}] * 60, object)}, "Python objects"),
    ],
)
def test_invalid_arrays_are_refused(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        prepare_images(tmp_path, train=save(tmp_path / "a.npz", **arrays))


@pytest.mark.parametrize(
    ("data", "message"), [(b"", "an"), (b"images\tlabels\n", "an"), (b"PK\x03\x04broken", "a readable")]
)
def test_files_that_are_not_npz_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(UserError, match=rf"a\.npz: not {message} \.npz file"):
        read_images(str(tmp_path / "a.npz"))
    np.save(tmp_path / "b.npy", GREY)
    with pytest.raises(UserError, match="one array"):
        read_images(str(tmp_path / "b.npy"))
    with pytest.raises(UserError, match="no such file"):
        read_images(str(tmp_path / "none.npz"))


def test_pixels_are_scaled_per_channel() -> None:
    pixels = Pixels(mean=(1.0, 2.0), scale=(2.0, 4.0))
    assert pixels(np.asarray([[[[3]], [[6]]]])).ravel().tolist() == [1.0, 1.0]


def test_numeric_labels_are_ordered_by_value_and_others_alphabetically() -> None:
    assert label_names(["10", "9", "-1", "9"]) == ["-1", "9", "10"]
    assert label_names(["b", "10", "9"]) == ["10", "9", "b"]
