"""What a run reports: messages and progress while it trains, its log, the learning curve and the model card.

Progress is a live display on a terminal, plain lines elsewhere, or nothing.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from regard.errors import UserError
from regard.files import replace_file
from regard.metrics import LOWER_IS_BETTER
from regard.recipe import Recipe
from regard.tasks import TASKS
from regard.training.checkpoint import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

LOG = "log.jsonl"
CURVE = "curve.svg"
MODEL_CARD = "README.md"
CLOCK_FIELDS = ("seconds", "tokens_per_second", "examples_per_second")
REFRESH = 0.25  # seconds between two updates of the live display
_NOT_SCORES = frozenset({"event", "step", "epoch", "best", "seconds", "checkpoints"})
_PERCENT = frozenset({"accuracy", "wer", "per", "bleu", "chrf"})
Event = dict[str, Any]


class Reporter:
    """Receives the progress of a training run, from the first process alone. This one reports nothing."""

    def say(self, text: str) -> None:
        """Report a choice or a warning."""

    def event(self, event: Event) -> None:
        """Report what was just written to the log."""

    def tick(self, step: int, done: float, seconds: float) -> None:
        """Report a step, after which `done` of the budget (0 to 1) is used up. Called often: be quick."""

    def close(self) -> None:
        """End the display."""


class Lines(Reporter):
    """Reports plain lines, as for a file."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._done = self._seconds = 0.0

    def say(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def event(self, event: Event) -> None:
        left = _left(self._done, self._seconds)
        self.say(describe_event(event) + (f" · {left} left" if left and event["event"] == "train" else ""))

    def tick(self, step: int, done: float, seconds: float) -> None:
        self._done, self._seconds = done, seconds


class Live(Reporter):
    """Reports by a progress bar with the latest numbers; validations scroll by above it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.text import Text

        self._console = Console(file=stream or sys.stderr)
        self._text = Text
        self._bar: Bar | None = None
        self._updated = 0.0
        self._latest: dict[str, Any] = {"loss": "", "score": "", "speed": ""}

    def say(self, text: str) -> None:
        # Text: nothing in a message is markup, and file names stay in one piece.
        self._console.print(self._text(text), soft_wrap=True, highlight=False)

    def event(self, event: Event) -> None:
        if event["event"] == "train":
            self._latest["loss"] = f"loss {event['loss']:.3f}"
            self._latest["speed"] = f"{event['tokens_per_second']:,.0f} tokens/s"
            return
        if event["event"] == "valid" and event["best"]:
            self._latest["score"] = "best " + ", ".join(_scores(event)[-1:])
        self.say(describe_event(event))

    def tick(self, step: int, done: float, seconds: float) -> None:
        now = time.monotonic()
        if now - self._updated < REFRESH:
            return
        self._updated = now
        if self._bar is None:
            self._bar = self._make_bar()
        left = _left(done, seconds)
        fields = {**self._latest, "left": f"{left} left" if left else ""}
        self._bar.update(self._bar.task_ids[0], completed=done, description=f"step {step:,}", **fields)
        self._bar.refresh()

    def _make_bar(self) -> Bar:
        from rich.progress import BarColumn, Progress, TextColumn

        fields = [TextColumn(f"{{task.fields[{name}]}}") for name in ("loss", "score", "speed", "left")]
        columns = (TextColumn("{task.description}"), BarColumn(20), *fields)
        bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
        bar.add_task("", total=1.0, left="", **self._latest)
        bar.start()
        return bar

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def make_reporter(stream: TextIO | None = None) -> Reporter:
    """A live display if the stream is a terminal, else lines."""
    stream = stream or sys.stderr
    return Live(stream) if stream.isatty() else Lines(stream)


def describe_event(event: Event) -> str:
    """An event as a line."""
    kind, step = event["event"], event.get("step", 0)
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
        return f"mean of the last {event['checkpoints']} checkpoints: {', '.join(_scores(event))} · {used}"
    if kind == "skip":
        return f"step {step:,} · skipped: the loss or its gradient is not a finite number"
    if kind == "end":
        why = "no better for too long" if event["reason"] == "patience" else f"{event['reason']} used up"
        return f"finished at step {step:,} after {format_duration(event['seconds'])}: {why}"
    return " · ".join(f"{key} {value}" for key, value in event.items())


def _scores(event: dict[str, Any]) -> list[str]:
    return [format_score(name, value) for name, value in event.items() if name not in _NOT_SCORES]


def format_score(name: str, value: float | None) -> str:
    """A score with its name, in percent where it is one."""
    if value is None:
        return f"{name} not a number"
    return f"{name} {value:.2f}" if name in _PERCENT else f"{name} {value:.4f}"


def _left(done: float, seconds: float) -> str:
    return format_duration(seconds / done - seconds) if done > 0.001 else ""


def format_duration(seconds: float) -> str:
    """A duration for people."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


# The log


class Log:
    """The log of a run: one JSON object per line, written from a position on."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        with self._reported():
            self._file = path.open("ab", buffering=0)
        self._file.truncate(min(position, path.stat().st_size))
        self.position = path.stat().st_size

    def write(self, event: Event) -> None:
        """Append an event; numbers that JSON does not know become null."""
        unknown = [key for key, value in event.items() if isinstance(value, float) and not math.isfinite(value)]
        data = (json.dumps(event | dict.fromkeys(unknown), ensure_ascii=False) + "\n").encode()
        with self._reported():
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.position += len(data)

    def sync(self) -> None:
        """Wait until it is on disk."""
        with self._reported():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot write: {error.strerror or error}; the last checkpoint is safe"
            ) from None


def read_log(path: Path) -> list[Event]:
    """The events of a run; a last line that was cut short is left out."""
    events = map(json.loads, path.read_bytes().split(b"\n")[:-1])
    return [event for event in events if isinstance(event, dict)]


# The learning curve


def draw_curve(run: Path, metric: str) -> Path | None:
    """Draw the log of a run -> the path of the picture, or None without matplotlib or without events."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    events = read_log(run / LOG)
    train = [(e["step"], e["loss"]) for e in events if e["event"] == "train"]
    valid = [e for e in events if e["event"] == "valid"]
    if not train and not valid:
        return None
    figure = Figure(figsize=(8, 4.5), layout="constrained")  # an object of its own: no window, no global state
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token (nats)")
    axes.grid(alpha=0.3)
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.6, label="training loss")
    if valid:
        steps, losses = zip(*((e["step"], e["loss"]) for e in valid), strict=True)
        axes.plot(steps, losses, "o-", ms=3, color="tab:orange", label="validation loss")
        best = max((e for e in valid if e["best"]), key=lambda e: e["step"], default=None)
        if best is not None:
            axes.axvline(best["step"], color="gray", linestyle=":", label=f"best (step {best['step']:,})")
    if metric != "loss" and valid:
        right = axes.twinx()
        right.set_ylabel(f"{metric} (%)")
        right.plot(steps, [e[metric] for e in valid], "s--", ms=3, color="tab:green", label=metric)
        lines = axes.get_lines() + right.get_lines()
        axes.legend(lines, [str(line.get_label()) for line in lines], loc="upper right")
    else:
        axes.legend(loc="upper right")
    path = run / CURVE
    replace_file(path, lambda temporary: figure.savefig(temporary, format="svg", metadata={"Date": None}))
    return path


# The model card

MEANING = {
    "loss": "negative log-probability of a token of the target, in nats",
    "perplexity": "exp(loss)",
    "bits_per_char": "the same in bits, per character of the text",
    "accuracy": "sequences that are right in full, in percent",
    "wer": "sequences that are wrong, in percent",
    "per": "edits per token of the reference, in percent",
    "bleu": "BLEU",
    "chrf": "chrF",
}
_LABELS = {"loss": "negative log-probability of a label, in nats", "accuracy": "labels that are right, in percent"}
TASK_MEANING = {
    "masked": {"accuracy": "masked tokens that are predicted right, in percent"},
    "classify": _LABELS,
    "image": _LABELS,
}
USES = {
    "pairs": ("generate {run} input.txt", "evaluate {run} pairs.tsv", "inspect {run} TEXT -o page.html"),
    "lm": ("generate {run} prompts.txt", "evaluate {run} text.txt"),
    "masked": (
        "evaluate {run} text.txt",
        "train --task classify --data labelled.tsv --from {run} --out runs/classifier",
    ),
    "span": ("evaluate {run} text.txt", "train --data pairs.tsv --from {run} --out runs/tuned"),
    "classify": ("generate {run} input.txt", "evaluate {run} labelled.tsv"),
    "image": ("generate {run} images.npz", "evaluate {run} images.npz"),
}


def write_model_card(
    run: Path,
    recipe: Recipe,
    progress: Progress,
    *,
    parameters: int,
    examples: tuple[int, int],
    notes: list[str],
    signatures: Mapping[str, str],
) -> None:
    """Write the model card; `examples` are the numbers for training and validation, `notes` the choices made."""
    data, train, task = recipe.data, recipe.train, TASKS[recipe.task]
    files = [data.train, data.source, data.target, data.valid, data.valid_source, data.valid_target]
    unit = {"text": "characters", "images": "images"}.get(task.reads, "examples")
    origin = f"starting from `{train.start_from}`" if train.start_from else f"preset `{recipe.preset}`"
    lines = [
        f"# {run.resolve().name}",
        "",
        f"{task.model[0].upper()}{task.model[1:]}, trained with regard: {origin}, {parameters:,} parameters.",
        "",
        "## Scores",
        "",
        *_score_table(progress, recipe, signatures),
        "",
        *([f"![learning curve]({CURVE})", ""] if (run / CURVE).exists() else []),
        "## Data",
        "",
        f"- files: {', '.join(f'`{name}`' for name in files if name)}",
        f"- {examples[0]:,} {unit} to train on, {examples[1]:,} to validate",
        *(f"- {note}" for note in notes),
        "",
        "## Training",
        "",
        f"- {progress.step:,} steps ({progress.epoch + 1} epochs begun, {progress.examples:,} examples), "
        f"{format_duration(progress.seconds)}, {train.workers} process{'es' * (train.workers != 1)}, seed {train.seed}",
        f"- ended by: {progress.finished}; skipped steps: {progress.skipped}",
        "- every setting: `recipe.toml`; every number: `log.jsonl`",
        "",
        "## Use",
        "",
        "```sh",
        *(f"regard {use.format(run=shlex.quote(str(run)))}" for use in USES[recipe.task]),
        "```",
    ]
    if task.name in ("pairs", "lm"):
        lines += ["", "```python", "import regard", f"regard.load({str(run)!r}).generate([...])", "```"]
    text = "\n".join(lines) + "\n"
    replace_file(run / MODEL_CARD, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _score_table(progress: Progress, recipe: Recipe, signatures: Mapping[str, str]) -> list[str]:
    best, metric, beam = progress.best, recipe.train.metric, recipe.train.validate_beam
    meanings = MEANING | TASK_MEANING.get(recipe.task, {})
    if best is None:
        return ["None: no validation gave a number."]
    scores = dict(best.scores)
    if not TASKS[recipe.task].labels:
        scores["perplexity"] = math.exp(min(best.scores["loss"], 700))
    rows = ["| on the validation examples | | |", "|---|---|---|"]
    for name, value in scores.items():
        meaning = meanings.get(name, "") + (f", `{signatures[name]}`" if name in signatures else "")
        rows.append(f"| {name} | {value:.4g} | {meaning} |")
    which = f"the mean of {best.averaged} checkpoints" if best.averaged else f"step {best.step:,}"
    order = "lowest" if metric in LOWER_IS_BETTER else "highest"
    search = ""
    if TASKS[recipe.task].reads == "pairs" and metric != "loss":
        search = f"; outputs by {'greedy search' if beam == 1 else f'beam search ({beam})'}"
    return [*rows, "", f"The weights are those of {which}, chosen by the {order} {metric}{search}."]
