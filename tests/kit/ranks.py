"""Several processes that train together, each with what it saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from regard.parallel import children
from regard.parallel.children import Channel

SECONDS = 240  # a process that takes longer is waiting for another one forever


def run_ranks(size: int, target: Callable[..., None], directory: Path, *arguments: object) -> list[Any]:
    """What each process saves; `target` gets its rank, their number, a store, a file to save to, and `arguments`."""
    files = [str(directory / f"saved-{rank}") for rank in range(size)]
    work = f"{target.__module__}:{target.__name__}"
    ranks = []
    for rank, file in enumerate(files):
        settings = {"target": work, "arguments": [rank, size, str(directory / "store"), file, *arguments]}
        ranks.append(children.spawn("kit.ranks:call", settings))
    deadline = time.monotonic() + SECONDS
    statuses = [rank.wait(max(0.0, deadline - time.monotonic())) for rank in ranks]  # None if it still runs
    errors = [rank.last_lines() for rank in ranks]
    for rank in ranks:
        rank.close()
    assert statuses == [0] * size, errors
    return [torch.load(file, weights_only=True) for file in files]


def call(channel: Channel, settings: dict[str, Any]) -> None:
    """The work of a rank of `run_ranks`."""
    module, _, name = settings["target"].partition(":")
    getattr(import_module(module), name)(*settings["arguments"])
