"""A smaller model: some heads are cut out of its weights, and its config says which are left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.config import Config
from regard.errors import UserError
from regard.inspect.importance import Removed
from regard.inspect.places import attentions, head_numbers, key_heads, place
from regard.model import Model
from regard.nn.attention import Attention


def cut(model: Model, removed: Removed) -> Model:
    """A model without the heads: the same as silencing them, and smaller."""
    require_cuttable(model)
    kept = {
        name: [h for h in range(a.heads) if h not in set(removed.get(name, ()))]
        for name, a in attentions(model).items()
    }
    empty = [name for name, heads in kept.items() if not heads]
    if empty:
        raise UserError(f"{empty[0]}: all of its heads would go; one must stay")
    small = Model(_config(model, kept)).to(next(model.parameters()).device).train(model.training)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name, attention in attentions(model).items():
        assert isinstance(attention, Attention)
        weights |= {f"{name}.{key}": x for key, x in _cut_attention(attention, kept[name])}
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            parameter.copy_(weights[name])
    return small


def require_cuttable(model: Model) -> None:
    """Heads that share queries with keys are not cut apart."""
    if not all(isinstance(attention, Attention) for attention in attentions(model).values()):
        raise UserError("heads of hashed attention (mixer lsh) cannot be removed")


def _config(model: Model, kept: dict[str, list[int]]) -> Config:
    changes: dict[str, Any] = {}
    for tower in ("encoder", "decoder"):
        stack = getattr(model.config, tower)
        if stack is None or stack.recurrent:
            continue
        lists: dict[str, list[tuple[int, ...]]] = {"kept_heads": [], "kept_cross_heads": []}
        for name in sorted((n for n in kept if n.startswith(f"{tower}.")), key=lambda n: place(n)[1]):
            numbers = head_numbers(model, name)
            field = "kept_cross_heads" if place(name)[0] == "cross" else "kept_heads"
            lists[field].append(tuple(numbers[head] for head in kept[name]))
        whole = tuple(range(stack.heads))
        fields = {key: tuple(value) for key, value in lists.items() if any(heads != whole for heads in value)}
        changes[tower] = type(stack).model_validate({**stack.model_dump(), **fields})
    return Config.model_validate({**model.config.model_dump(), **{k: v.model_dump() for k, v in changes.items()}})


def _cut_attention(attention: Attention, kept: list[int]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of an attention, by name, for some of its heads."""
    if len(kept) == attention.heads:
        return
    kept_groups = sorted({key_heads(attention)[head] for head in kept})
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
