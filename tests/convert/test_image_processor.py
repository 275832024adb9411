"""Pixels are normalised as by the image processor of the directory."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kit.families import shrunk
from regard.convert.vit import IMAGE_PROCESSOR, image_processor, read_image_processor
from regard.errors import UserError

CONFIG = shrunk("vit-base")


def normalised(image: np.ndarray, settings: dict) -> np.ndarray:
    """The reference: the steps of an image processor, in its order."""
    x = image * settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else image
    if not settings.get("do_normalize", True):
        return x
    mean, std = (np.array(settings.get(key, [0.5] * 3)).reshape(3, 1, 1) for key in ("image_mean", "image_std"))
    return (x - mean) / std


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]},
        {"do_normalize": False},
        {"do_rescale": False, "image_mean": [1.0, 2.0, 3.0], "image_std": [4.0, 5.0, 6.0]},
        {"rescale_factor": 0.01},
    ],
)
def test_pixels_are_normalised_as_by_the_image_processor(settings, tmp_path):
    if settings:
        (tmp_path / IMAGE_PROCESSOR).write_text(json.dumps(settings))
    pixels = read_image_processor(tmp_path, CONFIG.patches)
    image = np.random.default_rng(1).integers(0, 256, (1, 3, 6, 4))
    np.testing.assert_allclose(pixels(image)[0], normalised(image[0], settings), rtol=1e-4, atol=1e-5)
    exported = image_processor(pixels, CONFIG.patches)
    np.testing.assert_allclose(normalised(image[0], exported), pixels(image)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_mean": [0.5], "image_std": 2}, r"one number per channel \(3\)"),
        ({"image_std": [1, 0, 1]}, "only image_mean may contain zeros"),
        ({"image_mean": ["a", "b", "c"]}, "must be numbers"),
        ({"do_rescale": "no"}, "do_rescale must be true or false"),
    ],
)
def test_invalid_settings_are_refused(settings, message, tmp_path):
    (tmp_path / IMAGE_PROCESSOR).write_text(json.dumps(settings))
    with pytest.raises(UserError, match=message):
        read_image_processor(tmp_path, CONFIG.patches)
