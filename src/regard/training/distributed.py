"""The processes that train together, and the little they tell each other besides gradients."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.device import choose_device
from regard.errors import UserError

TIMEOUT = datetime.timedelta(minutes=30)
STORE = "REGARD_STORE"  # the file through which processes that we started ourselves find each other


class ProcessGroup:
    """This process's place among `size` that train together. Alone, every exchange is the identity."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and talks."""
        return self.rank == 0

    def gather(self, values: list[float]) -> list[list[float]]:
        """The numbers of every process, by rank."""
        return self.gather_later(values)()

    def gather_later(self, values: list[float]) -> Callable[[], list[list[float]]]:
        """The same, but they are only waited for when the result is called: there is work to do meanwhile."""
        if self.size == 1:
            return lambda: [values]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        sent = dist.all_gather(everyone, mine, async_op=True)

        def received() -> list[list[float]]:
            sent.wait()
            rows: list[list[float]] = torch.stack(everyone).tolist()
            return rows

        return received

    def gather_json(self, value: Any) -> list[Any]:
        """The values of every process, by rank; JSON rather than pickle."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = [int(row[0]) for row in self.gather([float(len(data))])]
        padded = data.new_zeros(max(sizes))
        padded[: len(data)] = data
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(everyone, padded)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(everyone, sizes, strict=True)]

    def share(self, value: Any) -> Any:
        """What the first process has, for everyone."""
        return self.gather_json(value if self.first else None)[0]

    def wait(self) -> None:
        """Go on when everyone has come this far."""
        self.gather([0.0])

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def started_by_others() -> bool:
    """Whether something like torchrun has already started one process per rank."""
    return _number("WORLD_SIZE", 1) > 1


def _number(name: str, default: int | None = None) -> int:
    """A number from the environment, where what starts the processes leaves it."""
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise UserError(f"{name}: is not set, although WORLD_SIZE is; start the processes with torchrun, or unset both")
    if not (value.isascii() and value.isdigit()):
        raise UserError(f"{name}: a whole number is expected in the environment, not {value!r}")
    return int(value)


def join(device: str) -> ProcessGroup:
    """Meet the other processes; the environment says who we are and where to meet."""
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if rank >= size:
        raise UserError(f"RANK: of {size} processes (WORLD_SIZE) the last is {size - 1}, not {rank}")
    store_file = os.environ.get(STORE)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if store_file is None and name not in os.environ]
    if missing:
        raise UserError(f"{missing[0]}: is not set, so the {size} processes of WORLD_SIZE cannot meet; use torchrun")
    if store_file is not None:
        ready_file(store_file, rank).touch()
    return meet(rank, size, choose_device(device, _number("LOCAL_RANK", rank)), store_file)


def ready_file(store_file: str, rank: int) -> Path:
    """The file by which a process says that it is about to join."""
    return Path(f"{store_file}.{rank}")


def meet(rank: int, size: int, device: torch.device, store_file: str | None = None) -> ProcessGroup:
    """Form the process group: through a file, or at the address in the environment."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if store_file is None:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=TIMEOUT)
    else:
        # Processes of one machine need no network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
        store = dist.FileStore(store_file, size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return ProcessGroup(rank, size, device)


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


MESSAGE = 1 << 22  # numbers sent at once: while one message is added up, the next is on its way


class GradientAllReduce:
    """The sum of everyone's gradients. With `narrow` they are sent in bfloat16."""

    def __init__(self, parameters: Iterable[nn.Parameter], narrow: bool) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self.total = torch.zeros(sum(p.numel() for p in self._parameters))
        self._sent = self.total.bfloat16() if narrow else self.total
        self._sent_parts, self._total_parts = self._parts(self._sent), self._parts(self.total)

    def __call__(self) -> None:
        """Replace the gradients of this process by those of all."""
        for part, parameter in zip(self._sent_parts, self._parameters, strict=True):
            if parameter.grad is None:  # it had no part in this process's share
                part.zero_()
            else:
                part.copy_(parameter.grad)
        for message in [dist.all_reduce(numbers, async_op=True) for numbers in self._sent.split(MESSAGE)]:
            message.wait()
        if self._sent is not self.total:
            self.total.copy_(self._sent)
        for part, parameter in zip(self._total_parts, self._parameters, strict=True):
            parameter.grad = part

    def _parts(self, numbers: Tensor) -> list[Tensor]:
        """The place of each parameter in a buffer."""
        pieces = numbers.split([p.numel() for p in self._parameters])
        return [piece.view_as(p) for piece, p in zip(pieces, self._parameters, strict=True)]


@torch.no_grad()
def same_start(parameters: Iterable[nn.Parameter]) -> None:
    """Give everyone the weights of the first process."""
    parameters = list(parameters)
    weights = torch.cat([p.detach().flatten() for p in parameters])
    dist.broadcast(weights, 0)
    for parameter, weight in zip(parameters, weights.split([p.numel() for p in parameters]), strict=True):
        parameter.copy_(weight.view_as(parameter))


CAUGHT = (signal.SIGTERM, signal.SIGINT)


class Stopped(SystemExit):
    """Training was told to stop and has saved its state; uncaught, the process ends with 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class Aborted(SystemExit):
    """Training was told to stop a second time, and did not wait to save."""


class Signals:
    """Takes note of signals; the loop asks between steps. A second signal does not wait."""

    def __init__(self) -> None:
        self.received = 0
        self._raise = False
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._old = {number: signal.signal(number, self._handle) for number in CAUGHT}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise Aborted(128 + number)
        self.received = number
        if self._raise:
            raise Stopped(number)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal raises Stopped where it arrives: for work that can be long and changes nothing."""
        if self.received:
            raise Stopped(self.received)
        self._raise = True
        try:
            yield
        finally:
            self._raise = False
