"""Reformer: a causal LM with LSH attention in reversible layers."""

from __future__ import annotations

import math
from typing import Any

import torch

from regard.config import Config
from regard.convert.family import Family, Fields, Json, Key
from regard.convert.table import Table, Transformed, shaped
from regard.errors import UserError


def _layers(hf: Fields) -> int:
    layers = hf.get("attn_layers", ["local", "lsh"] * 3)
    if not isinstance(layers, list) or not layers or any(layer != "lsh" for layer in layers):
        raise UserError(f"{hf.where}: attn_layers {layers!r} is not supported: all layers must be lsh")
    return len(layers)


def _buckets(hf: Fields) -> Any:
    buckets = hf.get("num_buckets")
    if isinstance(buckets, list) and all(type(part) is int for part in buckets):  # factors of the number of buckets
        return math.prod(buckets)
    return buckets


def _read_positions(hf: Fields) -> Json:
    if not hf.flag("axial_pos_embds", True):
        return {"decoder.position": "learned"}
    shape = hf.get("axial_pos_shape", [64, 64])
    widths = hf.get("axial_pos_embds_dim", [64, 192])
    if not (isinstance(shape, list) and isinstance(widths, list) and len(shape) == len(widths) == 2):
        raise UserError(f"{hf.where}: axial_pos_shape {shape!r} is not supported: it must have rows and columns")
    axial = {"rows": shape[0], "columns": shape[1], "row_width": widths[0]}
    return {"decoder.position": "axial", "decoder.axial": axial}


def _write_positions(config: Config) -> Json:
    axial = config.top.axial
    if axial is None:
        return {"axial_pos_embds": False}
    return {
        "axial_pos_embds": True,
        "axial_pos_shape": [axial.rows, axial.columns],
        "axial_pos_embds_dim": [axial.row_width, config.top.width - axial.row_width],
    }


def _weights(config: Config, hf: Fields) -> Table:
    layer = "reformer.encoder.layers.{n}."
    block = "decoder.blocks.{n}."
    positions = "reformer.embeddings.position_embeddings."
    rows: Table = {
        "reformer.embeddings.word_embeddings": "target_embedding",
        f"{positions}embedding": "decoder.position.table",
        "reformer.encoder.layer_norm": "decoder.norm",
        "lm_head.decoder.weight": "output.weight",
        f"{layer}attention.layer_norm": f"{block}attention_residual.norm",
        f"{layer}attention.self_attention.query_key": f"{block}attention.query_key",
        f"{layer}attention.self_attention.value": f"{block}attention.value",
        f"{layer}attention.output.dense": f"{block}attention.out",
        f"{layer}feed_forward.layer_norm": f"{block}feed_forward_residual.norm",
        f"{layer}feed_forward.dense.dense": f"{block}feed_forward.up",
        f"{layer}feed_forward.output.dense": f"{block}feed_forward.down",
    }
    if (axial := config.top.axial) is not None:
        first = shaped(axial.rows, 1, axial.row_width)
        second = shaped(1, axial.columns, config.top.width - axial.row_width)
        rows[f"{positions}weights.0"] = Transformed("decoder.position.rows.weight", first)
        rows[f"{positions}weights.1"] = Transformed("decoder.position.columns.weight", second)
    return rows


REFORMER = Family(
    model_type="reformer",
    architectures={"ReformerModelWithLMHead": {}},
    config=(
        Key.fixed("is_decoder", True),
        Key.of("attn_layers", "decoder.layers", read=_layers, write=lambda layers: ["lsh"] * layers),
        Key.count("vocab_size", "target_vocab", "source_vocab"),
        Key.count("hidden_size", "decoder.width"),
        Key.count("num_attention_heads", "decoder.heads"),
        Key.count("attention_head_size", "decoder.head_width", default=64),
        Key.count("feed_forward_size", "decoder.ff"),
        Key.activation("hidden_act", "decoder.activation", default="relu"),
        Key.value("layer_norm_eps", "decoder.norm_eps", default=1e-12),
        Key.count("max_position_embeddings", "decoder.max_length", default=4096),
        Key(_read_positions, _write_positions),
        Key.count("num_hashes", "decoder.lsh.hashes", default=1),
        Key.of("num_buckets", "decoder.lsh.buckets", read=_buckets),
        Key.count("lsh_attn_chunk_length", "decoder.lsh.chunk", default=64),
        Key.value("lsh_num_chunks_before", "decoder.lsh.before", default=1),
        Key.value("lsh_num_chunks_after", "decoder.lsh.after", default=0),
        Key.value("hidden_dropout_prob", "decoder.dropout", default=0.05),
        Key.value("lsh_attention_probs_dropout_prob", "decoder.attention_dropout", default=0.0),
        Key.written("tie_word_embeddings", lambda config: False),
        Key.special_ids("bos_token_id", "eos"),
    ),
    constants={
        "decoder": {"mixer": "lsh", "norm_at": "pre", "bias": "ff", "residual": "reversible"},
        "tie_output": False,
        "scale_embeddings": False,
    },
    weights=_weights,
    extra=lambda config: {"lm_head.bias": torch.zeros(config.target_vocab)},
    # The checkpoint has a bias of the LM head, but transformers 5 does not add it.
    ignored=("lm_head.bias", "lm_head.decoder.bias"),
)
