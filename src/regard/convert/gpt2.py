"""GPT-2: a causal LM. Its matrices are stored transposed, and one matrix holds queries, keys and values."""

from __future__ import annotations

from regard.config import Config
from regard.convert.family import Family, Fields, Key, tied_alias
from regard.convert.table import TRANSPOSED, Table, Transformed


def _weights(config: Config, hf: Fields) -> Table:
    layer = "transformer.h.{n}."
    block = "decoder.blocks.{n}."
    return {
        "transformer.wte": "target_embedding",
        "transformer.wpe": "decoder.position.table",
        "transformer.ln_f": "decoder.norm",
        "lm_head": "output",
        f"{layer}ln_1": f"{block}attention_residual.norm",
        f"{layer}ln_2": f"{block}feed_forward_residual.norm",
        f"{layer}attn.c_attn": Transformed((f"{block}attention.query", f"{block}attention.key_value"), TRANSPOSED),
        f"{layer}attn.c_proj": Transformed(f"{block}attention.out", TRANSPOSED),
        f"{layer}mlp.c_fc": Transformed(f"{block}feed_forward.up", TRANSPOSED),
        f"{layer}mlp.c_proj": Transformed(f"{block}feed_forward.down", TRANSPOSED),
    }


GPT2 = Family(
    model_type="gpt2",
    architectures={"GPT2LMHeadModel": {}},
    config=(
        Key.fixed("scale_attn_weights", True, write=False),
        Key.fixed("scale_attn_by_inverse_layer_idx", False, write=False),
        Key.fixed("add_cross_attention", False, write=False),
        Key.count("vocab_size", "target_vocab", "source_vocab"),
        Key.count("n_layer", "decoder.layers"),
        Key.count("n_embd", "decoder.width"),
        Key.count("n_head", "decoder.heads"),
        Key.count("n_inner", "decoder.ff", default=lambda hf: 4 * hf.count("n_embd")),
        Key.activation("activation_function", "decoder.activation", default="gelu_new"),
        Key.value("layer_norm_epsilon", "decoder.norm_eps", default=1e-5),
        Key.count("n_positions", "decoder.max_length", default=1024),
        Key.value("resid_pdrop", "decoder.dropout", default=0.1),
        Key.written("embd_pdrop", lambda config: config.top.dropout),
        Key.value("attn_pdrop", "decoder.attention_dropout", default=0.1),
        Key.tied("lm_head.weight"),
        Key.special_ids("bos_token_id", "eos"),
    ),
    constants={"decoder": {"norm_at": "pre", "position": "learned"}, "scale_embeddings": False},
    weights=_weights,
    prefix="transformer.",
    unprefixed=("lm_head.",),
    aliases=tied_alias("transformer.wte.weight"),
    ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
)
