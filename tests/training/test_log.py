"""Sinks receive every number of the log, also if the run is stopped and resumed."""

from __future__ import annotations

import os
import signal
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kit.backwards import MakeRecipe
from regard.errors import UserError
from regard.training.fit import fit
from regard.training.log import LOG, SINKS, TENSORBOARD, Reporters, Sink, numbers_of, read_log, with_sinks
from regard.training.report import Event, Reporter
from regard.training.trainer import Stopped

Numbers = set[tuple[str, int, float]]


class Display(Reporter):
    """Collects messages, and stops training after a step."""

    def __init__(self, last: int | None = None) -> None:
        self.messages: list[str] = []
        self._last = last

    def say(self, text: str) -> None:
        self.messages.append(text)

    def tick(self, step: int, done: float, seconds: float) -> None:
        if step == self._last:
            os.kill(os.getpid(), signal.SIGTERM)


def logged_numbers(run: Path) -> Numbers:
    """All numbers in the log as (name, step, value); events without a step get that of the previous event."""
    numbers = set()
    step = 0
    for event in read_log(run / LOG)[1:]:
        step = event.get("step", step)
        numbers |= {
            (f"{event['event']}/{key}", step, value)
            for key, value in event.items()
            if type(value) in (int, float) and key != "step"
        }
    return numbers


def train(recipe: MakeRecipe, run: Path, name: str, last: int | None = None) -> None:
    """Train with a sink; with `last`, stop after that step and resume."""
    order = recipe(steps=8, log_every=2, average=2)
    if last is not None:
        with pytest.raises(Stopped):
            fit(order, run, reporter=Reporters(Display(last), [SINKS[name](run)]))
    fit(order, run, resume=last is not None, reporter=Reporters(Display(), [SINKS[name](run)]))


@pytest.mark.parametrize("last", [None, 5])
def test_tensorboard_files_contain_every_logged_number(recipe: MakeRecipe, tmp_path: Path, last: int | None) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    run = tmp_path / "run"
    train(recipe, run, "tensorboard", last)
    numbers: Numbers = set()
    for file in (run / TENSORBOARD).iterdir():
        for event in loader.RawEventFileLoader(str(file)).Load():
            message = loader.event_pb2.Event.FromString(event)
            numbers |= {
                (value.tag, message.step, value.simple_value)
                for value in message.summary.value
                if value.HasField("simple_value")
            }

    def to_float32(value: float) -> float:
        return float(struct.unpack("f", struct.pack("f", value))[0])

    assert numbers == {(name, step, to_float32(value)) for name, step, value in logged_numbers(run)}
    assert {"train/loss", "valid/loss", "average/loss", "end/seconds"} <= {name for name, _, _ in numbers}


class Fake(ModuleType):
    """A client library with the functions of MLflow and of Weights & Biases that the sinks call."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.facts: dict[str, Any] = {}
        self.numbers: Numbers = set()
        self.calls: list[str] = []
        self.config = SimpleNamespace(update=self.log_params)

    def start_run(self, run_name: str) -> None:
        self.calls.append("start")
        self.numbers.clear()

    def init(self, name: str) -> Fake:
        self.start_run(name)
        return self

    def log_params(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    def log_metrics(self, numbers: dict[str, float], step: int) -> None:
        self.numbers |= {(name, step, value) for name, value in numbers.items()}

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.log_metrics(numbers, step)

    def end_run(self) -> None:
        self.calls.append("end")

    def finish(self) -> None:
        self.end_run()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Fake:
    module = Fake(request.param)
    module.__spec__ = SimpleNamespace(name=request.param)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


@pytest.mark.parametrize("last", [None, 5])
@pytest.mark.parametrize("fake", ["mlflow", "wandb"], indirect=True)
def test_mlflow_and_wandb_receive_every_logged_number(
    recipe: MakeRecipe, tmp_path: Path, fake: Fake, last: int | None
) -> None:
    run = tmp_path / "run"
    train(recipe, run, fake.__name__, last)
    assert fake.numbers == logged_numbers(run)
    start = read_log(run / LOG)[0]
    assert fake.facts == {key: value for key, value in start.items() if key != "event"}
    assert fake.calls == ["start", "end"] * (1 if last is None else 2)


@pytest.mark.parametrize("name", SINKS)
def test_error_about_a_missing_library_names_the_install_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(UserError, match=f"--log {name}: needs the package {name}: pip install "):
        with_sinks(Reporter(), [name], tmp_path)


def test_unknown_sink_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        with_sinks(Reporter(), ["tensorbord"], tmp_path)


@pytest.mark.parametrize("fake", ["mlflow"], indirect=True)
def test_failing_sink_does_not_stop_training(
    recipe: MakeRecipe, tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(fake, "log_metrics", refuse)
    display = Display()
    run = tmp_path / "run"
    report = fit(recipe(steps=4), run, reporter=Reporters(display, [SINKS["mlflow"](run)]))
    assert report.progress.step == 4
    warnings = [text for text in display.messages if "--log mlflow" in text]
    assert len(warnings) == 1 and "ConnectionError: no server" in warnings[0]


def test_display_receives_messages_and_sinks_receive_events(tmp_path: Path) -> None:
    received: list[Event] = []

    class Recorder(Sink):
        start = facts = numbers = finish = None  # type: ignore[assignment]

        def __init__(self) -> None:
            self.run = tmp_path

        def event(self, event: Event) -> None:
            received.append(event)

        def close(self) -> None:
            received.append({"event": "closed"})

    display = Display()
    both = Reporters(display, [Recorder(), Recorder()])
    both.say("hello")
    both.event({"event": "train", "step": 3, "loss": 1.5, "best": True, "note": "x", "epoch": None})
    both.close()
    assert display.messages == ["hello"] and [event["event"] for event in received] == ["train"] * 2 + ["closed"] * 2
    assert numbers_of(received[0]) == {"train/loss": 1.5}
