"""What models of classes know beside their weights: the names of the classes, and how pixels are prepared."""

from __future__ import annotations

from pathlib import Path

from regard.config import Config, Patches, parse
from regard.convert.family import Fields, Json
from regard.data.images import Pixels
from regard.errors import UserError
from regard.files import read_json

PREPROCESSOR = "preprocessor_config.json"


def label_names(hf: Fields, config: Config) -> tuple[str, ...]:
    """The names of the classes by number; empty where there are no classes."""
    if config.classes is None:
        return ()
    names = hf.get("id2label", {})
    if not isinstance(names, dict):
        raise UserError(f"{hf.where}: id2label must be a table of names, not {names!r}")
    numbered = [str(names.get(str(number), f"LABEL_{number}")) for number in range(config.classes)]
    if len(set(numbered)) < len(numbered):
        raise UserError(f"{hf.where}: id2label gives two classes the same name")
    return tuple(numbered)


def their_labels(labels: tuple[str, ...], config: Config) -> Json:
    """The names as a config.json has them."""
    if config.classes is None:
        return {}
    names = labels or tuple(f"LABEL_{number}" for number in range(config.classes))
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def pixels_of(directory: Path, config: Config) -> Pixels | None:
    """What is taken from every pixel and what it is divided by, where pixels are numbers from 0 to 255."""
    if config.patches is None:
        return None
    path, channels = directory / PREPROCESSOR, config.patches.channels
    data = read_json(path) if path.is_file() else {}
    hf = Fields(data if isinstance(data, dict) else {}, str(path))
    factor = hf.get("rescale_factor", 1 / 255) if hf.flag("do_rescale", True) else 1.0
    mean, scale = [0.0] * channels, [1.0] * channels
    if hf.flag("do_normalize", True):
        mean, scale = (hf.get(key, [0.5] * channels) for key in ("image_mean", "image_std"))
    if not all(isinstance(part, list) and len(part) == channels for part in (mean, scale)):
        raise UserError(f"{path}: image_mean and image_std must have a number for each of {channels} channels")
    if not all(isinstance(x, int | float) for x in (factor, *mean, *scale)) or not all((factor, *scale)):
        raise UserError(f"{path}: rescale_factor, image_mean and image_std must be numbers, and only the mean zero")
    return parse(Pixels, {"mean": [x / factor for x in mean], "scale": [x / factor for x in scale]}, str(path))


def their_pixels(pixels: Pixels | None, patches: Patches) -> Json:
    """The same as a preprocessor_config.json has it."""
    mean = pixels.mean if pixels else (0.0,) * patches.channels
    scale = pixels.scale if pixels else (1.0,) * patches.channels
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": patches.height, "width": patches.width},
        "do_rescale": False,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(scale),
    }
