"""Expensive directories: one pytest-xdist worker makes each of them, every worker gets a copy."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_copy(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A copy of a directory that `make` fills once per test session."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker has a subdirectory of the session directory
        base = base.parent
    original = base / f"shared-{name}"
    done = base / f"shared-{name}.done"
    with (base / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            original.mkdir()
            make(original)
            done.touch()
    copy = factory.mktemp(name) / name
    shutil.copytree(original, copy)
    return copy
