"""The processes that train together, and the little they tell each other besides gradients."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from regard.errors import UserError
from regard.train.machine import choose_device

TIMEOUT = datetime.timedelta(minutes=30)
STORE = "REGARD_STORE"  # the file through which processes that we started ourselves find each other


class World:
    """This process's place among `size` that train together. Alone, every exchange is the identity."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and talks."""
        return self.rank == 0

    def gather(self, values: list[float]) -> list[list[float]]:
        """The numbers of every process, by rank."""
        return self.gather_later(values)()

    def gather_later(self, values: list[float]) -> Callable[[], list[list[float]]]:
        """The same, but they are only waited for when the result is called: there is work to do meanwhile."""
        if self.size == 1:
            return lambda: [values]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        sent = dist.all_gather(everyone, mine, async_op=True)

        def received() -> list[list[float]]:
            sent.wait()
            rows: list[list[float]] = torch.stack(everyone).tolist()
            return rows

        return received

    def gather_json(self, value: Any) -> list[Any]:
        """The values of every process, by rank; JSON rather than pickle."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = [int(row[0]) for row in self.gather([float(len(data))])]
        padded = data.new_zeros(max(sizes))
        padded[: len(data)] = data
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(everyone, padded)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(everyone, sizes, strict=True)]

    def share(self, value: Any) -> Any:
        """What the first process has, for everyone."""
        return self.gather_json(value if self.first else None)[0]

    def wait(self) -> None:
        """Go on when everyone has come this far."""
        self.gather([0.0])

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def started_by_others() -> bool:
    """Whether something like torchrun has already started one process per rank."""
    return _number("WORLD_SIZE", 1) > 1


def _number(name: str, default: int | None = None) -> int:
    """A number from the environment, where what starts the processes leaves it."""
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise UserError(f"{name}: is not set, although WORLD_SIZE is; start the processes with torchrun, or unset both")
    if not (value.isascii() and value.isdigit()):
        raise UserError(f"{name}: a whole number is expected in the environment, not {value!r}")
    return int(value)


def join(device: str) -> World:
    """Meet the other processes; the environment says who we are and where to meet."""
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if rank >= size:
        raise UserError(f"RANK: of {size} processes (WORLD_SIZE) the last is {size - 1}, not {rank}")
    store_file = os.environ.get(STORE)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if store_file is None and name not in os.environ]
    if missing:
        raise UserError(f"{missing[0]}: is not set, so the {size} processes of WORLD_SIZE cannot meet; use torchrun")
    if store_file is not None:
        ready_file(store_file, rank).touch()
    return meet(rank, size, choose_device(device, _number("LOCAL_RANK", rank)), store_file)


def ready_file(store_file: str, rank: int) -> Path:
    """The file by which a process says that it is about to join."""
    return Path(f"{store_file}.{rank}")


def meet(rank: int, size: int, device: torch.device, store_file: str | None = None) -> World:
    """Form the process group: through a file, or at the address in the environment."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if store_file is None:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=TIMEOUT)
    else:
        # Processes of one machine need no network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
        store = dist.FileStore(store_file, size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return World(rank, size, device)
