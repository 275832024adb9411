"""How long to train and when to validate: pure functions of progress, so that a resumed run decides alike."""

from __future__ import annotations

import math
from typing import NamedTuple

from regard.settings import Train

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
