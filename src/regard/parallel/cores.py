"""The number of cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """The number of physical cores in the CPU affinity of this process, limited by the CPU quota of its container."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        try:
            shared = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text("ascii")
        except OSError:
            shared = str(cpu)
        siblings.add(shared.strip())
    return max(1, min(len(siblings), cpu_quota() or len(siblings)))


def cpu_quota() -> int | None:
    """The CPU quota of the cgroup in whole cores, or None without one."""
    try:
        quota, period = CPU_MAX.read_text("ascii").split()
        return None if quota == "max" else max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        return None
