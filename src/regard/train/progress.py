"""How far a run has come: plain numbers, from which everything that follows can be worked out."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from regard.settings import LOWER_IS_BETTER

Scores = dict[str, float]


class Window(BaseModel):
    """Sums over the steps since the last line of the log."""

    model_config = ConfigDict(extra="forbid")

    steps: int = 0
    examples: int = 0
    tokens: int = 0  # target symbols: what the loss is divided by
    symbols: int = 0  # of both sides
    nll: float = 0.0
    smoothed: float = 0.0
    norm: float = 0.0

    def means(self, seconds: float) -> dict[str, float]:
        """Per symbol, per step, and per second of the `seconds` that the window took."""
        seconds = max(seconds, 1e-9)
        return {
            "loss": self.nll / self.tokens,
            "objective": self.smoothed / self.tokens,
            "norm": self.norm / self.steps,
            "tokens_per_second": round(self.symbols / seconds, 1),
            "examples_per_second": round(self.examples / seconds, 1),
        }


class Best(BaseModel):
    """The best validation so far: the weights of this step are model.safetensors."""

    model_config = ConfigDict(extra="forbid")

    step: int
    value: float
    scores: Scores
    averaged: int = 0  # how many checkpoints were averaged, if it is their mean


class Progress(BaseModel):
    """Where training stands, between two steps."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0  # steps tried, the skipped ones included
    epoch: int = 0
    batch: int = 0  # batches of this epoch that are done
    examples: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of wall-clock time, validation included
    skipped: int = 0
    skipped_in_a_row: int = 0
    window: Window = Window()
    validated: int = 0  # the step of the last validation
    validated_at: float = 0.0  # and when that was, in seconds
    validation_seconds: float = 0.0
    validations_since_best: int = 0
    best: Best | None = None
    kept: list[int] = []  # steps whose weights are kept for averaging
    log_bytes: int = 0
    finished: str | None = None  # what ended the run


def better(metric: str, scores: Scores, best: Best | None) -> bool:
    """Whether scores beat the best so far; among equals the lower loss wins. What is not a number is never better."""
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    value = scores[metric]
    if value != value:
        return False
    if best is None or sign * value > sign * best.value:
        return True
    return value == best.value and scores["loss"] < best.scores["loss"]
