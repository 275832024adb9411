"""Transformer-XL: a decoder alone that remembers earlier segments and scores by distance.

transformers had it until its version 5, which no longer does; its own name for it is transfo-xl.
"""

from __future__ import annotations

import torch

from regard.config import Config, SpecialIds
from regard.convert.table import Changed, Family, Fields, Json, Table, Transform, stack_of, start_at
from regard.errors import UserError

CUTOFFS = [20000, 40000, 200000]  # where config.json leaves them out


def ours(hf: Fields, names: set[str], architecture: str, ids: SpecialIds) -> Json:
    _require_flat(hf)
    hf.fixed("attn_type", 0)
    hf.fixed("pre_lnorm", False)  # normalised before each sub-layer, but not at the end, as ours is
    width, memory = hf.count("d_model", 1024), hf.get("mem_len", 1600)
    clamp = hf.get("clamp_len", 1000)
    dropout = hf.get("dropout", 0.1)
    return {
        "source_vocab": hf.count("vocab_size"),
        "target_vocab": hf.count("vocab_size"),
        "decoder": {
            "layers": hf.count("n_layer", 18),
            "width": width,
            "heads": hf.count("n_head", 16),
            "head_width": hf.count("d_head", 64),
            "ff": hf.count("d_inner", 4096),
            "norm_eps": hf.get("layer_norm_epsilon", 1e-5),
            "bias": "ff",
            "position": "relative",
            "memory": memory,
            "window": _window(hf, memory),
            "reach": None if type(clamp) is int and clamp <= 0 else clamp,
            "dropout": dropout,
            "ff_dropout": dropout,
            "attention_dropout": hf.get("dropatt", 0.0),
        },
        "tie_output": "crit.out_layers.0.weight" not in names,
        "output_bias": "crit.out_layers.0.bias" in names,
        **start_at(ids, hf.get("bos_token_id")),
    }


def _require_flat(hf: Fields) -> None:
    """Refuse a softmax in levels: frequent tokens first, and rare ones by the group they are in."""
    cutoffs = hf.get("cutoffs", CUTOFFS)
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


def _window(hf: Fields, memory: int) -> int | None:
    """With the same length for all, a token sees as many as are remembered, itself among them."""
    if not hf.flag("same_length", True):
        return None
    if type(memory) is not int or memory < 2:
        raise UserError(f"{hf.where}: same_length True needs a mem_len of at least 2, not {memory!r}")
    return memory - 1


def theirs(config: Config) -> Json:
    decoder = stack_of(config, "decoder")
    return {
        "architectures": ["TransfoXLLMHeadModel"],
        "vocab_size": config.target_vocab,
        "cutoffs": [],
        "div_val": 1,
        "d_model": decoder.width,
        "d_embed": decoder.width,
        "n_head": decoder.heads,
        "d_head": decoder.head,
        "d_inner": decoder.ff,
        "n_layer": decoder.layers,
        "mem_len": decoder.memory,
        "clamp_len": -1 if decoder.reach is None else decoder.reach,
        "same_length": decoder.window is not None,
        "attn_type": 0,
        "untie_r": True,
        "pre_lnorm": False,
        "layer_norm_epsilon": decoder.norm_eps,
        "dropout": decoder.dropout,
        "dropatt": decoder.attention_dropout,
        "tie_word_embeddings": config.tie_output,
        "bos_token_id": config.start_id,
        "eos_token_id": config.ids.eos,
        "pad_token_id": config.ids.pad,
    }


def table(config: Config, hf: Fields) -> Table:
    layer, block = "transformer.layers.{n}.", "decoder.blocks.{n}."
    attention = f"{block}attention."
    rows: dict[str | tuple[str, ...], str | tuple[str, ...] | Changed] = {
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
    if hf.flag("untie_r", True):
        return rows | {
            f"{layer}dec_attn.r_w_bias": f"{attention}relative.content",
            f"{layer}dec_attn.r_r_bias": f"{attention}relative.place",
        }
    layers = stack_of(config, "decoder").layers  # there one for all, here one for each
    shared = Transform(lambda x: x.repeat(layers, 1), lambda x: x.chunk(layers)[0])
    for name, part in (("r_w_bias", "content"), ("r_r_bias", "place")):
        each = tuple(f"decoder.blocks.{n}.attention.relative.{part}" for n in range(layers))
        rows[f"transformer.{name}"] = Changed(each, shared)
    return rows


def same(hf: Fields) -> Json:
    found: Json = {}
    if hf.get("tie_word_embeddings") is not False:
        found["crit.out_layers.0.weight"] = "transformer.word_emb.emb_layers.0.weight"
    if not hf.flag("untie_r", True):
        for n in range(hf.count("n_layer", 18)):
            for name in ("r_w_bias", "r_r_bias"):
                found[f"transformer.layers.{n}.dec_attn.{name}"] = f"transformer.{name}"
    return found


def extra(config: Config) -> dict[str, torch.Tensor]:
    width = stack_of(config, "decoder").width
    found = {"transformer.pos_emb.inv_freq": 1 / (10000 ** (torch.arange(0.0, width, 2.0) / width))}
    return found if config.output_bias else found | {"crit.out_layers.0.bias": torch.zeros(config.target_vocab)}


TRANSFO_XL = Family(
    model_type="transfo-xl",
    architectures=("TransfoXLLMHeadModel",),
    ours=ours,
    theirs=theirs,
    table=table,
    towers=("decoder",),
    prefix="transformer.",
    heads=("crit.",),
    same=same,
    extra=extra,
    ignored=("transformer.pos_emb.inv_freq",),
    gone="transformers 5 no longer has this model, so the two could not be run side by side. What was checked: every"
    " weight has its place and the shape that config.json says. Releases up to 4.35.2 have it; there, begin a text"
    " with mems of length 0, for without mems it looks at a memory of zeros",
)
