"""Other places that the log of a run goes to: TensorBoard, MLflow and Weights & Biases, each an optional library.

A sink begins with all that is in the log already, so what it shows is complete for a resumed run too, and for one that
was begun without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from regard.errors import UserError, install
from regard.suggest import one_of
from regard.training.report import LOG, Event, Reporter, read_log

TENSORBOARD = "tensorboard"  # the directory of its files, in that of the run


class Sink(Reporter, ABC):
    """Receives every event of the log once, from its first line on. Subclasses say where numbers and facts go."""

    name: str
    package: str
    command: str  # that installs it
    module: str  # to import

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
        self._open, self._step = True, 0
        for each in read_log(self.run / LOG):  # this event is in it
            self._write(each)

    def close(self) -> None:
        if self._open:
            self._open = False
            self.finish()

    def _write(self, event: Event) -> None:
        if event["event"] == "start":
            self.facts({key: value for key, value in event.items() if key != "event"})
            return
        self._step = event.get("step", self._step)  # the mean of checkpoints belongs to no step: to the last one
        if numbers := numbers_of(event):
            self.numbers(numbers, self._step)

    @abstractmethod
    def start(self, library: Any) -> None:
        """Begin, with the imported library."""

    @abstractmethod
    def facts(self, facts: Mapping[str, Any]) -> None:
        """Record what is known when training starts."""

    @abstractmethod
    def numbers(self, numbers: Mapping[str, float], step: int) -> None:
        """Record the numbers of an event."""

    @abstractmethod
    def finish(self) -> None:
        """Write what is left."""


def numbers_of(event: Event) -> dict[str, float]:
    """The numbers of an event, named after it: train/loss."""
    return {
        f"{event['event']}/{key}": value
        for key, value in event.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


class TensorBoard(Sink):
    """Writes event files for TensorBoard into the run directory."""

    name = package = "tensorboard"
    command = install("log")
    module = "torch.utils.tensorboard"  # which needs the package

    def start(self, library: Any) -> None:
        shutil.rmtree(self.run / TENSORBOARD, ignore_errors=True)  # what an interrupted run wrote beyond its checkpoint
        self._writer = library.SummaryWriter(str(self.run / TENSORBOARD))

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._writer.add_text("start", json.dumps(facts, ensure_ascii=False), 0)

    def numbers(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class MLflow(Sink):
    """Makes a run of MLflow; its server and experiment are those of the environment (MLFLOW_TRACKING_URI ...)."""

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
    """Makes a run of Weights & Biases; its project and mode are those of the environment (WANDB_PROJECT ...)."""

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
    """Several reporters as one: a display, and sinks. A sink that fails is left out from then on; training goes on."""

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
        except Exception as error:  # of a library, a server or the network: whatever it is, the run matters more
            self._sinks.remove(sink)
            self.say(f"warning: --log {sink.name}: nothing more is sent: {type(error).__name__}: {error}")


def with_sinks(display: Reporter, names: Sequence[str], run: Path) -> Reporter:
    """A display with the sinks of these names for a run; a missing library is a UserError."""
    for name in names:
        if name not in SINKS:
            raise one_of("--log", name, SINKS)
    sinks = [SINKS[name](run) for name in dict.fromkeys(names)]
    return Reporters(display, sinks) if sinks else display
