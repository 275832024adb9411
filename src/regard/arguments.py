"""Arguments of the library's calls, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from regard.decode.hypothesis import unknown_flags
from regard.decode.request import Request
from regard.errors import UserError, shown_value
from regard.text.codec import Codec, Example


def checked_list(verb: str, what: str, items: Any, kinds: tuple[type, ...], example: str) -> list[Any]:
    """A list of what a verb takes; one text alone would be taken for a list of its letters."""
    if isinstance(items, str | bytes | Example | Request | dict) or not isinstance(items, Iterable):
        raise UserError(f"{verb}: takes a list of {what}, such as {example}, not {shown_value(items)}")
    checked = list(items)
    for index, item in enumerate(checked):
        if not isinstance(item, kinds):
            raise UserError(f"{verb}: takes a list of {what}, such as {example}; item {index} is {shown_value(item)}")
        check_texts(f"{verb}: item {index}", item)
    return checked


def check_texts(where: str, item: Any) -> None:
    """Check the fields of an Example: they are texts as in their columns. A Request checks itself."""
    for name in Example._fields if isinstance(item, Example) else ():
        value = getattr(item, name)
        if not isinstance(value, str) and (value is not None or name == "source"):
            hint = ", as in its column: 'N;PL'" if name == "features" else ""
            raise UserError(f"{where}: {name} is a text{hint}, not {shown_value(value)}")


def check_example(codec: Codec, example: Example) -> str:
    """Refuse features that do not fit a run -> a remark on what the run does not know in the example, if anything."""
    if problem := codec.features_problem(example):
        raise UserError(problem)
    target = codec.target.encode([example.target])[0] if example.target else []
    unknown = codec.unknown_tokens(example, codec.encode_source([example])[0], target)
    return unknown_flags(unknown).get("unknown", "")


def checked_ids(name: str, ids: Any, vocab: int) -> Tensor:
    """A table of ids as a tensor, checked."""
    try:
        table = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        table = torch.empty(0)
    if table.ndim != 2 or table.numel() == 0 or table.dtype.is_floating_point or table.dtype == torch.bool:
        raise UserError(f"logits: {name} are equally long rows of whole numbers, not {shown_value(ids)}")
    least, most = int(table.min()), int(table.max())
    if least < 0 or most >= vocab:
        wrong = least if least < 0 else most
        raise UserError(f"logits: {name}: the ids of this vocabulary are 0 to {vocab - 1}, not {wrong}")
    return table.long()
