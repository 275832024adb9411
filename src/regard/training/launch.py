"""How this process was started: by a launcher such as torchrun, again after a failure, or alone."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from regard.device import choose_device
from regard.errors import UserError
from regard.training.distributed import STORE, TIMEOUT, ProcessGroup, form_group, is_lost_connection, ready_file


def has_launcher() -> bool:
    """Whether something like torchrun has already started one process per rank."""
    return _number("WORLD_SIZE", 1) > 1


def was_restarted() -> bool:
    """Whether torchrun has started its processes again because one of them failed."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0) > 0


class Launch(NamedTuple):
    """What torchrun has started."""

    processes: int
    launchers: frozenset[str]  # its own processes, one per machine; the same for all attempts
    restarted: bool

    @classmethod
    def of(cls, group: ProcessGroup) -> Launch:
        """How the processes of a group were started; all have to call it."""
        launcher = f"{platform.node()} {os.getppid()}" if "TORCHELASTIC_RUN_ID" in os.environ else None
        # A launcher counts only the failures of its own processes; those of all machines are started again.
        ranks = group.gather_json((launcher, was_restarted()))
        return cls(group.size, frozenset(name for name, _ in ranks if name), any(again for _, again in ranks))


def restart_problem() -> str | None:
    """Why processes that torchrun starts again may not find each other, if so."""
    several = _number("GROUP_WORLD_SIZE", 1) > 1 and _number("TORCHELASTIC_MAX_RESTARTS", 0) > 0
    if not several or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return (
        "torchrun keeps one store for all its attempts, and processes that it starts again may wait there for dead "
        "ones; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where it is started, on every machine"
    )


def _number(name: str, default: int | None = None) -> int:
    """A number from the environment, as a launcher sets it."""
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise UserError(f"{name}: is not set, although WORLD_SIZE is; start the processes with torchrun, or unset both")
    if not (value.isascii() and value.isdigit()):
        raise UserError(f"{name}: a whole number is expected in the environment, not {value!r}")
    return int(value)


def process_device(request: str) -> torch.device:
    """The device that this process trains on; of several processes on a machine with GPUs, each gets its own."""
    if ":" in request and has_launcher():
        raise UserError(f"device: {request} is one GPU for several processes; with cuda, each takes its own")
    return choose_device(request, _number("LOCAL_RANK", _number("RANK", 0)))


def join_group(device: torch.device, offload: bool = False) -> ProcessGroup:
    """Join the process group that the environment describes (rank, size, address)."""
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if rank >= size:
        raise UserError(f"RANK: of {size} processes (WORLD_SIZE) the last is {size - 1}, not {rank}")
    store_file = os.environ.get(STORE)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if store_file is None and name not in os.environ]
    if missing:
        raise UserError(f"{missing[0]}: is not set, so the {size} processes of WORLD_SIZE cannot meet; use torchrun")
    if store_file is not None:
        ready_file(store_file, rank).touch()
    return form_group(rank, size, device, store_file or _launcher_store(), offload)


def _launcher_store() -> Any:
    """The store of the launcher, or the part of it that belongs to this attempt.

    torchrun keeps one store for all its attempts, and torch 2.13 tells them apart no more: a process that was started
    again would find the address of a dead one there, and wait for it. Launchers on several machines count attempts each
    for itself: see `restart_problem`.
    """
    store, *_ = next(rendezvous("env://", timeout=TIMEOUT))
    if _number("GROUP_WORLD_SIZE", 1) > 1:
        return store
    return dist.PrefixStore(f"attempt-{_number('TORCHELASTIC_RESTART_COUNT', 0)}", store)  # type: ignore[attr-defined]


@contextmanager
def name_lost_connection() -> Iterator[None]:
    """Turn the failure of a collective into a UserError; torchrun tells which process has ended."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise UserError(
            "another training process has ended, or its machine cannot be reached; the last checkpoint is safe, go on "
            "with --resume"
        ) from None
