"""Llama 2 and 3: a causal LM with rotary positions, RMS norms and gated feed-forward layers."""

from __future__ import annotations

from regard.config import Config
from regard.convert.family import Family, Fields, Json, Key, tied_alias
from regard.convert.table import Table
from regard.errors import UserError

BIASES = {(False, False): "none", (False, True): "ff", (True, True): "all"}  # (attention, feed-forward) -> bias
ROPE = {"factor": "factor", "low_freq_factor": "low", "high_freq_factor": "high"}  # Hugging Face -> regard


def _read_bias(hf: Fields) -> Json:
    attention = hf.flag("attention_bias", False)
    feed_forward = hf.flag("mlp_bias", False)
    if attention and not feed_forward:
        raise UserError(f"{hf.where}: attention_bias True is supported only together with mlp_bias True")
    return {"decoder.bias": BIASES[attention, feed_forward]}


def _write_bias(config: Config) -> Json:
    attention, feed_forward = next(flags for flags, bias in BIASES.items() if bias == config.top.bias)
    return {"attention_bias": attention, "mlp_bias": feed_forward}


def _read_rotary(hf: Fields) -> Json:
    """Read rope_theta and rope_scaling of older files, or rope_parameters of newer ones."""
    scaling = hf.get("rope_parameters", hf.get("rope_scaling", {}))
    if not isinstance(scaling, dict):
        raise UserError(f"{hf.where}: rope_scaling must be a table, not {scaling!r}")
    key = "rope_parameters" if "rope_parameters" in hf.data else "rope_scaling"
    kind = Fields(scaling, "").get("rope_type", scaling.get("type"))
    rope = Fields({**scaling, "rope_type": kind}, f"{hf.where}: {key}")
    rotary = {"base": rope.get("rope_theta", hf.get("rope_theta", 10000.0))}
    if rope.choice("rope_type", {"default": False, "llama3": True}, "default"):
        rotary |= {ours: rope.get(theirs) for theirs, ours in ROPE.items()}
        rotary["original"] = rope.get("original_max_position_embeddings", hf.get("max_position_embeddings"))
    return {"decoder.rotary": rotary}


def _write_rotary(config: Config) -> Json:
    rotary = config.top.rotary
    rope: Json = {"rope_theta": rotary.base, "rope_type": "default"}
    if rotary.factor != 1:
        rope |= {theirs: getattr(rotary, ours) for theirs, ours in ROPE.items()}
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": rotary.original}
    return {"rope_parameters": rope}


def _weights(config: Config, hf: Fields) -> Table:
    layer = "model.layers.{n}."
    block = "decoder.blocks.{n}."
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
    architectures={"LlamaForCausalLM": {}},
    config=(
        Key.count("vocab_size", "target_vocab", "source_vocab"),
        Key.count("num_hidden_layers", "decoder.layers"),
        Key.count("hidden_size", "decoder.width"),
        Key.count("num_attention_heads", "decoder.heads"),
        Key.count("num_key_value_heads", "decoder.kv_heads", default=lambda hf: hf.count("num_attention_heads")),
        Key.count(
            "head_dim",
            "decoder.head_width",
            default=lambda hf: max(hf.count("hidden_size") // hf.count("num_attention_heads"), 1),
        ),
        Key.count("intermediate_size", "decoder.ff"),
        Key.activation("hidden_act", "decoder.activation", default="silu"),
        Key.value("rms_norm_eps", "decoder.norm_eps", default=1e-6),
        Key(_read_bias, _write_bias),
        Key(_read_rotary, _write_rotary),
        Key.count("max_position_embeddings", "decoder.max_length", default=2048),
        Key.value("attention_dropout", "decoder.attention_dropout", default=0.0),
        Key.tied("lm_head.weight"),
        Key.special_ids("bos_token_id", "sos"),
    ),
    constants={
        "decoder": {"gated": True, "norm": "rms", "norm_at": "pre", "position": "rotary", "dropout": 0.0},
        "scale_embeddings": False,
    },
    weights=_weights,
    aliases=tied_alias("model.embed_tokens.weight"),
    ignored=("*.rotary_emb.inv_freq",),
)
