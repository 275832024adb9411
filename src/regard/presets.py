"""The model families as config values. Only this module and `convert` know their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regard.config import Config, parse
from regard.errors import UserError, one_of
from regard.recipe import Recipe, assign, put, recipe_tables

Table = dict[str, Any]


def _sizes(layers: int, width: int, heads: int, ff: int, **more: Any) -> Table:
    return {"layers": layers, "width": width, "heads": heads, "ff": ff, **more}


def _seq2seq(both: Table, decoder: Table | None = None, **joined: Any) -> Table:
    """An encoder-decoder with the same stack twice, but for what is changed in the decoder."""
    return {"encoder": dict(both), "decoder": {**both, **(decoder or {})}, **joined}


def _vocab(size: int) -> Table:
    return {"source_vocab": size, "target_vocab": size}


_BASE = _sizes(6, 512, 8, 2048, dropout=0.1)
_SMALL_DATA: Table = {"norm_at": "pre", "position": "rotary"}
_RECURRENT: Table = {"width": 256, "position": "none", "dropout": 0.2}
_TINY = _sizes(4, 128, 4, 512, dropout=0.1, attention_dropout=0.0)

# Devlin et al. 2019: an encoder that predicts masked tokens.
_BERT = _sizes(12, 768, 12, 3072, activation="gelu", norm_eps=1e-12, embed_norm=True)
_BERT |= {"position": "learned", "max_length": 512, "attention_dropout": 0.1}
# Radford et al. 2019: a decoder alone, normalised before each sub-layer.
_GPT = _sizes(12, 768, 12, 3072, activation="gelu_tanh", norm_at="pre")
_GPT |= {"position": "learned", "max_length": 1024, "attention_dropout": 0.1}
# Raffel et al. 2020: bucketed relative positions, RMS norm, no biases, unscaled scores.
_T5 = _sizes(6, 512, 8, 2048, head_width=64, score="dot", norm="rms", norm_at="pre", norm_eps=1e-6, bias="none")
_T5 |= {"position": "bucket", "ff_dropout": 0.1, "attention_dropout": 0.1}
# Touvron et al. 2023: rotary positions, gated feed-forward, and in the large ones grouped-query attention.
_LLAMA = _sizes(32, 4096, 32, 11008, activation="silu", gated=True, norm="rms", norm_at="pre", bias="none")
_LLAMA |= {"position": "rotary", "dropout": 0.0}
# Dai et al. 2019: relative positions and a memory of earlier segments.
_XL = _sizes(12, 512, 8, 2048, bias="ff", position="relative", memory=512)
# Kitaev et al. 2020: LSH attention in reversible layers.
_REFORMER = _sizes(12, 1024, 8, 4096, mixer="lsh", norm_at="pre", norm_eps=1e-12, bias="ff", residual="reversible")
_REFORMER |= {"position": "axial", "max_length": 65536, "axial": {"rows": 128, "columns": 512, "row_width": 256}}
_REFORMER |= {"lsh": {"hashes": 4, "chunk": 64}}
# Dosovitskiy et al. 2021: image patches read like tokens.
_VIT = _sizes(12, 768, 12, 3072, activation="gelu", norm_at="pre", norm_eps=1e-12)
_VIT |= {"position": "learned", "max_length": 197, "dropout": 0.0}

_UNSCALED: Table = {"scale_embeddings": False}
_UNTIED: Table = {"tie_output": False}
_MASKED: Table = _UNSCALED | {"token_types": 2, "output": "transformed", "output_bias": True, "frame": "both"}
_CAUSAL: Table = _UNSCALED | {"start": "eos", "frame": "none"}
_LLAMA_HEAD: Table = _UNSCALED | _UNTIED | {"frame": "start"}
_SHARED_FROM_PAD: Table = _UNSCALED | {"share_embeddings": True, "start": "pad"}
_CLASSES: Table = _UNSCALED | {"output": "classes", "output_bias": True}

PRESETS: dict[str, Table] = {
    # Vaswani et al. 2017, Table 3. One vocabulary for source, target and LM head.
    "transformer-base": _seq2seq(_BASE, share_embeddings=True),
    "transformer-big": _seq2seq(_sizes(6, 1024, 16, 4096, dropout=0.3), share_embeddings=True),
    # The same design for little data: normalised before each sub-layer, which trains without a long warm-up, and with
    # rotary positions, which got further than sinusoids in the same number of steps (BENCHMARKS.md).
    "transformer-small": _seq2seq(_sizes(4, 256, 4, 1024, dropout=0.2) | _SMALL_DATA),
    "transformer-tiny": _seq2seq(_sizes(2, 128, 4, 512, dropout=0.1) | _SMALL_DATA),
    # Bahdanau et al. 2015: additive score of the state before the step, whose input the context joins.
    "rnn-bahdanau": _seq2seq(
        _RECURRENT | {"mixer": "gru", "layers": 1, "score": "additive"},
        decoder={"attend_first": True},
        **_UNSCALED,
        **_UNTIED,
    ),
    # Luong et al. 2015: general score of the state after the step, with input feeding.
    "rnn-luong": _seq2seq(
        _RECURRENT | {"mixer": "lstm", "layers": 2, "score": "general"}, decoder={"input_feeding": True}, **_UNSCALED
    ),
    # Junczys-Dowmunt et al. 2018, as its translation models are published.
    "marian": _seq2seq(
        _BASE | {"activation": "silu", "position": "sinusoid_halves"},
        share_embeddings=True,
        output_bias=True,
        start="pad",
        **_vocab(58101),
    ),
    "bert-base": {"encoder": _BERT, **_MASKED, **_vocab(30522)},
    "bert-large": {"encoder": _BERT | _sizes(24, 1024, 16, 4096), **_MASKED, **_vocab(30522)},
    "bert-tiny": {"encoder": _BERT | _TINY, **_MASKED},
    "gpt2": {"decoder": _GPT, **_CAUSAL, **_vocab(50257)},
    "gpt-tiny": {"decoder": _GPT | _TINY | {"max_length": 256}, **_CAUSAL},
    "t5-small": _seq2seq(_T5, **_SHARED_FROM_PAD, **_vocab(32128)),
    "t5-base": _seq2seq(_T5 | _sizes(12, 768, 12, 3072), **_SHARED_FROM_PAD, **_vocab(32128)),
    "t5-v1.1-small": _seq2seq(
        _T5 | _sizes(8, 512, 6, 1024, activation="gelu_tanh", gated=True),
        **_SHARED_FROM_PAD,
        **_UNTIED,
        **_vocab(32128),
    ),
    "t5-tiny": _seq2seq(_T5 | _TINY | {"head_width": 32}, **_SHARED_FROM_PAD),
    "llama-2-7b": {"decoder": _LLAMA, **_LLAMA_HEAD, **_vocab(32000)},
    "llama-2-70b": {"decoder": _LLAMA | _sizes(80, 8192, 64, 28672, kv_heads=8), **_LLAMA_HEAD, **_vocab(32000)},
    "llama-3-8b": {
        "decoder": _LLAMA | {"kv_heads": 8, "ff": 14336, "rotary": {"base": 500000.0}},
        **_LLAMA_HEAD,
        **_vocab(128256),
    },
    "llama-tiny": {"decoder": _LLAMA | _TINY | {"ff": 344}, **_CAUSAL},
    "transformer-xl": {"decoder": _XL, "start": "eos", "frame": "none", **_vocab(204)},
    "xl-tiny": {"decoder": _XL | _TINY | {"memory": 128}, "start": "eos", "frame": "none"},
    "reformer": {"decoder": _REFORMER, **_CAUSAL, **_UNTIED, **_vocab(258)},
    "reformer-tiny": {
        "decoder": _REFORMER | _TINY | {"axial": {"rows": 128, "columns": 256, "row_width": 64}, "max_length": 32768},
        **_CAUSAL,
        **_UNTIED,
    },
    "vit-base": {
        "encoder": _VIT,
        "patches": {"height": 224, "width": 224, "channels": 3, "size": 16},
        "classes": 1000,
        **_CLASSES,
    },
    "vit-tiny": {
        "encoder": _VIT | _TINY | {"max_length": 17},
        "patches": {"height": 8, "width": 8, "channels": 1, "size": 2},
        "classes": 10,
        **_CLASSES,
    },
}


def merge(base: Table, changes: Table) -> Table:
    """Tables with `changes` laid over `base`, nested ones likewise."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def applicable_changes(base: Table, changes: Table) -> Table:
    """Changes without those to a stack that `base` does not have, where they are the same for both stacks."""
    stacks = {name: changes.get(name) for name in ("encoder", "decoder")}
    encoder, decoder = stacks.values()
    if not isinstance(encoder, dict) or not isinstance(decoder, dict):
        return changes
    own_keys = {"encoder": encoder.keys() - decoder.keys(), "decoder": decoder.keys() - encoder.keys()}
    return {key: value for key, value in changes.items() if key not in stacks or base.get(key) or own_keys[key]}


# Keys that a recurrent stack uses; only a decoder attends. All others belong to attention layers.
_RECURRENT_KEYS = {"encoder": {"mixer", "layers", "width", "dropout"}}
_RECURRENT_KEYS["decoder"] = _RECURRENT_KEYS["encoder"] | {
    *("score", "cross_window", "cross_center", "max_length", "attention_dropout", "input_feeding", "attend_first")
}


def unused_changes(base: Table, changes: Table) -> list[tuple[str, str]]:
    """(stack, key) of changes that a recurrent stack does not use, unless the other stack uses the same one."""
    stacks = {name: stack for name in ("encoder", "decoder") if isinstance(stack := changes.get(name), dict)}
    unused = {
        name: {key for key, value in stack.items() if key not in _RECURRENT_KEYS[name] and value != "none"}
        if merge(base.get(name) or {}, stack).get("mixer") in ("gru", "lstm")
        else set()
        for name, stack in stacks.items()
    }

    def used(key: str, value: Any) -> bool:
        return any(key not in unused[name] and stack.get(key) == value for name, stack in stacks.items())

    return [(name, key) for name, keys in unused.items() for key in sorted(keys) if not used(key, stacks[name][key])]


def refuse_unused(base: Table, changes: Table) -> None:
    """Raise an error that names the changes without effect."""
    if unused := unused_changes(base, changes):
        names = ", ".join(f"{stack}.{key}" for stack, key in unused)
        raise UserError(f"model: {names}: not used by a recurrent stack (gru, lstm), only by attention layers")


def preset(
    name: str,
    vocab: int | None = None,
    *,
    source_vocab: int | None = None,
    target_vocab: int | None = None,
    changes: Table | None = None,
) -> Config:
    """The config of a family, with vocabularies (`vocab` serves both sides) and changed keys."""
    if name not in PRESETS:
        raise one_of("preset", name, PRESETS)
    table = merge(PRESETS[name], applicable_changes(PRESETS[name], changes or {}))
    for side, size in (("source_vocab", source_vocab), ("target_vocab", target_vocab)):
        size = vocab if size is None else size
        table[side] = table.get(side, 8000) if size is None else size
    if table["source_vocab"] != table["target_vocab"] and "share_embeddings" not in (changes or {}):
        table["share_embeddings"] = False  # two vocabularies cannot share an embedding
    return parse(Config, table, f"preset {name}")


def changed_recipe(recipe: str | None, options: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """A recipe's tables with options (train.steps: 9) laid over them, and `--set` settings over both.

    What a recipe sets for its own preset and another preset does not read is left out.
    """
    tables = recipe_tables(recipe) if recipe is not None else {}
    chosen: dict[str, Any] = {"preset": options.get("preset", tables.get("preset"))}
    for setting in settings:
        if setting.partition("=")[0].strip() == "preset":
            assign(chosen, setting)
    if chosen["preset"] != tables.get("preset") and isinstance(tables.get("model"), dict):
        for stack, key in unused_changes(PRESETS.get(chosen["preset"], {}), tables["model"]):
            del tables["model"][stack][key]
    for table, alternatives in (("train", {"minutes", "steps", "epochs"}), ("data", {"train", "source", "target"})):
        if any(f"{table}.{key}" in options for key in alternatives):  # a budget, or data, replaces the recipe's
            for key in alternatives:
                tables.get(table, {}).pop(key, None)
    for path, value in options.items():
        put(tables, path.split("."), value)
    for setting in settings:
        assign(tables, setting)
    return tables


def model_without_data(recipe: Recipe, vocab: int | None, where: str) -> Config:
    """The model of a recipe whose vocabulary is not known yet: `vocab`, or the size that its tokens ask for."""
    if recipe.preset == "auto":
        raise UserError(f"{where}: its preset is chosen from the data; name one with --set preset=transformer-small")
    source, target = (
        vocab or (int(size) if (size := tokens.partition(":")[2]).isdigit() else None)
        for tokens in (recipe.text.source_tokens, recipe.text.target_tokens)
    )
    config = preset(recipe.preset, source_vocab=source, target_vocab=target, changes=recipe.model)
    refuse_unused(PRESETS[recipe.preset], recipe.model)
    return config
