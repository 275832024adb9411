"""The description of a model for the core: a table of numbers and a list of tensors, from a config and weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, localcontext
from typing import Any

import numpy as np

from regard_native.config import model_config
from regard_native.core import NativeError

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "tanh")
POSITIONS = ("none", "sinusoid", "sinusoid_halves", "learned", "rotary", "alibi", "bucket", "relative")
MIXERS = ("attention", "gru", "lstm")
SCORES = {"scaled_dot": 0, "dot": 0, "general": 1, "cosine": 2, "additive": 3, "concat": 3, "location": 4}
FAR = 128  # distance from which on buckets are constant
BUCKETS = 32
FLOATS = ("float16", "float32", "float64")
MAGIC = b"regardrn"  # of a packed file
FILE_VERSION = 1


class Description:
    """The numbers and tensors in the order in which `read_model` of the core reads them."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> None:
        config = model_config(config)
        for name, weight in weights.items():
            if weight.dtype not in FLOATS:
                raise NativeError(
                    f"the weights {name:.100} have the type {weight.dtype}; allowed are {', '.join(FLOATS)}"
                )
        self.numbers: list[float] = []
        self.tensors: list[np.ndarray] = []
        self._weights = weights
        self._unused = set(weights)
        encoder, decoder = config["encoder"], config["decoder"]
        source = "source_embedding.weight"
        target = source if config["share_embeddings"] and encoder is not None else "target_embedding.weight"
        start = config["ids"][config["start"]]
        scales = [
            math.sqrt(stack["width"]) if config["scale_embeddings"] and stack else 1.0 for stack in (encoder, decoder)
        ]
        self.numbers += [config["source_vocab"], config["target_vocab"], start, config["ids"]["eos"], *scales]
        self._stack("encoder", encoder)
        self._stack("decoder", decoder, crosses=encoder is not None)
        if encoder is not None:
            self._tensor(source)
        self._tensor(target)
        self._tensor(target if config["tie_output"] else "output.weight")
        if config["output_bias"]:
            self._tensor("output.bias")
        else:
            self._add(None)
        if self._unused:
            raise NativeError(f"the weights do not fit config.json: {min(self._unused):.100} is not known")

    def _tensor(self, name: str) -> None:
        self._unused.discard(name)
        self._add(self._weights.get(name))

    def _linear(self, name: str) -> None:
        self._tensor(f"{name}.weight")
        self._tensor(f"{name}.bias")

    def _stack(self, name: str, stack: Mapping[str, Any] | None, crosses: bool = False) -> None:
        self.numbers.append(stack is not None)
        if stack is None:
            return
        self.numbers += [MIXERS.index(stack["mixer"]), stack["width"], stack["layers"], stack["heads"]]
        if stack["mixer"] != "attention":
            self._recurrent(name, stack)
            return
        query = self._weight(f"{name}.blocks.0.attention.query.weight")
        heads = stack["heads"] if stack["kept_heads"] is None else len(stack["kept_heads"][0])
        head_width = stack["head_width"] or stack["width"] // stack["heads"]
        if query.shape != (heads * head_width, stack["width"]):  # the tables below have these sizes
            raise NativeError(f"the weights do not fit config.json: the {name} has other widths")
        pre = stack["norm_at"] == "pre"
        window = min((limit for limit in (stack["window"], stack["memory"]) if limit), default=0)
        self.numbers += [
            stack["ff"], window, pre, stack["norm"] == "rms", stack["norm_eps"],
            ACTIVATIONS.index(stack["activation"]), stack["gated"],
        ]  # fmt: skip
        self._position(name, stack)
        self.numbers.append(stack["embed_norm"])
        if stack["embed_norm"]:
            self._linear(f"{name}.embed_norm")
        if pre:
            self._linear(f"{name}.norm")
        for layer in range(stack["layers"]):
            block = f"{name}.blocks.{layer}"
            self._attention(stack, stack["kept_heads"], layer, f"{block}.attention", f"{block}.attention_residual.norm")
            if crosses:
                norm = f"{block}.cross_residual.norm"
                self._attention(stack, stack["kept_cross_heads"], layer, f"{block}.cross", norm, crosses=True)
            self._linear(f"{block}.feed_forward.up")
            if stack["gated"]:
                self._linear(f"{block}.feed_forward.gate")
            self._linear(f"{block}.feed_forward.down")
            self._linear(f"{block}.feed_forward_residual.norm")

    def _recurrent(self, name: str, stack: Mapping[str, Any]) -> None:
        self.numbers += [stack["input_feeding"], stack["attend_first"]]
        decodes = name == "decoder"
        for layer in range(stack["layers"]):
            cell = f"{name}.blocks.{layer}" + ".cell" * decodes
            for direction in ("",) if decodes else ("", "_reverse"):
                for part in ("ih", "hh"):
                    self._tensor(f"{cell}.weight_{part}_l0{direction}")
                    self._tensor(f"{cell}.bias_{part}_l0{direction}")
        if decodes:
            cross = f"{name}.blocks.{stack['layers'] - 1}.cross"
            width = stack["width"]
            scale = 1 / math.sqrt(width) if stack["score"] == "scaled_dot" else 1.0
            self.numbers += [1, 1, width, width, width, False, scale, 0, 0]
            self._score(stack, cross, [0], [0], width, crosses=True)
            for layer in range(stack["layers"]):
                self._linear(f"{name}.bridges.{layer}")
            self._linear(f"{name}.combine")

    def _attention(
        self,
        stack: Mapping[str, Any],
        kept: Sequence[Sequence[int]] | None,
        layer: int,
        name: str,
        norm: str,
        crosses: bool = False,
    ) -> None:
        heads = list(range(stack["heads"]) if kept is None else kept[layer])
        kv_heads = stack["kv_heads"] or stack["heads"]
        groups = [head * kv_heads // stack["heads"] for head in heads]
        used = sorted(set(groups))
        width = stack["head_width"] or stack["width"] // stack["heads"]
        scale = 1 / math.sqrt(width) if stack["score"] == "scaled_dot" else 1.0
        self.numbers += [len(groups), len(used), width, width, stack["value_width"] or width, True, scale]
        groups = [used.index(group) for group in groups]
        self.numbers += [*groups, *heads]
        self._score(stack, name, groups, list(range(len(used))), width, crosses)
        for part in ("query", "key_value", "out"):
            self._linear(f"{name}.{part}")
        self._linear(norm)

    def _score(
        self,
        stack: Mapping[str, Any],
        name: str,
        groups: Sequence[int],
        kv_heads: Sequence[int],
        width: int,
        crosses: bool,
    ) -> None:
        """The score function, the window and the relative positions of an attention."""
        score = stack["score"]
        heads = range(len(groups))
        self.numbers.append(SCORES[score])
        if score in ("general", "location"):
            weight = self._weight(f"{name}.score.weight")
            if score == "location":
                self.numbers.append(weight.shape[2])
            for head in heads:
                self._add_linear(weight[head].T)
        elif score == "cosine":
            self.numbers += [math.exp(x) for x in self._weight(f"{name}.score.log_temperature").ravel().tolist()]
        elif score in ("additive", "concat"):
            if score == "additive":
                query, key = self._weight(f"{name}.score.query_weight"), self._weight(f"{name}.score.key_weight")
                bias = self._weight(f"{name}.score.bias")
            else:
                both = self._weight(f"{name}.score.weight")
                query, key, bias = both[:, :width], both[:, width:], None
            for head in heads:
                self._add_linear(query[head].T, None if bias is None else bias[head].ravel())
            for head in kv_heads:
                self._add_linear(key[head].T)
            for head in heads:
                self._add(self._weight(f"{name}.score.v")[head].ravel())
        self.numbers.append(stack["cross_window"] or 0 if crosses else 0)
        centered = crosses and stack["cross_center"] == "predicted"
        self.numbers.append(centered)
        if centered:
            for head in heads:
                self._add_linear(self._weight(f"{name}.center.hidden")[head].T)
            for head in heads:
                self._add(self._weight(f"{name}.center.v")[head].ravel())
        relative = stack["position"] == "relative" and not crosses
        self.numbers.append(relative)
        if relative:
            self.numbers.append(stack["reach"] or 0)
            for part in ("content", "place"):
                for head in heads:
                    self._add(self._weight(f"{name}.relative.{part}")[head])
            self._tensor(f"{name}.relative.project.weight")

    def _weight(self, name: str) -> np.ndarray:
        if name not in self._weights:
            raise NativeError(f"the weights do not fit config.json: {name} is missing")
        self._unused.discard(name)
        return self._weights[name]

    def _add(self, tensor: np.ndarray | None) -> None:
        self.numbers.append(-1 if tensor is None else len(self.tensors))
        if tensor is not None:
            self.tensors.append(tensor)

    def _add_linear(self, weight: np.ndarray, bias: np.ndarray | None = None) -> None:
        self._add(weight)
        self._add(bias)

    def _position(self, name: str, stack: Mapping[str, Any]) -> None:
        kind = stack["position"]
        self.numbers.append(POSITIONS.index(kind))
        if kind in ("sinusoid", "sinusoid_halves", "relative"):
            self._rates([_power(10_000.0, -2 * i, stack["width"]) for i in range((stack["width"] + 1) // 2)])
        elif kind == "rotary":
            self._rates(rotary_rates(stack["head_width"] or stack["width"] // stack["heads"], stack["rotary"]))
        elif kind == "learned":
            self.numbers.append(stack["max_length"])
            self._tensor(f"{name}.position.table.weight")
        elif kind == "alibi":
            self.numbers += alibi_slopes(stack["heads"])
        elif kind == "bucket":
            self.numbers.append(BUCKETS)
            self._tensor(f"{name}.position.table.weight")
            self.numbers.append(FAR)
            self.numbers += [bucket(offset, name == "encoder", BUCKETS) for offset in range(-FAR, FAR + 1)]

    def _rates(self, rates: Sequence[float]) -> None:
        self.numbers += [len(rates), *rates]


def packed(
    header: Sequence[int],
    numbers: Sequence[float],
    tensors: Sequence[np.ndarray],
    ids: Sequence[Sequence[int]],
    vocabularies: Sequence[Sequence[bytes]],
) -> Iterator[bytes]:
    """The parts of a file for C programs; docs/native.md describes it."""
    counts = [len(numbers), len(tensors), *map(len, ids)]
    for texts in vocabularies:
        counts += [len(texts), sum(map(len, texts))]
    yield MAGIC + _little([FILE_VERSION, *header, *counts], "<i4")
    yield _little(numbers, "<f8")
    yield _little([tensor.size for tensor in tensors], "<i8")
    yield _little([tensor.shape[0] if tensor.ndim else 1 for tensor in tensors], "<i8")
    for tensor in tensors:
        yield _little(tensor, "<f4")
    for row in ids:
        yield _little(row, "<i4")
    for texts in vocabularies:
        yield _little(np.cumsum([len(text) for text in texts]), "<i4")
    for texts in vocabularies:
        yield b"".join(texts)


def _little(values: Any, kind: str) -> bytes:
    return np.asarray(values, dtype=kind).tobytes()


def _power(base: float, numerator: int, denominator: int) -> float:
    """base ** (numerator / denominator), with the same bits on every machine."""
    with localcontext() as context:
        context.prec = 30
        return float((Decimal(base).ln() * numerator / denominator).exp())


def rotary_rates(width: int, rotary: Mapping[str, Any]) -> list[float]:
    """The angle per position of every pair."""
    rates = [_power(rotary["base"], -2 * i, width) for i in range(width // 2)]
    if rotary["factor"] == 1:
        return rates
    turns = [rotary["original"] * rate / (2 * math.pi) for rate in rates]
    shares = [min(1.0, max(0.0, (turn - rotary["low"]) / (rotary["high"] - rotary["low"]))) for turn in turns]
    return [rate * (share + (1 - share) / rotary["factor"]) for rate, share in zip(rates, shares, strict=True)]


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), ... for n heads, a power of two; other counts add every second slope of the next power."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [_power(2.0, -8 * (i + 1), power) for i in range(power)]
    return slopes + [_power(2.0, -4 * (2 * i + 1), power) for i in range(heads - power)]


def bucket(offset: int, both_ways: bool, buckets: int) -> int:
    """The bucket of a key position minus a query position."""
    count = buckets // 2 if both_ways else buckets
    base = count if both_ways and offset > 0 else 0
    distance = abs(offset) if both_ways else max(0, -offset)
    exact = count // 2
    if distance < exact:
        return base + distance
    steps = count - exact
    # The largest s with distance / exact >= (FAR / exact) ** (s / steps), in whole numbers.
    far = max(s for s in range(steps + 1) if distance**steps * exact**s >= exact**steps * FAR**s)
    return base + min(count - 1, exact + far)
