"""Shards answered over Ray Data: by actors on the machines of a cluster, each of which loads the runs once.

Actors read the input and write shards themselves, as any other process does, so that the paths are those of a file
system that all machines share. Ray starts an actor anew that has ended, and gives its shard to another one.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from regard.decode.sharded_output import POLL, Answer, ShardDirectory
from regard.errors import UserError, missing_extra
from regard.parallel.cores import cores

CONNECT = 10.0  # seconds to reach a cluster
Rows = dict[str, Any]  # a batch of Ray Data: its columns


class ShardActor:
    """An actor that answers the shards whose numbers it gets."""

    def __init__(self, out: str, make: Callable[[], Answer]) -> None:
        self.out, self.make = Path(out), make

    @cached_property
    def opened(self) -> tuple[ShardDirectory, Answer]:
        """Opened by the first shard, so that an error is reported as one of a shard."""
        return ShardDirectory(self.out), self.make()

    def __call__(self, numbers: Rows) -> Rows:
        """Answer shards -> for each an empty text, or what is wrong: Ray hands on the tracebacks of errors alone."""
        return {"error": [self._error(int(number)) for number in numbers["number"]]}

    def _error(self, number: int) -> str:
        try:
            directory, answer = self.opened
            while not directory.answer(directory.shards[number], answer):
                time.sleep(POLL)  # an actor of a driver that was killed has it, and ends soon
        except UserError as error:
            return str(error)
        return ""


def answer_shards(
    directory: ShardDirectory, make: Callable[[], Answer], address: str, actors: int | None, cpus: int, gpus: int
) -> None:
    """Answer all missing shards with `actors`, by default as many as the cluster has processors (or GPUs) for.

    `make` is called once in each actor, which gets so many processors and GPUs. `address` is that of a cluster, `auto`
    for the one that runs on this machine, or `local` to start one here for as long as this takes.
    """
    missing = directory.missing()
    if not missing:
        return
    with connected(address) as ray:
        data = import_module("ray.data")
        count = min(len(missing), actors or _room(ray.cluster_resources(), cpus, gpus))
        data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        numbers = [{"number": shard.number} for shard in missing]
        # a block for each: a block is what an actor takes, and what is done again if it ends
        rows = data.from_items(numbers, override_num_blocks=len(numbers)).map_batches(
            ShardActor,
            fn_constructor_args=(str(directory.out), make),
            batch_size=1,
            compute=data.ActorPoolStrategy(size=count),
            num_cpus=cpus,
            num_gpus=gpus,
        )
        for row in rows.iter_rows():
            if row["error"]:
                raise UserError(row["error"])


class NoCluster(UserError):
    """There is no cluster at an address, or none could be started."""


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module `ray`, connected to a cluster until the end: at an address, `auto` or `local`."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise missing_extra("--ray", error.name or "ray", "ray") from None
    try:
        _require_listener(address)
        # Ray itself would count hardware threads, also those that this process may not run on.
        resources = {"num_cpus": cores()} if address == "local" else {}
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False, **resources)
    except (OSError, ValueError, RuntimeError) as error:
        raise NoCluster(
            f"--ray {address}: no cluster there: {error}\n  local starts one here, auto finds the one of this machine"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Raise an OSError where nobody listens, at which Ray itself would try for many minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), CONNECT).close()


def _room(resources: dict[str, float], cpus: int, gpus: int) -> int:
    """How many actors the cluster has room for."""
    room = int(resources.get("GPU", 0)) // gpus if gpus else int(resources.get("CPU", 0)) // cpus
    if not room:
        what = "GPU" if gpus else f"{cpus} processors on it"
        raise UserError(f"--ray: the cluster has no machine with a {what}; its resources are {resources}")
    return room
