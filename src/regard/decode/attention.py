"""Reading a decoder's attention over the source, through the taps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.decode.options import Head
from regard.errors import UserError
from regard.model import Model
from regard.nn.attention import Attention


def cross_attentions(model: Model) -> dict[int, Attention]:
    """The attention over the source in each decoder layer that has one."""
    assert model.decoder is not None
    layers = {i: getattr(block, "cross", None) for i, block in enumerate(model.decoder.blocks)}
    return {i: cross for i, cross in layers.items() if cross is not None}


@contextmanager
def watching(model: Model, layers: Sequence[int]) -> Iterator[dict[int, list[Tensor]]]:
    """While open, collect the weights (B, H, T, S) of every pass through these layers."""
    seen: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    handles = []
    crosses = cross_attentions(model)
    try:
        for layer in layers:

            def note(module: nn.Module, args: Any, weights: Tensor, layer: int = layer) -> None:
                seen[layer].append(weights.detach())

            handles.append(crosses[layer].weights.register_forward_hook(note))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def heads_of(model: Model, chosen: Sequence[Head]) -> tuple[Head, ...]:
    """The heads to read: the chosen ones, checked, or all of the last layer but one, where alignments are clearest."""
    crosses = cross_attentions(model)
    if not chosen:
        layer = sorted(crosses)[-2:][0]
        return tuple((layer, head) for head in range(crosses[layer].heads))
    for layer, head in chosen:
        if layer not in crosses or head >= crosses[layer].heads:
            known = ", ".join(f"{i + 1}: {cross.heads} heads" for i, cross in sorted(crosses.items()))
            raise UserError(
                f"alignment_heads: there is no layer {layer + 1} with a head {head + 1}"
                f" (layers that look at the source, from 1: {known})"
            )
    return tuple(chosen)


def mean_heads(seen: dict[int, list[Tensor]], heads: Sequence[Head]) -> Tensor:
    """What was seen, joined over passes: the mean of the heads, (B, T, S)."""
    joined = {layer: torch.cat(passes, dim=2) for layer, passes in seen.items()}
    return torch.stack([joined[layer][:, head] for layer, head in heads]).mean(0)
