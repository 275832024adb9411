"""Child processes, which exchange messages with their parent over a socket pair and exit when it exits.

`Template.start` forks a process that has loaded the modules and data that its children share, `fork` forks this
process, and `spawn` starts a new interpreter. Without fork, `Template.start` spawns. Errors quote the end of stderr.
"""

from __future__ import annotations

import gc
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any, TypeVar

from regard.errors import UserError, is_out_of_memory, memory_message
from regard.parallel.messages import Channel, Message

NO_FORK = "REGARD_NO_FORK"  # environment variable: start every child as a new interpreter, as on Windows
STDERR_LINES = 15  # of a failed child, shown in the error
POLL_SECONDS = 0.005

T = TypeVar("T")
R = TypeVar("R")


class ChildDied(UserError):
    """A child exited before it finished its work; the message has its status and the last lines of its stderr."""


class ChildFault(RuntimeError):
    """An error in the program, raised in a child; the message is its traceback."""


_children: weakref.WeakSet[Child] = weakref.WeakSet()


class Child:
    """A child process. Its exit status is negative if a signal killed it."""

    def __init__(self, name: str, pid: int, channel: Channel, stderr: IO[bytes] | None, poll: Callable[[], int | None]):
        self.name = name
        self.pid = pid
        self.channel = channel
        self._stderr = stderr
        self._poll = poll
        self._status: int | None = None
        _children.add(self)

    def poll(self) -> int | None:
        """The exit status; None while the child runs."""
        if self._status is None:
            self._status = self._poll()
        return self._status

    def wait(self, seconds: float) -> int | None:
        """Wait for the exit status -> the status, or None after the timeout."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self._status

    def ask(self, header: dict[str, Any], parts: Sequence[bytes] = ()) -> Message:
        """Send a request and wait for the answer; errors of the child are raised."""
        with suppress(OSError):  # the child has exited; `answer` reports it
            self.channel.send(header, parts)
        return self.answer()

    def answer(self) -> Message:
        """Wait for the answer to an earlier request; errors of the child are raised."""
        answer = None
        with suppress(OSError):
            answer = self.channel.receive()
        if answer is None:
            raise ChildDied(self.failure(1.0))
        if "mistake" in answer.header:
            raise UserError(answer.header["mistake"])
        if "fault" in answer.header:
            raise ChildFault(f"{self.name}: {answer.header['fault']}")
        return answer

    def signal(self, number: int) -> None:
        """Send a signal if the child is running."""
        if self.poll() is None:  # its process id cannot be reused before its status is read
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)

    def close(self, grace: float = 0.0) -> None:
        """Close the channel, on which the child exits; kill it after a grace period in seconds."""
        self.channel.close()
        if self.wait(grace) is None:
            self.kill()
            self.wait(10.0)
        if self._stderr is not None:
            self._stderr.close()
        _children.discard(self)

    def failure(self, seconds: float = 0.0) -> str:
        """A description of the exit with the last lines of stderr; waits at most `seconds` for the exit status."""
        status = self.wait(seconds)
        if status is None:
            how = "does not answer"
        elif status < 0:
            how = f"was killed by signal {-status}"
        else:
            how = f"ended with status {status}"
        hint = " (out of memory?)" if status == -9 else ""
        return "\n  ".join([f"{self.name} {how}{hint}", *self.last_lines()])

    def last_lines(self) -> list[str]:
        """The last lines of stderr, if it is captured."""
        if self._stderr is None or sys.platform == "win32":  # Windows has no pread
            return []
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), 1 << 16, max(0, size - (1 << 16)))
        return tail.decode("utf-8", "replace").strip().splitlines()[-STDERR_LINES:]


Work = Callable[[Channel, dict[str, Any]], None]  # called in a child with its end of the channel and its settings


def has_fork() -> bool:
    """Whether children are forked on this system. The frameworks of macOS do not survive a fork."""
    return sys.platform.startswith("linux") and NO_FORK not in os.environ


def can_fork() -> bool:
    """Whether this process has a single thread of Python and torch: a fork copies only the calling thread.

    The caller must ensure that the tokenizers library has started no threads.
    """
    if not has_fork() or threading.active_count() > 1:
        return False
    torch = sys.modules.get("torch")
    return torch is None or (torch.get_num_threads() == 1 and not torch.cuda.is_initialized())


def fork(work: Work, settings: dict[str, Any], name: str = "a worker process") -> Child:
    """Fork this process, which requires `can_fork`; the child has a copy of its memory."""
    ours, theirs = socket.socketpair()
    stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by `Child.close`
    pid = _fork(work, settings, theirs, stderr.fileno(), ours)
    theirs.close()
    return Child(name, pid, Channel(ours), stderr, lambda: _status_of(pid))


def spawn(
    work: str,
    settings: dict[str, Any],
    name: str = "a worker process",
    capture: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start a new interpreter that calls `work` ("module:function")."""
    ours, theirs = socket.socketpair()
    stderr = tempfile.TemporaryFile() if capture else None  # noqa: SIM115  closed by `Child.close`
    path = os.pathsep.join(dict.fromkeys(filter(None, [str(Path(__file__).parents[2]), *sys.path])))
    windows = sys.platform == "win32"
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import main; main()", "-" if windows else str(theirs.fileno())],
        stdin=subprocess.PIPE if windows else subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env={**os.environ, **(environment or {}), "PYTHONPATH": path},
        pass_fds=() if windows else (theirs.fileno(),),
    )
    if sys.platform == "win32":  # sockets are passed to other processes as bytes
        assert process.stdin is not None
        process.stdin.write(theirs.share(process.pid))
        process.stdin.close()
    theirs.close()
    child = Child(name, process.pid, Channel(ours), stderr, process.poll)
    with suppress(OSError):  # the child has exited; the caller's next call reports it
        child.channel.send({"work": work, "settings": settings})
    return child


def main() -> None:
    """The entry point of a spawned child."""
    if sys.platform == "win32":
        connection = socket.fromshare(sys.stdin.buffer.read())
    else:
        connection = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel(connection)
    first = channel.receive()
    if first is not None:
        sys.exit(_run(channel, resolve_name(first.header["work"]), first.header["settings"]))


def _fork(
    work: Work,
    settings: dict[str, Any],
    connection: socket.socket,
    stderr: int | None,
    ours: socket.socket,
) -> int:
    """Fork -> the process id. The child closes `ours` and all other connections of this process."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()  # otherwise the child writes the buffered text again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about other threads: only those of BLAS, which are safe
        pid = os.fork()
    if pid:
        return pid
    gc.freeze()  # keeps the garbage of the parent: its destructors may wait for threads that a child does not have
    status = 1
    try:
        ours.close()
        for child in _children:
            child.channel.close()
        _redirect(stderr)
        status = _run(Channel(connection), work, settings)
    finally:
        os._exit(status)


def _redirect(stderr: int | None) -> None:
    """Redirect stdin from the null device and stdout to stderr."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if stderr is not None:
        os.dup2(stderr, 2)
    os.dup2(2, 1)
    sys.stdout = sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _run(channel: Channel, work: Work, settings: dict[str, Any]) -> int:
    """Run the work of a child -> its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it too, and ends the child
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    if work is not _serve_forks:  # a template must have a single thread, because it is forked
        _exit_with_parent(channel.connection)
    status = 0
    try:
        work(channel, settings)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        status = 2
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return status


def _exit_with_parent(connection: socket.socket) -> None:
    """Exit as soon as the other end of a connection is closed, even during a computation."""
    if not hasattr(select, "poll"):  # on Windows, the child exits at its next message
        return
    poll = select.poll()
    poll.register(connection, 0)  # wakes up only when the connection is closed

    def watch() -> None:
        poll.poll()
        time.sleep(0.05)  # a child that was waiting for a message returns normally
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="exit-with-parent").start()


def _status_of(pid: int) -> int | None:
    """The exit status of a forked child, or None while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0  # the status was read elsewhere
    return os.waitstatus_to_exitcode(status) if ended else None


def answer_requests(channel: Channel, answer: Callable[[Message], Message]) -> None:
    """Answer the requests of `Child.ask` until the parent closes its end."""
    while (request := channel.receive()) is not None:
        try:
            reply = answer(request)
        except UserError as error:
            reply = Message({"mistake": str(error)})
        except Exception:
            reply = Message({"fault": traceback.format_exc()})
        with suppress(OSError):  # the parent has exited; `receive` reports it
            channel.send(reply.header, reply.parts)


class Template:
    """A process that loads the modules and data that its children share, and is forked for each child.

    `prepare` ("module:function") takes the settings and returns the work of the children and a description for `wait`.
    """

    def __init__(
        self,
        prepare: str = f"{__name__}:import_modules",
        settings: dict[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        name: str = "the template of worker processes",
    ) -> None:
        self._lock = threading.Lock()
        self._preparation = {"prepare": prepare, "settings": settings or {}}
        self._environment = environment  # inherited by the children
        self._process = spawn(f"{__name__}:_serve_forks", self._preparation, name, False, environment)
        self._description: dict[str, Any] | None = None

    def wait(self) -> dict[str, Any]:
        """Wait until the template is ready -> the description; a UserError in `prepare` is raised."""
        with self._lock:
            if self._description is None:
                self._description = self._process.answer().header["ready"]
        return self._description

    def start(self, settings: dict[str, Any], name: str = "a worker process", capture: bool = True) -> Child:
        """Start a child. With the default `prepare`, `settings` are {"work": "module:function", "settings": {...}}."""
        self.wait()
        if not has_fork():
            preparation = {**self._preparation, "child": settings}
            return spawn(f"{__name__}:_prepare_and_work", preparation, name, capture, self._environment)
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile() if capture else None  # noqa: SIM115  closed by `Child.close`
        handles = [theirs.fileno(), *([stderr.fileno()] if stderr else [])]
        try:
            pid: int = self._ask({"start": settings, "capture": capture}, handles)["pid"]
        except BaseException:
            ours.close()
            if stderr is not None:
                stderr.close()
            raise
        finally:
            theirs.close()
        return Child(name, pid, Channel(ours), stderr, lambda: self._poll(pid))

    def close(self, grace: float = 3.0) -> None:
        """End the template, after its children: it must reap them."""
        self._process.close(grace)

    def _poll(self, pid: int) -> int | None:
        try:
            status: int | None = self._ask({"poll": pid})["status"]
        except ChildDied:  # the template has exited first
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            status = -signal.SIGKILL
        return status

    def _ask(self, header: dict[str, Any], handles: Sequence[int] = ()) -> dict[str, Any]:
        with self._lock:
            with suppress(OSError):  # the template has exited; `answer` reports it
                self._process.channel.send(header, handles=handles)
            return self._process.answer().header


def import_modules(settings: dict[str, Any]) -> tuple[Work, dict[str, Any]]:
    """The default preparation: import the `modules` of the settings; children get their work by name."""
    for module in settings["modules"]:
        import_module(module)

    def work(channel: Channel, settings: dict[str, Any]) -> None:
        resolve_name(settings["work"])(channel, settings["settings"])

    return work, {}


def _serve_forks(control: Channel, settings: dict[str, Any]) -> None:
    """The work of a template: prepare, then fork a child for every request."""
    try:
        work, description = resolve_name(settings["prepare"])(settings["settings"])
    except UserError as error:
        control.send({"mistake": str(error)})
        return
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        control.send({"mistake": memory_message(error)})
        return
    control.send({"ready": description})
    while (message := control.receive()) is not None:
        request = message.header
        if "poll" in request:
            control.send({"status": _status_of(request["poll"])})
            continue
        handles = [control.handles.popleft() for _ in range(1 + request["capture"])]
        stderr = handles[1] if request["capture"] else None
        with socket.socket(fileno=handles[0]) as connection:
            pid = _fork(work, request["start"], connection, stderr, control.connection)
        for handle in handles[1:]:
            os.close(handle)
        control.send({"pid": pid})
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _prepare_and_work(channel: Channel, settings: dict[str, Any]) -> None:
    """The work of a template's child without fork."""
    work, _ = resolve_name(settings["prepare"])(settings["settings"])
    work(channel, settings["child"])


def ordered_map(
    workers: Sequence[Callable[[T], R]],
    items: Iterable[T],
    here: Callable[[T], R] | None = None,
    stop: Callable[[], None] = lambda: None,
) -> Iterator[R]:
    """Yield the results of items, in order; each worker runs in its own thread and may wait for a child.

    With `here`, this thread also takes items while it waits. `stop` is called after an error or an early end of the
    iteration; it must make waiting workers return.
    """
    free: queue.SimpleQueue[Callable[[T], R]] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def work(item: T) -> R:
        worker = free.get()
        try:
            return worker(item)
        finally:
            free.put(worker)

    rest = iter(items)
    pending: deque[tuple[Future[R], T]] = deque()
    with ThreadPoolExecutor(max(1, len(workers))) as executor:
        try:
            while True:
                for item in islice(rest, 2 * len(workers) + 1 - len(pending)):
                    pending.append((executor.submit(work, item), item))
                if not pending:
                    return
                while here is not None and not pending[0][0].done():  # take an item that no worker has begun
                    index = next((i for i, (future, _) in enumerate(pending) if future.cancel()), None)
                    if index is None:
                        break
                    done: Future[R] = Future()
                    done.set_result(here(pending[index][1]))
                    pending[index] = done, pending[index][1]
                yield pending.popleft()[0].result()
        except BaseException:
            for future, _ in pending:
                future.cancel()
            stop()
            raise
