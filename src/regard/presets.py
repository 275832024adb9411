"""The families, as values. This file and `convert` are the only ones that know their names."""

from __future__ import annotations

from typing import Any

from regard.config import Config, parse
from regard.errors import one_of

Table = dict[str, Any]


def _towers(both: Table, decoder: Table | None = None, **joined: Any) -> Table:
    return {"encoder": dict(both), "decoder": {**both, **(decoder or {})}, **joined}


_BASE: Table = {"layers": 6, "width": 512, "heads": 8, "ff": 2048, "dropout": 0.1}
_LITTLE: Table = _BASE | {"norm_at": "pre", "position": "rotary"}
_RECURRENT: Table = {"width": 256, "position": "none", "dropout": 0.2}

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
}


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
    for side, size in (("source_vocab", source_vocab), ("target_vocab", target_vocab)):
        given = vocab if size is None else size
        table[side] = table.get(side, 8000) if given is None else given
    if table["source_vocab"] != table["target_vocab"] and "share_embeddings" not in (changes or {}):
        table["share_embeddings"] = False  # two vocabularies cannot share a table
    return parse(Config, table, f"preset {name}")
