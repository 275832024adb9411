"""Transformer-XL: a causal LM with a memory of earlier segments and relative positions; not in transformers 5."""

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
            f"{hf.where}: cutoffs {cutoffs!r} is not supported, only []: later tokens have smaller"
            " embeddings and are predicted in two steps, the group and then the token (adaptive softmax); here all"
            " tokens share one embedding table and one softmax"
        )
    if hf.get("div_val", 4) != 1 or hf.get("d_embed", 1024) != hf.get("d_model", 1024):
        raise UserError(
            f"{hf.where}: d_embed and d_model must be equal, and div_val must be 1: embeddings with a projection"
            " matrix are not supported"
        )
    return {}


def _window(hf: Fields) -> int | None:
    """With same_length, a token attends to mem_len tokens, including itself."""
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
    layer = "transformer.layers.{n}."
    block = "decoder.blocks.{n}."
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
    layers = config.top.layers  # theirs shares one bias between layers, ours has one per layer
    shared = Transform(lambda x: x.repeat(layers, 1), lambda x: x.chunk(layers)[0])
    for name, part in biases.items():
        names = tuple(f"decoder.blocks.{n}.attention.relative.{part}" for n in range(layers))
        rows[f"transformer.{name}"] = Transformed(names, shared)
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
        Key.fixed("pre_lnorm", False),  # with pre_lnorm theirs has no final norm, unlike ours
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
    unproven="transformers 5 no longer has this model, so the outputs could not be compared. What was checked: every"
    " weight has a counterpart with the shape that config.json requires. Releases up to 4.35.2 have the model; there,"
    " start a text with mems of length 0, because without mems the model attends to a memory of zeros",
)
