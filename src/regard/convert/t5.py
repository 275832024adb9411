"""T5: an encoder-decoder with bucketed relative positions, RMS norms and no biases; T5 1.1 has gated layers and an
untied LM head."""

from __future__ import annotations

from regard.config import Config
from regard.convert.family import ACTIVATIONS, Family, Fields, Json, Key, activation_name, both
from regard.convert.table import SAME, Table, Transformed, scaled
from regard.errors import UserError


def _read_feed_forward(hf: Fields) -> Json:
    name = str(hf.get("feed_forward_proj", "relu"))
    gated = name.startswith("gated-")
    if name == "gated-gelu":  # means the tanh approximation
        name = "gated-gelu_new"
    activation = ACTIVATIONS.get(name.removeprefix("gated-"))
    if activation is None:
        supported = "only gated-gelu or an activation such as relu"
        raise UserError(f"{hf.where}: feed_forward_proj {name!r} is not supported, {supported}")
    return dict.fromkeys(both("gated"), gated) | dict.fromkeys(both("activation"), activation)


def _write_feed_forward(config: Config) -> Json:
    stack = config.stacks["encoder"]
    name = activation_name(stack.activation)
    if stack.gated:
        name = "gated-gelu" if stack.activation == "gelu_tanh" else f"gated-{name}"
    return {"feed_forward_proj": name}


def _weights(config: Config, hf: Fields) -> Table:
    # transformers divides the output of the decoder by sqrt(width) if the LM head is tied or the config requires it;
    # here this factor is part of the weights of the last norm.
    scales = hf.flag("scale_decoder_outputs", hf.get("tie_word_embeddings") is not False)
    last = scaled(config.top.width**-0.5) if scales else SAME
    rows: Table = {
        "shared": "source_embedding",
        "lm_head": "output",
        "encoder.final_layer_norm": "encoder.norm",
        "decoder.final_layer_norm": Transformed("decoder.norm", last),
    }
    for name, stack in config.stacks.items():
        layer = f"{name}.block.{{n}}.layer."
        block = f"{name}.blocks.{{n}}."
        first = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias"
        rows[first] = f"{name}.position.table"  # stored in the first layer, used by all layers
        attentions = [("0.SelfAttention", "attention")]
        if name == "decoder":
            attentions.append(("1.EncDecAttention", "cross"))
        for theirs, ours in attentions:
            rows |= {
                f"{layer}{theirs}.q": f"{block}{ours}.query",
                (f"{layer}{theirs}.k", f"{layer}{theirs}.v"): f"{block}{ours}.key_value",
                f"{layer}{theirs}.o": f"{block}{ours}.out",
                f"{layer}{theirs[0]}.layer_norm": f"{block}{ours}_residual.norm",
            }
        last_layer = f"{layer}{len(attentions)}."
        dense = f"{last_layer}DenseReluDense."
        rows |= {
            f"{dense}wi_0": f"{block}feed_forward.gate",
            f"{dense}wi_1" if stack.gated else f"{dense}wi": f"{block}feed_forward.up",
            f"{dense}wo": f"{block}feed_forward.down",
            f"{last_layer}layer_norm": f"{block}feed_forward_residual.norm",
        }
    return rows


STACK = {"score": "dot", "norm": "rms", "norm_at": "pre", "bias": "none", "position": "bucket"}
T5 = Family(
    model_type="t5",
    architectures={"T5ForConditionalGeneration": {}},
    config=(
        Key.fixed("relative_attention_num_buckets", 32),
        Key.fixed("relative_attention_max_distance", 128),
        Key.written("is_encoder_decoder", lambda config: True),
        Key.count("vocab_size", "source_vocab", "target_vocab"),
        Key.count("num_layers", "encoder.layers"),
        Key.count("num_decoder_layers", "decoder.layers", default=lambda hf: hf.count("num_layers")),
        Key.count("d_model", *both("width")),
        Key.count("num_heads", *both("heads")),
        Key.count("d_kv", *both("head_width")),
        Key.count("d_ff", *both("ff")),
        Key(_read_feed_forward, _write_feed_forward),
        Key.value("layer_norm_epsilon", *both("norm_eps"), default=1e-6),
        Key.value("dropout_rate", *both("dropout"), *both("attention_dropout"), *both("ff_dropout"), default=0.1),
        Key.tied("lm_head.weight"),
        Key.written("scale_decoder_outputs", lambda config: config.tie_output),  # read by the weight table
        Key.special_ids("decoder_start_token_id", "pad"),
    ),
    constants={"encoder": STACK, "decoder": STACK, "share_embeddings": True, "scale_embeddings": False},
    weights=_weights,
    aliases=lambda hf: dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), "shared.weight"
    ),
    ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)
