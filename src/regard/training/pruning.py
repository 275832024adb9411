"""Pruning a run: remove the least important heads, tune the rest by distillation from the full model, report."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.batch import Batch, collate
from regard.data.images import LabelledImages
from regard.data.order import Batches
from regard.decode.alignment import load_heads, save_heads
from regard.decode.request import Options
from regard.decode.torch_engine import TorchEngine
from regard.errors import UserError, plural
from regard.evaluate.evaluator import default_metrics, evaluate
from regard.files import write_json
from regard.inspect.inputs import WINDOW, TaskData, encode_pairs, task_batches
from regard.inspect.prune import (
    Criterion,
    HeadKey,
    PruneAmount,
    count_heads,
    greedy_order,
    group_heads,
    mean_loss,
    prune_heads,
    rank_heads,
    removable_heads,
    require_prunable,
    sort_heads,
)
from regard.loss import Loss, Objective
from regard.metrics import LOWER_IS_BETTER
from regard.model import Model
from regard.nn.adapters import add_gates, head_gates, remove_gates
from regard.nn.primitives import use_pool
from regard.parallel.ranks import ProcessGroup
from regard.recipe import Train
from regard.run import Run
from regard.text.codec import Example
from regard.training.step import Stepper, learning_rate, swapped_weights
from regard.training.validation import mean_scores

LR = 7e-4
DISTILLATION = 0.7  # weight of the divergence from the teacher in the objective
EMA = 0.995
SMOOTHING = 0.1
EVALUATIONS = 10  # during tuning
GATE_COST = 0.1  # penalty on all heads together, in loss per token
GATE_LR = 0.1  # high, because gates must change much in a short training
CURVE_POINTS = 12
SPEED_ROUNDS = 9
REPORT = "prune.json"
# Batch size of tuning
TUNE_TOKENS = 4096
TUNE_EXAMPLES = 64


class Distillation(Objective):
    """The smoothed loss plus the divergence from the predictions of a teacher."""

    def __init__(self, model: Model, label_smoothing: float, teacher: Model) -> None:
        super().__init__(model, label_smoothing)
        # In a closure, so that the teacher is not a submodule and stays in eval mode.
        self._teacher_logits = lambda batch: label_logits(teacher, batch)[0]

    def forward(self, batch: Batch) -> Loss:
        logits_NV, label_N = label_logits(self.model, batch)
        usual = F.cross_entropy(logits_NV, label_N, label_smoothing=self.label_smoothing, reduction="sum")
        with torch.no_grad():
            teacher_NV = self._teacher_logits(batch).log_softmax(-1)
            nll = F.cross_entropy(logits_NV, label_N, reduction="sum")
            correct = (logits_NV.argmax(-1) == label_N).sum()
        divergence = F.kl_div(logits_NV.log_softmax(-1), teacher_NV, log_target=True, reduction="sum")
        return Loss(DISTILLATION * divergence + (1 - DISTILLATION) * usual, nll, correct)


def label_logits(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits (N, V) and labels (N) of all positions that are not padding."""
    x_BTD = model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT)
    keep_BT = torch.ones_like(batch.label_BT, dtype=torch.bool) if batch.keep_BT is None else batch.keep_BT
    return model.predict(x_BTD[keep_BT]).float(), batch.label_BT[keep_BT]


def run_steps(
    stepper: Stepper, batches: Iterable[Batch], steps: int, after_step: Callable[[int], None] = lambda step: None
) -> list[float]:
    """Train on one batch per step -> the loss per token of each step. The model is in eval mode at the end."""
    losses = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for step, batch in zip(range(1, steps + 1), batches, strict=False):
            stepper.objective.segment_memory = None  # batches are in random order
            nll, _, norm = stepper.backward(step, [(batch, 1.0)])
            if stepper.memory_failures.examples:
                raise UserError("not enough memory to tune: a single example does not fit; leave out the longest")
            rate = learning_rate(stepper.train, step, (step - 1) / steps, stepper.model.config.top.width)
            stepper.update(step, rate, norm)
            losses.append(nll / batch.tokens)
            after_step(step)
    use_pool(stepper.model.eval(), None)
    return losses


def tune(
    model: Model,
    batches: Iterable[Batch],
    steps: int,
    *,
    teacher: Model | None = None,
    judge: Callable[[], float] | None = None,
    lr: float = LR,
) -> list[float]:
    """Train a model, with a teacher by distillation -> losses. The moving average with the lowest `judge` is kept."""
    warmup = max(1, steps // 10)
    train = Train(lr=lr, schedule="cosine", warmup=warmup, label_smoothing=SMOOTHING, ema=EMA)
    objective = None if teacher is None else Distillation(model, SMOOTHING, teacher)
    stepper = Stepper(model, train, ProcessGroup(device=model.device), objective)
    best = stepper.weights
    best_value = math.inf

    def judge_weights(step: int) -> None:
        nonlocal best, best_value
        if judge is None or (step != steps and step % max(1, steps // EVALUATIONS)):
            return
        with swapped_weights(model.eval(), stepper.weights):
            value = judge()
        if value < best_value:
            best = {name: x.clone() for name, x in stepper.weights.items()}
            best_value = value

    losses = run_steps(stepper, batches, steps, judge_weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(best[name])
    return losses


def learn_gates(
    model: Model, batches: Sequence[Batch], steps: int, *, cost: float = GATE_COST, lr: float = LR
) -> dict[HeadKey, float]:
    """Train a model with temporary head gates under an L0 penalty of `cost` -> the log-odds of every head."""
    add_gates(model)
    gates = head_gates(model)
    train = Train(lr=lr, schedule="constant", warmup=1, beta2=0.999, eps=1e-8, label_smoothing=SMOOTHING, l0=cost)
    stepper = Stepper(model, train, ProcessGroup(device=model.device))
    stepper.optimizer.param_groups[-1]["lr_factor"] = GATE_LR / lr  # the last group has the gates
    run_steps(stepper, shuffled(batches), steps)
    remove_gates(model)
    return {(name, head): float(x) for name, gate in gates.items() for head, x in enumerate(gate.odds.detach())}


def shuffled(batches: Sequence[Batch]) -> Iterator[Batch]:
    """Repeat the batches forever, each time in another order."""
    random = np.random.default_rng(1)
    while True:
        yield from (batches[index] for index in random.permutation(len(batches)))


def shuffled_data(run: Run, data: TaskData) -> Iterator[Batch]:
    """Repeat the data forever, each time in another order; pairs are also batched differently."""
    if isinstance(data, str | LabelledImages) or not run.task.seq2seq:
        yield from shuffled(task_batches(run, data, TUNE_TOKENS // 2))
        return
    pairs = encode_pairs(run, data)
    lengths = [np.array([len(pair[side]) for pair in pairs]) for side in (0, 1)]
    for epoch in count():
        for rows in Batches(lengths[0], lengths[1], 1, epoch, TUNE_TOKENS, TUNE_EXAMPLES):
            yield collate([pairs[i][0] for i in rows], [pairs[i][1] for i in rows], run.config)


@dataclass(frozen=True)
class Snapshot:
    """Size, quality and speed of a model."""

    heads: int
    parameters: int
    loss: float  # per token, in nats
    metrics: dict[str, float]
    sentences_per_second: float = 0.0  # of processor time, for greedy decoding or, without a decoder, forward passes


@dataclass(frozen=True)
class PruneReport:
    """The model before and after pruning, and the removed heads."""

    before: Snapshot
    pruned: Snapshot  # before tuning
    after: Snapshot  # after tuning, if any
    removed: dict[str, list[int]]  # numbers of the removed heads by attention
    curve: list[tuple[int, float]]  # (number of ablated heads, loss per token)
    tuned_steps: int


class Tuning(NamedTuple):
    """Steps and learning rate of the training after pruning and, before pruning, of head gates."""

    steps: int
    lr: float = LR


NO_TUNING = Tuning(0)


def prune(
    run: Run,
    data: TaskData,
    held_out: TaskData,
    amount: PruneAmount,
    *,
    greedy: bool = False,
    by: Criterion = "gradient",
    tuning: Tuning = NO_TUNING,
    judge_on: int = 256,
    notify: Callable[[str], None] = lambda message: None,
) -> tuple[Run, PruneReport]:
    """Remove heads from a run -> the smaller run, which is not saved, and the report.

    Head importance is measured on `judge_on` examples of the data, tuning uses all examples, and the report is measured
    on the held-out data. With `by="gates"`, a copy of the model is first trained with gates.
    """
    require_prunable(run.model)
    if all(attention.heads < 2 for attention in run.model.attentions().values()):
        raise UserError(f"{run.path}: its attention has only one head; pruning needs several")
    if greedy and by == "gates":
        raise UserError("--greedy measures importance repeatedly, which --by gates cannot do; choose one of them")
    batches = task_batches(run, sample(data, judge_on))
    valid = task_batches(run, held_out)
    model = run.model
    steps, lr = tuning
    if by == "gates":
        if not steps:
            raise UserError("--by gates needs --tune STEPS, the number of steps for learning the gates")
        notify(f"learning gates for {plural(steps, 'step')}")
        model = copy.deepcopy(run.model)
        importance = sort_heads(learn_gates(model, task_batches(run, data, TUNE_TOKENS // 2), steps, lr=lr))
    else:
        importance = rank_heads(model, batches, by)
    number = amount.of(importance)
    order = greedy_order(model, batches, number, by, notify) if greedy else removable_heads(model, list(importance))
    removed = group_heads(order[:number])
    notify(f"removing {number} of {count_heads(model)} heads")
    curve = quality_curve(model, valid, order)
    before = take_snapshot(run, held_out, valid)
    small = prune_heads(model, removed)
    smaller = replace(run, config=small.config, weights=small)
    pruned = after = take_snapshot(smaller, held_out, valid)
    if steps:
        notify(f"tuning for {plural(steps, 'step')}")
        judge = _judge(smaller, held_out, valid, notify)
        tune(small, shuffled_data(run, data), steps, teacher=run.model, judge=judge, lr=lr)
        after = take_snapshot(smaller, held_out, valid)
    works = [decoding_work(each, held_out, valid) for each in (run, smaller)]
    full, faster = fair_rates([work for work, _ in works], works[0][1], run.model.device)
    before = replace(before, sentences_per_second=full)
    pruned, after = (replace(each, sentences_per_second=faster) for each in (pruned, after))  # both have the same shape
    attentions = run.model.attentions()
    numbers = {name: [attentions[name].head_numbers[head] for head in heads] for name, heads in removed.items()}
    return smaller, PruneReport(before, pruned, after, numbers, curve, steps)


def quality_curve(model: Model, batches: Sequence[Batch], order: Sequence[HeadKey]) -> list[tuple[int, float]]:
    """The loss per token for growing numbers of ablated heads."""
    sizes = sorted({round(i * len(order) / CURVE_POINTS) for i in range(CURVE_POINTS + 1)})
    return [(size, mean_loss(model, batches, group_heads(order[:size]))) for size in sizes]


def take_snapshot(run: Run, data: TaskData, batches: Sequence[Batch]) -> Snapshot:
    """Measure a run on data, of which `batches` are made."""
    loss = mean_loss(run.model, batches)
    if run.task.seq2seq:
        assert not isinstance(data, str | LabelledImages)
        names = [name for name in default_metrics(run, [e.target or "" for e in data]) if name != "perplexity"]
        scores = evaluate(run, data, Options(), names, samples=0).metrics
        metrics = {name: value.score for name, value in scores.items()}
    elif run.task.labels:
        metrics = {"accuracy": mean_scores(run.model, batches, ProcessGroup(device=run.model.device))["accuracy"]}
    else:
        metrics = {"perplexity": math.exp(min(loss, 700.0))}
    return Snapshot(count_heads(run.model), run.model.size, loss, metrics)


def decoding_work(run: Run, data: TaskData, batches: Sequence[Batch]) -> tuple[Callable[[], object], int]:
    """A function that decodes a few examples (without a decoder: a forward pass), and the number of examples."""
    if run.task.seq2seq:
        assert not isinstance(data, str | LabelledImages)
        engine = TorchEngine(run, Options())
        examples = list(data[:64])
        return lambda: engine(examples), len(examples)
    first = batches[0].to(run.model.device)
    return lambda: Objective(run.model)(first), len(first.label_BT)


@torch.no_grad()
def fair_rates(works: Sequence[Callable[[], object]], items: int, device: torch.device) -> list[float]:
    """Median items per second of functions that are called in turns, so that other load affects all equally."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    for work in works:
        work()  # the first call is slower
    seconds: list[list[float]] = [[] for _ in works]
    for number in range(SPEED_ROUNDS):
        turns = list(enumerate(works))
        for index, work in turns if number % 2 == 0 else reversed(turns):
            began = clock()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[index].append(clock() - began)
    return [items / max(1e-9, statistics.median(each)) for each in seconds]


def _judge(run: Run, data: TaskData, batches: Sequence[Batch], notify: Callable[[str], None]) -> Callable[[], float]:
    """A function that measures the first metric or the loss of a run during tuning; lower is better."""
    metric = "loss"
    examples = sample(data, 1000)
    if not isinstance(data, str | LabelledImages) and run.task.seq2seq:
        metric = default_metrics(run, [example.target or "" for example in data])[0]

    def judge() -> float:
        if isinstance(examples, str | LabelledImages) or metric == "loss":
            value = mean_loss(run.model, batches)
        else:
            value = evaluate(run, examples, Options(), [metric], samples=0).metrics[metric].score
        notify(f"  {metric} {value:.4g}")
        return value if metric in LOWER_IS_BETTER else -value

    return judge


def sample(data: TaskData, size: int) -> TaskData:
    """At most `size` pairs or images at equal distances, or the beginning of a text."""
    if isinstance(data, str):
        return data[: size * WINDOW]
    rows = range(_size(data))
    return _take(data, rows[:: max(1, len(rows) // size)][:size])


def split_data(data: TaskData, every: int = 10, most: int = 1000) -> tuple[TaskData, TaskData]:
    """Split into training and held-out data without common sources; the end of a text is held out."""
    if isinstance(data, str):
        end = len(data) - min(most * WINDOW, len(data) // every)
        return data[:end], data[end:]
    numbers = list(range(_size(data)))  # number of the source of each row
    if not isinstance(data, LabelledImages):
        first = {source: i for i, source in enumerate(dict.fromkeys(example.source for example in data))}
        numbers = [first[example.source] for example in data]
    held_out = [row for row, number in enumerate(numbers) if number % every == 0]
    return _take(data, [row for row, number in enumerate(numbers) if number % every]), _take(data, held_out[:most])


def _size(data: Sequence[Example] | LabelledImages) -> int:
    return len(data.images_NCHW if isinstance(data, LabelledImages) else data)


def _take(data: Sequence[Example] | LabelledImages, rows: Sequence[int]) -> TaskData:
    return data.take(rows) if isinstance(data, LabelledImages) else [data[row] for row in rows]


def save_pruned(smaller: Run, report: PruneReport, path: str | Path, original: Path) -> None:
    """Save the smaller run with its report and the new indices of the remaining alignment heads."""
    path = Path(path)
    smaller.save(path)
    write_json(path / REPORT, asdict(report))
    heads = []
    attentions = smaller.model.attentions()
    for layer, index in load_heads(original):
        name = f"decoder.blocks.{layer}.cross"
        if name not in attentions:
            continue
        numbers = attentions[name].head_numbers
        old = sorted({*numbers, *report.removed.get(name, [])})
        if index < len(old) and old[index] in numbers:
            heads.append((layer, numbers.index(old[index])))
    if heads:
        save_heads(path, heads)
