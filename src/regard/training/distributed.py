"""Data-parallel training: the process group, the workers that this machine starts, and the all-reduce of gradients."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.errors import UserError

TIMEOUT = datetime.timedelta(minutes=30)
FOREVER = datetime.timedelta(days=30)
STORE = "REGARD_STORE"  # names the rendezvous file of the workers that `Workers` starts
EXIT_SECONDS = 5.0  # that the workers have to exit before they are killed
LAST = b"\0"  # no signal has this number
CHUNK = 1 << 22  # numbers per all-reduce: while one chunk is summed, the next is on its way


class ProcessGroup:
    """This process's rank among `size` that train together. With one process, every collective is the identity."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu", store: Any = None) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self._store = store  # where the processes met
        self._waits = 0

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and reports."""
        return self.rank == 0

    def gather(self, values: list[float]) -> list[list[float]]:
        """The numbers of every process, by rank."""
        return self.gather_later(values)()

    def gather_later(self, values: list[float]) -> Callable[[], list[list[float]]]:
        """The same, started now and waited for when the result is called: there is work to do meanwhile."""
        if self.size == 1:
            return lambda: [values]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        pending = dist.all_gather(gathered, mine, async_op=True)

        def wait() -> list[list[float]]:
            pending.wait()
            rows: list[list[float]] = torch.stack(gathered).tolist()
            return rows

        return wait

    def gather_json(self, value: Any) -> list[Any]:
        """The values of every process, by rank; JSON rather than pickle."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = [int(row[0]) for row in self.gather([float(len(data))])]
        padded = data.new_zeros(max(sizes))
        padded[: len(data)] = data
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(gathered, sizes, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, for all."""
        return self.gather_json(value if self.first else None)[0]

    def wait_for_first(self) -> None:
        """Wait until rank 0 calls this too, for hours if need be: a collective would give up after half an hour."""
        self._waits += 1
        key = f"first-{self._waits}"
        if self.first and self.size > 1:
            self._store.set(key, "here")
        elif self.size > 1:
            self._store.wait([key], FOREVER)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def ready_file(store_file: str, rank: int) -> Path:
    """The file that a worker creates when it is about to join."""
    return Path(f"{store_file}.{rank}")


def form_group(rank: int, size: int, device: torch.device, store: Any) -> ProcessGroup:
    """Form the process group; the processes meet in a store, or in the file of that name."""
    backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    if bound is not None:
        torch.cuda.set_device(bound)  # FSDP2 shards onto the current GPU, which would be the first one for all
    if isinstance(store, str):
        # Processes of one machine need no network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
        store = dist.FileStore(store, size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT, device_id=bound)
    return ProcessGroup(rank, size, device, store)


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether a collective failed, as it does when another process has ended."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)  # gloo has no type for it


class WorkerDied(UserError):
    """A worker has ended; the message has its status and the last lines of its stderr."""


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
        """Wait until all are about to join the group; raise WorkerDied if one fails before."""
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
        deadline = time.monotonic() + EXIT_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    @contextmanager
    def name_failures(self) -> Iterator[None]:
        """Turn a connection that breaks because a worker died into a WorkerDied with its rank and stderr."""
        try:
            yield
        except RuntimeError:
            deadline = time.monotonic() + 1  # a connection may break a moment before the exit status is there
            while all(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
                time.sleep(0.02)
            report = self._report()
            if report is None:
                raise
            raise WorkerDied(report) from None

    @contextmanager
    def continued_by(self, signals: Sequence[int]) -> Iterator[None]:
        """Continue stopped workers when one of these signals arrives here.

        While this process waits for them in a collective, Python cannot call its handlers; a thread can take note.
        """
        if threading.current_thread() is not threading.main_thread():  # elsewhere no signals arrive
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

        def watch() -> None:
            while (received := os.read(reader, 1)) != LAST:
                if before >= 0:  # the event loop of a program that has called us
                    with suppress(OSError):
                        os.write(before, received)
                if received[0] in signals and hasattr(signal, "SIGCONT"):
                    for process in self._processes:
                        process.send_signal(signal.SIGCONT)

        thread = threading.Thread(target=watch, daemon=True, name="continue-workers")
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.write(writer, LAST)
            thread.join()
            os.close(writer)
            os.close(reader)

    def _report(self) -> str | None:
        """The status and stderr of the first worker that has ended."""
        for rank, process in enumerate(self._processes, start=1):
            code = process.poll()
            if code is None:
                continue
            stderr = self._stderr(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            hint = " (out of memory?)" if code == -9 else ""
            last = "".join(f"\n  {line}" for line in stderr[-15:])
            name = f"training process {rank} of {self.size}"
            return f"{name} {how}{hint}; the last checkpoint is safe, go on with --resume{last}"
        return None


def exit_with_parent() -> None:
    """In a worker: exit as soon as the process that started it has ended."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="exit-with-parent").start()


class GradientAllReduce:
    """Sums the gradients of all processes. With `bf16` they are sent in bfloat16."""

    def __init__(self, parameters: Iterable[nn.Parameter], bf16: bool) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        device = self._parameters[0].device if self._parameters else None
        self.total = torch.zeros(sum(p.numel() for p in self._parameters), device=device)
        self._sent = self.total.bfloat16() if bf16 else self.total
        self._sent_views, self._total_views = self._views(self._sent), self._views(self.total)

    def __call__(self) -> None:
        """Replace the gradients of this process by the sum over all."""
        for view, parameter in zip(self._sent_views, self._parameters, strict=True):
            if parameter.grad is None:  # not used by this process's share of the batch
                view.zero_()
            else:
                view.copy_(parameter.grad)
        for pending in [dist.all_reduce(chunk, async_op=True) for chunk in self._sent.split(CHUNK)]:
            pending.wait()
        if self._sent is not self.total:
            self.total.copy_(self._sent)
        for view, parameter in zip(self._total_views, self._parameters, strict=True):
            parameter.grad = view

    def _views(self, buffer: Tensor) -> list[Tensor]:
        """The slice of a buffer that belongs to each parameter, in its shape."""
        pieces = buffer.split([p.numel() for p in self._parameters])
        return [piece.view_as(p) for piece, p in zip(pieces, self._parameters, strict=True)]


@torch.no_grad()
def broadcast_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Give all processes the weights of rank 0; one by one, for a copy of all may not fit beside them."""
    for parameter in parameters:
        dist.broadcast(parameter.detach(), 0)


# Sharded tensors are recognised by their methods: importing their class takes as long as a short training.


def local(x: Tensor) -> Tensor:
    """The part of a tensor that this process holds: all of it, unless it is sharded."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part


def whole(x: Tensor) -> Tensor:
    """A tensor with the shards of all processes, each of which has to ask for it."""
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full


def whole_weights(weights: Mapping[str, Tensor], wanted: bool = True) -> dict[str, Tensor]:
    """Weights with the shards of all processes, each of which has to call it; gathered on the CPU, one by one.

    A process that does not want them takes part, and gets none.
    """
    gathered = ((name, whole(x).cpu() if hasattr(x, "full_tensor") else x) for name, x in weights.items())
    return {name: x for name, x in gathered if wanted}
