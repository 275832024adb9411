"""The machine: cores, devices, the memory allocator, support for bfloat16."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Literal

import torch

from regard.errors import UserError
from regard.suggest import closest

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h


def tune_allocator() -> bool:
    """Let glibc keep freed memory instead of returning it to the system at every step; False on another libc.

    The kernel must zero new pages, which costs a small model up to a third of its training time.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        ctypes.CDLL(None).gnu_get_libc_version  # noqa: B018  another libc has no such symbol
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 64 << 20))
    return all(mallopt(name, value) == 1 for name, value in settings)


def release_memory() -> None:
    """Return freed memory to the system, which glibc does by itself only where it lies at the end of the heap."""
    with suppress(OSError, AttributeError):  # another libc has no such function
        ctypes.CDLL(None).malloc_trim(0)


def choose_device(request: str, local_rank: int = 0) -> torch.device:
    """The device of that name; `auto` takes a GPU if there is one."""
    kind, colon, index = request.partition(":")
    known = ("auto", "cpu", "cuda", "mps")
    if kind not in known or (colon and kind != "cuda"):
        raise UserError(f"device: is auto, cpu, cuda, cuda:N or mps, not {request!r}{closest(kind, known)}")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise UserError("device: cuda was asked for, but torch finds no CUDA GPU; use auto or cpu")
        if index and (not index.isdigit() or int(index) >= torch.cuda.device_count()):
            raise UserError(f"device: no GPU {request}; there are {torch.cuda.device_count()}, from cuda:0")
        return torch.device("cuda", int(index) if index else local_rank % torch.cuda.device_count())
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("device: mps was asked for, but this machine has none; use auto or cpu")
    return torch.device(kind)


# Prints the time of a linear layer's products, forward and backward, in bfloat16 as a multiple of that in fp32.
_PROBE = """
import time, torch
from torch.nn import functional as F
torch.set_num_threads(1)
x, weight = torch.randn(512, 256), torch.randn(1024, 256)
def fp32():
    y = F.linear(x, weight)
    y @ weight, y.T @ x
def bf16():
    a, b = x.bfloat16(), weight.bfloat16()
    y = F.linear(a, b).float().bfloat16()
    (y @ b).float(), (y.T @ a).float()
def clock(work):
    best = 99.0
    for _ in range(20):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
print(clock(bf16) / clock(fp32))
"""


@cache
def bf16_problem(device: torch.device, probe: str = _PROBE, slow: bool = True) -> str | None:
    """Why bfloat16 should not be used on a device, or None; a CPU is probed in a process of its own, which may crash.

    With `slow`, being no faster than fp32 is a reason too.
    """
    if device.type == "cuda":
        return None if torch.cuda.is_bf16_supported() else "this GPU has no bfloat16"
    if device.type != "cpu":
        return f"not tried on {device.type}"
    try:
        result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "a trial did not end"
    if result.returncode < 0:
        return f"a trial crashed with {signal.Signals(-result.returncode).name}"
    if result.returncode:
        return f"a trial failed: {(result.stderr.strip().splitlines() or ['no message'])[-1]}"
    ratio = float(result.stdout)
    return None if ratio < 1 or not slow else f"it takes {ratio:.1f} times as long as fp32 on this processor"


def usable_precision(
    precision: Literal["fp32", "bf16"], device: torch.device, report: Callable[[str], None], slow: bool = True
) -> Literal["fp32", "bf16"]:
    """The requested precision, or fp32 with a message if the device has a problem with bf16."""
    if precision == "bf16" and (problem := bf16_problem(device, slow=slow)):
        report(f"precision: fp32 instead of bf16: {problem}")
        return "fp32"
    return precision
