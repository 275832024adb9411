"""A short training of a model that was changed, by what it said before."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.batch import Batch, collate
from regard.data.images import Pictures
from regard.data.order import batches as cut_batches
from regard.decode.alignment import load_heads, save_heads
from regard.decode.generate import TorchEngine
from regard.decode.options import Options
from regard.errors import UserError
from regard.evaluate import default_metrics, evaluate
from regard.files import write_json
from regard.inspect.importance import Criterion, HeadKey, mean_loss, rank_heads, sort_heads
from regard.inspect.inputs import WINDOW, TaskData, encode_pairs, task_batches
from regard.inspect.prune import (
    PruneAmount,
    count_heads,
    greedy_order,
    group_heads,
    prune_heads,
    removable_heads,
    require_prunable,
)
from regard.loss import Objective
from regard.metrics import LOWER_IS_BETTER
from regard.model import Model
from regard.nn.dropout import MaskPool, use_pool
from regard.nn.gates import add_gates, expected_open, head_gates, remove_gates
from regard.recipe import Train
from regard.run import Run
from regard.text.codec import Example
from regard.training.step import Ema, learning_rate, lent, make_optimizer, set_rate

LR = 7e-4
DISTILLED = 0.7  # of what is minimised: how far the model is from its teacher; the rest is the usual loss
DECAY = 0.995  # of the moving average
SMOOTHING = 0.1
JUDGED = 10  # times, on the way


def tune(
    model: Model,
    batches: Iterator[Batch],
    steps: int,
    *,
    teacher: Model | None = None,
    judge: Callable[[], float] | None = None,
    lr: float = LR,
    seed: int = 1,
) -> list[float]:
    """Train in this process for some steps -> the loss per token of each; it ends in eval mode.

    With a teacher the model also learns to say what that says, which tells it more than one right token does. What is
    kept is a moving average of the weights; with a `judge` (less is better), the best of several on the way, and else
    the last.
    """
    device = model.device
    train = Train(steps=steps, lr=lr, schedule="cosine", warmup=max(1, steps // 10), seed=seed)
    optimizer, ema = make_optimizer(model, train), Ema(model, DECAY)
    pool = MaskPool(seed)
    use_pool(model.train(), pool)
    losses: list[float] = []
    kept, best = ema.weights, math.inf
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for step, batch in zip(range(1, steps + 1), batches, strict=False):
            torch.manual_seed(seed * 1_000_003 + step)
            pool.begin(step)
            nll, objective = _distil(model, teacher, batch.to(device))
            optimizer.zero_grad(set_to_none=True)
            objective.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            set_rate(optimizer, learning_rate(train, step, (step - 1) / steps, 1))
            optimizer.step()
            ema.update(model, step)
            losses.append(nll)
            if judge is not None and (step == steps or step % max(1, steps // JUDGED) == 0):
                with lent(model.eval(), ema.weights):
                    value = judge()
                model.train()
                if value < best:
                    kept, best = {name: x.clone() for name, x in ema.weights.items()}, value
    use_pool(model.eval(), None)
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=True):
            parameter.copy_(kept[name])
    return losses


def _distil(model: Model, teacher: Model | None, batch: Batch) -> tuple[float, Tensor]:
    """-> loss per token, and what is minimised."""
    logits_NV, label_N = _logits(model, batch)
    usual = F.cross_entropy(logits_NV, label_N, label_smoothing=SMOOTHING)
    nll = float(F.cross_entropy(logits_NV.detach(), label_N))
    if teacher is None:
        return nll, usual
    with torch.no_grad():
        wanted_NV = _logits(teacher, batch)[0].log_softmax(-1)
    apart = F.kl_div(logits_NV.log_softmax(-1), wanted_NV, log_target=True, reduction="batchmean")
    return nll, DISTILLED * apart + (1 - DISTILLED) * usual


def _logits(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    x_BTD = model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT)
    keep_BT = torch.ones_like(batch.label_BT, dtype=torch.bool) if batch.keep_BT is None else batch.keep_BT
    return model.predict(x_BTD[keep_BT]).float(), batch.label_BT[keep_BT]


def learn_gates(
    model: Model,
    batches: Sequence[Batch],
    steps: int,
    *,
    press: float = 0.1,
    lr: float = 3e-4,
    gate_lr: float = 0.1,
    seed: int = 1,
) -> dict[HeadKey, float]:
    """Train a model with gates for some steps -> the log-odds of every head; then the gates are taken away again.

    `press` is what it costs, in loss per token, to keep all heads. The model is changed: it learns to do without the
    heads that are being shut.
    """
    device = model.device
    weights = list(model.parameters())
    add_gates(model)
    gates = head_gates(model)
    objective = Objective(model.train(), label_smoothing=0.1)
    odds = [part.odds for part in gates.values()]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": lr}, {"params": odds, "lr": gate_lr}], weight_decay=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        order: list[int] = []
        for _ in range(steps):
            order = order or torch.randperm(len(batches)).tolist()
            batch = batches[order.pop()].to(device)
            optimizer.zero_grad(set_to_none=True)
            (objective(batch).smoothed / batch.tokens + press * expected_open(model)).backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
    remove_gates(model.eval())
    return {(name, head): float(x) for name, part in gates.items() for head, x in enumerate(part.odds.detach())}


POINTS = 12  # of the curve
REPORT = "prune.json"
TUNE_TOKENS, TUNE_EXAMPLES = 4096, 64  # of a batch


@dataclass(frozen=True)
class Snapshot:
    """A model before or after."""

    heads: int
    parameters: int
    loss: float  # per token, in nats
    metrics: dict[str, float]
    sentences_per_second: float  # decoded greedily on this machine, or read where nothing is decoded


@dataclass(frozen=True)
class PruneReport:
    """What pruning did."""

    before: Snapshot
    pruned: Snapshot  # before any tuning
    after: Snapshot  # the same, if nothing was tuned
    removed: dict[str, list[int]]  # numbers of the heads by attention
    curve: list[tuple[int, float]]  # heads silenced, loss per token
    tuned_steps: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def prune(
    run: Run,
    material: TaskData,
    held_out: TaskData,
    amount: PruneAmount,
    *,
    greedy: bool = False,
    by: Criterion = "gradient",
    tune_steps: int = 0,
    judge_on: int = 256,
    lr: float = LR,
    talk: Callable[[str], None] = lambda message: None,
) -> tuple[Run, PruneReport]:
    """Remove heads from a run -> the smaller run (not saved yet), and the report.

    Heads are judged on `judge_on` of the examples; the tuning learns from all of them; what is reported is measured on
    those held out. With `by="gates"`, a copy of the model is first trained with gates for `tune_steps`.
    """
    check(run)
    if greedy and by == "gates":
        raise UserError("--greedy judges heads again and again, which --by gates cannot; choose one")
    batches, valid = task_batches(run, sample(material, judge_on)), task_batches(run, held_out)
    model = run.model
    if by == "gates":
        model, order = _gated(run, material, tune_steps, lr, talk)
    else:
        order = rank_heads(model, batches, by)
    count = amount.of(order)
    going = greedy_order(model, batches, count, by, talk) if greedy else removable_heads(model, list(order))
    removed = group_heads(going[:count])
    talk(f"{count} of {count_heads(model)} heads go")
    curve = quality_curve(model, valid, going)
    before = measure(run, held_out, valid)
    small = prune_heads(model, removed)
    smaller = Run(small.config, run.codec, small, run.path, run.labels, run.pixels)
    pruned = measure(smaller, held_out, valid)
    after = pruned
    if tune_steps:
        talk(f"tuning for {tune_steps} steps")
        judge = _judge(smaller, held_out, valid, talk)
        tune(small, epochs(run, material), tune_steps, teacher=run.model, judge=judge, lr=lr)
        after = measure(smaller, held_out, valid)
    numbers = {
        name: [run.model.attentions()[name].head_numbers[head] for head in heads] for name, heads in removed.items()
    }
    return smaller, PruneReport(before, pruned, after, numbers, curve, tune_steps)


def _judge(run: Run, material: TaskData, batches: Sequence[Batch], talk: Callable[[str], None]) -> Callable[[], float]:
    """How good a run is while it is tuned: by the first of its metrics, or by the loss; less is better."""
    metric = "loss"
    if not isinstance(material, str | Pictures) and run.config.output != "classes":
        metric = default_metrics(run, [example.target or "" for example in material])[0]
    some = sample(material, 1000)

    def judge() -> float:
        if isinstance(some, str | Pictures) or metric == "loss":
            value = mean_loss(run.model, batches)
        else:
            value = evaluate(run, some, Options(), [metric], samples=0).metrics[metric].score
        talk(f"  {metric} {value:.4g}")
        return value if metric in LOWER_IS_BETTER else -value

    return judge


def sample(material: TaskData, count: int) -> TaskData:
    """Some of the pairs or images, evenly spread, or the beginning of a text."""
    if isinstance(material, str):
        return material[: count * WINDOW]
    if isinstance(material, Pictures):
        rows = range(0, len(material.images_NCHW), max(1, len(material.images_NCHW) // count))[:count]
        return _pictures(material, rows)
    return material[:: max(1, len(material) // count)][:count]


def _pictures(pictures: Pictures, rows: Sequence[int]) -> Pictures:
    labels = None if pictures.labels is None else [pictures.labels[row] for row in rows]
    return Pictures(pictures.images_NCHW[list(rows)], labels)


def _gated(
    run: Run, material: TaskData, steps: int, lr: float, talk: Callable[[str], None]
) -> tuple[Model, dict[HeadKey, float]]:
    """A copy of the model that has learned to do without heads, and its heads, those most shut first."""
    if not steps:
        raise UserError("--by gates learns which heads are needed: say for how many steps, with --tune")
    talk(f"learning gates for {steps} steps")
    learner = copy.deepcopy(run.model)
    found = learn_gates(learner, task_batches(run, material, 2048), steps, lr=lr)
    return learner, sort_heads(found)


def save(smaller: Run, report: PruneReport, path: str | Path, original: Path) -> None:
    """Write the smaller run with its report; alignment heads that are left are counted anew."""
    path = Path(path)
    smaller.save(path)
    write_json(path / REPORT, report.to_json())
    kept = []
    for layer, index in load_heads(original):
        name = f"decoder.blocks.{layer}.cross"
        old = head_numbers_before(smaller.model, report, name)
        if index < len(old) and old[index] in smaller.model.attentions()[name].head_numbers:
            kept.append((layer, smaller.model.attentions()[name].head_numbers.index(old[index])))
    if kept:
        save_heads(path, kept)


def head_numbers_before(model: Model, report: PruneReport, name: str) -> list[int]:
    """The heads an attention had before they were removed."""
    return (
        sorted({*model.attentions()[name].head_numbers, *report.removed.get(name, [])})
        if name in model.attentions()
        else []
    )


def check(run: Run) -> None:
    """Is there anything to remove?"""
    require_prunable(run.model)
    if all(attention.heads < 2 for attention in run.model.attentions().values()):
        raise UserError(
            f"{run.path}: its attention has one head, which cannot go; only models with several can be pruned"
        )


# What it does


def quality_curve(model: Model, batches: Sequence[Batch], order: Sequence[HeadKey]) -> list[tuple[int, float]]:
    """The loss per token as more and more heads are silenced."""
    counts = sorted({round(i * len(order) / POINTS) for i in range(POINTS + 1)})
    return [(count, mean_loss(model, batches, group_heads(order[:count]))) for count in counts]


def measure(run: Run, material: TaskData, batches: Sequence[Batch]) -> Snapshot:
    """How good, how large and how fast a run is."""
    each = mean_loss(run.model, batches)
    if run.config.encoder is not None and run.config.decoder is not None:
        assert not isinstance(material, str | Pictures)
        names = [name for name in default_metrics(run, [e.target or "" for e in material]) if name != "perplexity"]
        decode, some = TorchEngine(run, Options()), list(material[:64])
        decode(some[:4])  # the first call is always slow
        rate = len(some) / min(_seconds(lambda: decode(some)) for _ in range(3))
        found = evaluate(run, material, Options(), names, samples=0)
        metrics = {name: value.score for name, value in found.metrics.items()}
    else:
        first = batches[0].to(run.model.device)
        rate = len(first.label_BT) / min(_seconds(lambda: Objective(run.model)(first)) for _ in range(3))
        metrics = {"perplexity": math.exp(min(each, 700.0))}
        if run.config.output == "classes":
            metrics = {"accuracy": _accuracy(run.model, batches)}
    return Snapshot(count_heads(run.model), run.model.size, each, metrics, rate)


@torch.no_grad()
def _accuracy(model: Model, batches: Sequence[Batch]) -> float:
    device = model.device
    right = sum(int(Objective(model)(batch.to(device)).correct) for batch in batches)
    return 100 * right / sum(batch.tokens for batch in batches)


@torch.no_grad()
def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return max(1e-9, time.perf_counter() - began)


def split(material: TaskData, every: int = 10, most: int = 1000) -> tuple[TaskData, TaskData]:
    """What to learn from and what to measure on: no source is on both sides; of a text, the end is held out."""
    if isinstance(material, str):
        at = len(material) - min(most * WINDOW, len(material) // every)
        return material[:at], material[at:]
    if isinstance(material, Pictures):
        rows = range(len(material.images_NCHW))
        held_out = list(rows[::every][:most])
        return _pictures(material, [row for row in rows if row % every]), _pictures(material, held_out)
    order = {source: i for i, source in enumerate(dict.fromkeys(example.source for example in material))}
    measured = [example for example in material if order[example.source] % every == 0][:most]
    return [example for example in material if order[example.source] % every], measured


# Tuning


def epochs(run: Run, material: TaskData, seed: int = 1) -> Iterator[Batch]:
    """The material over and over, each time in another order."""
    pairs = run.config.encoder is not None and run.config.decoder is not None
    if pairs and not isinstance(material, str | Pictures):
        yield from _pair_epochs(run, material, seed)
        return
    batches = task_batches(run, material, 2048)
    draws = np.random.default_rng(seed)
    while True:
        yield from (batches[i] for i in draws.permutation(len(batches)))


def _pair_epochs(run: Run, examples: Sequence[Example], seed: int) -> Iterator[Batch]:
    pairs = encode_pairs(run, examples)
    lengths = [np.array([len(pair[side]) for pair in pairs]) for side in (0, 1)]
    epoch = 0
    while True:
        for rows in cut_batches(lengths[0], lengths[1], seed, epoch, TUNE_TOKENS, TUNE_EXAMPLES):
            yield collate([pairs[i][0] for i in rows], [pairs[i][1] for i in rows], run.config)
        epoch += 1
