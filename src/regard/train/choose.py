"""Choices that a recipe may leave open, each a pure function of what is known, with its reason in words."""

from __future__ import annotations

from typing import NamedTuple

from regard.settings import Train

FEW_SYMBOLS = 50_000  # of both sides, in all training examples
MANY_EXAMPLES = 100_000
WORTH_EXAMPLES = 1_000  # below, starting processes takes longer than they save
WORTH_STEPS = 200
WORTH_MINUTES = 0.5
LEAST_ROWS = 8  # of a batch, per process; fewer will do if they are long
LEAST_SYMBOLS = 256


class Choice(NamedTuple):
    """What was chosen and why."""

    value: str
    reason: str


def choose_preset(examples: int, symbols: int, device: str) -> Choice:
    """A model that the data can fill and the machine can train."""
    size = f"{examples:,} training examples, {symbols:,} symbols"
    if symbols < FEW_SYMBOLS:
        return Choice("transformer-tiny", f"little data ({size})")
    if examples >= MANY_EXAMPLES and device == "cuda":
        return Choice("transformer-base", f"much data ({size}) and a GPU")
    if examples >= MANY_EXAMPLES:
        return Choice("transformer-small", f"much data ({size}), but no GPU")
    return Choice("transformer-small", size)


def choose_workers(train: Train, device: str, cores: int, examples: int, rows: int, symbols: int) -> Choice:
    """How many processes; several one-thread processes do more on a CPU than one with several threads.

    `rows` and `symbols` are those of a batch.
    """
    if train.workers:
        return Choice(str(train.workers), "as asked for")
    if device != "cpu":
        return Choice("1", f"on {device}; for several GPUs use torchrun")
    if cores == 1:
        return Choice("1", "one core")
    short = (train.steps or WORTH_STEPS) < WORTH_STEPS or (train.minutes or WORTH_MINUTES) < WORTH_MINUTES
    if examples < WORTH_EXAMPLES or short:
        return Choice("1", "too little to do for more")
    workers = min(cores, max(1, rows // LEAST_ROWS, min(rows, symbols // LEAST_SYMBOLS)))
    if workers < cores:
        return Choice(str(workers), f"{cores} cores, but only {rows} examples per batch")
    return Choice(str(workers), "one per core")
