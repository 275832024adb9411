"""Process groups, whose ranks are started by torchrun or by rank 0.

torch is imported inside functions: commands that run in a single process do not pay for torch.distributed.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from regard.errors import UserError
from regard.parallel.children import Child, ChildDied, Template
from regard.parallel.messages import Channel

if TYPE_CHECKING:
    import torch

TIMEOUT = datetime.timedelta(minutes=30)
WAIT_FOR_FIRST = datetime.timedelta(days=30)
EXIT_SECONDS = 5.0  # grace period before ranks are killed
EXIT_STATUS_SECONDS = 1.0
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
RESUME = "the last checkpoint is safe, continue with resume=True"

T = TypeVar("T")


class ProcessGroup:
    """The rank of this process in a group of `size`. In a group of one, every collective is the identity."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu", store: Any = None) -> None:
        import torch

        self.rank = rank
        self.first = rank == 0  # this process writes files and reports
        self.size = size
        self.device = torch.device(device)
        self._store = store
        self._waits = 0

    def gather(self, values: list[float]) -> list[list[float]]:
        """Gather the numbers of all processes, by rank."""
        return self.gather_later(values)()

    def gather_later(self, values: list[float]) -> Callable[[], list[list[float]]]:
        """Start a gather -> a function that waits for its result."""
        if self.size == 1:
            return lambda: [values]
        import torch
        import torch.distributed as dist

        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        pending = dist.all_gather(gathered, mine, async_op=True)

        def wait() -> list[list[float]]:
            pending.wait()
            rows: list[list[float]] = torch.stack(gathered).tolist()
            return rows

        return wait

    def gather_json(self, value: Any) -> list[Any]:
        """Gather the JSON values of all processes, by rank (torch's own gather of objects uses pickle)."""
        if self.size == 1:
            return [value]
        import torch
        import torch.distributed as dist

        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = [int(row[0]) for row in self.gather([float(len(data))])]
        padded = data.new_zeros(max(sizes))
        padded[: len(data)] = data
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(gathered, sizes, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """The JSON value of rank 0."""
        return self.gather_json(value if self.first else None)[0]

    def wait_for_first(self) -> None:
        """Wait until rank 0 calls this too. It may wait for hours, while collectives time out after half an hour."""
        self._waits += 1
        key = f"first-{self._waits}"
        if self.first and self.size > 1:
            self._store.set(key, "here")
        elif self.size > 1:
            self._store.wait([key], WAIT_FOR_FIRST)

    def run_in_first(self, work: Callable[[], T]) -> T | None:
        """Run `work` in rank 0 -> its result there, None elsewhere. After a UserError the other ranks exit with 2."""
        result = None
        problem = None
        if self.first:
            try:
                result = work()
            except UserError as error:
                problem = error
        self.wait_for_first()
        failed = self.broadcast(problem is not None)
        if problem is not None:
            raise problem
        if failed:
            raise SystemExit(2)
        return result

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        if self.size == 1:
            return
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def form_group(rank: int, size: int, device: torch.device, store: Any, offload: bool = False) -> ProcessGroup:
    """Form the process group; `store` is a key-value store or, on a single machine, the name of a file."""
    import torch
    import torch.distributed as dist

    backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    if offload and bound is not None:  # the gradient norm and full copies of offloaded shards are computed on the CPU
        backend = "cpu:gloo,cuda:nccl"
    if bound is not None:
        torch.cuda.set_device(bound)  # FSDP2 uses the current GPU, by default the first one in every process
    if isinstance(store, str):  # all processes are on this machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
        store = dist.FileStore(store, size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT, device_id=bound)
    return ProcessGroup(rank, size, device, store)


def process_device(request: str, rank: int | None = None) -> torch.device:
    """The device of this process; every rank has its own GPU. If `rank` is None, it is read from the environment."""
    from regard.device import choose_device

    if ":" in request and (rank is not None or has_launcher()):
        raise UserError(f"device: {request} is one GPU for several processes; with cuda, each takes its own")
    return choose_device(request, _number("LOCAL_RANK", _number("RANK", 0)) if rank is None else rank)


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether a collective failed because another process exited."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo" in str(error)  # gloo raises RuntimeError itself


def has_launcher() -> bool:
    """Whether a launcher such as torchrun has started several processes."""
    return _number("WORLD_SIZE", 1) > 1


def was_restarted() -> bool:
    """Whether torchrun has restarted its processes after a failure."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0) > 0


class Launch(NamedTuple):
    """How the processes of a group were started."""

    processes: int
    launchers: frozenset[str]  # the torchrun processes, one per machine; the same in every attempt
    restarted: bool
    problem: str | None = None  # a reason why a restart may fail

    @classmethod
    def of(cls, group: ProcessGroup) -> Launch:
        """Gather the facts from every process of the group; all of them must call this."""
        launcher = f"{platform.node()} {os.getppid()}" if "TORCHELASTIC_RUN_ID" in os.environ else None
        # A launcher counts only the failures of its own processes, but after any failure all processes are restarted.
        ranks = group.gather_json((launcher, was_restarted()))
        launchers = frozenset(name for name, _ in ranks if name)
        return cls(group.size, launchers, any(restarted for _, restarted in ranks), restart_problem())


def restart_problem() -> str | None:
    """The reason why processes restarted by torchrun may fail to connect to each other, or None."""
    several = _number("GROUP_WORLD_SIZE", 1) > 1 and _number("TORCHELASTIC_MAX_RESTARTS", 0) > 0
    if not several or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return (
        "torchrun uses one store for all attempts, so restarted processes may wait there for dead ones; set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every machine"
    )


def _number(name: str, default: int | None = None) -> int:
    """A number that a launcher has set in the environment."""
    value = os.environ.get(name)
    if value is None:
        if default is not None:
            return default
        raise UserError(f"{name}: is not set, although WORLD_SIZE is; start the processes with torchrun, or unset both")
    if not (value.isascii() and value.isdigit()):
        raise UserError(f"{name}: a whole number is expected in the environment, not {value!r}")
    return int(value)


def join_group(device: torch.device, offload: bool = False) -> ProcessGroup:
    """Join the process group that the environment describes (rank, size, address)."""
    rank = _number("RANK")
    size = _number("WORLD_SIZE")
    if rank >= size:
        raise UserError(f"RANK: the last of {size} processes (WORLD_SIZE) is {size - 1}, not {rank}")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(f"{missing[0]}: is not set, so the {size} processes of WORLD_SIZE cannot meet; use torchrun")
    return form_group(rank, size, device, launcher_store(), offload)


def launcher_store() -> Any:
    """The store of the launcher, with a key prefix for this attempt.

    Without the prefix, a restarted process would read the address of a dead process and wait for it. Launchers on
    several machines count attempts independently, so they cannot use it (see `restart_problem`).
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, *_ = next(rendezvous("env://", timeout=TIMEOUT))
    if _number("GROUP_WORLD_SIZE", 1) > 1:
        return store
    return dist.PrefixStore(f"attempt-{_number('TORCHELASTIC_RESTART_COUNT', 0)}", store)  # type: ignore[attr-defined]


@contextmanager
def name_lost_connection() -> Iterator[None]:
    """Turn the failure of a collective into a UserError; torchrun reports which process exited."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise UserError(f"another training process has ended, or its machine cannot be reached; {RESUME}") from None


@contextmanager
def launched_group(request: str, offload: bool) -> Iterator[tuple[ProcessGroup, Launch]]:
    """The group of the processes that a launcher has started, or of this process, on the requested device."""
    device = process_device(request)
    if not has_launcher():
        group = ProcessGroup(device=device)
        yield group, Launch.of(group)
        return
    with join_group(device, offload) as group, name_lost_connection():
        yield group, Launch.of(group)


def start_template(modules: list[str]) -> Template:
    """Start the process that local ranks are forked from."""
    return Template(settings={"modules": modules}, name="the template of training processes")


@contextmanager
def local_group(
    work: str, settings: dict[str, Any], size: int, device: torch.device, offload: bool = False
) -> Iterator[ProcessGroup]:
    """Start the other ranks on this machine and form a group; `work` ("module:function") calls `join_local_group`."""
    from regard.files import scratch_directory  # imports pydantic, which the other processes do not need

    with ExitStack() as stack:
        store = f"{stack.enter_context(scratch_directory())}/store"
        template = stack.enter_context(closing(start_template([work.partition(":")[0]])))
        children = []
        for rank in range(1, size):
            job = {"work": work, "settings": {**settings, "rank": rank, "size": size, "store": store}}
            child = template.start(job, f"training process {rank} of {size}")
            stack.callback(child.close, EXIT_SECONDS)
            children.append(child)
        for child in children:
            if child.channel.receive() is None:
                raise ChildDied(_describe_failure(child))
        group = stack.enter_context(form_group(0, size, device, store, offload))
        with _continue_on_signals(children):
            try:
                yield group
            except RuntimeError:
                if dead := _find_dead(children):
                    raise ChildDied(_describe_failure(dead)) from None
                raise


def join_local_group(
    channel: Channel, settings: dict[str, Any], device: torch.device, offload: bool = False
) -> ProcessGroup:
    """Join the group of `local_group`, in a rank that it has started."""
    channel.send({"ready": True})
    return form_group(settings["rank"], settings["size"], device, settings["store"], offload)


def _find_dead(children: Sequence[Child]) -> Child | None:
    """A rank that has exited; a connection can break shortly before the exit status is available."""
    deadline = time.monotonic() + EXIT_STATUS_SECONDS
    while True:
        for child in children:
            if child.poll() is not None:
                return child
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)


def _describe_failure(child: Child) -> str:
    how, *lines = child.failure(EXIT_STATUS_SECONDS).split("\n")
    return "\n".join([f"{how}; {RESUME}", *lines])


@contextmanager
def _continue_on_signals(children: Sequence[Child]) -> Iterator[None]:
    """Send SIGCONT to suspended ranks after a stop signal, from a thread: collectives block signal handlers."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCONT"):
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while received := os.read(reader, 1):  # until the writer is closed
            if received[0] in STOP_SIGNALS:
                for child in children:
                    child.signal(signal.SIGCONT)

    thread = threading.Thread(target=watch, daemon=True, name="continue-ranks")
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writer)
        thread.join()
        os.close(reader)
