"""The families, as values. This file and `convert` are the only ones that know their names."""

from __future__ import annotations

from typing import Any

from regard.config import Config, parse
from regard.errors import UserError, one_of

Table = dict[str, Any]


def _towers(both: Table, decoder: Table | None = None, **joined: Any) -> Table:
    return {"encoder": dict(both), "decoder": {**both, **(decoder or {})}, **joined}


_BASE: Table = {"layers": 6, "width": 512, "heads": 8, "ff": 2048, "dropout": 0.1}
_LITTLE: Table = _BASE | {"norm_at": "pre", "position": "rotary"}
_RECURRENT: Table = {"width": 256, "position": "none", "dropout": 0.2}

# Devlin et al. 2019: an encoder that predicts masked tokens.
_BERT: Table = {
    "layers": 12,
    "width": 768,
    "heads": 12,
    "ff": 3072,
    "activation": "gelu",
    "norm_eps": 1e-12,
    "embed_norm": True,
    "position": "learned",
    "max_length": 512,
    "attention_dropout": 0.1,
}
# Radford et al. 2019: a decoder alone, normalised before each sub-layer.
_GPT: Table = {
    "layers": 12,
    "width": 768,
    "heads": 12,
    "ff": 3072,
    "activation": "gelu_tanh",
    "norm_at": "pre",
    "position": "learned",
    "max_length": 1024,
    "attention_dropout": 0.1,
}
# Raffel et al. 2020: distances in buckets, norms without a mean, no bias, scores not scaled.
_T5: Table = {
    "layers": 6,
    "width": 512,
    "heads": 8,
    "head_width": 64,
    "ff": 2048,
    "score": "dot",
    "norm": "rms",
    "norm_at": "pre",
    "norm_eps": 1e-6,
    "bias": "none",
    "position": "bucket",
    "ff_dropout": 0.1,
    "attention_dropout": 0.1,
}
# Touvron et al. 2023: rotary positions, gated feed-forward, and in the large ones fewer heads of keys than of queries.
_LLAMA: Table = {
    "layers": 32,
    "width": 4096,
    "heads": 32,
    "ff": 11008,
    "activation": "silu",
    "gated": True,
    "norm": "rms",
    "norm_at": "pre",
    "bias": "none",
    "position": "rotary",
    "dropout": 0.0,
}
# Dai et al. 2019: segments that remember the ones before, and scores by distance.
_XL: Table = {
    "layers": 12,
    "width": 512,
    "heads": 8,
    "ff": 2048,
    "bias": "ff",
    "position": "relative",
    "memory": 512,
}
# Kitaev et al. 2020: attention among tokens that hash alike, in layers that can be run backwards.
_REFORMER: Table = {
    "mixer": "lsh",
    "layers": 12,
    "width": 1024,
    "heads": 8,
    "ff": 4096,
    "norm_at": "pre",
    "norm_eps": 1e-12,
    "bias": "ff",
    "residual": "reversible",
    "position": "axial",
    "max_length": 65536,
    "axial": {"rows": 128, "columns": 512, "row_width": 256},
    "lsh": {"hashes": 4, "chunk": 64},
}
# Dosovitskiy et al. 2021: patches of an image read like words.
_VIT: Table = {
    "layers": 12,
    "width": 768,
    "heads": 12,
    "ff": 3072,
    "activation": "gelu",
    "norm_at": "pre",
    "norm_eps": 1e-12,
    "position": "learned",
    "max_length": 197,
    "dropout": 0.0,
}
_PLAIN: Table = {"scale_embeddings": False}
_MASKED: Table = _PLAIN | {"token_types": 2, "output": "transformed", "output_bias": True, "frame": "both"}
_CAUSAL: Table = _PLAIN | {"start": "eos", "frame": "none"}
_UNTIED: Table = {"tie_output": False}
_TINY: Table = {"layers": 4, "width": 128, "heads": 4, "ff": 512, "dropout": 0.1, "attention_dropout": 0.0}


def _both(vocab: int) -> Table:
    return {"source_vocab": vocab, "target_vocab": vocab}


PRESETS: dict[str, Table] = {
    # Vaswani et al. 2017, Table 3. One vocabulary for source, target and prediction layer.
    "transformer-base": _towers(_BASE, share_embeddings=True),
    "transformer-big": _towers(_BASE | {"width": 1024, "heads": 16, "ff": 4096, "dropout": 0.3}, share_embeddings=True),
    # The same design for little data: normalised before each sub-layer, which trains without a long warm-up, and with
    # rotary positions, which got further than sinusoids in the same number of steps (BENCHMARKS.md).
    "transformer-small": _towers(
        _LITTLE | {"layers": 4, "width": 256, "heads": 4, "ff": 1024, "dropout": 0.2},
    ),
    "transformer-tiny": _towers(_LITTLE | {"layers": 2, "width": 128, "heads": 4, "ff": 512}),
    # Bahdanau et al. 2015: additive score, asked with the state before the step, which the context then enters.
    "rnn-bahdanau": _towers(
        _RECURRENT | {"mixer": "gru", "layers": 1, "score": "additive"},
        decoder={"attend_first": True},
        scale_embeddings=False,
        tie_output=False,
    ),
    # Luong et al. 2015: general score, asked with the state after the step, whose outcome is fed to the next.
    "rnn-luong": _towers(
        _RECURRENT | {"mixer": "lstm", "layers": 2, "score": "general"},
        decoder={"input_feeding": True},
        scale_embeddings=False,
    ),
    # Junczys-Dowmunt et al. 2018, as its translation models are published.
    "marian": _towers(
        _BASE | {"activation": "silu", "position": "sinusoid_halves"},
        share_embeddings=True,
        output_bias=True,
        start="pad",
        **_both(58101),
    ),
    "bert-base": {"encoder": _BERT, **_MASKED, **_both(30522)},
    "bert-large": {
        "encoder": _BERT | {"layers": 24, "width": 1024, "heads": 16, "ff": 4096},
        **_MASKED,
        **_both(30522),
    },
    "bert-tiny": {"encoder": _BERT | _TINY, **_MASKED},
    "gpt2": {"decoder": _GPT, **_CAUSAL, **_both(50257)},
    "gpt-tiny": {"decoder": _GPT | _TINY | {"max_length": 256}, **_CAUSAL},
    "t5-small": _towers(_T5, share_embeddings=True, start="pad", **_PLAIN, **_both(32128)),
    "t5-base": _towers(
        _T5 | {"layers": 12, "width": 768, "heads": 12, "ff": 3072},
        share_embeddings=True,
        start="pad",
        **_PLAIN,
        **_both(32128),
    ),
    "t5-v1.1-small": _towers(
        _T5 | {"layers": 8, "heads": 6, "ff": 1024, "activation": "gelu_tanh", "gated": True},
        share_embeddings=True,
        start="pad",
        **_PLAIN,
        **_UNTIED,
        **_both(32128),
    ),
    "t5-tiny": _towers(_T5 | _TINY | {"head_width": 32}, share_embeddings=True, start="pad", **_PLAIN),
    "llama-2-7b": {"decoder": _LLAMA, **_PLAIN, **_UNTIED, "frame": "start", **_both(32000)},
    "llama-2-70b": {
        "decoder": _LLAMA | {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "ff": 28672},
        **_PLAIN,
        **_UNTIED,
        "frame": "start",
        **_both(32000),
    },
    "llama-3-8b": {
        "decoder": _LLAMA | {"kv_heads": 8, "ff": 14336, "rotary": {"base": 500000.0}},
        **_PLAIN,
        **_UNTIED,
        "frame": "start",
        **_both(128256),
    },
    "llama-tiny": {"decoder": _LLAMA | _TINY | {"ff": 344}, **_CAUSAL},
    "transformer-xl": {"decoder": _XL, "start": "eos", "frame": "none", **_both(204)},
    "xl-tiny": {"decoder": _XL | _TINY | {"memory": 128}, "start": "eos", "frame": "none"},
    "reformer": {"decoder": _REFORMER, **_CAUSAL, **_UNTIED, **_both(258)},
    "reformer-tiny": {
        "decoder": _REFORMER | _TINY | {"axial": {"rows": 128, "columns": 256, "row_width": 64}, "max_length": 32768},
        **_CAUSAL,
        **_UNTIED,
    },
    "vit-base": {
        "encoder": _VIT,
        "patches": {"height": 224, "width": 224, "channels": 3, "size": 16},
        "output": "classes",
        "classes": 1000,
        "output_bias": True,
        "scale_embeddings": False,
    },
    "vit-tiny": {
        "encoder": _VIT | _TINY | {"max_length": 17},
        "patches": {"height": 8, "width": 8, "channels": 1, "size": 2},
        "output": "classes",
        "classes": 10,
        "output_bias": True,
        "scale_embeddings": False,
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
    """Changes without those to a tower that `base` does not have, where they are said of both towers alike."""
    given = {name: changes.get(name) for name in ("encoder", "decoder")}
    here, there = given.values()
    if not isinstance(here, dict) or not isinstance(there, dict):
        return changes
    alike = here.keys() & there.keys()
    spare = {name: changed.keys() - alike for name, changed in (("encoder", here), ("decoder", there))}
    return {key: value for key, value in changes.items() if key not in given or base.get(key) or spare[key]}


# What a recurrent tower reads; only a decoder attends. All else belongs to layers of attention.
_RECURRENT_KEYS = {"encoder": {"mixer", "layers", "width", "dropout"}}
_RECURRENT_KEYS["decoder"] = _RECURRENT_KEYS["encoder"] | {
    *("score", "cross_window", "cross_center", "max_length", "attention_dropout", "input_feeding", "attend_first")
}


def unused_changes(base: Table, changes: Table) -> list[tuple[str, str]]:
    """(tower, key) of changes that a recurrent tower does not read; said of both towers, one that reads it will do."""
    towers = {name: tower for name in ("encoder", "decoder") if isinstance(tower := changes.get(name), dict)}
    deaf = {
        name: {key for key, value in tower.items() if key not in _RECURRENT_KEYS[name] and value != "none"}
        if merge(base.get(name) or {}, tower).get("mixer") in ("gru", "lstm")
        else set()
        for name, tower in towers.items()
    }

    def heard(name: str, key: str) -> bool:
        return any(key not in deaf[other] and tower.get(key) == towers[name][key] for other, tower in towers.items())

    return [(name, key) for name, keys in deaf.items() for key in sorted(keys) if not heard(name, key)]


def refuse_unused(base: Table, changes: Table) -> None:
    """Raise an error that names the changes which would change nothing."""
    if found := unused_changes(base, changes):
        names = ", ".join(f"{tower}.{key}" for tower, key in found)
        raise UserError(f"model: {names}: not read by a recurrent tower (gru, lstm), only by layers of attention")


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
        given = vocab if size is None else size
        table[side] = table.get(side, 8000) if given is None else given
    if table["source_vocab"] != table["target_vocab"] and "share_embeddings" not in (changes or {}):
        table["share_embeddings"] = False  # two vocabularies cannot share a table
    return parse(Config, table, f"preset {name}")
