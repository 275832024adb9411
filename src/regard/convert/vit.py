"""ViT: an encoder over image patches that classifies with a class token, and the settings of its image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.batch import Pixels
from regard.config import Config, PatchConfig, parse
from regard.convert.family import ENCODER_KEYS, Family, Fields, Json, Key
from regard.convert.table import Table, Transformed, shaped
from regard.errors import UserError

IMAGE_PROCESSOR = "preprocessor_config.json"


def _sides(hf: Fields, key: str, default: int) -> tuple[int, int]:
    value: Any = hf.get(key, default)
    sides = value if isinstance(value, list) else [value, value]
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise UserError(f"{hf.where}: {key} must be one or two positive integers, not {value!r}")
    return sides[0], sides[1]


def _read_patches(hf: Fields) -> Json:
    height, width = _sides(hf, "image_size", 224)
    size, other = _sides(hf, "patch_size", 16)
    if size != other:
        raise UserError(f"{hf.where}: patch_size {hf.get('patch_size')!r} is not supported: patches must be square")
    vocab = max(hf.ids.model_dump(exclude_none=True).values()) + 1  # the model reads no tokens
    return {
        "patches": {"height": height, "width": width, "size": size},
        "encoder.max_length": 1 + max(height // size, 1) * max(width // size, 1),
        "source_vocab": vocab,
        "target_vocab": vocab,
    }


def _write_patches(config: Config) -> Json:
    patches = config.image_patches
    sides = [patches.height, patches.width]
    return {"image_size": sides[0] if sides[0] == sides[1] else sides, "patch_size": patches.size}


def _weights(config: Config, hf: Fields) -> Table:
    encoder = config.top
    patches = config.image_patches
    kernel = shaped(encoder.width, patches.channels, patches.size, patches.size)
    layer = "vit.encoder.layer.{n}."
    block = "encoder.blocks.{n}."
    return {
        "vit.embeddings.cls_token": Transformed("image.first", shaped(1, 1, encoder.width)),
        "vit.embeddings.patch_embeddings.projection.weight": Transformed("image.project.weight", kernel),
        "vit.embeddings.patch_embeddings.projection.bias": "image.project.bias",
        "vit.embeddings.position_embeddings": Transformed(
            "encoder.position.table.weight", shaped(1, encoder.max_length, encoder.width)
        ),
        f"{layer}layernorm_before": f"{block}attention_residual.norm",
        f"{layer}layernorm_after": f"{block}feed_forward_residual.norm",
        f"{layer}attention.attention.query": f"{block}attention.query",
        (f"{layer}attention.attention.key", f"{layer}attention.attention.value"): f"{block}attention.key_value",
        f"{layer}attention.output.dense": f"{block}attention.out",
        f"{layer}intermediate.dense": f"{block}feed_forward.up",
        f"{layer}output.dense": f"{block}feed_forward.down",
        "vit.layernorm": "encoder.norm",
        "classifier": "output",
    }


VIT = Family(
    model_type="vit",
    architectures={"ViTForImageClassification": {"output": "classes", "output_bias": True}},
    config=(
        Key.fixed("qkv_bias", True),
        Key.fixed("problem_type", None, "single_label_classification", write=False),
        Key(_read_patches, _write_patches),
        Key.count("num_channels", "patches.channels", default=3),
        *ENCODER_KEYS,
        Key.value("hidden_dropout_prob", "encoder.dropout", default=0.0),
        Key.value("attention_probs_dropout_prob", "encoder.attention_dropout", default=0.0),
    ),
    constants={"encoder": {"norm_at": "pre", "position": "learned"}, "scale_embeddings": False},
    weights=_weights,
    reads_images=True,
    ignored=("vit.pooler.dense.*",),
)


def read_image_processor(directory: Path, patches: PatchConfig) -> Pixels:
    """The normalisation of pixels: mean and scale per channel, for values from 0 to 255."""
    path = directory / IMAGE_PROCESSOR
    channels = patches.channels
    hf = Fields.load(path)
    factor = hf.get("rescale_factor", 1 / 255) if hf.flag("do_rescale", True) else 1.0
    mean = [0.0] * channels
    scale = [1.0] * channels
    if hf.flag("do_normalize", True):
        mean, scale = (hf.get(key, [0.5] * channels) for key in ("image_mean", "image_std"))
    if not all(isinstance(part, list) and len(part) == channels for part in (mean, scale)):
        raise UserError(f"{path}: image_mean and image_std must have one number per channel ({channels})")
    if not all(isinstance(x, int | float) for x in (factor, *mean, *scale)) or not all((factor, *scale)):
        rule = "must be numbers, and only image_mean may contain zeros"
        raise UserError(f"{path}: rescale_factor, image_mean and image_std {rule}")
    return parse(Pixels, {"mean": [x / factor for x in mean], "scale": [x / factor for x in scale]}, str(path))


def image_processor(pixels: Pixels | None, patches: PatchConfig) -> Json:
    """The normalisation as a preprocessor_config.json."""
    pixels = pixels or Pixels(mean=(0.0,) * patches.channels, scale=(1.0,) * patches.channels)
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": patches.height, "width": patches.width},
        "do_rescale": False,
        "do_normalize": True,
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.scale),
    }
