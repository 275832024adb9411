"""Transformer-XL: a causal LM with a memory of earlier segments and relative positions.

transformers had it under the name transfo-xl until its version 5.
"""

from __future__ import annotations

import torch

from regard.config import Config
from regard.convert.family import Family, Fields, Json, Key, tied_alias
from regard.convert.table import Table, Transform, Transformed
from regard.errors import UserError


def _refuse_adaptive(hf: Fields) -> Json:
    """Refuse adaptive embeddings and an adaptive softmax."""
    cutoffs = hf.get("cutoffs", [20000, 40000, 200000])
    if cutoffs:
        raise UserError(
            f"{hf.where}: cutoffs {cutoffs!r} is not supported, only []: tokens beyond the first cutoff are embedded"
            " in fewer numbers and predicted in two steps, first their group and then the token (adaptive softmax);"
            " here all tokens are rows of one table and of one softmax"
        )
    if hf.get("div_val", 4) != 1 or hf.get("d_embed", 1024) != hf.get("d_model", 1024):
        raise UserError(
            f"{hf.where}: d_embed and d_model must be the same, and div_val 1: embeddings that pass a matrix of their"
            " own before they enter the model are not supported"
        )
    return {}


def _window(hf: Fields) -> int | None:
    """With same_length, a token attends to as many tokens as the memory has, itself among them."""
    memory = hf.get("mem_len", 1600)
    if not hf.flag("same_length", True):
        return None
    if type(memory) is not int or memory < 2:
        raise UserError(f"{hf.where}: same_length True needs a mem_len of at least 2, not {memory!r}")
    return memory - 1


def _reach(hf: Fields) -> int | None:
    clamp: int = hf.get("clamp_len", 1000)
    return None if type(clamp) is int and clamp <= 0 else clamp


def _weights(config: Config, hf: Fields) -> Table:
    layer, block = "transformer.layers.{n}.", "decoder.blocks.{n}."
    attention = f"{block}attention."
    rows: Table = {
        "transformer.word_emb.emb_layers.0": "target_embedding",
        "crit.out_layers.0": "output",
        f"{layer}dec_attn.qkv_net": (f"{attention}query", f"{attention}key_value"),
        f"{layer}dec_attn.r_net": f"{attention}relative.project",
        f"{layer}dec_attn.o_net": f"{attention}out",
        f"{layer}dec_attn.layer_norm": f"{block}attention_residual.norm",
        f"{layer}pos_ff.CoreNet.0": f"{block}feed_forward.up",
        f"{layer}pos_ff.CoreNet.3": f"{block}feed_forward.down",
        f"{layer}pos_ff.layer_norm": f"{block}feed_forward_residual.norm",
    }
    biases = {"r_w_bias": "content", "r_r_bias": "place"}
    if hf.flag("untie_r", True):
        return rows | {f"{layer}dec_attn.{name}": f"{attention}relative.{part}" for name, part in biases.items()}
    layers = config.top.layers  # theirs shares one between the layers, ours has one in each
    shared = Transform(lambda x: x.repeat(layers, 1), lambda x: x.chunk(layers)[0])
    for name, part in biases.items():
        each = tuple(f"decoder.blocks.{n}.attention.relative.{part}" for n in range(layers))
        rows[f"transformer.{name}"] = Transformed(each, shared)
    return rows


def _aliases(hf: Fields) -> dict[str, str]:
    names = tied_alias("transformer.word_emb.emb_layers.0.weight", "crit.out_layers.0.weight")(hf)
    if not hf.flag("untie_r", True):
        for n in range(hf.count("n_layer", 18)):
            for name in ("r_w_bias", "r_r_bias"):
                names[f"transformer.layers.{n}.dec_attn.{name}"] = f"transformer.{name}"
    return names


def _extra(config: Config) -> dict[str, torch.Tensor]:
    width = config.top.width
    frequencies = {"transformer.pos_emb.inv_freq": 1 / (10000 ** (torch.arange(0.0, width, 2.0) / width))}
    bias = {} if config.output_bias else {"crit.out_layers.0.bias": torch.zeros(config.target_vocab)}
    return frequencies | bias


TRANSFO_XL = Family(
    model_type="transfo-xl",
    architectures={"TransfoXLLMHeadModel": {}},
    config=(
        Key(_refuse_adaptive, lambda config: {"cutoffs": [], "div_val": 1, "d_embed": config.top.width}),
        Key.fixed("attn_type", 0),
        Key.fixed("pre_lnorm", False),  # theirs has no norm at the end then, as ours has
        Key.written("untie_r", lambda config: True),  # read by the weight table
        Key.count("vocab_size", "target_vocab", "source_vocab"),
        Key.count("n_layer", "decoder.layers", default=18),
        Key.count("d_model", "decoder.width", default=1024),
        Key.count("n_head", "decoder.heads", default=16),
        Key.count("d_head", "decoder.head_width", default=64),
        Key.count("d_inner", "decoder.ff", default=4096),
        Key.value("layer_norm_epsilon", "decoder.norm_eps", default=1e-5),
        Key.value("mem_len", "decoder.memory", default=1600),
        Key.of("same_length", "decoder.window", read=_window, write=lambda window: window is not None),
        Key.of("clamp_len", "decoder.reach", read=_reach, write=lambda reach: -1 if reach is None else reach),
        Key.value("dropout", "decoder.dropout", "decoder.ff_dropout", default=0.1),
        Key.value("dropatt", "decoder.attention_dropout", default=0.0),
        Key.tied("crit.out_layers.0.weight"),
        Key.stored("crit.out_layers.0.bias", "output_bias"),
        Key.special_ids("bos_token_id", "eos"),
    ),
    constants={"decoder": {"bias": "ff", "position": "relative"}},
    weights=_weights,
    prefix="transformer.",
    unprefixed=("crit.",),
    aliases=_aliases,
    extra=_extra,
    ignored=("transformer.pos_emb.inv_freq",),
    unproven="transformers 5 no longer has this model, so the two could not be run side by side. What was checked:"
    " every weight has its place and the shape that config.json says. Releases up to 4.35.2 have it; there, begin a"
    " text with mems of length 0, for without mems it looks at a memory of zeros",
)
