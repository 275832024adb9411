"""Head pruning: the importance of heads, by gradient, ablation or learned gates, and removing them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from regard.batch import Batch
from regard.config import Config
from regard.errors import UserError
from regard.files import replace_file, rewriting
from regard.loss import Objective
from regard.model import Model, kind_and_layer
from regard.nn.adapters import add_gates
from regard.nn.attention import Attention
from regard.nn.hooks import patch, without
from regard.nn.reversible import ReversibleBlock
from regard.run import WEIGHTS, Run

HeadKey = tuple[str, int]  # the name of an attention, and the index of a head in it
HeadGroups = Mapping[str, Sequence[int]]  # indices of heads by the name of their attention
Criterion = Literal["gradient", "ablation", "gates"]  # gates are learned in training, not measured
NO_HEADS: HeadGroups = MappingProxyType({})
PRUNED_FILES = ("config.json", WEIGHTS)  # files of a run that pruning changes


def gradient_importance(model: Model, batches: Sequence[Batch], removed: HeadGroups = NO_HEADS) -> dict[HeadKey, float]:
    """The expected |dL/dg| per token of a gate g = 1 on each remaining head, with separate gates for every example."""
    device = model.device
    heads = {name: attention.heads for name, attention in model.attentions().items()}
    total = {name: torch.zeros(count, device=device) for name, count in heads.items()}
    tokens = 0
    trainable = [p for p in model.parameters() if p.requires_grad]
    model.requires_grad_(False)
    try:
        for batch in batches:
            batch = batch.to(device)
            gates = {}
            for name, count in heads.items():
                gate_BH11 = torch.ones(len(batch.label_BT), count, 1, 1, device=device)
                gate_BH11[:, list(removed.get(name, ()))] = 0.0
                gates[name] = gate_BH11.requires_grad_()
            with torch.enable_grad(), patch(model, {f"{name}.mixed": gate.mul for name, gate in gates.items()}):
                grads = torch.autograd.grad(Objective(model)(batch).smoothed, list(gates.values()))
            for name, grad_BH11 in zip(gates, grads, strict=True):
                total[name] += grad_BH11.abs().sum((0, 2, 3))
            tokens += batch.tokens
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
    return {(name, head): float(total[name][head] / max(1, tokens)) for name, head in _heads_left(model, removed)}


def ablation_importance(model: Model, batches: Sequence[Batch], removed: HeadGroups = NO_HEADS) -> dict[HeadKey, float]:
    """The increase of the loss per token when one more head is ablated in addition to `removed`, for each head."""
    loss = mean_loss(model, batches, removed)
    return {
        (name, head): mean_loss(model, batches, {**removed, name: [*removed.get(name, ()), head]}) - loss
        for name, head in _heads_left(model, removed)
    }


@torch.no_grad()
def mean_loss(model: Model, batches: Sequence[Batch], removed: HeadGroups = NO_HEADS) -> float:
    """The loss per token in nats, with some heads ablated."""
    total = 0.0
    tokens = 0
    with patch(model, {f"{name}.mixed": without(*heads) for name, heads in removed.items() if heads}):
        for batch in batches:
            total += float(Objective(model)(batch.to(model.device)).smoothed)
            tokens += batch.tokens
    return total / max(1, tokens)


def rank_heads(
    model: Model, batches: Sequence[Batch], by: Criterion, removed: HeadGroups = NO_HEADS
) -> dict[HeadKey, float]:
    """All heads with their importance, the least important first."""
    measure = {"gradient": gradient_importance, "ablation": ablation_importance}[by]
    return sort_heads(measure(model, batches, removed))


def sort_heads(values: Mapping[HeadKey, float]) -> dict[HeadKey, float]:
    """Sort heads by value, ties by name and index."""
    return dict(sorted(values.items(), key=lambda item: (item[1], item[0])))


def _heads_left(model: Model, removed: HeadGroups) -> list[HeadKey]:
    heads = [(name, head) for name, attention in model.attentions().items() for head in range(attention.heads)]
    return [(name, head) for name, head in heads if head not in removed.get(name, ())]


@dataclass(frozen=True)
class PruneAmount:
    """How many heads to remove: a fraction, a number, or all with an importance below a threshold."""

    fraction: float | None = None
    count: int | None = None
    threshold: float | None = None

    @classmethod
    def parse(cls, heads: str | None, threshold: float | None) -> PruneAmount:
        """From a share such as `0.4` or `40%`, a number such as `12`, or a threshold."""
        if (heads is None) == (threshold is None):
            raise UserError("how many heads to remove? Use --heads 0.4, --heads 12, or --threshold X")
        if heads is None:
            return cls(threshold=threshold)
        try:
            if heads.endswith("%"):
                amount = cls(fraction=float(heads[:-1]) / 100)
            else:
                amount = cls(fraction=float(heads)) if "." in heads else cls(count=int(heads))
        except ValueError:
            raise UserError(f"--heads {heads}: not a share (0.4 or 40%) or a number of heads (12)") from None
        if not 0 < (amount.fraction or amount.count or 0) < (1 if amount.count is None else 1 << 30):
            raise UserError(f"--heads {heads}: a share is between 0 and 1 (or 0% and 100%), a number is 1 or more")
        return amount

    def of(self, importance: dict[HeadKey, float]) -> int:
        """The number of heads to remove; `importance` is sorted. Every attention keeps at least one head."""
        most = len(importance) - len({name for name, _ in importance})
        if self.threshold is not None:
            below = sum(value < self.threshold for value in importance.values())
            if not below:
                smallest = f"the smallest importance is {min(importance.values()):.3g}"
                raise UserError(f"--threshold {self.threshold:g}: every head is above it; {smallest}")
            return min(below, most)
        count = self.count if self.count is not None else round((self.fraction or 0) * len(importance))
        if count > most:
            part = f"{count} of {len(importance)} heads"
            raise UserError(f"--heads: {part} cannot be removed: every attention keeps one, so at most {most} can")
        return max(1, count)


def count_heads(model: Model) -> int:
    return sum(attention.heads for attention in model.attentions().values())


def removable_heads(model: Model, order: Sequence[HeadKey]) -> list[HeadKey]:
    """The heads of `order` that can be removed, in order: every attention keeps its last remaining head."""
    left = {name: attention.heads for name, attention in model.attentions().items()}
    out = []
    for name, head in order:
        if left[name] > 1:
            left[name] -= 1
            out.append((name, head))
    return out


def greedy_order(
    model: Model, batches: Sequence[Batch], count: int, by: Criterion, say: Callable[[str], None]
) -> list[HeadKey]:
    """Choose the heads to remove, in order; importance is measured again after each choice."""
    order: list[HeadKey] = []
    for number in range(1, count + 1):
        ranking = rank_heads(model, batches, by, group_heads(order))
        order = removable_heads(model, [*order, *ranking])[:number]
        if number % 10 == 0:
            say(f"{number} of {count} heads chosen")
    return order


def group_heads(heads: Sequence[HeadKey]) -> dict[str, list[int]]:
    """Indices of heads by the name of their attention."""
    groups: dict[str, list[int]] = {}
    for name, head in heads:
        groups.setdefault(name, []).append(head)
    return {name: sorted(indices) for name, indices in groups.items()}


def prune_heads(model: Model, removed: HeadGroups) -> Model:
    """A smaller model without some heads; its outputs equal those of the model with these heads ablated."""
    require_prunable(model)
    remaining = group_heads(_heads_left(model, removed))
    for name in model.attentions():
        if name not in remaining:
            raise UserError(f"{name}: all of its heads would be removed; one must remain")
    small = Model(_pruned_config(model, remaining)).to(model.device).train(model.training)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name, attention in model.attentions().items():
        assert isinstance(attention, Attention)
        weights |= {f"{name}.{key}": x for key, x in _pruned_parameters(attention, remaining[name])}
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            parameter.copy_(weights[name])
    return small


def require_prunable(model: Model) -> None:
    """Refuse hashed attention, whose heads share queries with keys."""
    if not all(isinstance(attention, Attention) for attention in model.attentions().values()):
        raise UserError("heads of hashed attention (mixer lsh) cannot be removed")


def _pruned_config(model: Model, remaining: dict[str, list[int]]) -> Config:
    stacks = {}
    for side, stack in model.config.stacks.items():
        if stack.recurrent:
            continue
        fields: dict[str, list[tuple[int, ...]]] = {"kept_heads": [], "kept_cross_heads": []}
        attentions = {name: part for name, part in model.attentions().items() if name.startswith(f"{side}.")}
        for name, attention in attentions.items():
            field = "kept_cross_heads" if kind_and_layer(name)[0] == "cross" else "kept_heads"
            fields[field].append(tuple(attention.head_numbers[head] for head in remaining[name]))
        unpruned = tuple(range(stack.heads))
        changes = {key: layers for key, layers in fields.items() if any(heads != unpruned for heads in layers)}
        stacks[side] = {**stack.model_dump(), **changes}
    return Config.model_validate({**model.config.model_dump(), **stacks})


def _pruned_parameters(attention: Attention, heads: list[int]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of an attention reduced to some of its heads, by name; none if it keeps all."""
    if len(heads) == attention.heads:
        return
    groups = sorted({attention.kv_indices[head] for head in heads})
    for name, parameter in attention.named_parameters():
        x = parameter.detach()
        part, _, leaf = name.rpartition(".")
        if part in ("query", "relative.project"):
            x = x.unflatten(0, (attention.heads, -1))[heads].flatten(0, 1)
        elif part == "key_value":
            sides = x.tensor_split((attention.kv_heads * attention.head_width,))  # keys, then values
            x = torch.cat([side.unflatten(0, (attention.kv_heads, -1))[groups].flatten(0, 1) for side in sides])
        elif part == "out":
            x = x if leaf == "bias" else x.unflatten(1, (attention.heads, -1))[:, heads].flatten(1, 2)
        else:  # scores and centres have parameters per head, keys per key/value head
            x = x[groups if leaf == "key_weight" else heads]
        yield name, x


def gate_heads(model: Model) -> None:
    """Add gates to all heads; refuse models whose heads cannot be pruned."""
    layers = model.attentions().values()
    plain = all(isinstance(a, Attention) and a.key_value is not None for a in layers)
    if not plain or any(isinstance(part, ReversibleBlock) for part in model.modules()):
        raise UserError("train.l0: only heads of plain Transformer layers have gates")
    if all(attention.heads < 2 for attention in layers):
        raise UserError("train.l0: every attention has a single head, which cannot be removed")
    add_gates(model)


def prune_closed_gates(path: Path, backup: Path) -> str:
    """Prune heads with zero output weights, but keep one per attention; copy the files to `backup` -> a message."""
    run = Run.load(path)
    removed = {}
    for name, attention in run.model.attentions().items():
        weight_DHE = run.model.get_parameter(f"{name}.out.weight").unflatten(1, (attention.heads, -1))
        closed = [head for head in range(attention.heads) if not weight_DHE[:, head].any()]
        removed[name] = closed[1:] if len(closed) == attention.heads else closed
    count = sum(map(len, removed.values()))
    if count:
        backup.mkdir(parents=True, exist_ok=True)
        for name in PRUNED_FILES:
            _copy(path / name, backup / name)
        small = prune_heads(run.model, removed)
        replace(run, config=small.config, weights=small).save(path)
    return f"heads: the gates of {count} of {count_heads(run.model)} closed in training; these heads are pruned"


def restore_unpruned(path: Path, backup: Path) -> None:
    """Undo `prune_closed_gates`, so that training continues with all heads."""
    if all((backup / name).is_file() for name in PRUNED_FILES):
        with rewriting(path, *PRUNED_FILES):
            for name in PRUNED_FILES:
                _copy(backup / name, path / name)
    shutil.rmtree(backup, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    replace_file(target, lambda temporary: shutil.copyfile(source, temporary))
