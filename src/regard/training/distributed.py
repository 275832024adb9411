"""Data-parallel training: the process group, the workers that this machine starts, and the sum of their gradients."""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard.errors import UserError

TIMEOUT = datetime.timedelta(minutes=30)
FOREVER = datetime.timedelta(days=30)
STORE = "REGARD_STORE"  # names the rendezvous file of the workers that `Workers` starts
EXIT_SECONDS = 5.0  # that the workers have to exit before they are killed
LAST = b"\0"  # no signal has this number


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


def form_group(rank: int, size: int, device: torch.device, store: Any, offload: bool = False) -> ProcessGroup:
    """Form the process group; the processes meet in a store, or in the file of that name."""
    backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    if offload and bound is not None:  # the norm and whole copies of offloaded shards are computed on the CPU
        backend = "cpu:gloo,cuda:nccl"
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


class DDPModule:
    """A module in DistributedDataParallel: gradients are summed over all processes while they are computed.

    Of the backward passes of a step only the last one sends gradients. A process whose memory runs out in it can give
    the step up without leaving the others waiting. With `bf16`, gradients are sent in bfloat16.
    """

    def __init__(self, module: nn.Module, bf16: bool) -> None:
        self._bf16 = bf16
        self._sums: list[torch.futures.Future[Tensor]] = []  # of the buckets of gradients that this step has sent
        self.sent_all = False
        self._ddp = DistributedDataParallel(
            _ModuleOrFill(module),
            init_sync=False,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            # Not only for parameters that a step does not use: without it buckets are laid out anew after the first
            # step. Of three processes or more the sums have other bits then, and a resumed run would not end like one
            # that was not interrupted.
            find_unused_parameters=True,
        )
        self._ddp.register_comm_hook(None, lambda _, bucket: self._all_reduce(bucket))

    def begin(self) -> None:
        """Begin a step: nothing was sent yet."""
        self._sums.clear()
        self.sent_all = False

    def sending(self, last: bool) -> AbstractContextManager[None]:
        """Around a forward and a backward pass: gradients are sent if it is the last one of the step."""
        return nullcontext() if last else self._ddp.no_sync()

    def __call__(self, *inputs: Any) -> Any:
        return self._ddp(*inputs)

    def add_nothing(self) -> None:
        """Take part in the sum of a step in which this process has nothing to read."""
        self._ddp(fill=0.0).backward()

    def give_up(self) -> bool:
        """End a pass that failed -> whether other processes have gradients from it; the rest of them becomes NaN.

        If not, the others wait, and this process can begin its step again.
        """
        for pending in self._sums:
            pending.wait()
        self._ddp.reducer._reset_state()  # lets a forward pass follow a backward pass that failed
        if self._sums:
            self._ddp(fill=math.nan).backward()  # sends the buckets that the others wait for
        return bool(self._sums)

    def _all_reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Sum a bucket over all processes: a mean would be wrong, for the loss is divided by the tokens of all."""
        index: int = bucket.index()
        if index < len(self._sums):  # the pass that failed has sent it
            return self._sums[index]
        gradients: Tensor = bucket.buffer()
        sent = gradients.bfloat16() if self._bf16 else gradients

        def received(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            (total,) = done.value()  # raises what went wrong
            return gradients.copy_(total) if self._bf16 else total

        summed: torch.futures.Future[Tensor] = dist.all_reduce(sent, async_op=True).get_future().then(received)
        self._sums.append(summed)
        self.sent_all = bucket.is_last()
        return summed


class _ModuleOrFill(nn.Module):
    """A module, which can also be called without inputs, for a loss whose gradient is `fill`.

    With 0 it is that of one parameter, for a parameter that no process uses is to have none.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        # DistributedDataParallel prints a warning in every process if it looks for unused parameters and finds none.
        # With one, a GPU is waited for at the end of a backward pass; the norm is asked for right after it anyway.
        self._unused = nn.Parameter(next(module.parameters()).new_zeros(1))

    def forward(self, *inputs: Any, fill: float | None = None) -> Any:
        if fill is None:
            return self._module(*inputs)
        trained = [p for p in self._module.parameters() if p.requires_grad]
        return fill * torch.stack([p.sum() for p in (trained if fill else trained[:1])]).sum()


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
