"""Runs a function in several ranks and collects the tensors they save."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from regard.parallel import children
from regard.parallel.children import Channel

MAX_SECONDS = 240  # a rank that takes longer is deadlocked


def run_ranks(size: int, target: Callable[..., None], directory: Path, *arguments: object) -> list[Any]:
    """Call `target(rank, size, store, file, *arguments)` in every rank -> the contents of the saved files."""
    files = [str(directory / f"saved-{rank}") for rank in range(size)]
    work = f"{target.__module__}:{target.__name__}"
    ranks = []
    for rank, file in enumerate(files):
        settings = {"target": work, "arguments": [rank, size, str(directory / "store"), file, *arguments]}
        ranks.append(children.spawn("kit.ranks:call", settings))
    deadline = time.monotonic() + MAX_SECONDS
    statuses = [rank.wait(max(0.0, deadline - time.monotonic())) for rank in ranks]  # None if it still runs
    errors = [rank.last_lines() for rank in ranks]
    for rank in ranks:
        rank.close()
    assert statuses == [0] * size, errors
    return [torch.load(file, weights_only=True) for file in files]


def call(channel: Channel, settings: dict[str, Any]) -> None:
    """The work of one rank of `run_ranks`."""
    module, _, name = settings["target"].partition(":")
    getattr(import_module(module), name)(*settings["arguments"])
