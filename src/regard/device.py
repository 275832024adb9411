"""The machine: devices, the memory allocator, support for bfloat16."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Literal

from regard.errors import UserError
from regard.recipe import DEVICES
from regard.suggest import closest

if TYPE_CHECKING:  # torch is imported when a device is chosen or tested
    import torch


def tune_allocator() -> bool:
    """Make glibc keep freed memory instead of returning it to the system at every step; False on another libc.

    The kernel must zero new pages, which can take a third of the training time of a small model.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {-3: 32 << 20, -1: 1 << 30, -2: 64 << 20}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h
    return all(mallopt(name, value) == 1 for name, value in settings.items())


def release_memory() -> None:
    """Return freed memory to the system; by default, glibc returns only memory at the end of the heap."""
    with suppress(OSError, AttributeError):  # another libc lacks this function
        ctypes.CDLL(None).malloc_trim(0)


def choose_device(request: str, local_rank: int = 0) -> torch.device:
    """The device with this name; `auto` selects a GPU if one is available."""
    import torch

    kind, colon, index = request.partition(":")
    if kind not in DEVICES or (colon and kind != "cuda"):
        raise UserError(f"device: must be auto, cpu, cuda, cuda:N or mps, not {request!r:.100}{closest(kind, DEVICES)}")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise UserError("device: torch finds no CUDA GPU on this machine; use auto or cpu")
        if index and (not index.isdigit() or int(index) >= torch.cuda.device_count()):
            raise UserError(f"device: no GPU {request}; this machine has {torch.cuda.device_count()}, from cuda:0")
        return torch.device("cuda", int(index) if index else local_rank % torch.cuda.device_count())
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("device: this machine has no mps device; use auto or cpu")
    return torch.device(kind)


# Prints the time of the matrix products of a linear layer, forward and backward, in bfloat16 relative to fp32.
_PROBE = """
import timeit, torch
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
print(min(timeit.repeat(bf16, number=1, repeat=20)) / min(timeit.repeat(fp32, number=1, repeat=20)))
"""


@cache
def bf16_problem(device: torch.device, probe: str = _PROBE, slow: bool = True) -> str | None:
    """The reason not to use bfloat16 on a device, or None; with `slow`, no speed-up over fp32 is a reason too.

    A CPU is probed in a child process, because unsupported instructions would crash this one.
    """
    if device.type == "cuda":
        import torch

        return None if torch.cuda.is_bf16_supported() else "this GPU does not support bfloat16"
    if device.type != "cpu":
        return f"not tested on {device.type}"
    try:
        result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "the test did not finish"
    if result.returncode < 0:
        return f"the test crashed with {signal.Signals(-result.returncode).name}"
    if result.returncode:
        return f"the test failed: {(result.stderr.strip().splitlines() or ['no message'])[-1]}"
    ratio = float(result.stdout)
    return None if ratio < 1 or not slow else f"it takes {ratio:.1f} times as long as fp32 on this processor"


def usable_precision(
    precision: Literal["fp32", "bf16"], device: torch.device, report: Callable[[str], None], slow: bool = True
) -> Literal["fp32", "bf16"]:
    """The requested precision, or fp32 with a message if the device cannot use bf16 well."""
    if precision == "bf16" and (problem := bf16_problem(device, slow=slow)):
        report(f"precision: fp32 instead of bf16: {problem}")
        return "fp32"
    return precision
