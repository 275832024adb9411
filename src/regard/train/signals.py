"""SIGTERM and SIGINT: finish the step, save, leave with 143 or 130."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

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
