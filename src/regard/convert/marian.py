"""MarianMT: the original Transformer, with sinusoidal positions in two halves and a bias in the LM head."""

from __future__ import annotations

import torch

from regard.config import Config
from regard.convert.family import Family, Fields, Key, both
from regard.convert.table import Table, Transformed, shaped


def _shared(hf: Fields) -> bool:
    return hf.flag("share_encoder_decoder_embeddings", True)


def _target_vocab(hf: Fields) -> int:
    vocab = hf.count("vocab_size")
    return vocab if _shared(hf) else hf.count("decoder_vocab_size", vocab)


def _weights(config: Config, hf: Fields) -> Table:
    rows: Table = {"final_logits_bias": Transformed("output.bias", shaped(1, config.target_vocab))}
    if config.share_embeddings:
        rows["model.shared"] = "source_embedding"
    else:
        rows |= {"model.encoder.embed_tokens": "source_embedding", "model.decoder.embed_tokens": "target_embedding"}
    for stack in config.stacks:
        layer = f"model.{stack}.layers.{{n}}."
        block = f"{stack}.blocks.{{n}}."
        for theirs, ours in (("self_attn", "attention"), ("encoder_attn", "cross")):
            rows |= {
                f"{layer}{theirs}.q_proj": f"{block}{ours}.query",
                (f"{layer}{theirs}.k_proj", f"{layer}{theirs}.v_proj"): f"{block}{ours}.key_value",
                f"{layer}{theirs}.out_proj": f"{block}{ours}.out",
                f"{layer}{theirs}_layer_norm": f"{block}{ours}_residual.norm",
            }
        rows |= {
            f"{layer}fc1": f"{block}feed_forward.up",
            f"{layer}fc2": f"{block}feed_forward.down",
            f"{layer}final_layer_norm": f"{block}feed_forward_residual.norm",
        }
    return rows


def _aliases(hf: Fields) -> dict[str, str]:
    if not _shared(hf):
        return {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    seconds = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    return dict.fromkeys(seconds, "model.shared.weight")


MARIAN = Family(
    model_type="marian",
    architectures={"MarianMTModel": {}},
    config=(
        Key.fixed("tie_word_embeddings", True),
        Key.fixed("normalize_before", False, write=False),
        Key.fixed("normalize_embedding", False, write=False),
        Key.fixed("add_final_layer_norm", False, write=False),
        Key.fixed("static_position_embeddings", True, write=False),
        Key.written("is_encoder_decoder", lambda config: True),
        Key.flag("share_encoder_decoder_embeddings", "share_embeddings", default=True),
        Key.count("vocab_size", "source_vocab"),
        Key.of("decoder_vocab_size", "target_vocab", read=_target_vocab),
        *(
            Key.count(f"{stack}_{key}", f"{stack}.{field}")
            for stack in ("encoder", "decoder")
            for key, field in (("layers", "layers"), ("attention_heads", "heads"), ("ffn_dim", "ff"))
        ),
        Key.count("d_model", *both("width")),
        Key.activation("activation_function", *both("activation"), default="gelu"),
        Key(
            lambda hf: dict.fromkeys(both("max_length"), hf.count("max_position_embeddings", 1024)),
            lambda config: {"max_position_embeddings": max(stack.max_length for stack in config.stacks.values())},
        ),
        Key.value("dropout", *both("dropout"), default=0.1),
        Key.value("attention_dropout", *both("attention_dropout"), default=0.0),
        Key.value("activation_dropout", *both("ff_dropout"), default=0.0),
        Key.flag("scale_embedding", "scale_embeddings", default=False),
        Key.stored("final_logits_bias", "output_bias"),
        Key.special_ids("decoder_start_token_id", "pad"),
        Key.written("forced_eos_token_id", lambda config: config.ids.eos),
    ),
    constants={stack: {"position": "sinusoid_halves"} for stack in ("encoder", "decoder")},
    weights=_weights,
    aliases=_aliases,
    extra=lambda config: {} if config.output_bias else {"final_logits_bias": torch.zeros(1, config.target_vocab)},
    ignored=("model.*.embed_positions.weight",),
)
