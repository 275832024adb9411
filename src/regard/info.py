"""The budget before the bill: parameters by part, FLOPs per token and memory of a model that need not fit this machine.

Everything is read off a model on the meta device, which has shapes but no numbers.

Parameters    every tensor once, filed under what it does; a shared table is counted where it is first used.
FLOPs         matrix products of one forward pass, a multiply and an add counted as two. A weight matrix of n numbers
              costs 2n per symbol that passes through it; attention costs 2 * heads * (head width + value width) * keys
              per query and layer: scores, and the mixing of values. Keys are the symbols of a text and those remembered
              of earlier segments; hashed attention compares with no more than its chunks hold. What is said about a
              text or an image as a whole is shared by its symbols. Biases, softmax and normalisation are left out.
              Training costs three times the forward pass.
Training      weights, gradients and two Adam moments (16 bytes per parameter), and what a forward pass over one batch
              keeps for the backward pass, which is counted by tracing it. Reversible layers keep almost nothing and
              compute it again one by one: there it is the most that is alive at once in both passes.
Decoding      weights, and keys and values for every symbol of the source and of each hypothesis.
Time          the FLOPs of training at the rate that this machine reaches in a matrix product of the model's width.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from regard.config import Config
from regard.count import BYTES, cache_bytes, count_flops, count_parameters
from regard.errors import UserError
from regard.footprint import count_activations
from regard.model import on_meta
from regard.presets import PRESETS, preset, refuse_unread
from regard.settings import Train, load_recipe

ADAM_BYTES = 16  # a weight, its gradient and two moments


@dataclass(frozen=True)
class Load:
    """The work a budget is drawn up for."""

    length: int = 32  # symbols of a source and of a target; images have as many as they have squares
    batch_tokens: int = 4096  # symbols per training batch, on either side
    sentences: int = 32  # decoded at once
    beam: int = 5


@dataclass(frozen=True)
class Info:
    """What a model costs."""

    parameters: dict[str, int]  # part -> count; they add up to `total`
    total: int
    source_flops: int  # forward pass, per source symbol
    target_flops: int  # forward pass, per target symbol
    weights: int  # bytes
    optimizer: int
    activations: int
    cache: int
    cache_per_symbol: int  # bytes per target symbol of one hypothesis
    load: Load

    @property
    def flops_per_token(self) -> int:
        """One source symbol and one target symbol, of what there is, forward."""
        return self.source_flops + self.target_flops

    @property
    def training(self) -> int:
        return self.optimizer + self.activations

    @property
    def decoding(self) -> int:
        return self.weights + self.cache

    def training_seconds(self, symbols: float, rate: float) -> float:
        """How long training on so many target symbols takes if all work goes at `rate` FLOPs per second."""
        return 3 * self.flops_per_token * symbols / rate

    def subtotals(self) -> dict[str, int]:
        """Sums over parts with a common prefix; q, k and v of an attention are summed as `.query_key_value`."""
        sums: dict[str, int] = {}
        for part, count in self.parameters.items():
            *groups, leaf = part.split(".")
            prefixes = [".".join(groups[: i + 1]) for i in range(len(groups))]
            if leaf in ("query", "query_key", "key", "value"):
                prefixes.append(".".join((*groups, "query_key_value")))
            for prefix in prefixes:
                sums[prefix] = sums.get(prefix, 0) + count
        return sums

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
            "memory": {
                "training": self.training,
                "decoding": self.decoding,
                "weights": self.weights,
                "optimizer": self.optimizer,
                "activations": self.activations,
                "cache": self.cache,
                "cache_per_token": self.cache_per_symbol,
            },
            "load": vars(self.load),
        }


def describe(config: Config, load: Load | None = None) -> Info:
    """Draw up the budget of a model."""
    load = load or Load()
    if config.patches is not None:
        load = replace(load, length=1 + config.patches.count)
    model = on_meta(config)
    parameters = count_parameters(model)
    total = sum(parameters.values())
    source_flops, target_flops = count_flops(model, load.length)
    per_source, per_target = cache_bytes(model)
    hypotheses = load.sentences * load.beam
    return Info(
        parameters=parameters,
        total=total,
        source_flops=source_flops,
        target_flops=target_flops,
        weights=BYTES * total,
        optimizer=ADAM_BYTES * total,
        activations=count_activations(config, load.length, load.batch_tokens),
        cache=load.length * (load.sentences * per_source + hypotheses * per_target),
        cache_per_symbol=per_target,
        load=load,
    )


def configure(tables: dict[str, Any], vocab: int | None, where: str) -> tuple[Config, Train]:
    """The model and training of a recipe whose vocabulary is not known yet: `vocab`, or the size its tokens ask for."""
    recipe = load_recipe(tables, where)
    if recipe.preset == "auto":
        raise UserError(f"{where}: its preset is chosen from the data; name one with --set preset=transformer-small")
    source, target = (
        vocab or (int(tokens.partition(":")[2]) if tokens.partition(":")[2].isdigit() else None)
        for tokens in (recipe.text.source_tokens, recipe.text.target_tokens)
    )
    config = preset(recipe.preset, source_vocab=source, target_vocab=target, changes=recipe.model)
    refuse_unread(PRESETS[recipe.preset], recipe.model)
    return config, recipe.train


def measure_rate(width: int, seconds: float = 0.2) -> float:
    """FLOPs per second of this machine's processor in matrix products of a model of that width."""
    width = min(width, 2048)
    x, weight = torch.ones(512, width), torch.ones(width, 4 * width)
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        began = time.perf_counter()
        torch.mm(x, weight)
        best = min(best, time.perf_counter() - began)
    return 2 * 512 * width * 4 * width / best


def duration(seconds: float) -> str:
    """A time a person can read, in one unit."""
    for size, unit in ((86400 * 2, "days"), (3600 * 2, "hours"), (60 * 2, "minutes")):
        if seconds >= size:
            return f"{seconds / (size / 2):.1f} {unit}"
    return f"{seconds:.1f} s"


def si(number: float, unit: str = "") -> str:
    """A number a person can read: 201.3M, 1.5 GB."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{' ' if unit else ''}{letter}{unit}"
    return f"{number:.0f}{' ' + unit if unit else ''}"
