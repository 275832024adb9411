"""Llama 2 and 3: a decoder alone with rotary positions, RMS norms and gated layers."""

from __future__ import annotations

from regard.config import Config, SpecialIds
from regard.convert.table import ACTIVATIONS, Family, Fields, Json, Table, stack_of, start_at, tied_to, word_for
from regard.errors import UserError


def ours(hf: Fields, names: set[str], architecture: str, ids: SpecialIds) -> Json:
    width, heads = hf.count("hidden_size"), hf.count("num_attention_heads")
    return {
        "source_vocab": hf.count("vocab_size"),
        "target_vocab": hf.count("vocab_size"),
        "decoder": {
            "layers": hf.count("num_hidden_layers"),
            "width": width,
            "heads": heads,
            "kv_heads": hf.count("num_key_value_heads", heads),
            "head_width": hf.count("head_dim", max(width // heads, 1)),
            "ff": hf.count("intermediate_size"),
            "activation": hf.choice("hidden_act", ACTIVATIONS, "silu"),
            "gated": True,
            "norm": "rms",
            "norm_at": "pre",
            "norm_eps": hf.get("rms_norm_eps", 1e-6),
            "bias": _bias(hf),
            "position": "rotary",
            "rotary": _rotary(hf),
            "max_length": hf.count("max_position_embeddings", 2048),
            "dropout": 0.0,
            "attention_dropout": hf.get("attention_dropout", 0.0),
        },
        "tie_output": "lm_head.weight" not in names,
        "scale_embeddings": False,
        **start_at(ids, hf.get("bos_token_id"), "sos"),
    }


def _bias(hf: Fields) -> str:
    attention, feed_forward = hf.flag("attention_bias", False), hf.flag("mlp_bias", False)
    if attention and not feed_forward:
        raise UserError(f"{hf.where}: attention_bias True is supported only together with mlp_bias True")
    return {(False, False): "none", (False, True): "ff", (True, True): "all"}[attention, feed_forward]


def _rotary(hf: Fields) -> Json:
    """Older files have rope_theta and rope_scaling, newer ones both in rope_parameters."""
    scaling = hf.get("rope_parameters", hf.get("rope_scaling", {}))
    if not isinstance(scaling, dict):
        raise UserError(f"{hf.where}: rope_scaling must be a table, not {scaling!r}")
    inner = Fields(
        scaling, f"{hf.where}: rope_parameters" if "rope_parameters" in hf.data else f"{hf.where}: rope_scaling"
    )
    kind = Fields({"rope_type": inner.get("rope_type", inner.get("type"))}, inner.where)
    stretched = kind.choice("rope_type", {"default": False, "llama3": True}, "default")
    turning: Json = {"base": inner.get("rope_theta", hf.get("rope_theta", 10000.0))}
    if stretched:
        turning |= {
            "factor": inner.get("factor"),
            "low": inner.get("low_freq_factor"),
            "high": inner.get("high_freq_factor"),
            "original": inner.get("original_max_position_embeddings", hf.get("max_position_embeddings")),
        }
    return turning


def theirs(config: Config) -> Json:
    decoder = stack_of(config, "decoder")
    turning = decoder.rotary
    rope: Json = {"rope_type": "default"}
    if turning.factor != 1:
        rope = {
            "rope_type": "llama3",
            "factor": turning.factor,
            "low_freq_factor": turning.low,
            "high_freq_factor": turning.high,
            "original_max_position_embeddings": turning.original,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.target_vocab,
        "hidden_size": decoder.width,
        "intermediate_size": decoder.ff,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv,
        "head_dim": decoder.head,
        "hidden_act": word_for(decoder.activation),
        "max_position_embeddings": decoder.max_length,
        "rms_norm_eps": decoder.norm_eps,
        "attention_bias": decoder.bias == "all",
        "mlp_bias": decoder.bias != "none",
        "attention_dropout": decoder.attention_dropout,
        "rope_parameters": {"rope_theta": turning.base, **rope},
        "tie_word_embeddings": config.tie_output,
        "bos_token_id": config.start_id,
        "eos_token_id": config.ids.eos,
        "pad_token_id": config.ids.pad,
    }


def table(config: Config, hf: Fields) -> Table:
    layer, block = "model.layers.{n}.", "decoder.blocks.{n}."
    return {
        "model.embed_tokens": "target_embedding",
        "model.norm": "decoder.norm",
        "lm_head": "output",
        f"{layer}input_layernorm": f"{block}attention_residual.norm",
        f"{layer}post_attention_layernorm": f"{block}feed_forward_residual.norm",
        f"{layer}self_attn.q_proj": f"{block}attention.query",
        (f"{layer}self_attn.k_proj", f"{layer}self_attn.v_proj"): f"{block}attention.key_value",
        f"{layer}self_attn.o_proj": f"{block}attention.out",
        f"{layer}mlp.gate_proj": f"{block}feed_forward.gate",
        f"{layer}mlp.up_proj": f"{block}feed_forward.up",
        f"{layer}mlp.down_proj": f"{block}feed_forward.down",
    }


LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    ours=ours,
    theirs=theirs,
    table=table,
    towers=("decoder",),
    same=tied_to("model.embed_tokens.weight"),
    ignored=("*.rotary_emb.inv_freq",),
)
