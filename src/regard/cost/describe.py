"""The cost of a model without building it: parameters by part, FLOPs, memory and time."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from regard.config import Config
from regard.cost.activations import BYTES, count_activations, prediction_size
from regard.model import Model, on_meta
from regard.nn.attention import Attention
from regard.tasks import infer_task

ADAM_BYTES = 16  # a weight, its gradient and two moments
_MEMORY = ("training", "decoding", "weights", "optimizer", "activations", "cache", "cache_per_token")


@dataclass(frozen=True)
class Workload:
    """The workload for which memory and FLOPs are counted."""

    length: int = 32  # tokens of a source and of a target; for images, replaced by the number of patches
    batch_tokens: int = 4096  # tokens of each side in a training batch
    sentences: int = 32  # in a decoding batch
    beam: int = 5


@dataclass(frozen=True)
class Info:
    """The cost of a model."""

    parameters: dict[str, int]  # part -> count; they add up to `total`
    total: int
    source_flops: int  # forward pass, per source token
    target_flops: int  # forward pass, per target token
    weights: int  # bytes
    optimizer: int
    activations: int
    cache: int
    cache_per_token: int  # bytes per target token of one hypothesis
    workload: Workload

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a forward pass over one source token and one target token."""
        return self.source_flops + self.target_flops

    @property
    def training(self) -> int:
        return self.optimizer + self.activations

    @property
    def decoding(self) -> int:
        return self.weights + self.cache

    def training_seconds(self, tokens: float, rate: float) -> float:
        """The training time for this number of target tokens at `rate` FLOPs per second."""
        return 3 * self.flops_per_token * tokens / rate

    def subtotals(self) -> dict[str, int]:
        """Sums over parts with a common prefix; `.query_key_value` is the sum over q, k and v of an attention."""
        sums: Counter[str] = Counter()
        for part, count in self.parameters.items():
            *groups, leaf = part.split(".")
            prefixes = [".".join(groups[: i + 1]) for i in range(len(groups))]
            if leaf in ("query", "query_key", "key", "value"):
                prefixes.append(".".join((*groups, "query_key_value")))
            for prefix in prefixes:
                sums[prefix] += count
        return dict(sums)

    def to_json(self) -> dict[str, Any]:
        return {
            "parameters": {"total": self.total, **self.parameters},
            "subtotals": self.subtotals(),
            "flops_per_token": self.flops_per_token,
            "flops": {
                "per_source_token": self.source_flops,
                "per_target_token": self.target_flops,
                "training_per_token": 3 * self.flops_per_token,
            },
            "memory": {name: getattr(self, name) for name in _MEMORY},
            "load": asdict(self.workload),
        }


def describe(config: Config, workload: Workload | None = None) -> Info:
    """Parameters, FLOPs and memory of a model, without building it."""
    workload = workload or Workload()
    if infer_task(config) == "image":
        workload = replace(workload, length=1 + config.image_patches.count)
    model = on_meta(config)
    parameters = count_parameters(model)
    total = sum(parameters.values())
    source_flops, target_flops = count_flops(model, workload.length)
    per_source, per_target = cache_bytes(model)
    hypotheses = workload.sentences * workload.beam
    return Info(
        parameters=parameters,
        total=total,
        source_flops=source_flops,
        target_flops=target_flops,
        weights=BYTES * total,
        optimizer=ADAM_BYTES * total,
        activations=count_activations(config, workload.length, workload.batch_tokens),
        cache=workload.length * (workload.sentences * per_source + hypotheses * per_target),
        cache_per_token=per_target,
        workload=workload,
    )


_ORDER = (
    "embedding", "shared_embedding", "source_embedding", "target_embedding", "token_type_embedding", "image",
    "encoder", "decoder", "pooler", "transform", "prediction", "positions",
    "self_attention", "cross_attention", "query", "query_key", "key", "value", "out", "score",
    "feed_forward", "recurrent", "bridge", "combine", "norms",
)  # fmt: skip
_PROJECTIONS = ("query", "query_key", "key_value", "value", "out")
_LEAVES = {"feed_forward": "feed_forward", "position": "positions", "bridges": "bridge", "combine": "combine"}


def count_parameters(model: Model) -> dict[str, int]:
    """Parameters by part. Shared tensors count once: `prediction` is 0 if it is tied to the embedding."""
    parts = Counter() if model.output is None else Counter({"prediction": 0})
    for name, tensor in model.named_parameters(remove_duplicate=True):
        part = part_of(name)
        if part.endswith(".key_value"):  # one matrix: the rows of the keys, then the rows of the values
            attention = model.get_submodule(name.partition(".key_value")[0])
            assert isinstance(attention, Attention)
            keys = tensor[: attention.kv_heads * attention.head_width].numel()
            parts[part.replace("key_value", "key")] += keys
            parts[part.replace("key_value", "value")] += tensor.numel() - keys
        elif part in ("source_embedding", "target_embedding"):
            sided = part if len(model.config.stacks) == 2 else "embedding"
            parts["shared_embedding" if model.config.share_embeddings else sided] += tensor.numel()
        else:
            parts[part] += tensor.numel()
    return dict(sorted(parts.items(), key=lambda item: [_ORDER.index(step) for step in item[0].split(".")]))


def part_of(name: str) -> str:
    """The part of the model that contains the parameter with this name."""
    stack, *path = name.split(".")
    if stack not in ("encoder", "decoder"):
        return {"output": "prediction"}.get(stack, stack)
    if "norm" in path or "embed_norm" in path:
        return f"{stack}.norms"
    for step, kind in (("attention", "self_attention"), ("cross", "cross_attention")):
        if step in path:
            owner = path[path.index(step) + 1]
            return f"{stack}.{kind}.{owner if owner in _PROJECTIONS else 'score'}"
    return next((f"{stack}.{part}" for step, part in _LEAVES.items() if step in path), f"{stack}.recurrent")


# Ends of the names of weights that are added to scores, not multiplied
_ADDED = (".v", "score.bias", "log_temperature", "relative.content", "relative.place")


def count_flops(model: Model, length: int) -> tuple[int, int]:
    """FLOPs of a forward pass per source token and per target token, if both sides have `length` tokens."""
    config = model.config
    keys = length + (config.top.memory if config.has_memory else 0)
    flops_of = {"encoder": 0.0, "decoder": 0.0}  # per source token, and per target token
    for name, tensor in model.named_parameters(remove_duplicate=True):
        idle = part_of(name).endswith(("embedding", "positions", "norms", "prediction")) or name.endswith(_ADDED)
        if tensor.dim() > 1 and not idle:  # a matrix that multiplies every token
            flops = 2 * tensor.numel()
            share = _source_share(config, name)
            if name.startswith(("pooler", "decoder.bridges")):  # multiply one vector per text
                flops //= length
            elif name.startswith("image"):
                flops = flops * (length - 1) // length  # the class token is not a patch
            elif ".attention.key_value." in name or ".attention.relative." in name:
                flops = flops * keys // length  # the memory is projected by the same weights
            flops_of["encoder"] += flops * share
            flops_of["decoder"] += flops * (1 - share)
    for name, attention in model.attentions().items():
        compared = keys if isinstance(attention, Attention) else min(keys, attention.compared_keys)
        # With relative positions, distances are scored too.
        relative = isinstance(attention, Attention) and attention.relative is not None
        per_key = attention.heads * (attention.head_width * (2 if relative else 1) + attention.value_width)
        flops_of[name.partition(".")[0]] += 2 * compared * per_key
    prediction = 2 * prediction_size(model) // (length if model.classifies else 1)
    flops_of[model.top_name] += prediction
    return int(flops_of["encoder"]), int(flops_of["decoder"])


def _source_share(config: Config, name: str) -> float:
    """The share of a matrix that multiplies source tokens: the encoder, and keys and values of the cross-attention."""
    if "decoder" not in config.stacks:
        return 1.0
    if name.startswith("encoder") or ".cross.key_value." in name or name.endswith(".cross.score.key_weight"):
        return 1.0
    return 0.5 if config.top.score == "concat" and name.endswith(".cross.score.weight") else 0.0


def cache_bytes(model: Model) -> tuple[int, int]:
    """Bytes in the cache per source token of a sentence, and per target token of a hypothesis.

    The state of a recurrent decoder is not counted: its size is constant.
    """
    per_source = per_target = 0
    for name, attention in model.attentions().items():
        size = BYTES * attention.kv_heads * (attention.head_width + attention.value_width)
        if name.endswith("cross"):
            per_source += size
        elif name.startswith("decoder"):
            per_target += size
    return per_source, per_target


def measure_rate(width: int, seconds: float = 0.2) -> float:
    """FLOPs per second of this CPU in the matrix products of a model of this width."""
    width = min(width, 2048)
    x = torch.ones(512, width)
    weight = torch.ones(width, 4 * width)
    best = float("inf")
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        torch.mm(x, weight)
        best = min(best, time.perf_counter() - start)
    return 2 * 512 * width * 4 * width / best


def duration(seconds: float) -> str:
    """A duration in one unit: 2.5 hours."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def si(number: float, unit: str = "") -> str:
    """A number with an SI prefix: 201.3M, 1.5 GB."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{' ' if unit else ''}{letter}{unit}"
    return f"{number:.0f}{' ' + unit if unit else ''}"
