"""Messages and progress of training: a live display on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import errno
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from regard.data.reader import MAX_LOCATIONS
from regard.errors import plural

if TYPE_CHECKING:
    from rich.live import Live as ProgressBar

REFRESH_SECONDS = 0.25  # between two updates of the live display
BAR_WIDTH = 20  # characters
FIRST_LINE_SECONDS = 2.0  # until the first progress line of `Lines`
LINE_SECONDS = 30.0  # between two progress lines
_NOT_SCORES = frozenset({"event", "step", "epoch", "best", "seconds", "checkpoints"})
_PERCENT = frozenset({"accuracy", "wer", "per", "bleu", "chrf"})
Event = dict[str, Any]


class Reporter:
    """Receives the progress of a run from the first process. This class discards it."""

    def say(self, text: str) -> None:
        """Report a choice or a warning."""

    def event(self, event: Event) -> None:
        """Report an event that was written to the log."""

    def loss(self, loss: float, tokens: int) -> None:
        """Report the loss of a step (per predicted token) and the number of its tokens; called before `tick`."""

    def tick(self, step: int, done: float, seconds: float) -> None:
        """Report a step and the used share of the budget (0 to 1). This is called often."""

    def close(self) -> None:
        """End the display."""


class Display(Reporter):
    """Writes to a stream, by default stderr, and measures the mean loss and the speed of recent steps."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._loss: float | None = None
        self._since: tuple[float, int] | None = None  # None: exclude the time until the next step
        self._tokens = 0
        self._rate: float | None = None

    def loss(self, loss: float, tokens: int) -> None:
        self._loss = loss if self._loss is None else 0.9 * self._loss + 0.1 * loss
        self._tokens += tokens

    def _clock(self, step: int, seconds: float) -> None:
        """Update the speed, which is measured over about the last ten seconds; `seconds` is the time of the run."""
        if self._since is None:  # the start of the first step of a resumed run is unknown
            self._since = (0.0, 0) if step == 1 else (seconds, self._tokens)
        began, before = self._since
        if seconds <= began or self._tokens <= before:
            return
        self._rate = (self._tokens - before) / (seconds - began)
        if seconds - began > 10:  # forget the older half
            self._since = (began + seconds) / 2, (before + self._tokens) // 2

    def _parts(self, step: int, done: float, seconds: float) -> list[str]:
        """The parts of a progress line, without unknown numbers."""
        loss = "" if self._loss is None else f"loss {self._loss:.3f}"
        rate = "" if self._rate is None else f"{self._rate:,.0f} tokens/s"
        return list(filter(None, [f"step {step:,}", loss, rate, _left(done, seconds)]))


class Lines(Display):
    """Prints plain lines, for example to a file: logged events, and progress in long times without events."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._done = self._seconds = 0.0
        self._next: float | None = None  # time of the next line, in seconds of the run

    def say(self, text: str) -> None:
        with _surviving(self._stream):
            self._stream.write(text + "\n")
            self._stream.flush()

    def event(self, event: Event) -> None:
        left = _left(self._done, self._seconds)
        self.say(describe_event(event) + (f" · {left}" if left and event["event"] == "train" else ""))
        self._next = self._seconds + LINE_SECONDS
        if event["event"] == "valid":
            self._since = None

    def tick(self, step: int, done: float, seconds: float) -> None:
        self._done = done
        self._seconds = seconds
        self._clock(step, seconds)
        if self._next is None:
            self._next = FIRST_LINE_SECONDS + (0.0 if step == 1 else seconds)
        if seconds >= self._next:
            self.say(" · ".join(self._parts(step, done, seconds)))
            self._next = seconds + LINE_SECONDS


class Live(Display):
    """Shows a line with a progress bar and the latest numbers; other messages scroll above it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.text import Text

        super().__init__(stream)
        self._console = Console(file=self._stream)
        self._text = Text
        self._bar: ProgressBar | None = None
        self._updated = 0.0
        self._best = ""

    def say(self, text: str) -> None:
        # As Text, because messages have no markup; words and file names are not broken.
        for line in text.split("\n"):
            folded = textwrap.fill(
                line, self._console.width, break_long_words=False, break_on_hyphens=False, subsequent_indent="  "
            )
            with _surviving(self._stream):
                self._console.print(self._text(folded), soft_wrap=True, highlight=False)

    def event(self, event: Event) -> None:
        if event["event"] == "train":
            return
        if event["event"] == "valid":
            self._since = None
            self._best = "best " + ", ".join(_scores(event)[-1:]) if event["best"] else self._best
        self.say(describe_event(event))

    def tick(self, step: int, done: float, seconds: float) -> None:
        now = time.monotonic()
        if now - self._updated < REFRESH_SECONDS:
            return
        self._updated = now
        self._clock(step, seconds)
        with _surviving(self._stream):
            if self._bar is None:
                from rich.live import Live as ProgressBar

                self._bar = ProgressBar(console=self._console, auto_refresh=False, transient=True)
                self._bar.start()
            self._bar.update(self._line(step, done, seconds), refresh=True)

    def _line(self, step: int, done: float, seconds: float) -> Any:
        """The line, cut to the width of the terminal."""
        room = self._console.width - 1  # a full line would wrap on some terminals
        shown = ""
        for part in filter(None, [*self._parts(step, done, seconds), self._best]):
            longer = f"{shown} · {part}" if shown else part
            shown = longer if len(longer) <= room else shown
        bar = min(BAR_WIDTH, room - len(shown) - 1)
        if bar < BAR_WIDTH // 2:
            return self._text(shown, no_wrap=True)
        full = min(bar, round(done * bar))
        return self._text.assemble(("━" * full, "green"), ("━" * (bar - full), "dim"), f" {shown}", no_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            with _surviving(self._stream):
                self._bar.stop()
            self._bar = None


@contextmanager
def _surviving(stream: TextIO) -> Iterator[None]:
    """Ignore errors of the stream; once the terminal or pipe is closed, write to the null device."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EIO, errno.EPIPE):
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:  # the stream may not be a file
                os.dup2(nothing.fileno(), stream.fileno())


def make_reporter(stream: TextIO | None = None) -> Reporter:
    """A live display if the stream is a terminal, else plain lines."""
    stream = stream or sys.stderr
    return Live(stream) if stream.isatty() else Lines(stream)


def describe_event(event: Event) -> str:
    kind = event["event"]
    step = event.get("step", 0)
    if kind == "train":
        return (
            f"step {step:,} · epoch {event['epoch']:.2f} · loss {event['loss']:.4f} · lr {event['lr']:.2e} · "
            f"{event['tokens_per_second']:,.0f} tokens/s"
        )
    if kind == "valid":
        best = " · best so far" if event["best"] else ""
        return f"step {step:,} · validation: {', '.join(_scores(event))}{best}"
    if kind == "average":
        used = "used" if event["best"] else "not better, not used"
        return f"mean of the last {plural(event['checkpoints'], 'checkpoint')}: {', '.join(_scores(event))} · {used}"
    if kind == "skip":
        return f"step {step:,} · skipped: the loss or its gradient is not a finite number"
    if kind == "memory":
        named = "; ".join(event["skipped"][:MAX_LOCATIONS]) + "; ..." * (len(event["skipped"]) > MAX_LOCATIONS)
        unfit = f"; skipped because a batch of one does not fit: {named}" if named else ""
        return f"step {step:,} · memory ran out: the batch was split into {plural(event['pieces'], 'part')}{unfit}"
    if kind == "end":
        why = "no improvement (patience)" if event["reason"] == "patience" else f"{event['reason']} used up"
        memory = ""
        if failures := event.get("memory_failures"):
            unfit = f", {plural(event['unfit'], 'example')} skipped" if event["unfit"] else ""
            memory = f"; memory ran out {plural(failures, 'time')} (batches split{unfit})"
        return f"finished at step {step:,} after {format_duration(event['seconds'])}: {why}{memory}"
    return " · ".join(f"{key} {value}" for key, value in event.items())


def _scores(event: dict[str, Any]) -> list[str]:
    return [format_score(name, value) for name, value in event.items() if name not in _NOT_SCORES]


def format_score(name: str, value: float | None) -> str:
    if value is None:
        return f"{name} not a number"
    return f"{name} {value:.2f}" if name in _PERCENT else f"{name} {value:.4f}"


def _left(done: float, seconds: float) -> str:
    return f"{format_duration(seconds / done - seconds)} left" if done > 0.001 else ""


def format_duration(seconds: float) -> str:
    """A duration in at most two units: 45 s, 12 min 05 s, 3 h 40 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
