"""MarianMT: the Transformer of the paper, with sines and cosines in two halves and a bias on its predictions."""

from __future__ import annotations

import torch

from regard.config import Config, SpecialIds
from regard.convert.table import ACTIVATIONS, Changed, Family, Fields, Json, Table, shaped, stack_of, start_at, word_for


def ours(hf: Fields, names: set[str], architecture: str, ids: SpecialIds) -> Json:
    hf.fixed("tie_word_embeddings", True)
    hf.fixed("normalize_before", False)
    hf.fixed("normalize_embedding", False)
    hf.fixed("add_final_layer_norm", False)
    hf.fixed("static_position_embeddings", True)
    shared = hf.flag("share_encoder_decoder_embeddings", True)
    vocab = hf.count("vocab_size")

    def tower(name: str) -> Json:
        return {
            "layers": hf.count(f"{name}_layers"),
            "width": hf.count("d_model"),
            "heads": hf.count(f"{name}_attention_heads"),
            "ff": hf.count(f"{name}_ffn_dim"),
            "activation": hf.choice("activation_function", ACTIVATIONS, "gelu"),
            "position": "sinusoid_halves",
            "max_length": hf.count("max_position_embeddings", 1024),
            "dropout": hf.get("dropout", 0.1),
            "attention_dropout": hf.get("attention_dropout", 0.0),
            "ff_dropout": hf.get("activation_dropout", 0.0),
        }

    return {
        "source_vocab": vocab,
        "target_vocab": vocab if shared else hf.count("decoder_vocab_size", vocab),
        "encoder": tower("encoder"),
        "decoder": tower("decoder"),
        "share_embeddings": shared,
        "scale_embeddings": hf.flag("scale_embedding", False),
        "output_bias": "final_logits_bias" in names,
        **start_at(ids, hf.get("decoder_start_token_id"), "pad"),
    }


def theirs(config: Config) -> Json:
    encoder, decoder = stack_of(config, "encoder"), stack_of(config, "decoder")
    return {
        "architectures": ["MarianMTModel"],
        "vocab_size": config.source_vocab,
        "decoder_vocab_size": config.target_vocab,
        "d_model": encoder.width,
        **{
            f"{name}_{key}": value
            for name, stack in (("encoder", encoder), ("decoder", decoder))
            for key, value in (
                ("layers", stack.layers),
                ("attention_heads", stack.heads),
                ("ffn_dim", stack.ff),
            )
        },
        "activation_function": word_for(encoder.activation),
        "max_position_embeddings": max(encoder.max_length, decoder.max_length),
        "dropout": encoder.dropout,
        "attention_dropout": encoder.attention_dropout,
        "activation_dropout": encoder.ff_dropout,
        "share_encoder_decoder_embeddings": config.share_embeddings,
        "tie_word_embeddings": True,
        "scale_embedding": config.scale_embeddings,
        "is_encoder_decoder": True,
        "pad_token_id": config.ids.pad,
        "eos_token_id": config.ids.eos,
        "forced_eos_token_id": config.ids.eos,
        "decoder_start_token_id": config.start_id,
    }


def table(config: Config, hf: Fields) -> Table:
    rows: dict[str | tuple[str, ...], str | Changed] = {
        "final_logits_bias": Changed("output.bias", shaped(1, config.target_vocab)),
    }
    if config.share_embeddings:
        rows["model.shared"] = "source_embedding"
    else:
        rows |= {"model.encoder.embed_tokens": "source_embedding", "model.decoder.embed_tokens": "target_embedding"}
    for tower in ("encoder", "decoder"):
        layer, block = f"model.{tower}.layers.{{n}}.", f"{tower}.blocks.{{n}}."
        for attention, here in (("self_attn", "attention"), ("encoder_attn", "cross")):
            rows |= {
                f"{layer}{attention}.q_proj": f"{block}{here}.query",
                (f"{layer}{attention}.k_proj", f"{layer}{attention}.v_proj"): f"{block}{here}.key_value",
                f"{layer}{attention}.out_proj": f"{block}{here}.out",
                f"{layer}{attention}_layer_norm": f"{block}{here}_residual.norm",
            }
        rows |= {
            f"{layer}fc1": f"{block}feed_forward.up",
            f"{layer}fc2": f"{block}feed_forward.down",
            f"{layer}final_layer_norm": f"{block}feed_forward_residual.norm",
        }
    return rows


def same(hf: Fields) -> Json:
    if not hf.flag("share_encoder_decoder_embeddings", True):
        return {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    seconds = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    return dict.fromkeys(seconds, "model.shared.weight")


MARIAN = Family(
    model_type="marian",
    architectures=("MarianMTModel",),
    ours=ours,
    theirs=theirs,
    table=table,
    towers=("encoder", "decoder"),
    same=same,
    extra=lambda config: {} if config.output_bias else {"final_logits_bias": torch.zeros(1, config.target_vocab)},
    ignored=("model.*.embed_positions.weight",),
)
