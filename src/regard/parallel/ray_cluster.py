"""Connection to a Ray cluster, an optional dependency."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from regard.errors import UserError, missing_extra
from regard.parallel.cores import cores

CONNECT_SECONDS = 10.0


class NoCluster(UserError):
    """No cluster answers at an address, or none could be started."""


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect to a cluster -> the module `ray`, which is shut down at the end of the context.

    `address` is HOST:PORT, `auto` for the cluster that runs on this machine, or `local` to start one here.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise missing_extra("--ray", error.name or "ray", "ray") from None
    try:
        host, colon, port = address.rpartition(":")
        if colon and port.isdigit() and "/" not in host:  # without a listener there, Ray would retry for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        # By default Ray counts hardware threads, including those outside the CPU affinity of this process.
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
