"""The training loop: steps, validation, checkpoints, until a budget runs out or a signal arrives."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from regard.errors import UserError
from regard.model import Model
from regard.recipe import Train
from regard.run import mean_weights
from regard.training.checkpoint import Best, CheckpointManager, Progress, Scores, Tensors, Window, better
from regard.training.distributed import ProcessGroup, is_lost_connection
from regard.training.loader import DataLoader
from regard.training.plan import Budget, validation_due
from regard.training.report import LOG, Event, Log, Reporter
from regard.training.step import Stepper

CHECKPOINT_SECONDS = 120.0
SAVING_SHARE = 1 / 20  # of the time, at most
MOST_SKIPS = 3  # in a row
CAUGHT = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


class Stopped(SystemExit):
    """A signal stopped training, which has saved its state; uncaught, the process ends with 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class Aborted(SystemExit):
    """A second signal stopped training before it could save."""


class Signals:
    """Records signals, which the loop asks for between steps. A second signal ends the process at once.

    Not so if a launcher started it: schedulers signal all processes, and the launcher passes on what it gets itself.
    """

    def __init__(self, launched: bool = False) -> None:
        self.received = 0
        self._launched = launched
        self._raise = False
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            # nohup has SIGHUP ignored, and so it stays; a shell does that to SIGINT for all that runs in the background
            caught = [n for n in CAUGHT if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
            self._old = {number: signal.signal(number, self._handle) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and self._launched:
            return
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


class Trainer:
    """Trains a model and keeps its run directory up to date.

    `validate` gives the loss and the metric of the recipe; all processes call it, with the same result.
    """

    def __init__(
        self,
        model: Model,
        train: Train,
        loader: DataLoader,
        validate: Callable[[Model], Scores],
        run: Path,
        group: ProcessGroup,
        reporter: Reporter,
        signals: Signals,
    ) -> None:
        self.model = model
        self.train = train
        self.loader = loader
        self.validate = validate
        self.group = group
        self.reporter = reporter
        self.signals = signals
        self.budget = Budget.of(train)
        self.progress = Progress()
        self.stepper = Stepper(model, train, group)
        self.checkpoints = CheckpointManager(run, self.stepper)
        self._steps_per_epoch = math.ceil(loader.batches_in(0) / train.accumulate)
        self._log: Log | None = None  # of the first process
        self._saved_at = self._logged_at = self._began = 0.0
        self._save_seconds: float | None = 0.0  # that the last checkpoint took, with the step after it
        self._unfit_in_a_row = 0  # steps of which nothing fits into memory

    def run(self, start: Event) -> Progress:
        """Train from the last checkpoint, or from the beginning, to the end. `start` opens the log.

        The run is not marked as finished before `mark_finished` is called.
        """
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
            raise Stopped(self.signals.received) from None  # the first process has saved, and ended before this one
        finally:
            if self._log is not None:
                self._log.close()
        return self.progress

    def mark_finished(self) -> None:
        """Save that nothing is left to do: last of all, when all files of the run are written."""
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

    # Steps

    def _step(self) -> int:
        """Take one step -> the signal that asks to stop, or 0. All processes agree on everything.

        The norm is not gathered: all processes have the same gradients.
        """
        progress, window = self.progress, self.progress.window
        batches = self.loader.step(progress.epoch, progress.batch, self.group.rank, self.group.size)
        if batches.begins_epoch:
            self.stepper.objective.segment_memory = None
        step = progress.step + 1
        rate = self.stepper.rate(step, self._done())
        nll, smoothed, norm = self.stepper.backward(step, batches.shares)
        failures = self.stepper.memory_failures
        numbers = [nll, smoothed, self._clock(), float(self.signals.received), failures.count, failures.tokens]
        gathered = self.group.gather_later(numbers)
        moved = self.stepper.update(step, rate, norm)
        ranks = gathered()
        progress.seconds = ranks[0][2]
        progress.step = step
        progress.batch += batches.batches
        progress.examples += batches.examples
        progress.tokens += batches.tokens
        if progress.batch >= self.loader.batches_in(progress.epoch):
            progress.epoch, progress.batch = progress.epoch + 1, 0
        nll, smoothed, failed, unfit = (sum(row[i] for row in ranks) for i in (0, 1, 4, 5))
        tokens = max(0, batches.tokens - int(unfit))
        if failed:
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
        self.stepper.objective.segment_memory = None  # it may hold what is not finite
        self._event("skip", step=progress.step, loss=loss, norm=norm)
        if progress.skipped_in_a_row >= MOST_SKIPS:
            raise UserError(
                f"training diverges: loss or gradients were not finite in {MOST_SKIPS} steps in a row, the last being "
                f"step {progress.step}; these steps did not touch the weights\n"
                f"  start again with a lower learning rate (train.lr, now {self.train.lr:g}), a longer warm-up "
                f"(train.warmup, now {self.train.warmup}), clipping (train.clip, now {self.train.clip:g})"
                + (", or train.precision=fp32" if self.train.precision != "fp32" else "")
            )

    def _report_memory(self, locate: Callable[[int, int], str], tokens: int) -> None:
        """Count and report that memory ran out in a step of which so many tokens are left; all processes call it."""
        progress, failures = self.progress, self.stepper.memory_failures
        mine = (failures.count, failures.pieces, [locate(*example) for example in failures.examples])
        ranks = self.group.gather_json(mine)
        skipped = [name for _, _, names in ranks for name in names]
        progress.memory_failures += sum(count for count, _, _ in ranks)
        progress.unfit += len(skipped)
        pieces = sum(pieces for count, pieces, _ in ranks if count)
        self._event("memory", step=progress.step, pieces=pieces, skipped=skipped)
        self._unfit_in_a_row = 0 if tokens else self._unfit_in_a_row + 1
        if self._unfit_in_a_row >= MOST_SKIPS:
            raise UserError(
                f"not enough memory: in {MOST_SKIPS} steps in a row, the last being step {progress.step}, not one "
                f"example fits even alone, such as {skipped[0]}\n"
                "  take a smaller model (model.width, model.layers), leave out long examples (data.max_length) or "
                "shorten rows of text (train.context), use fewer processes (train.workers), or free memory"
            )

    def _log_window(self, rate: float) -> None:
        progress = self.progress
        numbers: Event = {"examples": progress.examples, "tokens": progress.tokens}
        numbers |= progress.window.means(progress.seconds - self._logged_at)
        self._event("train", step=progress.step, epoch=self._epochs(), lr=rate, **numbers, seconds=self._rounded())
        self._logged_at = progress.seconds
        progress.window = Window()

    # How far

    def _clock(self) -> float:
        return time.monotonic() - self._began

    def _rounded(self) -> float:
        return round(self.progress.seconds, 3)

    def _epochs(self) -> float:
        return self.progress.epoch + self.progress.batch / self.loader.batches_in(self.progress.epoch)

    def _done(self) -> float:
        return self.budget.done(self.progress.step, self._epochs(), self.progress.seconds)[0]

    def _over(self) -> str | None:
        """The reason why the run ends now, or None; always after a validation."""
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

    # Validation

    def _validate(self) -> None:
        """Score the weights (or their moving average), keep them if they are the best so far, and save."""
        progress = self.progress
        weights = None if self.stepper.ema is None else self.stepper.ema.weights
        began = progress.seconds
        scores = self._scores(weights)
        progress.validated = progress.step
        progress.validated_at = progress.seconds
        progress.validation_seconds += progress.seconds - began
        # With a price on heads, later weights have fewer of them: the last weights count, not the best.
        improved = self.train.l0 > 0 or better(self.train.metric, scores, progress.best)
        if improved:
            progress.best = Best(step=progress.step, value=scores[self.train.metric], scores=scores)
            progress.validations_since_best = 0
        else:
            progress.validations_since_best += 1
        epochs, seconds = self._epochs(), self._rounded()
        self._event("valid", step=progress.step, epoch=epochs, **scores, best=improved, seconds=seconds)
        if self.train.average:
            progress.kept = [*progress.kept, progress.step][-self.train.average :]
            self.checkpoints.keep(progress.step)
        self._save()

    def _scores(self, weights: Tensors | None) -> Scores:
        """Validate with these weights; the same on all processes, as is the time afterwards.

        A signal that arrives meanwhile stops the run as it was before; the resumed run validates again.
        """
        alone = self.group.first and not self.stepper.sharded  # a sharded run is saved by all processes together
        at_once = self.signals.at_once() if alone else nullcontext()
        try:
            with self.stepper.evaluated(weights) as model, at_once:
                scores = self.validate(model)
        except Stopped as stopped:
            self._stop(stopped.number)
        first: tuple[Scores, float] = self.group.broadcast((scores, self._clock()))
        scores, self.progress.seconds = first
        return scores

    def _checkpoint_due(self) -> bool:
        """Whether to save now; all processes agree, for the time is that of the first."""
        seconds = self.progress.seconds - self._saved_at
        if self._save_seconds is None:  # the clock was read last before the checkpoint, and now after it
            self._save_seconds = seconds
        return seconds >= max(CHECKPOINT_SECONDS, self._save_seconds / SAVING_SHARE)

    def _save(self) -> None:
        """Write a checkpoint; it never changes what is computed."""
        self._saved_at, self._save_seconds = self.progress.seconds, None
        if self._log is not None:
            self._log.sync()
            self.progress.log_bytes = self._log.position
        self.checkpoints.save(self.progress)

    def _stop(self, number: int) -> NoReturn:
        """Save, and end as a signal asks."""
        self._save()
        self.reporter.say(
            f"{signal.Signals(number).name}: saved at step {self.progress.step:,}; continue with --resume"
        )
        raise Stopped(number)

    def _restore(self) -> None:
        self.progress = self.checkpoints.restore()
        self.progress.finished = None
        self.checkpoints.recover(self.progress)
        self._saved_at = self._logged_at = self.progress.seconds
        steps = [int(row[0]) for row in self.group.gather([float(self.progress.step)])]
        if len(set(steps)) > 1:
            raise RuntimeError(f"training processes found different checkpoints: steps {steps}")

    # The end

    def _finish(self, reason: str) -> None:
        """Average the last checkpoints if asked to, and log the end."""
        progress = self.progress
        if len(progress.kept) > 1:
            self._average()
        progress.finished = reason
        best = progress.best and {"best_step": progress.best.step, self.train.metric: progress.best.value}
        counts = {"skipped": progress.skipped}
        if progress.memory_failures:
            counts |= {"memory_failures": progress.memory_failures, "unfit": progress.unfit}
        self._event("end", step=progress.step, reason=reason, **counts, **(best or {}), seconds=self._rounded())
        if self._log is not None:
            progress.log_bytes = self._log.position

    def _average(self) -> None:
        """The mean of the last validated weights becomes the model if it is at least as good as the best of them."""
        progress = self.progress
        self.group.gather([0.0])  # wait for the first process, which may still be writing them
        weights = mean_weights(map(self.checkpoints.files.kept, progress.kept))
        scores, count = self._scores(weights), len(progress.kept)
        same = progress.best is not None and scores == progress.best.scores
        used = same or better(self.train.metric, scores, progress.best)
        if used:
            self.checkpoints.publish(weights)
            value = scores[self.train.metric]
            progress.best = Best(step=progress.step, value=value, scores=scores, averaged=count)
        self._event("average", checkpoints=count, **scores, best=used, seconds=self._rounded())

    def _event(self, kind: str, **fields: Any) -> None:
        """Write to the log and report."""
        if self._log is not None:
            event = {"event": kind, **fields}
            self._log.write(event)
            self.reporter.event(event)
