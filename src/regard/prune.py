"""Removing heads for real: which ones, the smaller model, and what it costs and gains."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.batch import Batch, Ids, collate
from regard.data.order import batches as cut_batches
from regard.decode.alignment import load_heads, save_heads
from regard.decode.generate import Decoder
from regard.decode.options import Options
from regard.errors import UserError
from regard.evaluate import default_metrics, evaluate
from regard.files import write_json
from regard.inspect.choose import (
    Amount,
    Measure,
    by_attention,
    greedy_order,
    heads_of,
    how_many,
    ranking,
    removable,
)
from regard.inspect.cut import cut
from regard.inspect.gates import learn_gates
from regard.inspect.importance import Spot, encode_pairs, loss, make_batches
from regard.inspect.places import attentions, head_numbers
from regard.model import Model
from regard.run import Run
from regard.settings import Train
from regard.text.example import Example
from regard.train.optim import learning_rate
from regard.train.step import Stepper
from regard.train.world import World

POINTS = 12  # of the curve
REPORT = "prune.json"


@dataclass(frozen=True)
class State:
    """A model before or after."""

    heads: int
    parameters: int
    loss: float  # per symbol, in nats
    metrics: dict[str, float]
    sentences_per_second: float  # decoded greedily on this machine


@dataclass(frozen=True)
class Report:
    """What pruning did."""

    before: State
    pruned: State  # before any tuning
    after: State  # the same, if nothing was tuned
    removed: dict[str, list[int]]  # numbers of the heads by attention
    curve: list[tuple[int, float]]  # heads silenced, loss per symbol
    tuned_steps: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def prune(
    run: Run,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    amount: Amount,
    *,
    greedy: bool = False,
    by: Measure = "gradient",
    tune_steps: int = 0,
    judge_on: int = 256,
    lr: float = 3e-4,
    talk: Callable[[str], None] = lambda message: None,
) -> tuple[Run, Report]:
    """Remove heads from a run -> the smaller run (not saved yet), and the report.

    Heads are judged on `judge_on` of the examples; the tuning learns from all of them; what is reported is measured on
    those held out. With `by="gates"`, a copy of the model is first trained with gates for `tune_steps`.
    """
    check(run)
    if greedy and by == "gates":
        raise UserError("--greedy judges heads again and again, which --by gates cannot; choose one")
    pairs = encode_pairs(run, examples)
    step = max(1, len(pairs) // judge_on)
    batches = make_batches(pairs[::step][:judge_on], run.config)
    valid = make_batches(encode_pairs(run, held_out), run.config)
    model = run.model
    if by == "gates":
        model, order = _gated(model, pairs, tune_steps, lr, talk)
    else:
        order = ranking(model, batches, by)
    count = how_many(order, amount)
    going = greedy_order(model, batches, count, by, talk) if greedy else removable(model, list(order))
    removed = by_attention(going[:count])
    talk(f"{count} of {heads_of(model)} heads go")
    curve = quality_curve(model, valid, going)
    before = measure(run, held_out, valid)
    small = cut(model, removed)
    smaller = Run(small.config, run.codec, small, run.path)
    pruned = measure(smaller, held_out, valid)
    after = pruned
    if tune_steps:
        talk(f"tuning for {tune_steps} steps")
        tune(small, pairs, tune_steps, lr=lr)
        after = measure(smaller, held_out, valid)
    numbers = {name: [head_numbers(run.model, name)[head] for head in heads] for name, heads in removed.items()}
    return smaller, Report(before, pruned, after, numbers, curve, tune_steps)


def _gated(
    model: Model, pairs: Sequence[tuple[Ids, Ids]], steps: int, lr: float, talk: Callable[[str], None]
) -> tuple[Model, dict[Spot, float]]:
    """A copy of the model that has learned to do without heads, and its heads, those most shut first."""
    if not steps:
        raise UserError("--by gates learns which heads are needed: say for how many steps, with --tune")
    talk(f"learning gates for {steps} steps")
    learner = copy.deepcopy(model)
    found = learn_gates(learner, pairs, steps, lr=lr).importance()
    return learner, dict(sorted(found.items(), key=lambda item: (item[1], item[0])))


def save(smaller: Run, report: Report, path: str | Path, original: Path) -> None:
    """Write the smaller run with its report; alignment heads that are left are counted anew."""
    path = Path(path)
    smaller.save(path)
    write_json(path / REPORT, report.to_json())
    kept = []
    for layer, index in load_heads(original):
        name = f"decoder.blocks.{layer}.cross"
        old = head_numbers_before(smaller.model, report, name)
        if index < len(old) and old[index] in head_numbers(smaller.model, name):
            kept.append((layer, head_numbers(smaller.model, name).index(old[index])))
    if kept:
        save_heads(path, kept)


def head_numbers_before(model: Model, report: Report, name: str) -> list[int]:
    """The heads an attention had before they were removed."""
    return sorted({*head_numbers(model, name), *report.removed.get(name, [])}) if name in attentions(model) else []


def check(run: Run) -> None:
    """Is there anything to remove?"""
    if all(attention.heads < 2 for attention in attentions(run.model).values()):
        raise UserError(
            f"{run.path}: its attention has one head, which cannot go; only models with several can be pruned"
        )


# What it does


def quality_curve(model: Model, batches: Sequence[Batch], order: Sequence[Spot]) -> list[tuple[int, float]]:
    """The loss per symbol as more and more heads are silenced."""
    counts = sorted({round(i * len(order) / POINTS) for i in range(POINTS + 1)})
    return [(count, loss(model, batches, by_attention(order[:count]))) for count in counts]


def measure(run: Run, examples: Sequence[Example], batches: Sequence[Batch]) -> State:
    """How good, how large and how fast a run is."""
    names = [name for name in default_metrics(run, [e.target or "" for e in examples]) if name != "perplexity"]
    sample = list(examples[:64])
    decode = Decoder(run, Options())
    decode(sample[:4])  # the first call is always slow
    seconds = min(_seconds(lambda: decode(sample)) for _ in range(3))
    found = evaluate(run, examples, Options(), names, samples=0)
    return State(
        heads_of(run.model),
        sum(p.numel() for p in run.model.parameters()),
        loss(run.model, batches),
        {name: value.score for name, value in found.metrics.items()},
        len(sample) / max(1e-9, seconds),
    )


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def split(examples: Sequence[Example], every: int = 10, most: int = 1000) -> tuple[list[Example], list[Example]]:
    """Examples to learn from and to measure on: no source is on both sides."""
    order = {source: i for i, source in enumerate(dict.fromkeys(example.source for example in examples))}
    held_out = [example for example in examples if order[example.source] % every == 0][:most]
    return [example for example in examples if order[example.source] % every], held_out


def tune(model: Model, pairs: Sequence[tuple[Ids, Ids]], steps: int, *, lr: float = 3e-4, seed: int = 1) -> list[float]:
    """Train in this process for some steps on pairs of ids -> the loss per symbol of each; it ends in eval mode."""
    device = next(model.parameters()).device
    warmup = max(1, steps // 10)
    train = Train(steps=steps, lr=lr, schedule="cosine", warmup=warmup, batch_tokens=2048, seed=seed)
    lengths = [np.array([len(pair[side]) for pair in pairs]) for side in (0, 1)]
    stepper = Stepper(model, train, World(device=device))
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        for rows in cut_batches(lengths[0], lengths[1], seed, epoch, train.batch_tokens):
            batch = collate([pairs[i][0] for i in rows], [pairs[i][1] for i in rows], model.config)
            step = len(losses) + 1
            nll, _, norm = stepper.backward(step, [(batch, 1.0)])
            stepper.update(learning_rate(train, step, (step - 1) / steps, 1), norm)
            losses.append(nll / batch.tokens)
            if len(losses) == steps:
                break
        epoch += 1
    model.eval()
    return losses
