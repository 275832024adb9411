"""Starting the other processes of a training run, and making sure that all live or none.

A worker reads its standard input, which is a pipe held by the first process: when that one ends, however it ends, the
pipe closes and the worker leaves. Conversely a worker's end breaks its connections, and the first process says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from regard.errors import UserError
from regard.train.world import STORE, ready_file

PATIENCE = 5.0  # seconds a worker has to leave before it is made to


class WorkerDied(UserError):
    """A process that trained with us is gone; the message says what it left behind."""


class Workers:
    """Ranks 1 and up, as processes that run `python -m MODULE ARGUMENTS`. Leaving the context ends them."""

    def __init__(self, size: int, module: str, arguments: Sequence[str]) -> None:
        self.size = size
        self._command = [sys.executable, "-m", module, *arguments]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Workers:
        self._directory = Path(tempfile.mkdtemp(prefix="regard-"))  # readable by this user alone
        self.store_file = str(self._directory / "store")
        environment = {**os.environ, "WORLD_SIZE": str(self.size), STORE: self.store_file}
        for rank in range(1, self.size):
            with self._stderr(rank).open("wb") as stderr:
                self._processes.append(
                    subprocess.Popen(
                        self._command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        stderr=stderr,
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    )
                )
        return self

    def wait(self) -> None:
        """Wait until all are ready to meet; one that fails before would be waited for in vain."""
        ranks = range(1, self.size)
        while not all(ready_file(self.store_file, rank).exists() for rank in ranks):
            if any(process.poll() is not None for process in self._processes):
                raise WorkerDied(self._report())
            time.sleep(0.02)

    def _stderr(self, rank: int) -> Path:
        return self._directory / f"{rank}.stderr"

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, a connection that breaks because a worker is gone says which and why."""
        try:
            yield
        except RuntimeError:
            deadline = time.monotonic() + 1  # the connection may be seen to break before the end is known
            while all(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
                time.sleep(0.02)
            report = self._report()
            if report is None:
                raise
            raise WorkerDied(report) from None

    def _report(self) -> str | None:
        """What the first worker that has ended left behind."""
        for rank, process in enumerate(self._processes, start=1):
            code = process.poll()
            if code is None:
                continue
            said = self._stderr(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            hint = " (out of memory?)" if code == -9 else ""
            last = "".join(f"\n  {line}" for line in said[-15:])
            what = f"training process {rank} of {self.size} {how}{hint}"
            return f"{what}; the last checkpoint is safe, go on with --resume{last}"
        return None


def leave_with_parent() -> None:
    """In a worker: end as soon as the process that started it has ended."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="leave-with-parent").start()
