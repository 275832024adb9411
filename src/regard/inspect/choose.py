"""Which heads go: how many, and in what order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from regard.batch import Batch
from regard.errors import UserError
from regard.inspect.importance import Removed, Spot, ablation_importance, gradient_importance, loss
from regard.inspect.places import attentions
from regard.model import Model

Measure = Literal["gradient", "ablation", "gates"]


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
