"""Removing heads for real: which ones, the smaller model, and what it costs and gains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from regard.batch import Batch, Ids, collate
from regard.data.order import batches as cut_batches
from regard.decode.alignment import load_heads, save_heads
from regard.decode.generate import Decoder
from regard.decode.options import Options
from regard.errors import UserError
from regard.evaluate import default_metrics, evaluate
from regard.files import write_json
from regard.inspect.cut import cut
from regard.inspect.importance import (
    Removed,
    Spot,
    ablation_importance,
    encode_pairs,
    gradient_importance,
    loss,
    make_batches,
)
from regard.inspect.places import attentions, head_numbers
from regard.model import Model
from regard.run import Run
from regard.settings import Train
from regard.text.example import Example
from regard.train.optim import learning_rate
from regard.train.step import Stepper
from regard.train.world import World

Measure = Literal["gradient", "ablation"]
POINTS = 12  # of the curve
REPORT = "prune.json"


@dataclass(frozen=True)
class Amount:
    """How many heads go: a part of all, a number, or all that are needed less than a threshold."""

    fraction: float | None = None
    count: int | None = None
    threshold: float | None = None

    @classmethod
    def parse(cls, heads: str | None, threshold: float | None) -> Amount:
        """From `0.4`, `40%` or `12`, or from a threshold."""
        if (heads is None) == (threshold is None):
            raise UserError("say how many heads go: --heads 0.4, --heads 12, or --threshold X")
        if heads is None:
            return cls(threshold=threshold)
        try:
            if heads.endswith("%"):
                return cls(fraction=float(heads[:-1]) / 100)._checked(heads)
            return (cls(fraction=float(heads)) if "." in heads else cls(count=int(heads)))._checked(heads)
        except ValueError:
            raise UserError(f"--heads {heads}: not a part (0.4 or 40%) or a number of heads (12)") from None

    def _checked(self, told: str) -> Amount:
        if not 0 < (self.fraction or self.count or 0) < (1 if self.count is None else 1 << 30):
            raise UserError(f"--heads {told}: a part is between 0 and 1 (or 0% and 100%), a number is 1 or more")
        return self


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
    those held out.
    """
    check(run)
    pairs = encode_pairs(run, examples)
    step = max(1, len(pairs) // judge_on)
    batches = make_batches(pairs[::step][:judge_on], run.config)
    valid = make_batches(encode_pairs(run, held_out), run.config)
    order = ranking(run.model, batches, by)
    count = how_many(order, amount)
    going = greedy_order(run.model, batches, count, by, talk) if greedy else removable(run.model, list(order))
    removed = by_attention(going[:count])
    talk(f"{count} of {heads_of(run.model)} heads go")
    curve = quality_curve(run.model, valid, going)
    before = measure(run, held_out, valid)
    small = cut(run.model, removed)
    smaller = Run(small.config, run.codec, small, run.path)
    pruned = measure(smaller, held_out, valid)
    after = pruned
    if tune_steps:
        talk(f"tuning for {tune_steps} steps")
        tune(small, pairs, tune_steps, lr=lr)
        after = measure(smaller, held_out, valid)
    numbers = {name: [head_numbers(run.model, name)[head] for head in heads] for name, heads in removed.items()}
    return smaller, Report(before, pruned, after, numbers, curve, tune_steps)


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


# Which heads


def check(run: Run) -> None:
    """Is there anything to remove?"""
    if all(attention.heads < 2 for attention in attentions(run.model).values()):
        raise UserError(
            f"{run.path}: its attention has one head, which cannot go; only models with several can be pruned"
        )


def heads_of(model: Model) -> int:
    """How many heads a model has."""
    return sum(attention.heads for attention in attentions(model).values())


def ranking(model: Model, batches: Sequence[Batch], by: Measure, removed: Removed | None = None) -> dict[Spot, float]:
    """Every head with its importance, the least important first."""
    if by == "gradient":
        found = gradient_importance(model, batches, removed)
    else:
        found = _ablation(model, batches, removed or {})
    return dict(sorted(found.items(), key=lambda item: (item[1], item[0])))


def _ablation(model: Model, batches: Sequence[Batch], removed: Removed) -> dict[Spot, float]:
    if not removed:
        return ablation_importance(model, batches)
    out = {}
    plain = loss(model, batches, removed)
    for name, attention in attentions(model).items():
        gone = list(removed.get(name, ()))
        for head in range(attention.heads):
            if head not in gone:
                out[name, head] = loss(model, batches, {**removed, name: [*gone, head]}) - plain
    return out


def how_many(order: dict[Spot, float], amount: Amount) -> int:
    """How many heads an amount means; every attention keeps at least one."""
    most = len(order) - len({name for name, _ in order})
    if amount.threshold is not None:
        wanted = sum(value < amount.threshold for value in order.values())
        if not wanted:
            least = next(iter(order.values()))
            raise UserError(f"--threshold {amount.threshold:g}: every head matters more; the least does by {least:.3g}")
        return min(wanted, most)
    wanted = amount.count if amount.count is not None else round((amount.fraction or 0) * len(order))
    if wanted > most:
        raise UserError(
            f"--heads: {wanted} of {len(order)} heads cannot go: one stays in every attention, so at most {most}"
        )
    return max(1, wanted)


def removable(model: Model, names: Sequence[Spot]) -> list[Spot]:
    """Of heads in the order in which they would go, those that can: the last of an attention stays."""
    left = {name: attention.heads for name, attention in attentions(model).items()}
    out = []
    for name, head in names:
        if left[name] > 1:
            left[name] -= 1
            out.append((name, head))
    return out


def greedy_order(
    model: Model, batches: Sequence[Batch], count: int, by: Measure, talk: Callable[[str], None]
) -> list[Spot]:
    """Heads in the order in which they go when the rest is judged again after each."""
    gone: list[Spot] = []
    while len(gone) < count:
        removed = by_attention(gone)
        left = {name: a.heads - len(removed.get(name, [])) for name, a in attentions(model).items()}
        order = [spot for spot in ranking(model, batches, by, removed) if left[spot[0]] > 1]
        gone.append(order[0])
        if len(gone) % 10 == 0:
            talk(f"{len(gone)} of {count} heads chosen")
    return gone


def by_attention(spots: Sequence[Spot]) -> dict[str, list[int]]:
    """Heads by the name of their attention."""
    out: dict[str, list[int]] = {}
    for name, head in spots:
        out.setdefault(name, []).append(head)
    return {name: sorted(heads) for name, heads in out.items()}


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
    longest = int(max(side.max() for side in lengths))
    stepper = Stepper(model, train, World(device=device), train.batch_tokens + longest)
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
