"""The log of a run, and sinks that receive its events: TensorBoard, MLflow and Weights & Biases, all optional."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from regard.errors import UserError, install
from regard.files import open_file
from regard.suggest import one_of
from regard.training.report import Event, Reporter

LOG = "log.jsonl"
TENSORBOARD = "tensorboard"  # subdirectory of the run


class Log:
    """The log of a run: one JSON object per line. An existing file is truncated to `position` bytes."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        with self._reported():
            self._file = open_file(path, "ab", buffering=0)
            try:
                self._file.truncate(min(position, path.stat().st_size))
                self.position = path.stat().st_size
            except OSError:
                self._file.close()
                raise

    def write(self, event: Event) -> None:
        """Append an event; infinity and NaN become null."""
        unknown = [key for key, value in event.items() if isinstance(value, float) and not math.isfinite(value)]
        data = (json.dumps(event | dict.fromkeys(unknown), ensure_ascii=False) + "\n").encode()
        with self._reported():
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.position += len(data)

    def sync(self) -> None:
        """Wait until the log is on disk."""
        with self._reported():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"{self.path}: cannot write: {reason}; the last checkpoint is safe") from None


def read_log(path: Path) -> list[Event]:
    """The events in a log, without an incomplete last line."""
    with open_file(path) as file:
        events = map(json.loads, file.read().split(b"\n")[:-1])
    return [event for event in events if isinstance(event, dict)]


class Sink(Reporter, ABC):
    """Sends all events of the log to a library, including those from before a run was resumed with the sink.

    `start` begins a run of the library, `facts` and `numbers` record events, `finish` closes the run.
    """

    name: str
    package: str
    command: str  # to install the package
    module: str

    def __init__(self, run: Path) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise UserError(f"--log {self.name}: needs the package {self.package}: {self.command}")
        self.run = run
        self._open = False

    def event(self, event: Event) -> None:
        if self._open:
            self._write(event)
            return
        self.start(importlib.import_module(self.module))
        self._open = True
        self._step = 0
        for each in read_log(self.run / LOG):  # includes this event
            self._write(each)

    def close(self) -> None:
        if self._open:
            self._open = False
            self.finish()

    def _write(self, event: Event) -> None:
        if event["event"] == "start":
            self.facts({key: value for key, value in event.items() if key != "event"})
            return
        self._step = event.get("step", self._step)  # the event of averaged checkpoints has no step
        if numbers := numbers_of(event):
            self.numbers(numbers, self._step)

    @abstractmethod
    def start(self, library: Any) -> None: ...

    @abstractmethod
    def facts(self, facts: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def numbers(self, numbers: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def finish(self) -> None: ...


def numbers_of(event: Event) -> dict[str, float]:
    """The numbers of an event by name, such as train/loss."""
    return {
        f"{event['event']}/{key}": value
        for key, value in event.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


class TensorBoard(Sink):
    """Writes event files for TensorBoard into the run directory."""

    name = package = "tensorboard"
    command = install("log")
    module = "torch.utils.tensorboard"  # needs the package

    def start(self, library: Any) -> None:
        # An interrupted run may have written events after its last checkpoint.
        shutil.rmtree(self.run / TENSORBOARD, ignore_errors=True)
        self._writer = library.SummaryWriter(str(self.run / TENSORBOARD))

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._writer.add_text("start", json.dumps(facts, ensure_ascii=False), 0)

    def numbers(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class MLflow(Sink):
    """Creates an MLflow run; environment variables choose server and experiment (MLFLOW_TRACKING_URI ...)."""

    name = package = module = "mlflow"
    command = "pip install mlflow"

    def start(self, library: Any) -> None:
        self._mlflow = library
        library.start_run(run_name=str(self.run))

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._mlflow.log_params(dict(facts))

    def numbers(self, numbers: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


class WandB(Sink):
    """Creates a run of Weights & Biases; environment variables choose project and mode (WANDB_PROJECT ...)."""

    name = package = module = "wandb"
    command = "pip install wandb"

    def start(self, library: Any) -> None:
        self._run = library.init(name=str(self.run))

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._run.config.update(dict(facts))

    def numbers(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self) -> None:
        self._run.finish()


SINKS: Mapping[str, type[Sink]] = MappingProxyType({sink.name: sink for sink in (TensorBoard, MLflow, WandB)})


class Reporters(Reporter):
    """A display and sinks. A failing sink is removed, and training continues."""

    def __init__(self, display: Reporter, sinks: Sequence[Sink]) -> None:
        self._display = display
        self._sinks = list(sinks)

    def say(self, text: str) -> None:
        self._display.say(text)

    def event(self, event: Event) -> None:
        self._display.event(event)
        for sink in list(self._sinks):
            self._attempt(sink, partial(sink.event, event))

    def loss(self, loss: float, tokens: int) -> None:
        self._display.loss(loss, tokens)

    def tick(self, step: int, done: float, seconds: float) -> None:
        self._display.tick(step, done, seconds)

    def close(self) -> None:
        self._display.close()
        for sink in list(self._sinks):
            self._attempt(sink, sink.close)

    def _attempt(self, sink: Sink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # errors of libraries, servers and the network must not stop training
            self._sinks.remove(sink)
            self.say(f"warning: --log {sink.name}: stopped sending after an error: {type(error).__name__}: {error}")


def with_sinks(display: Reporter, names: Sequence[str], run: Path) -> Reporter:
    """A display with the sinks of a run that have these names."""
    for name in names:
        if name not in SINKS:
            raise one_of("--log", name, SINKS)
    sinks = [SINKS[name](run) for name in dict.fromkeys(names)]
    return Reporters(display, sinks) if sinks else display
