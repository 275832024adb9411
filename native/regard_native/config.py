"""The table `model` of a config.json: keys, types and sizes, checked before anything is computed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from regard_native.core import NativeError

MAX_COUNT = 2**31 - 1
MAX_FEW = 1000
MAX_WIDTH = 1_000_000
TORCH = "use the engine torch"


class Rule(NamedTuple):
    """The default of a key, and which values it may have."""

    default: Any
    allowed: str
    accepts: Callable[[Any], bool]


def _whole(default: Any, least: int, most: int, none: bool = False) -> Rule:
    text = f"whole numbers from {least} to {most}" + " and null" * none
    return Rule(default, text, lambda x: (none and x is None) or (type(x) is int and least <= x <= most))


def _number(default: float, least: float, most: float) -> Rule:
    allowed = f"numbers from {least:g} to {most:g}"
    return Rule(default, allowed, lambda x: type(x) in (int, float) and least <= x <= most)


def _flag(default: bool) -> Rule:
    return Rule(default, "true and false", lambda x: type(x) is bool)


def _word(default: str, *others: str) -> Rule:
    words = (default, *others)
    return Rule(default, ", ".join(words), lambda x: isinstance(x, str) and x in words)


def _heads(x: Any) -> bool:
    whole = isinstance(x, list | tuple) and all(isinstance(heads, list | tuple) for heads in x)
    return x is None or (whole and all(type(head) is int and 0 <= head < MAX_FEW for heads in x for head in heads))


def _words(x: Any) -> bool:
    return isinstance(x, list | tuple) and all(isinstance(word, str) for word in x)


def _table(x: Any) -> bool:
    return isinstance(x, Mapping)


REQUIRED = object()
UNUSED = Rule(None, "", lambda x: True)  # by decoding
STACK = {
    "mixer": _word("attention", "lsh", "gru", "lstm"),
    "layers": _whole(6, 1, MAX_FEW),
    "width": _whole(512, 1, MAX_WIDTH),
    "heads": _whole(8, 1, MAX_FEW),
    "kv_heads": _whole(None, 1, MAX_FEW, none=True),
    "head_width": _whole(None, 1, MAX_WIDTH, none=True),
    "value_width": _whole(None, 1, MAX_WIDTH, none=True),
    "score": _word("scaled_dot", "dot", "general", "additive", "concat", "cosine", "location"),
    "window": _whole(None, 1, MAX_COUNT, none=True),
    "cross_window": _whole(None, 1, MAX_COUNT, none=True),
    "cross_center": _word("step", "predicted"),
    "ff": _whole(2048, 1, MAX_WIDTH),
    "activation": _word("relu", "gelu", "gelu_tanh", "silu", "tanh"),
    "gated": _flag(False),
    "norm": _word("layer", "rms"),
    "norm_at": _word("post", "pre"),
    "norm_eps": _number(1e-5, 1e-30, 1e30),
    "bias": _word("all", "ff", "none"),
    "residual": _word("add", "reversible"),
    "embed_norm": _flag(False),
    "position": _word(
        "sinusoid", "none", "sinusoid_halves", "learned", "axial", "rotary", "alibi", "bucket", "relative"
    ),
    "rotary": Rule({}, "a table", _table),
    "axial": UNUSED,
    "lsh": UNUSED,
    "memory": _whole(0, 0, MAX_COUNT),
    "reach": _whole(None, 1, MAX_COUNT, none=True),
    "max_length": _whole(1024, 1, MAX_COUNT),
    "dropout": UNUSED,
    "attention_dropout": UNUSED,
    "ff_dropout": UNUSED,
    "input_feeding": _flag(False),
    "attend_first": _flag(False),
    "kept_heads": Rule(None, "lists of heads by layer, and null", _heads),
    "kept_cross_heads": Rule(None, "lists of heads by layer, and null", _heads),
}
ROTARY = {
    "base": _number(10_000.0, 1.0, 1e30),
    "factor": _number(1.0, 1.0, 1e30),
    "low": _number(1.0, 1e-30, 1e30),
    "high": _number(4.0, 1e-30, 1e30),
    "original": _whole(8192, 1, MAX_COUNT),
}
IDS = {name: _whole(number, 0, MAX_COUNT) for number, name in enumerate(("pad", "unk", "sos", "eos"))} | {
    "mask": _whole(None, 0, MAX_COUNT, none=True)
}
MODEL = {
    "source_vocab": _whole(REQUIRED, 1, MAX_COUNT),
    "target_vocab": _whole(REQUIRED, 1, MAX_COUNT),
    "encoder": Rule(None, "a table and null", lambda x: x is None or _table(x)),
    "decoder": Rule(None, "a table and null", lambda x: x is None or _table(x)),
    "share_embeddings": _flag(False),
    "tie_output": _flag(True),
    "scale_embeddings": _flag(True),
    "token_types": _whole(0, 0, MAX_COUNT),
    "patches": Rule(None, "a table and null", lambda x: x is None or _table(x)),
    "output": _word("tokens", "transformed", "classes", "none"),
    "output_bias": _flag(False),
    "pooler": _flag(False),
    "classes": _whole(None, 1, MAX_COUNT, none=True),
    "start": _word("sos", "eos", "pad"),
    "frame": _word("end", "both", "start", "none"),
    "ids": Rule({}, "a table", _table),
}
TEXT = {
    "source_tokens": Rule(REQUIRED, "names of schemes", lambda x: isinstance(x, str)),
    "target_tokens": Rule(REQUIRED, "names of schemes", lambda x: isinstance(x, str)),
    "shared": _flag(False),
    "features": Rule((), "lists of names", _words),
    "columns": Rule(("source", "target"), "lists of names", _words),
    "feature_separator": Rule(";", "strings", lambda x: isinstance(x, str) and x != ""),
    "frame": _word("end", "both", "start", "none"),
    "ids": Rule(None, "a table and null", lambda x: x is None or _table(x)),
    "sizes": UNUSED,
}


def checked(table: Any, rules: Mapping[str, Rule], where: str) -> dict[str, Any]:
    """A table with the defaults of its missing keys."""
    if not isinstance(table, Mapping):
        raise NativeError(f"{where}: must be a table of keys and values")
    if unknown := sorted(f"{key!s:.50}" for key in table if key not in rules):
        raise NativeError(f"{where}.{unknown[0]}: is not known to this version")
    values = {key: table.get(key, rule.default) for key, rule in rules.items()}
    for key, rule in rules.items():
        if key not in table and rule.default is REQUIRED:
            raise NativeError(f"{where}.{key}: is required")
        if not rule.accepts(values[key]):
            kind = f"{values[key]!r:.60}" if isinstance(values[key], str | float) else type(values[key]).__name__
            if type(values[key]) is int:
                kind = f"{values[key]}" if abs(values[key]) < 10**20 else "a number of more than 20 digits"
            raise NativeError(f"{where}.{key}: is {kind}; allowed are {rule.allowed}")
    return values


def model_config(table: Any) -> dict[str, Any]:
    """A checked config of a model that the core supports."""
    config = checked(table, MODEL, "model")
    config["ids"] = checked(config["ids"], IDS, "model.ids")
    for name in ("encoder", "decoder"):
        if config[name] is not None:
            config[name] = _stack(checked(config[name], STACK, f"model.{name}"), name)
    decoder = config["decoder"]
    if decoder is None or config["output"] != "tokens" or config["patches"] or config["token_types"]:
        raise NativeError(f"the native engine decodes models that generate text from text; this one does not; {TORCH}")
    encoder = config["encoder"]
    if encoder is not None and config["share_embeddings"] and config["source_vocab"] != config["target_vocab"]:
        raise NativeError("model: with shared embeddings, both vocabularies have the same size")
    if decoder["mixer"] != "attention" and (encoder is None or encoder["width"] != decoder["width"]):
        raise NativeError("model: a recurrent decoder needs an encoder of the same width")
    return config


def _stack(stack: dict[str, Any], name: str) -> dict[str, Any]:
    for key, unsupported in (("mixer", "lsh"), ("residual", "reversible"), ("position", "axial")):
        if stack[key] == unsupported:
            raise NativeError(f"the native engine does not support {key} {stack[key]}; {TORCH}")
    where = f"model.{name}"
    stack["rotary"] = checked(stack["rotary"], ROTARY, f"{where}.rotary")
    if stack["cross_center"] == "predicted" and stack["cross_window"] is None:
        raise NativeError(f"{where}: cross_center predicted needs a cross_window")
    if stack["mixer"] != "attention":
        return stack
    heads, kv_heads = stack["heads"], stack["kv_heads"] or stack["heads"]
    width = stack["head_width"] or stack["width"] // heads
    problems = (
        (heads % kv_heads or kv_heads > heads, "heads must be a multiple of kv_heads"),
        (stack["head_width"] is None and stack["width"] % heads, "width must be a multiple of heads"),
        (stack["score"] == "concat" and heads != kv_heads, "score concat needs kv_heads equal to heads"),
        (stack["position"] == "rotary" and width % 2, "rotary positions need an even head width"),
        (stack["rotary"]["high"] <= stack["rotary"]["low"], "rotary.high must be above rotary.low"),
        (stack["reach"] and stack["position"] != "relative", "reach needs position relative"),
    )
    for failed, message in problems:
        if failed:
            raise NativeError(f"{where}: {message}")
    for key in ("kept_heads", "kept_cross_heads"):
        kept = stack[key]
        if kept is None:
            continue
        ordered = all(len(each) and list(each) == sorted(set(each)) and each[-1] < heads for each in kept)
        if len(kept) != stack["layers"] or not ordered:
            raise NativeError(f"{where}.{key}: must list, for each layer, some of the heads in order")
    return stack
