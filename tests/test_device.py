"""The choice of device and precision, and the tuning of the memory allocator."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from regard.device import bf16_problem, choose_device, tune_allocator
from regard.errors import UserError

CPU = torch.device("cpu")


def test_allocator_is_tuned_only_with_glibc() -> None:
    glibc = sys.platform.startswith("linux") and "glibc" in os.confstr("CS_GNU_LIBC_VERSION")  # type: ignore[operator]
    assert tune_allocator() == glibc


def test_missing_device_is_refused() -> None:
    assert choose_device("cpu") == CPU
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA GPU"):
            choose_device("cuda")
    if not torch.backends.mps.is_available():
        with pytest.raises(UserError, match="mps"):
            choose_device("mps")


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "crashed with SIGILL"),
        ("raise ValueError('no kernel')", "ValueError: no kernel"),
        ("print(1.5)", "1.5 times as long"),
        ("print(0.5)", None),
    ],
)
def test_bf16_is_probed_in_a_child_process(probe: str, reason: str | None) -> None:
    problem = bf16_problem(CPU, probe)
    assert problem is None if reason is None else reason in str(problem)
    if reason is not None:  # a run that began in bfloat16 continues in it, even if it is slow
        assert (bf16_problem(CPU, probe, slow=False) is None) == ("times" in reason)
