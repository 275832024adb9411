"""Layers that store no activations, because the backward pass recomputes them.

Reversible layers are recomputed from their outputs: they have two streams, concatenated in one vector, and add a
function of one stream to the other. Other layers are recomputed from their inputs, which are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from regard.nn.attention import AttentionMask
from regard.nn.block import Block
from regard.nn.cache import KV
from regard.nn.lsh import LSHAttention, SortOrder
from regard.nn.position import Position
from regard.nn.primitives import Dropout, MaskPool


class ReversibleBlock(Block):
    """One layer over two streams: y1 = x1 + attention(norm(x2)), then y2 = x2 + feed_forward(norm(y1))."""

    def forward(
        self,
        x_BTD: Tensor,
        pos_BT: Tensor,
        mask: AttentionMask,
        position: Position,
        past: KV | None = None,
        source: tuple[KV, AttentionMask] | None = None,
    ) -> tuple[Tensor, KV]:
        """Like `Block.forward`, without a source; x is (B, T, 2D)."""
        one_BTD, two_BTD = x_BTD.chunk(2, dim=-1)
        out_BTD, kv, _ = self.attend(two_BTD, pos_BT, mask, position, past)
        one_BTD = one_BTD + out_BTD
        two_BTD = two_BTD + self.transform(one_BTD)
        return self.output(torch.cat((one_BTD, two_BTD), dim=-1)), kv

    def attend(
        self,
        x_BTD: Tensor,
        pos_BT: Tensor,
        mask: AttentionMask,
        position: Position,
        past: KV | None = None,
        order: SortOrder | None = None,
    ) -> tuple[Tensor, KV, SortOrder | None]:
        """-> the attention output of one stream, its KV, and the order of LSH attention."""
        residual = self.attention_residual
        x_BTD = residual.norm(x_BTD)
        kv = self.attention.project_kv(x_BTD, pos_BT, position)
        kv = kv if past is None else past.extend(kv)
        if isinstance(self.attention, LSHAttention):
            order = order or self.attention.sort(kv, mask)
            out_BTD = self.attention(x_BTD, kv, mask, position, order)
        else:
            out_BTD = self.attention(x_BTD, kv, mask, position)
        return residual.dropout(out_BTD), kv, order

    def transform(self, x_BTD: Tensor) -> Tensor:
        """The feed-forward output of one stream."""
        residual = self.feed_forward_residual
        out: Tensor = residual.dropout(self.feed_forward(residual.norm(x_BTD)))
        return out


def run_reversible(
    blocks: Sequence[ReversibleBlock], x_BTD: Tensor, pos_BT: Tensor, mask: AttentionMask, position: Position
) -> Tensor:
    """Run layers for training without storing their activations; x is (B, T, 2D)."""
    halves = [half for block in blocks for half in _halves(block, pos_BT, mask, position)]
    weights = [weight for half in halves for weight in half.weights]
    out: Tensor = _Run.apply(halves, RandomState.of(blocks[0], x_BTD.device), x_BTD, *weights)
    return out


@dataclass
class _HalfLayer:
    """(a, b) -> (b, a + function(b)); the same random state gives the same result."""

    function: Callable[[Tensor], Tensor]
    weights: list[nn.Parameter]


def _halves(
    block: ReversibleBlock, pos_BT: Tensor, mask: AttentionMask, position: Position
) -> tuple[_HalfLayer, _HalfLayer]:
    order: SortOrder | None = None

    def attend(x_BTD: Tensor) -> Tensor:
        # A recomputed input differs in its last digits. Hashing it could put tokens into other buckets, where they
        # attend to other keys, so the order of the forward pass is reused.
        nonlocal order
        out_BTD, _, order = block.attend(x_BTD, pos_BT, mask, position, order=order)
        return out_BTD

    return (
        _HalfLayer(attend, _trainable(block.attention_residual, block.attention)),
        _HalfLayer(block.transform, _trainable(block.feed_forward_residual, block.feed_forward)),
    )


def _trainable(*modules: nn.Module) -> list[nn.Parameter]:
    return [weight for module in modules for weight in module.parameters() if weight.requires_grad]


class _Run(torch.autograd.Function):
    """All half-layers of a stack as one function that stores only its output."""

    @staticmethod
    def forward(ctx: Any, halves: list[_HalfLayer], random: RandomState, x_BTD: Tensor, *weights: Tensor) -> Tensor:
        device = "cpu" if x_BTD.is_meta else x_BTD.device.type
        ctx.halves = halves
        ctx.random = random
        ctx.random_states = []
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        a, b = x_BTD.chunk(2, dim=-1)
        for half in halves:
            ctx.random_states.append(random.get())
            a, b = b, a + half.function(b)
        out = torch.cat((a, b), dim=-1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        (a, b), (grad_a, grad_b) = out.chunk(2, dim=-1), grads[0].chunk(2, dim=-1)
        weight_grads: list[Tensor] = []
        after_forward = ctx.random.get()
        for half, random_state in zip(reversed(ctx.halves), reversed(ctx.random_states), strict=True):
            ctx.random.set(random_state)
            x = a.detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(*ctx.autocast):
                y = half.function(x)
            grad_x, *grads_of_half = torch.autograd.grad(y, (x, *half.weights), grad_b.to(y.dtype))
            weight_grads[:0] = grads_of_half
            a, b = b - y.detach(), x.detach()
            grad_a, grad_b = grad_b, grad_a + grad_x
        ctx.random.set(after_forward)
        return None, None, torch.cat((grad_a, grad_b), dim=-1), *weight_grads


def run_checkpointed(block: nn.Module, *inputs: Any) -> tuple[Tensor, KV]:
    """Run a layer and store only its inputs; the backward pass recomputes it with the same dropout."""
    pool = pool_of(block)
    if pool is None:
        out: tuple[Tensor, KV] = checkpoint(block, *inputs, use_reentrant=False)
        return out
    offsets = pool.offsets
    at_forward = pool.offsets.getstate()

    @contextmanager
    def replay() -> Iterator[None]:
        now = offsets.getstate()
        offsets.setstate(at_forward)
        try:
            yield
        finally:
            offsets.setstate(now)

    out = checkpoint(block, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), replay()))
    return out


def pool_of(module: nn.Module) -> MaskPool | None:
    """The mask pool of the dropout inside a module, or None."""
    return next((part.pool for part in module.modules() if isinstance(part, Dropout) and part.pool is not None), None)


class RandomState(NamedTuple):
    """Functions that save and restore the random number generator of dropout."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> RandomState:
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index]
            return cls(generator.get_state, generator.set_state)
        pool = pool_of(module)
        if pool is not None:
            return cls(pool.offsets.getstate, pool.offsets.setstate)
        return cls(torch.get_rng_state, torch.set_rng_state)
