"""Reformer: a decoder alone whose attention hashes, in layers that can be run backwards."""

from __future__ import annotations

import math
from typing import Any

import torch

from regard.config import Config, SpecialIds
from regard.convert.table import ACTIVATIONS, Changed, Family, Fields, Json, Table, shaped, stack_of, start_at, word_for
from regard.errors import UserError


def ours(hf: Fields, names: set[str], architecture: str, ids: SpecialIds) -> Json:
    hf.fixed("is_decoder", True)
    layers = hf.get("attn_layers", ["local", "lsh"] * 3)
    if not isinstance(layers, list) or not layers or any(layer != "lsh" for layer in layers):
        raise UserError(f"{hf.where}: attn_layers {layers!r} is not supported, only layers that are all lsh")
    buckets: Any = hf.get("num_buckets")
    if isinstance(buckets, list) and all(type(part) is int for part in buckets):  # factors of one number
        buckets = math.prod(buckets)
    return {
        "source_vocab": hf.count("vocab_size"),
        "target_vocab": hf.count("vocab_size"),
        "decoder": {
            "mixer": "lsh",
            "layers": len(layers),
            "width": hf.count("hidden_size"),
            "heads": hf.count("num_attention_heads"),
            "head_width": hf.count("attention_head_size", 64),
            "ff": hf.count("feed_forward_size"),
            "activation": hf.choice("hidden_act", ACTIVATIONS, "relu"),
            "norm_at": "pre",
            "norm_eps": hf.get("layer_norm_eps", 1e-12),
            "bias": "ff",
            "residual": "reversible",
            **_position(hf),
            "lsh": {
                "hashes": hf.count("num_hashes", 1),
                "buckets": buckets,
                "chunk": hf.count("lsh_attn_chunk_length", 64),
                "before": hf.get("lsh_num_chunks_before", 1),
                "after": hf.get("lsh_num_chunks_after", 0),
            },
            "dropout": hf.get("hidden_dropout_prob", 0.05),
            "attention_dropout": hf.get("lsh_attention_probs_dropout_prob", 0.0),
        },
        "tie_output": False,
        "scale_embeddings": False,
        **start_at(ids, hf.get("bos_token_id")),
    }


def _position(hf: Fields) -> Json:
    length = hf.count("max_position_embeddings", 4096)
    if not hf.flag("axial_pos_embds", True):
        return {"position": "learned", "max_length": length}
    shape, widths = hf.get("axial_pos_shape", [64, 64]), hf.get("axial_pos_embds_dim", [64, 192])
    if not (isinstance(shape, list) and isinstance(widths, list) and len(shape) == len(widths) == 2):
        raise UserError(f"{hf.where}: axial_pos_shape {shape!r} is not supported, only rows and columns")
    axial = {"rows": shape[0], "columns": shape[1], "row_width": widths[0]}
    return {"position": "axial", "axial": axial, "max_length": length}


def theirs(config: Config) -> Json:
    decoder = stack_of(config, "decoder")
    axial, lsh = decoder.axial, decoder.lsh
    places: Json = {"axial_pos_embds": False}
    if axial is not None:
        places = {
            "axial_pos_embds": True,
            "axial_pos_shape": [axial.rows, axial.columns],
            "axial_pos_embds_dim": [axial.row_width, decoder.width - axial.row_width],
        }
    return {
        "architectures": ["ReformerModelWithLMHead"],
        "vocab_size": config.target_vocab,
        "hidden_size": decoder.width,
        "attn_layers": ["lsh"] * decoder.layers,
        "num_attention_heads": decoder.heads,
        "attention_head_size": decoder.head,
        "feed_forward_size": decoder.ff,
        "hidden_act": word_for(decoder.activation),
        "layer_norm_eps": decoder.norm_eps,
        "max_position_embeddings": decoder.max_length,
        **places,
        "num_hashes": lsh.hashes,
        "num_buckets": lsh.buckets,
        "lsh_attn_chunk_length": lsh.chunk,
        "lsh_num_chunks_before": lsh.before,
        "lsh_num_chunks_after": lsh.after,
        "hidden_dropout_prob": decoder.dropout,
        "lsh_attention_probs_dropout_prob": decoder.attention_dropout,
        "is_decoder": True,
        "tie_word_embeddings": False,
        "bos_token_id": config.start_id,
        "eos_token_id": config.ids.eos,
        "pad_token_id": config.ids.pad,
    }


def table(config: Config, hf: Fields) -> Table:
    decoder = stack_of(config, "decoder")
    layer, block = "reformer.encoder.layers.{n}.", "decoder.blocks.{n}."
    places = "reformer.embeddings.position_embeddings."
    rows: dict[str | tuple[str, ...], str | Changed] = {
        "reformer.embeddings.word_embeddings": "target_embedding",
        f"{places}embedding": "decoder.position.table",
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
    if decoder.axial is not None:
        axial, rest = decoder.axial, decoder.width - decoder.axial.row_width
        first, second = shaped(axial.rows, 1, axial.row_width), shaped(1, axial.columns, rest)
        rows[f"{places}weights.0"] = Changed("decoder.position.rows.weight", first)
        rows[f"{places}weights.1"] = Changed("decoder.position.columns.weight", second)
    return rows


REFORMER = Family(
    model_type="reformer",
    architectures=("ReformerModelWithLMHead",),
    ours=ours,
    theirs=theirs,
    table=table,
    towers=("decoder",),
    extra=lambda config: {"lm_head.bias": torch.zeros(config.target_vocab)},
    # A bias of the prediction layer is stored, but transformers 5 does not add it.
    ignored=("lm_head.bias", "lm_head.decoder.bias"),
)
