"""Several processes that train together, each with what it saves."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

SECONDS = 240  # one that waits longer waits for ever
# Processes are forked from one that has imported what takes longest: most of these tests would be spent on imports.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "regard.training.fit"])


def run_ranks(size: int, target: Callable[..., None], directory: Path, *arguments: object) -> list[Any]:
    """What each process saves; `target` gets its rank, their number, a store, a file to save to, and `arguments`."""
    files = [str(directory / f"saved-{rank}") for rank in range(size)]
    processes = [
        CONTEXT.Process(target=target, args=(rank, size, str(directory / "store"), file, *arguments))
        for rank, file in enumerate(files)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]  # None if it still runs
    for process in processes:
        process.kill()
    assert codes == [0] * size
    return [torch.load(file, weights_only=True) for file in files]
