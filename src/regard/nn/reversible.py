"""Layers that can be run backwards: what went into them is computed from what came out, so nothing has to be stored.

Two streams, side by side in one vector, take turns: what one says is added to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.nn.attention import KV, AttentionMask
from regard.nn.block import Block
from regard.nn.dropout import Dropout
from regard.nn.lsh import LSHAttention, Order
from regard.nn.position import Position


class ReversibleBlock(Block):
    """One layer over two streams: y1 = x1 + attention(norm(x2)), then y2 = x2 + feed_forward(norm(y1))."""

    def forward(
        self,
        x_BTD: Tensor,
        pos_BT: Tensor,
        sight: AttentionMask,
        position: Position,
        past: KV | None = None,
        source: tuple[KV, AttentionMask] | None = None,
    ) -> tuple[Tensor, KV]:
        """As `Block.forward`, without a source; x is (B, T, 2D)."""
        one_BTD, two_BTD = x_BTD.chunk(2, dim=-1)
        said_BTD, seen, _ = self.attend(two_BTD, pos_BT, sight, position, past)
        one_BTD = one_BTD + said_BTD
        two_BTD = two_BTD + self.feed(one_BTD)
        return self.output(torch.cat((one_BTD, two_BTD), dim=-1)), seen

    def attend(
        self,
        x_BTD: Tensor,
        pos_BT: Tensor,
        sight: AttentionMask,
        position: Position,
        past: KV | None = None,
        order: Order | None = None,
    ) -> tuple[Tensor, KV, Order | None]:
        """-> what attention says about one stream, the keys it saw, and the order it hashed them in."""
        residual = self.attention_residual
        x_BTD = residual.norm(x_BTD)
        seen = self.attention.keys(x_BTD, pos_BT, position)
        seen = seen if past is None else past.extend(seen)
        if isinstance(self.attention, LSHAttention):
            order = order or self.attention.sort(seen, sight)
            said_BTD = self.attention(x_BTD, seen, sight, position, order)
        else:
            said_BTD = self.attention(x_BTD, seen, sight, position)
        return residual.dropout(said_BTD), seen, order

    def feed(self, x_BTD: Tensor) -> Tensor:
        """What the feed-forward network says about one stream."""
        residual = self.feed_forward_residual
        out: Tensor = residual.dropout(self.feed_forward(residual.norm(x_BTD)))
        return out


def run_reversible(
    blocks: Sequence[ReversibleBlock], x_BTD: Tensor, pos_BT: Tensor, sight: AttentionMask, position: Position
) -> Tensor:
    """Run layers for training without storing what passes between them; x is (B, T, 2D)."""
    turns = [turn for block in blocks for turn in _turns(block, pos_BT, sight, position)]
    weights = [weight for turn in turns for weight in turn.weights]
    out: Tensor = _Run.apply(turns, Draws.of(blocks[0], x_BTD.device), x_BTD, *weights)
    return out


@dataclass
class _Turn:
    """Half a layer: (a, b) becomes (b, a + say(b)). Asked again with the same random numbers, it says the same."""

    say: Callable[[Tensor], Tensor]
    weights: list[nn.Parameter]


def _turns(block: ReversibleBlock, pos_BT: Tensor, sight: AttentionMask, position: Position) -> tuple[_Turn, _Turn]:
    first: Order | None = None

    def attend(x_BTD: Tensor) -> Tensor:
        # An input that was computed back differs in its last digits. Hashed anew, some of it would fall into another
        # bucket and see other keys, so the order of the first time is kept.
        nonlocal first
        said_BTD, _, first = block.attend(x_BTD, pos_BT, sight, position, order=first)
        return said_BTD

    return (
        _Turn(attend, _trained(block.attention_residual, block.attention)),
        _Turn(block.feed, _trained(block.feed_forward_residual, block.feed_forward)),
    )


def _trained(*modules: nn.Module) -> list[nn.Parameter]:
    return [weight for module in modules for weight in module.parameters() if weight.requires_grad]


class _Run(torch.autograd.Function):
    """All turns of a tower as one step, which stores nothing but its output."""

    @staticmethod
    def forward(ctx: Any, turns: list[_Turn], draws: Draws, x_BTD: Tensor, *weights: Tensor) -> Tensor:
        kind = "cpu" if x_BTD.is_meta else x_BTD.device.type
        ctx.turns, ctx.draws, ctx.marks = turns, draws, []
        ctx.precision = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        a, b = x_BTD.chunk(2, dim=-1)
        for turn in turns:
            ctx.marks.append(draws.mark())
            a, b = b, a + turn.say(b)
        out = torch.cat((a, b), dim=-1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        (a, b), (grad_a, grad_b) = out.chunk(2, dim=-1), grads[0].chunk(2, dim=-1)
        weight_grads: list[Tensor] = []
        now = ctx.draws.mark()
        for turn, mark in zip(reversed(ctx.turns), reversed(ctx.marks), strict=True):
            ctx.draws.rewind(mark)
            heard = a.detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(*ctx.precision):
                said = turn.say(heard)
            grad_heard, *found = torch.autograd.grad(said, (heard, *turn.weights), grad_b.to(said.dtype))
            weight_grads[:0] = found
            a, b = b - said.detach(), heard.detach()
            grad_a, grad_b = grad_b, grad_a + grad_heard
        ctx.draws.rewind(now)
        return None, None, torch.cat((grad_a, grad_b), dim=-1), *weight_grads


class Draws(NamedTuple):
    """Where dropout takes its random numbers from, and how to take the same ones again."""

    mark: Callable[[], Any]
    rewind: Callable[[Any], Any]

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> Draws:
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index]
            return cls(generator.get_state, generator.set_state)
        for part in module.modules():
            if isinstance(part, Dropout) and part.pool is not None:
                return cls(part.pool.mark, part.pool.rewind)
        return cls(torch.get_rng_state, torch.set_rng_state)
