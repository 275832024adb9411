"""Which heads go: how many, and in what order."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from regard.batch import Batch
from regard.config import Config
from regard.errors import UserError
from regard.files import replace_file
from regard.inspect.importance import Removed, Spot, ablation_importance, gradient_importance, loss
from regard.model import Model, kind_and_layer
from regard.nn.attention import Attention
from regard.nn.gates import add_gates
from regard.nn.reversible import ReversibleBlock
from regard.run import WEIGHTS, Run

Criterion = Literal["gradient", "ablation", "gates"]


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


def heads_of(model: Model) -> int:
    """How many heads a model has."""
    return sum(attention.heads for attention in model.attentions().values())


def ranking(model: Model, batches: Sequence[Batch], by: Criterion, removed: Removed | None = None) -> dict[Spot, float]:
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
    for name, attention in model.attentions().items():
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
    left = {name: attention.heads for name, attention in model.attentions().items()}
    out = []
    for name, head in names:
        if left[name] > 1:
            left[name] -= 1
            out.append((name, head))
    return out


def greedy_order(
    model: Model, batches: Sequence[Batch], count: int, by: Criterion, talk: Callable[[str], None]
) -> list[Spot]:
    """Heads in the order in which they go when the rest is judged again after each."""
    gone: list[Spot] = []
    while len(gone) < count:
        removed = by_attention(gone)
        left = {name: a.heads - len(removed.get(name, [])) for name, a in model.attentions().items()}
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


def cut(model: Model, removed: Removed) -> Model:
    """A model without the heads: the same as silencing them, and smaller."""
    require_cuttable(model)
    kept = {
        name: [h for h in range(a.heads) if h not in set(removed.get(name, ()))]
        for name, a in model.attentions().items()
    }
    empty = [name for name, heads in kept.items() if not heads]
    if empty:
        raise UserError(f"{empty[0]}: all of its heads would go; one must stay")
    small = Model(_config(model, kept)).to(model.device).train(model.training)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name, attention in model.attentions().items():
        assert isinstance(attention, Attention)
        weights |= {f"{name}.{key}": x for key, x in _cut_attention(attention, kept[name])}
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            parameter.copy_(weights[name])
    return small


def require_cuttable(model: Model) -> None:
    """Heads that share queries with keys are not cut apart."""
    if not all(isinstance(attention, Attention) for attention in model.attentions().values()):
        raise UserError("heads of hashed attention (mixer lsh) cannot be removed")


def _config(model: Model, kept: dict[str, list[int]]) -> Config:
    changes: dict[str, Any] = {}
    for tower in ("encoder", "decoder"):
        stack = getattr(model.config, tower)
        if stack is None or stack.recurrent:
            continue
        lists: dict[str, list[tuple[int, ...]]] = {"kept_heads": [], "kept_cross_heads": []}
        for name in sorted((n for n in kept if n.startswith(f"{tower}.")), key=lambda n: kind_and_layer(n)[1]):
            numbers = model.attentions()[name].head_numbers
            field = "kept_cross_heads" if kind_and_layer(name)[0] == "cross" else "kept_heads"
            lists[field].append(tuple(numbers[head] for head in kept[name]))
        whole = tuple(range(stack.heads))
        fields = {key: tuple(value) for key, value in lists.items() if any(heads != whole for heads in value)}
        changes[tower] = type(stack).model_validate({**stack.model_dump(), **fields})
    return Config.model_validate({**model.config.model_dump(), **{k: v.model_dump() for k, v in changes.items()}})


def _cut_attention(attention: Attention, kept: list[int]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of an attention, by name, for some of its heads."""
    if len(kept) == attention.heads:
        return
    kept_groups = sorted({attention.kv_indices[head] for head in kept})
    for name, parameter in attention.named_parameters():
        x = parameter.detach()
        part, _, leaf = name.rpartition(".")
        if part in ("query", "relative.project"):
            x = x.unflatten(0, (attention.heads, -1))[kept].flatten(0, 1)
        elif part == "key_value":
            sides = x.tensor_split((attention.kv_heads * attention.head_width,))  # keys, then values
            x = torch.cat([side.unflatten(0, (attention.kv_heads, -1))[kept_groups].flatten(0, 1) for side in sides])
        elif part == "out":
            x = x if leaf == "bias" else x.unflatten(1, (attention.heads, -1))[:, kept].flatten(1, 2)
        else:  # scores and centres have their numbers per head, keys theirs per key/value head
            x = x[kept_groups if leaf == "key_weight" else kept]
        yield name, x


FILES = ("config.json", WEIGHTS)  # what cutting changes


def gate_heads(model: Model) -> None:
    """Put gates on all heads, if they can be cut afterwards."""
    found = model.attentions().values()
    plain = all(isinstance(a, Attention) and a.key_value is not None for a in found)
    if not plain or any(isinstance(part, ReversibleBlock) for part in model.modules()):
        raise UserError("train.l0: only heads of plain Transformer layers learn to be done without")
    if all(attention.heads < 2 for attention in found):
        raise UserError("train.l0: every attention has one head, which cannot go")
    add_gates(model)


def cut_shut_heads(path: Path, whole: Path) -> str:
    """Cut the heads of a run that say nothing -> what was done, in words. One stays in every attention.

    What the run was before is kept in the directory `whole`.
    """
    run = Run.load(path)
    removed = {}
    for name, attention in run.model.attentions().items():
        weight_DHE = run.model.get_parameter(f"{name}.out.weight").unflatten(1, (attention.heads, -1))
        shut = [head for head in range(attention.heads) if not weight_DHE[:, head].any()]
        removed[name] = shut[1:] if len(shut) == attention.heads else shut
    total, gone = sum(a.heads for a in run.model.attentions().values()), sum(map(len, removed.values()))
    if gone:
        whole.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            _copy(path / name, whole / name)
        small = cut(run.model, removed)
        Run(small.config, run.codec, small, path, run.labels, run.pixels).save(path)
    return f"heads: {gone} of {total} were shut in training and are cut"


def restore_uncut(path: Path, whole: Path) -> None:
    """Make a run that was cut at its end what it was, so that training goes on with all its heads."""
    if all((whole / name).is_file() for name in FILES):
        for name in FILES:
            _copy(whole / name, path / name)
    shutil.rmtree(whole, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    replace_file(target, lambda temporary: shutil.copyfile(source, temporary))
