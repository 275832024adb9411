"""ViT: patches of an image read like words, and a class told from the first vector."""

from __future__ import annotations

from typing import Any

from regard.config import Config, SpecialIds
from regard.convert.table import (
    ACTIVATIONS,
    Changed,
    Family,
    Fields,
    Json,
    Table,
    class_count,
    shaped,
    stack_of,
    word_for,
)
from regard.convert.tokenizers import their_labels
from regard.errors import UserError


def ours(hf: Fields, names: set[str], architecture: str, ids: SpecialIds) -> Json:
    hf.fixed("qkv_bias", True)
    hf.fixed("problem_type", None, "single_label_classification")
    height, width = _sides(hf, "image_size", 224)
    size, other = _sides(hf, "patch_size", 16)
    if size != other:
        raise UserError(f"{hf.where}: patch_size {hf.get('patch_size')!r} is not supported: patches must be square")
    return {
        "source_vocab": max(ids.model_dump(exclude_none=True).values()) + 1,
        "target_vocab": max(ids.model_dump(exclude_none=True).values()) + 1,
        "encoder": {
            "layers": hf.count("num_hidden_layers"),
            "width": hf.count("hidden_size"),
            "heads": hf.count("num_attention_heads"),
            "ff": hf.count("intermediate_size"),
            "activation": hf.choice("hidden_act", ACTIVATIONS, "gelu"),
            "norm_at": "pre",
            "norm_eps": hf.get("layer_norm_eps", 1e-12),
            "position": "learned",
            "max_length": 1 + max(height // size, 1) * max(width // size, 1),
            "dropout": hf.get("hidden_dropout_prob", 0.0),
            "attention_dropout": hf.get("attention_probs_dropout_prob", 0.0),
        },
        "patches": {"height": height, "width": width, "channels": hf.count("num_channels", 3), "size": size},
        "scale_embeddings": False,
        "output": "classes",
        "output_bias": True,
        "classes": class_count(hf),
        "ids": ids,
    }


def _sides(hf: Fields, key: str, default: int) -> tuple[int, int]:
    value: Any = hf.get(key, default)
    sides = value if isinstance(value, list) else [value, value]
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise UserError(f"{hf.where}: {key} must be a whole number or two, not {value!r}")
    return sides[0], sides[1]


def theirs(config: Config) -> Json:
    encoder, patches = stack_of(config, "encoder"), config.patches
    assert patches is not None
    square = patches.height == patches.width
    return {
        "architectures": ["ViTForImageClassification"],
        "hidden_size": encoder.width,
        "num_hidden_layers": encoder.layers,
        "num_attention_heads": encoder.heads,
        "intermediate_size": encoder.ff,
        "hidden_act": word_for(encoder.activation),
        "hidden_dropout_prob": encoder.dropout,
        "attention_probs_dropout_prob": encoder.attention_dropout,
        "layer_norm_eps": encoder.norm_eps,
        "image_size": patches.height if square else [patches.height, patches.width],
        "patch_size": patches.size,
        "num_channels": patches.channels,
        "qkv_bias": True,
        **their_labels((), config),
    }


def table(config: Config, hf: Fields) -> Table:
    encoder, patches = stack_of(config, "encoder"), config.patches
    assert patches is not None
    width, size = encoder.width, patches.size
    kernel = shaped(width, patches.channels, size, size)
    layer, block = "vit.encoder.layer.{n}.", "encoder.blocks.{n}."
    return {
        "vit.embeddings.cls_token": Changed("image.first", shaped(1, 1, width)),
        "vit.embeddings.patch_embeddings.projection.weight": Changed("image.project.weight", kernel),
        "vit.embeddings.patch_embeddings.projection.bias": "image.project.bias",
        "vit.embeddings.position_embeddings": Changed(
            "encoder.position.table.weight", shaped(1, encoder.max_length, width)
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
    architectures=("ViTForImageClassification",),
    ours=ours,
    theirs=theirs,
    table=table,
    towers=("encoder",),
    images=True,
    ignored=("vit.pooler.dense.*",),
)
