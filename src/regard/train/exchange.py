"""Gradients of processes that train together on processors: put into one buffer, summed by one exchange.

DistributedDataParallel sends them in buckets while later ones are still being computed. That pays where the sending is
done by other hardware. Where it takes the time of the cores that compute, each message costs about a millisecond of
waking up, and sending when all is ready is cheaper: a step of a small model on two cores took 6% less.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

MESSAGE = 1 << 22  # numbers sent at once: while one message is added up, the next is on its way


class Exchange:
    """The sum of everyone's gradients. With `narrow` they are sent in bfloat16."""

    def __init__(self, parameters: Iterable[nn.Parameter], narrow: bool) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self.total = torch.zeros(sum(p.numel() for p in self._parameters))
        self._sent = self.total.bfloat16() if narrow else self.total
        self._sent_parts, self._total_parts = self._parts(self._sent), self._parts(self.total)

    def __call__(self) -> None:
        """Replace the gradients of this process by those of all."""
        for part, parameter in zip(self._sent_parts, self._parameters, strict=True):
            if parameter.grad is None:  # it had no part in this process's share
                part.zero_()
            else:
                part.copy_(parameter.grad)
        for message in [dist.all_reduce(numbers, async_op=True) for numbers in self._sent.split(MESSAGE)]:
            message.wait()
        if self._sent is not self.total:
            self.total.copy_(self._sent)
        for part, parameter in zip(self._total_parts, self._parameters, strict=True):
            parameter.grad = part

    def _parts(self, numbers: Tensor) -> list[Tensor]:
        """The place of each parameter in a buffer."""
        pieces = numbers.split([p.numel() for p in self._parameters])
        return [piece.view_as(p) for piece, p in zip(pieces, self._parameters, strict=True)]


@torch.no_grad()
def same_start(parameters: Iterable[nn.Parameter]) -> None:
    """Give everyone the weights of the first process."""
    parameters = list(parameters)
    weights = torch.cat([p.detach().flatten() for p in parameters])
    dist.broadcast(weights, 0)
    for parameter, weight in zip(parameters, weights.split([p.numel() for p in parameters]), strict=True):
        parameter.copy_(weight.view_as(parameter))
