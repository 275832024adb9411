"""GPT-2: a decoder alone. Its matrices are stored the other way round, queries, keys and values in one."""

from __future__ import annotations

from regard.config import Config, SpecialIds
from regard.convert.table import (
    ACTIVATIONS,
    TURNED,
    Changed,
    Family,
    Fields,
    Json,
    Table,
    stack_of,
    start_at,
    tied_to,
    word_for,
)


def ours(hf: Fields, names: set[str], architecture: str, ids: SpecialIds) -> Json:
    hf.fixed("scale_attn_weights", True)
    hf.fixed("scale_attn_by_inverse_layer_idx", False)
    hf.fixed("add_cross_attention", False)
    width = hf.count("n_embd")
    return {
        "source_vocab": hf.count("vocab_size"),
        "target_vocab": hf.count("vocab_size"),
        "decoder": {
            "layers": hf.count("n_layer"),
            "width": width,
            "heads": hf.count("n_head"),
            "ff": hf.count("n_inner", 4 * width),
            "activation": hf.choice("activation_function", ACTIVATIONS, "gelu_new"),
            "norm_at": "pre",
            "norm_eps": hf.get("layer_norm_epsilon", 1e-5),
            "position": "learned",
            "max_length": hf.count("n_positions", 1024),
            "dropout": hf.get("resid_pdrop", 0.1),
            "attention_dropout": hf.get("attn_pdrop", 0.1),
        },
        "tie_output": "lm_head.weight" not in names,
        "scale_embeddings": False,
        **start_at(ids, hf.get("bos_token_id")),
    }


def theirs(config: Config) -> Json:
    decoder = stack_of(config, "decoder")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.target_vocab,
        "n_positions": decoder.max_length,
        "n_embd": decoder.width,
        "n_layer": decoder.layers,
        "n_head": decoder.heads,
        "n_inner": decoder.ff,
        "activation_function": word_for(decoder.activation),
        "resid_pdrop": decoder.dropout,
        "embd_pdrop": decoder.dropout,
        "attn_pdrop": decoder.attention_dropout,
        "layer_norm_epsilon": decoder.norm_eps,
        "tie_word_embeddings": config.tie_output,
        "bos_token_id": config.start_id,
        "eos_token_id": config.ids.eos,
        "pad_token_id": config.ids.pad,
    }


def table(config: Config, hf: Fields) -> Table:
    layer, block = "transformer.h.{n}.", "decoder.blocks.{n}."
    return {
        "transformer.wte": "target_embedding",
        "transformer.wpe": "decoder.position.table",
        "transformer.ln_f": "decoder.norm",
        "lm_head": "output",
        f"{layer}ln_1": f"{block}attention_residual.norm",
        f"{layer}ln_2": f"{block}feed_forward_residual.norm",
        f"{layer}attn.c_attn": Changed((f"{block}attention.query", f"{block}attention.key_value"), TURNED),
        f"{layer}attn.c_proj": Changed(f"{block}attention.out", TURNED),
        f"{layer}mlp.c_fc": Changed(f"{block}feed_forward.up", TURNED),
        f"{layer}mlp.c_proj": Changed(f"{block}feed_forward.down", TURNED),
    }


GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel",),
    ours=ours,
    theirs=theirs,
    table=table,
    towers=("decoder",),
    prefix="transformer.",
    heads=("lm_head.",),
    same=tied_to("transformer.wte.weight"),
    ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
)
