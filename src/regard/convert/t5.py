"""T5: distances in buckets, RMS norms, no biases; 1.1 has gated layers and a prediction layer of its own."""

from __future__ import annotations

from regard.config import Config, SpecialIds
from regard.convert.table import (
    ACTIVATIONS,
    SAME,
    Changed,
    Family,
    Fields,
    Json,
    Table,
    scaled,
    stack_of,
    start_at,
    word_for,
)
from regard.errors import UserError


def ours(hf: Fields, names: set[str], architecture: str, ids: SpecialIds) -> Json:
    hf.fixed("relative_attention_num_buckets", 32)
    hf.fixed("relative_attention_max_distance", 128)
    gated, activation = _feed_forward(hf)
    tower = {
        "width": hf.count("d_model"),
        "heads": hf.count("num_heads"),
        "head_width": hf.count("d_kv"),
        "ff": hf.count("d_ff"),
        "activation": activation,
        "gated": gated,
        "score": "dot",
        "norm": "rms",
        "norm_at": "pre",
        "norm_eps": hf.get("layer_norm_epsilon", 1e-6),
        "bias": "none",
        "position": "bucket",
        "dropout": hf.get("dropout_rate", 0.1),
        "attention_dropout": hf.get("dropout_rate", 0.1),
        "ff_dropout": hf.get("dropout_rate", 0.1),
    }
    layers = hf.count("num_layers")
    return {
        "source_vocab": hf.count("vocab_size"),
        "target_vocab": hf.count("vocab_size"),
        "encoder": {**tower, "layers": layers},
        "decoder": {**tower, "layers": hf.count("num_decoder_layers", layers)},
        "share_embeddings": True,
        "tie_output": "lm_head.weight" not in names,
        "scale_embeddings": False,
        **start_at(ids, hf.get("decoder_start_token_id"), "pad"),
    }


def _feed_forward(hf: Fields) -> tuple[bool, str]:
    word = str(hf.get("feed_forward_proj", "relu"))
    if word == "gated-gelu":  # which has always meant the approximation
        return True, "gelu_tanh"
    gated = word.startswith("gated-")
    activation = word.removeprefix("gated-")
    if activation not in ACTIVATIONS:
        raise UserError(f"{hf.where}: feed_forward_proj {word!r} is not supported, only relu, gated-gelu and the like")
    return gated, ACTIVATIONS[activation]


def _scales(hf: Fields) -> bool:
    return hf.flag("scale_decoder_outputs", hf.get("tie_word_embeddings") is not False)


def theirs(config: Config) -> Json:
    encoder, decoder = stack_of(config, "encoder"), stack_of(config, "decoder")
    word = word_for(encoder.activation)
    if encoder.gated:
        word = "gated-gelu" if encoder.activation == "gelu_tanh" else f"gated-{word}"
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": config.source_vocab,
        "d_model": encoder.width,
        "d_kv": encoder.head,
        "d_ff": encoder.ff,
        "num_layers": encoder.layers,
        "num_decoder_layers": decoder.layers,
        "num_heads": encoder.heads,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "dropout_rate": encoder.dropout,
        "layer_norm_epsilon": encoder.norm_eps,
        "feed_forward_proj": word,
        "tie_word_embeddings": config.tie_output,
        "scale_decoder_outputs": config.tie_output,
        "is_encoder_decoder": True,
        "pad_token_id": config.ids.pad,
        "eos_token_id": config.ids.eos,
        "decoder_start_token_id": config.start_id,
    }


def table(config: Config, hf: Fields) -> Table:
    # Theirs divides what comes out of the decoder by sqrt(width); ours has this in the weights of its last norm.
    last = scaled(stack_of(config, "decoder").width ** -0.5) if _scales(hf) else SAME
    rows: dict[str | tuple[str, ...], str | Changed] = {
        "shared": "source_embedding",
        "lm_head": "output",
        "encoder.final_layer_norm": "encoder.norm",
        "decoder.final_layer_norm": Changed("decoder.norm", last),
    }
    for tower in ("encoder", "decoder"):
        layer, block = f"{tower}.block.{{n}}.layer.", f"{tower}.blocks.{{n}}."
        first = f"{tower}.block.0.layer.0.SelfAttention.relative_attention_bias"
        rows[first] = f"{tower}.position.table"  # kept in the first layer, used by all
        attentions = [("0.SelfAttention", "attention")]
        if tower == "decoder":
            attentions.append(("1.EncDecAttention", "cross"))
        for attention, here in attentions:
            rows |= {
                f"{layer}{attention}.q": f"{block}{here}.query",
                (f"{layer}{attention}.k", f"{layer}{attention}.v"): f"{block}{here}.key_value",
                f"{layer}{attention}.o": f"{block}{here}.out",
                f"{layer}{attention[0]}.layer_norm": f"{block}{here}_residual.norm",
            }
        dense = f"{layer}{len(attentions)}.DenseReluDense"
        gated = stack_of(config, tower).gated
        rows |= {
            f"{dense}.wi_0": f"{block}feed_forward.gate",
            f"{dense}.wi_1" if gated else f"{dense}.wi": f"{block}feed_forward.up",
            f"{dense}.wo": f"{block}feed_forward.down",
            f"{layer}{len(attentions)}.layer_norm": f"{block}feed_forward_residual.norm",
        }
    return rows


T5 = Family(
    model_type="t5",
    architectures=("T5ForConditionalGeneration",),
    ours=ours,
    theirs=theirs,
    table=table,
    towers=("encoder", "decoder"),
    same=lambda hf: {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
    ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)
