"""The loop: steps, validation, checkpoints, until a budget runs out."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from regard.errors import UserError
from regard.model import Model
from regard.recipe import Train
from regard.training.checkpoint import Best, CheckpointManager, Progress, Scores, Tensors, Window, better
from regard.training.distributed import ProcessGroup, Signals, Stopped
from regard.training.loader import DataLoader
from regard.training.report import LOG, Event, Log, Reporter
from regard.training.step import Ema, Stepper, learning_rate, lent

CHECKPOINT_SECONDS = 120.0
MOST_SKIPS = 3  # in a row

Validate = Callable[[Model], Scores]  # "loss" and the metric of the recipe; called by all processes, the same for all


class Trainer:
    """Trains a model on a feed of examples, and keeps a run directory up to date."""

    def __init__(
        self,
        model: Model,
        train: Train,
        feed: DataLoader,
        validate: Validate,
        run: Path,
        world: ProcessGroup,
        talk: Reporter,
        conclude: Callable[[Progress], None],
    ) -> None:
        """`conclude` is called in the first process when all is done but the mark that it is."""
        self.model = model
        self.train = train
        self.feed = feed
        self.validate = validate
        self.world = world
        self.talk = talk
        self._conclude = conclude
        self.budget = Budget.of(train)
        self.progress = Progress()
        self.stepper = Stepper(model, train, world)
        self.ema = Ema(model, train.ema) if train.ema else None
        self.keeper = CheckpointManager(run, self.stepper.objective, self.stepper.optimizer, self.ema)
        self.signals = Signals()
        self._log: Log | None = None  # the first process has one
        self._saved_at = self._logged_at = self._began = 0.0
        top = model.config.decoder or model.config.encoder
        assert top is not None
        self._width = top.width

    def run(self, start: Event) -> Progress:
        """Train from the last checkpoint, or from the beginning, to the end. `start` opens the log."""
        with self.signals:
            self._restore()
            self._began = time.monotonic() - self.progress.seconds
            if self.world.first:
                self._log = Log(self.keeper.path / LOG, self.progress.log_bytes)
            try:
                if self._log is not None and self._log.position == 0:
                    self._log.write({"event": "start", **start})
                self._loop()
            finally:
                if self._log is not None:
                    self._log.close()
        return self.progress

    def _loop(self) -> None:
        while True:
            if self._validation_due():
                self._validate()
            reason = self._over()
            if reason is not None:
                self._finish(reason)
                return
            stop = self._step()
            self.talk.tick(self.progress.step, self._done(), self.progress.seconds)
            if stop:
                self._leave(stop)
            if self.progress.seconds - self._saved_at >= CHECKPOINT_SECONDS:
                self._save()

    # Steps

    def _step(self) -> int:
        """Take one step -> the signal that asks to stop, or 0. All processes agree on everything.

        The norm needs no telling: everyone has the same gradients.
        """
        progress, window = self.progress, self.progress.window
        portion = self.feed.portion(progress.epoch, progress.batch)
        if portion.fresh:
            self.stepper.objective.segment_memory = None
        step = progress.step + 1
        rate = learning_rate(self.train, step, self._done(), self._width)
        nll, smoothed, norm = self.stepper.backward(step, portion.shares)
        told = self.world.gather_later([nll, smoothed, self._clock(), float(self.signals.received)])
        moved = self.stepper.update(rate, norm)
        if moved and self.ema is not None:
            self.ema.update(self.model, step)
        everyone = told()
        progress.seconds = everyone[0][2]
        progress.step = step
        progress.batch += portion.batches
        progress.examples += portion.examples
        progress.tokens += portion.tokens
        if progress.batch >= self.feed.batches_in(progress.epoch):
            progress.epoch, progress.batch = progress.epoch + 1, 0
        nll, smoothed = (sum(row[i] for row in everyone) for i in (0, 1))
        if moved:
            progress.skipped_in_a_row = 0
            window.steps += 1
            window.examples += portion.examples
            window.tokens += portion.tokens
            window.symbols += portion.symbols
            window.nll += nll
            window.smoothed += smoothed
            window.norm += norm
        else:
            self._skip(nll / portion.tokens, norm)
        if step % self.train.log_every == 0 and window.steps:
            self._log_window(rate)
        return int(max(row[3] for row in everyone))

    def _skip(self, loss: float, norm: float) -> None:
        progress = self.progress
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        self.stepper.objective.segment_memory = None  # it may be what is not finite
        self._event({"event": "skip", "step": progress.step, "loss": loss, "norm": norm})
        if progress.skipped_in_a_row >= MOST_SKIPS:
            raise UserError(
                f"training diverges: loss or gradients were not finite in {MOST_SKIPS} steps in a row, the last being "
                f"step {progress.step}; these steps did not touch the weights\n"
                f"  start again with a lower learning rate (train.lr, now {self.train.lr:g}), a longer warm-up "
                f"(train.warmup, now {self.train.warmup}), clipping (train.clip, now {self.train.clip:g})"
                + (", or train.precision=fp32" if self.train.precision != "fp32" else "")
            )

    def _log_window(self, rate: float) -> None:
        progress = self.progress
        took = progress.seconds - self._logged_at
        self._logged_at = progress.seconds
        self._event(
            {
                "event": "train",
                "step": progress.step,
                "epoch": self._epochs(),
                "lr": rate,
                "examples": progress.examples,
                "tokens": progress.tokens,
                **progress.window.means(took),
                "seconds": round(progress.seconds, 3),
            }
        )
        progress.window = Window()

    # How far

    def _clock(self) -> float:
        return time.monotonic() - self._began

    def _epochs(self) -> float:
        return self.progress.epoch + self.progress.batch / self.feed.batches_in(self.progress.epoch)

    def _done(self) -> float:
        return self.budget.done(self.progress.step, self._epochs(), self.progress.seconds)[0]

    def _over(self) -> str | None:
        """What ends the run now, if anything does; always after a validation."""
        progress = self.progress
        done, name = self.budget.done(progress.step, self._epochs(), progress.seconds)
        if done >= 1 and progress.validated == progress.step:
            return name
        if self.train.patience and progress.validations_since_best >= self.train.patience:
            return "patience"
        return None

    def _validation_due(self) -> bool:
        progress = self.progress
        steps = progress.step - progress.validated
        if steps == 0:
            return False
        if self._done() >= 1:
            return True
        since = Since(steps, progress.seconds - progress.validated_at, progress.validation_seconds, progress.seconds)
        return validation_due(self.train.validate_every, self.feed.steps_in(0), self.budget, since)

    # Validation

    def _validate(self) -> None:
        """Score the weights (or their moving average), keep them if they are the best so far, and save."""
        progress = self.progress
        weights = None if self.ema is None else self.ema.weights
        began = progress.seconds
        try:
            scores = self._scores(weights)
        except Stopped as stopped:
            self._leave(stopped.number)  # as it was before the validation, which the resumed run will do
        progress.validated = progress.step
        progress.validated_at = progress.seconds
        progress.validation_seconds += progress.seconds - began
        # Where heads are pressed to go, later weights have fewer: the last ones count, not the best.
        improved = self.train.l0 > 0 or better(self.train.metric, scores, progress.best)
        if improved:
            progress.best = Best(step=progress.step, value=scores[self.train.metric], scores=scores)
            progress.validations_since_best = 0
        else:
            progress.validations_since_best += 1
        seconds = round(progress.seconds, 3)
        self._event(
            {
                "event": "valid",
                "step": progress.step,
                "epoch": self._epochs(),
                **scores,
                "best": improved,
                "seconds": seconds,
            }
        )
        if self.train.average:
            progress.kept = [*progress.kept, progress.step][-self.train.average :]
            if self.world.first:
                self.keeper.keep(progress.step)
        self._save()

    def _scores(self, weights: Tensors | None) -> Scores:
        """Validate with these weights; the same on all processes, as is the time afterwards."""
        self.model.eval()
        with lent(self.model, weights):
            if self.world.first:
                with self.signals.at_once():
                    scores = self.validate(self.model)
            else:
                scores = self.validate(self.model)
        told: tuple[Scores, float] = self.world.share((scores, self._clock()))
        scores, self.progress.seconds = told
        return scores

    def _save(self) -> None:
        """Write a checkpoint; it never changes what is computed."""
        self._saved_at = self.progress.seconds
        if self._log is not None:
            self._log.sync()
            self.progress.log_bytes = self._log.position
            self.keeper.save(self.progress)

    def _leave(self, number: int) -> NoReturn:
        """Save and obey a signal."""
        self._save()
        self.talk.say(f"{signal.Signals(number).name}: saved at step {self.progress.step:,}; continue with --resume")
        raise Stopped(number)

    def _restore(self) -> None:
        self.progress = self.keeper.restore()
        self.progress.finished = None
        if self.world.first:
            self.keeper.recover(self.progress)
        self._saved_at = self._logged_at = self.progress.seconds
        steps = [int(row[0]) for row in self.world.gather([float(self.progress.step)])]
        if len(set(steps)) > 1:
            raise RuntimeError(f"training processes found different checkpoints: steps {steps}")

    # The end

    def _finish(self, reason: str) -> None:
        """Average the last checkpoints if asked to, and mark the run as finished."""
        progress = self.progress
        if len(progress.kept) > 1:
            self._average()
        progress.finished = reason
        best = progress.best
        ended: Event = {"event": "end", "step": progress.step, "reason": reason, "skipped": progress.skipped}
        if best is not None:
            ended |= {"best_step": best.step, self.train.metric: best.value}
        self._event({**ended, "seconds": round(progress.seconds, 3)})
        if self._log is not None:
            self._conclude(progress)
            progress.log_bytes = self._log.position
            self.keeper.mark(progress)  # last of all: a run that is marked has nothing left to do

    def _average(self) -> None:
        """The mean of the last validated weights becomes the model if it is at least as good as the best of them."""
        progress = self.progress
        self.world.wait()  # the first process may still be writing them
        weights = self.keeper.average(progress.kept)
        try:
            scores = self._scores(weights)
        except Stopped as stopped:
            self._leave(stopped.number)
        count = len(progress.kept)
        same = progress.best is not None and scores == progress.best.scores
        used = same or better(self.train.metric, scores, progress.best)
        if used:
            if self.world.first:
                self.keeper.publish(weights)
            value = scores[self.train.metric]
            progress.best = Best(step=progress.step, value=value, scores=scores, averaged=count)
        seconds = round(progress.seconds, 3)
        self._event({"event": "average", "checkpoints": count, **scores, "best": used, "seconds": seconds})

    def _event(self, event: Event) -> None:
        """Write to the log and tell whoever listens."""
        if self._log is not None:
            self._log.write(event)
            self.talk.event(event)


DEFAULT_MINUTES = 10.0
MOST_VALIDATIONS = 40
FEWEST_VALIDATIONS = 10  # with a time budget, even if no epoch is ever completed
VALIDATION_SHARE = 0.1  # of the time, at most


class Budget(NamedTuple):
    """What may be used up; the first to run out ends the run."""

    seconds: float | None
    steps: int | None
    epochs: int | None

    @classmethod
    def of(cls, train: Train) -> Budget:
        """The budget of a recipe; with none, ten minutes."""
        minutes = train.minutes
        if minutes is None and train.steps is None and train.epochs is None:
            minutes = DEFAULT_MINUTES
        return cls(None if minutes is None else 60 * minutes, train.steps, train.epochs)

    def done(self, step: int, epochs: float, seconds: float) -> tuple[float, str]:
        """The part that is used up, from 0 to 1, and of what."""
        parts = [
            (step / self.steps, "steps") if self.steps else (0.0, "steps"),
            (epochs / self.epochs, "epochs") if self.epochs else (0.0, "epochs"),
            (seconds / self.seconds, "minutes") if self.seconds else (0.0, "minutes"),
        ]
        part, name = max(parts, key=lambda item: item[0])
        return min(1.0, part), name


class Since(NamedTuple):
    """What happened since the last validation, and what validations have cost so far."""

    steps: int
    seconds: float
    validation_seconds: float
    total_seconds: float


def validation_due(every: int | None, steps_per_epoch: int, budget: Budget, since: Since) -> bool:
    """Whether it is time to validate: every so many steps, or about once per epoch, at most 40 times in a run.

    With a time budget, validation takes at most a tenth of the time, and comes at least ten times if that allows it.
    """
    if every is not None:
        return since.steps >= every
    if budget.seconds is None:
        total = min(budget.steps or math.inf, (budget.epochs or math.inf) * steps_per_epoch)
        return since.steps >= max(steps_per_epoch, math.ceil(total / MOST_VALIDATIONS))
    if since.steps == 0 or since.validation_seconds > VALIDATION_SHARE * since.total_seconds:
        return False
    epoch_over = since.steps >= steps_per_epoch and since.seconds >= budget.seconds / MOST_VALIDATIONS
    return epoch_over or since.seconds >= budget.seconds / FEWEST_VALIDATIONS
