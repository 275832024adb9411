"""The families, as values. This file and `convert` are the only ones that know their names."""

from __future__ import annotations

from typing import Any

from regard.config import Config, parse
from regard.errors import one_of

Table = dict[str, Any]


def _both(stack: Table, **joined: Any) -> Table:
    return {"encoder": dict(stack), "decoder": dict(stack), **joined}


BASE: Table = {"layers": 6, "width": 512, "heads": 8, "ff": 2048, "dropout": 0.1}

PRESETS: dict[str, Table] = {
    # Vaswani et al. 2017, Table 3. One vocabulary for source, target and prediction layer.
    "transformer-base": _both(BASE, share_embeddings=True),
    "transformer-big": _both(BASE | {"width": 1024, "heads": 16, "ff": 4096, "dropout": 0.3}, share_embeddings=True),
    # The same design for little data; normalised before each sub-layer, which trains without a long warm-up.
    "transformer-small": _both(
        BASE | {"layers": 4, "width": 256, "heads": 4, "ff": 1024, "dropout": 0.2, "norm_at": "pre"}
    ),
    "transformer-tiny": _both(
        BASE | {"layers": 2, "width": 128, "heads": 4, "ff": 512, "dropout": 0.1, "norm_at": "pre"}
    ),
    # Bahdanau et al. 2015: additive score, asked with the state before the step, which the context then enters.
    "rnn-bahdanau": _both(
        {"mixer": "gru", "layers": 1, "width": 256, "score": "additive", "position": "none", "dropout": 0.2},
        scale_embeddings=False,
        tie_output=False,
    )
    | {},
    # Luong et al. 2015: asked with the state after the step, general score, input feeding.
    "rnn-luong": _both(
        {"mixer": "lstm", "layers": 2, "width": 256, "score": "general", "position": "none", "dropout": 0.2},
        scale_embeddings=False,
    ),
}
PRESETS["rnn-bahdanau"]["decoder"]["attend_first"] = True
PRESETS["rnn-luong"]["decoder"]["input_feeding"] = True


def merge(base: Table, changes: Table) -> Table:
    """Tables with `changes` laid over `base`, nested ones likewise."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


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
    table = merge(PRESETS[name], changes or {})
    table["source_vocab"] = source_vocab or vocab or table.get("source_vocab") or 8000
    table["target_vocab"] = target_vocab or vocab or table.get("target_vocab") or 8000
    if table["source_vocab"] != table["target_vocab"] and "share_embeddings" not in (changes or {}):
        table["share_embeddings"] = False  # two vocabularies cannot share a table
    return parse(Config, table, f"preset {name}")
