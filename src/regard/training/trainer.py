"""The training loop: steps, validation, checkpoints, until a budget runs out or a signal arrives."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from regard.errors import UserError
from regard.metrics import LOWER_IS_BETTER
from regard.model import Model
from regard.parallel.ranks import STOP_SIGNALS, ProcessGroup, is_lost_connection
from regard.training.checkpoint import Best, CheckpointManager, Progress, Scores, Tensors, Window
from regard.training.directory import New, Resumed
from regard.training.log import LOG, Log
from regard.training.plan import Budget
from regard.training.report import Event, Reporter
from regard.training.step import Stepper, learning_rate
from regard.weight_files import mean_weights

CHECKPOINT_SECONDS = 120.0
SAVING_SHARE = 1 / 20  # maximum share of the time
MAX_SKIPS = 3  # in a row
MAX_VALIDATIONS = 40
MIN_VALIDATIONS = 10  # with a time budget
VALIDATION_SHARE = 0.1  # maximum share of the time


class Stopped(SystemExit):
    """A signal stopped training after its state was saved; uncaught, the process exits with 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class Aborted(SystemExit):
    """A second signal stopped training before it could save."""


@dataclass
class Signals:
    """Records signals. A second signal ends the process, unless it was `launched`: launchers repeat signals."""

    launched: bool = False
    received: int = 0
    _raise: bool = False

    @contextmanager
    def caught(self) -> Iterator[Signals]:
        """Handle signals inside the context."""
        previous = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only in the main thread
            # An ignored SIGHUP (nohup) stays ignored. SIGINT does not: shells ignore it in all background jobs.
            caught = [n for n in STOP_SIGNALS if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
            previous = {number: signal.signal(number, self._handle) for number in caught}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and self.launched:
            return
        if self.received:
            raise Aborted(128 + number)
        self.received = number
        if self._raise:
            raise Stopped(number)

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Raise Stopped on a signal without waiting for the end of a step, for long work without side effects."""
        if self.received:
            raise Stopped(self.received)
        self._raise = True
        try:
            yield
        finally:
            self._raise = False


class Trainer:
    """Trains a model and keeps its run directory up to date; `validate` must return equal scores in all processes."""

    def __init__(
        self,
        model: Model,
        setup: New | Resumed,
        validate: Callable[[Model], Scores],
        group: ProcessGroup,
        reporter: Reporter,
        signals: Signals,
    ) -> None:
        self.model = model
        self.train = setup.recipe.train
        self.loader = setup.loader
        self.validate = validate
        self.group = group
        self.reporter = reporter
        self.signals = signals
        self.budget = Budget.of(self.train)
        self.progress = setup.progress if isinstance(setup, Resumed) else Progress()
        self.stepper = Stepper(model, self.train, group)
        self.checkpoints = CheckpointManager(setup.path, self.stepper)
        self._steps_per_epoch = math.ceil(len(self.loader.batches(0)) / self.train.accumulate)
        self._log: Log | None = None  # of the first process
        self._saved_at = self._logged_at = self._began = 0.0
        self._save_seconds: float | None = 0.0  # duration of the last checkpoint and the step after it
        self._unfit_in_a_row = 0  # steps in which no example fits into memory

    def run(self, start: Event) -> Progress:
        """Train to the end of the budget; `start` has the facts for the first line of the log."""
        self._restore()
        self._began = time.monotonic() - self.progress.seconds
        if self.group.first:
            self._log = Log(self.checkpoints.files.run / LOG, self.progress.log_bytes)
        try:
            if self._log is not None and self._log.position == 0:
                self._log.write({"event": "start", **start})
            self._loop()
        except RuntimeError as error:
            if not self.signals.received or not is_lost_connection(error):
                raise
            raise Stopped(self.signals.received) from None  # the first process has saved and exited
        finally:
            if self._log is not None:
                self._log.close()
        return self.progress

    def mark_finished(self) -> None:
        """Record the end of training, after all other files of the run."""
        self.checkpoints.files.save(self.progress, {})

    def _loop(self) -> None:
        while True:
            if self._validation_due():
                self._validate()
            if reason := self._over():
                self._finish(reason)
                return
            stop = self._step()
            self.reporter.tick(self.progress.step, self._done(), self.progress.seconds)
            if stop:
                self._stop(stop)
            if self._checkpoint_due():
                self._save()

    def _step(self) -> int:
        """Take one step -> the number of a signal to stop, or 0. All processes get the same result."""
        progress = self.progress
        window = progress.window
        batches = self.loader.step(progress.epoch, progress.batch, self.group.rank, self.group.size)
        if batches.begins_epoch:
            self.stepper.objective.segment_memory = None
        step = progress.step + 1
        rate = learning_rate(self.train, step, self._done(), self.model.config.top.width)
        nll, smoothed, norm = self.stepper.backward(step, batches.shares)
        gathered = self.group.gather_later([nll, smoothed, self._clock(), float(self.signals.received)])
        moved = self.stepper.update(step, rate, norm)
        ranks = gathered()
        progress.seconds = ranks[0][2]
        progress.step = step
        progress.batch += batches.batches
        progress.examples += batches.examples
        progress.tokens += batches.tokens
        if progress.batch >= len(self.loader.batches(progress.epoch)):
            progress.epoch += 1
            progress.batch = 0
        nll, smoothed, *_ = map(sum, zip(*ranks, strict=True))
        failures = self.stepper.memory_failures  # only a single process continues after one
        tokens = max(0, batches.tokens - failures.tokens)
        if failures.count:
            self._report_memory(batches.locate, tokens)
        if moved and tokens:
            progress.skipped_in_a_row = 0
            window.steps += 1
            window.examples += batches.examples
            window.tokens += tokens
            window.symbols += batches.all_tokens
            window.nll += nll
            window.smoothed += smoothed
            window.norm += norm
            self.reporter.loss(nll / tokens, batches.all_tokens)
        elif tokens:
            self._skip(nll / tokens, norm)
        if step % self.train.log_every == 0 and window.steps:
            self._log_window(rate)
        return int(max(row[3] for row in ranks))

    def _skip(self, loss: float, norm: float) -> None:
        progress = self.progress
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        self.stepper.objective.segment_memory = None  # it may not be finite
        self._event("skip", step=progress.step, loss=loss, norm=norm)
        if progress.skipped_in_a_row >= MAX_SKIPS:
            raise UserError(
                f"training diverges: loss or gradients were not finite in {MAX_SKIPS} steps in a row, the last being "
                f"step {progress.step}; these steps did not change the weights\n"
                f"  start again with a lower learning rate (train.lr, now {self.train.lr:g}), a longer warm-up "
                f"(train.warmup, now {self.train.warmup}), clipping (train.clip, now {self.train.clip:g})"
                + (", or train.precision=fp32" if self.train.precision != "fp32" else "")
            )

    def _report_memory(self, locate: Callable[[int, int], str], tokens: int) -> None:
        """Count and report the memory failures of a step that trained on the remaining number of `tokens`."""
        progress = self.progress
        failures = self.stepper.memory_failures
        skipped = [locate(*example) for example in failures.examples]
        progress.memory_failures += failures.count
        progress.unfit += len(skipped)
        self._event("memory", step=progress.step, pieces=failures.pieces, skipped=skipped)
        self._unfit_in_a_row = 0 if tokens else self._unfit_in_a_row + 1
        if self._unfit_in_a_row >= MAX_SKIPS:
            raise UserError(
                f"not enough memory: in {MAX_SKIPS} steps in a row, the last being step {progress.step}, no single "
                f"example fits, such as {skipped[0]}\n"
                "  use a smaller model (model.width, model.layers), leave out long examples (data.max_length) or "
                "shorten rows of text (train.context), or free memory"
            )

    def _log_window(self, rate: float) -> None:
        progress = self.progress
        totals = {"examples": progress.examples, "tokens": progress.tokens}
        means = progress.window.means(progress.seconds - self._logged_at)
        self._event("train", step=progress.step, epoch=self._epochs(), lr=rate, **totals, **means)
        self._logged_at = progress.seconds
        progress.window = Window()

    def _clock(self) -> float:
        return time.monotonic() - self._began

    def _epochs(self) -> float:
        return self.progress.epoch + self.progress.batch / len(self.loader.batches(self.progress.epoch))

    def _done(self) -> float:
        return self.budget.done(self.progress.step, self._epochs(), self.progress.seconds)[0]

    def _over(self) -> str | None:
        """The reason why the run ends now, or None; a run ends only after a validation."""
        progress = self.progress
        done, name = self.budget.done(progress.step, self._epochs(), progress.seconds)
        if done >= 1 and progress.validated == progress.step:
            return name
        if self.train.patience and progress.validations_since_best >= self.train.patience:
            return "patience"
        return None

    def _validation_due(self) -> bool:
        if self.progress.step == self.progress.validated:
            return False
        every = self.train.validate_every
        return self._done() >= 1 or validation_due(every, self._steps_per_epoch, self.budget, self.progress)

    def _validate(self) -> None:
        """Validate the weights (or their moving average) and save; they become the model if they are the best."""
        progress = self.progress
        began = progress.seconds
        scores = self._scores(None if self.stepper.ema is None else self.stepper.ema.weights)
        progress.validated = progress.step
        progress.validated_at = progress.seconds
        progress.validation_seconds += progress.seconds - began
        # With a penalty on heads, later weights have fewer heads, so the last weights are saved, not the best.
        improved = self.train.l0 > 0 or better(self.train.metric, scores, progress.best)
        if improved:
            progress.best = Best(step=progress.step, value=scores[self.train.metric], scores=scores)
            progress.validations_since_best = 0
        else:
            progress.validations_since_best += 1
        self._event("valid", step=progress.step, epoch=self._epochs(), **scores, best=improved)
        if self.train.average:
            progress.kept = [*progress.kept, progress.step][-self.train.average :]
            self.checkpoints.keep(progress.step)
        self._save()

    def _scores(self, weights: Tensors | None) -> Scores:
        """Validate -> the same scores and time in all processes. On a signal, the state before validation is saved."""
        saves_alone = self.group.first and not self.stepper.sharded  # a sharded run is saved by all processes together
        immediate = self.signals.immediate() if saves_alone else nullcontext()
        try:
            with self.stepper.evaluated(weights) as model, immediate:
                scores = self.validate(model)
        except Stopped as stopped:
            self._stop(stopped.number)
        first: tuple[Scores, float] = self.group.broadcast((scores, self._clock()))
        scores, self.progress.seconds = first
        return scores

    def _checkpoint_due(self) -> bool:
        """Whether to save now, by the clock of the first process."""
        seconds = self.progress.seconds - self._saved_at
        if self._save_seconds is None:  # the first step after a checkpoint
            self._save_seconds = seconds
        return seconds >= max(CHECKPOINT_SECONDS, self._save_seconds / SAVING_SHARE)

    def _save(self) -> None:
        """Write a checkpoint; this does not change what is computed."""
        self._saved_at = self.progress.seconds
        self._save_seconds = None
        if self._log is not None:
            self._log.sync()
            self.progress.log_bytes = self._log.position
        self.checkpoints.save(self.progress)

    def _stop(self, number: int) -> NoReturn:
        self._save()
        name = signal.Signals(number).name
        self.reporter.say(f"{name}: saved at step {self.progress.step:,}; continue with --resume")
        raise Stopped(number)

    def _restore(self) -> None:
        """Load the last checkpoint of a resumed run."""
        progress = self.progress
        if progress.step:
            self.checkpoints.restore(progress.step)
            self.checkpoints.complete(progress)
        progress.finished = None
        self._saved_at = self._logged_at = progress.seconds
        steps = [int(row[0]) for row in self.group.gather([float(progress.step)])]
        if len(set(steps)) > 1:
            raise RuntimeError(f"training processes found different checkpoints: steps {steps}")

    def _finish(self, reason: str) -> None:
        """Average the last validated weights if configured, and log the end."""
        progress = self.progress
        if len(progress.kept) > 1:
            self._average()
        progress.finished = reason
        facts: Event = {"step": progress.step, "reason": reason, "skipped": progress.skipped}
        if progress.memory_failures:
            facts |= {"memory_failures": progress.memory_failures, "unfit": progress.unfit}
        if progress.best:
            facts |= {"best_step": progress.best.step, self.train.metric: progress.best.value}
        self._event("end", **facts)
        if self._log is not None:
            progress.log_bytes = self._log.position

    def _average(self) -> None:
        """Average the last validated weights; the mean becomes the model if its scores are not below the best."""
        progress = self.progress
        self.group.gather([0.0])  # wait for the first process to write them
        weights = mean_weights(map(self.checkpoints.files.kept, progress.kept))
        scores = self._scores(weights)
        count = len(progress.kept)
        same = progress.best is not None and scores == progress.best.scores
        used = same or better(self.train.metric, scores, progress.best)
        if used:
            self.checkpoints.publish(weights)
            value = scores[self.train.metric]
            progress.best = Best(step=progress.step, value=value, scores=scores, averaged=count)
        self._event("average", checkpoints=count, **scores, best=used)

    def _event(self, kind: str, **fields: Any) -> None:
        if self._log is not None:
            event = {"event": kind, **fields}
            if kind not in ("skip", "memory"):
                event["seconds"] = round(self.progress.seconds, 3)
            self._log.write(event)
            self.reporter.event(event)


def validation_due(every: int | None, steps_per_epoch: int, budget: Budget, progress: Progress) -> bool:
    """Whether to validate: after `every` steps or an epoch; by time at least 10 times, for at most a tenth of it."""
    steps = progress.step - progress.validated
    seconds = progress.seconds - progress.validated_at
    if every is not None:
        return steps >= every
    if budget.seconds is None:
        total = min(budget.steps or math.inf, (budget.epochs or math.inf) * steps_per_epoch)
        return steps >= max(steps_per_epoch, math.ceil(total / MAX_VALIDATIONS))
    if steps == 0 or progress.validation_seconds > VALIDATION_SHARE * progress.seconds:
        return False
    epoch_over = steps >= steps_per_epoch and seconds >= budget.seconds / MAX_VALIDATIONS
    return epoch_over or seconds >= budget.seconds / MIN_VALIDATIONS


def better(metric: str, scores: Scores, best: Best | None) -> bool:
    """Whether scores are better than the best so far; the loss breaks ties. NaN is never better."""
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    value = scores[metric]
    if value != value:
        return False
    if best is None or sign * value > sign * best.value:
        return True
    return value == best.value and scores["loss"] < best.scores["loss"]
