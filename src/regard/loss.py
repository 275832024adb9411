"""The training objective: a sum over tokens. The training step divides it once by the global number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from regard.batch import Batch
from regard.model import Model
from regard.nn.adapters import expected_open
from regard.nn.transformer import SegmentMemory

# Logits per chunk, which fit into the CPU cache. Otherwise a small model with a large vocabulary spends most time on
# writing logits to memory and reading them back for the softmax and its gradient.
CHUNK_ELEMENTS = 1 << 20


class Loss(NamedTuple):
    """Sums over the labels that are not padding."""

    smoothed: Tensor  # label-smoothed cross-entropy, the training objective
    nll: Tensor  # negative log-probability of the labels, detached
    correct: Tensor  # number of labels with the highest logit, detached


class _ChunkedLoss(torch.autograd.Function):
    """LM head, softmax and smoothed cross-entropy in one function, over cache-sized chunks of rows.

    Gradients are computed in the forward pass, while the logits are in the cache, and scaled in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, label_N: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = len(x_ND)
        vocab = len(weight_VD)
        rows = _chunk_rows(weight_VD)
        x_grad_ND = torch.empty_like(x_ND)
        weight_grad_VD = torch.zeros_like(weight_VD)
        bias_grad_V = None if bias_V is None else torch.zeros_like(bias_V)
        smoothed, nll, correct = (x_ND.new_zeros((), dtype=torch.float32) for _ in range(3))
        for start in range(0, count, rows):
            x = x_ND[start : start + rows]
            label = label_N[start : start + rows].unsqueeze(1)
            logits = F.linear(x, weight_VD, bias_V).float()
            top = logits.amax(-1, keepdim=True)
            label_logit = logits.gather(1, label)
            correct += (label_logit == top).sum()
            logits -= top
            logit_sum = logits.sum() if smoothing else 0.0
            grad = logits.exp_()
            normaliser = grad.sum(-1, keepdim=True)
            log_normaliser = normaliser.log()
            chosen = (label_logit - top - log_normaliser).sum()
            nll -= chosen
            smoothed -= (1 - smoothing) * chosen + smoothing / vocab * (logit_sum - vocab * log_normaliser.sum())
            grad /= normaliser
            if smoothing:
                grad -= smoothing / vocab
            grad.scatter_add_(1, label, grad.new_full((1, 1), smoothing - 1).expand_as(label))
            grad = grad.to(x_ND.dtype)
            torch.mm(grad, weight_VD, out=x_grad_ND[start : start + rows])
            weight_grad_VD.addmm_(grad.T, x)
            if bias_grad_V is not None:
                bias_grad_V += grad.sum(0)
        ctx.save_for_backward(x_grad_ND, weight_grad_VD, bias_grad_V)
        ctx.mark_non_differentiable(nll, correct)
        return smoothed, nll, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else grad * grads[0].to(grad.dtype) for grad in ctx.saved_tensors]
        return *scaled, None, None


def output_loss(
    x_ND: Tensor, weight_VD: Tensor, label_N: Tensor, smoothing: float, bias_V: Tensor | None = None
) -> Loss:
    """The loss of hidden states under the LM head; label smoothing spreads `smoothing` evenly over the vocabulary."""
    if torch.is_grad_enabled() and not torch.is_autocast_enabled(x_ND.device.type):
        return Loss(*_ChunkedLoss.apply(x_ND, weight_VD, bias_V, label_N, smoothing))
    total = Loss(*(x_ND.new_zeros((), dtype=torch.float32) for _ in Loss._fields))
    rows = _chunk_rows(weight_VD)
    for x, label in zip(x_ND.split(rows), label_N.split(rows), strict=True):
        logits = F.linear(x, weight_VD, bias_V).float()
        nll = F.cross_entropy(logits, label, reduction="sum")
        smoothed = F.cross_entropy(logits, label, reduction="sum", label_smoothing=smoothing) if smoothing else nll
        correct = (logits.gather(1, label.unsqueeze(1)).squeeze(1) == logits.amax(-1)).sum()
        total = Loss(total.smoothed + smoothed, total.nll + nll.detach(), total.correct + correct)
    return total


def _chunk_rows(weight_VD: Tensor) -> int:
    return max(16, CHUNK_ELEMENTS // len(weight_VD))


def memory_rows(memory: SegmentMemory | None, rows: slice) -> SegmentMemory | None:
    """The segment memory of some rows of a batch."""
    return None if memory is None else tuple(x_BPD[rows] for x_BPD in memory)


def join_memories(memories: Sequence[SegmentMemory | None]) -> SegmentMemory | None:
    """The segment memory of a batch, joined from its parts."""
    parts = [memory for memory in memories if memory is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    return tuple(torch.cat(layers) for layers in zip(*parts, strict=True))


class Objective(nn.Module):
    """The model and its loss as one module, for data-parallel training."""

    def __init__(
        self, model: Model, label_smoothing: float = 0.0, scheduled_sampling: float = 0.0, l0: float = 0.0
    ) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing
        self.scheduled_sampling = scheduled_sampling
        self.l0 = l0  # weight of the penalty for open head gates
        self.segment_memory: SegmentMemory | None = None  # of the previous segment; the caller resets it

    def forward(self, batch: Batch) -> Loss:
        if self.training and self.scheduled_sampling:
            x_BTD = self._scheduled_sampling(batch)
        elif self.model.config.has_memory:
            x_BTD, self.segment_memory = self.model.read_segment(batch.input_BT, self.segment_memory)
        else:
            x_BTD = self.model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT)
        if batch.keep_BT is None:
            x_ND = x_BTD.flatten(0, 1)
            label_N = batch.label_BT.flatten()
        else:  # no logits are computed for padding
            x_ND = x_BTD[batch.keep_BT]
            label_N = batch.label_BT[batch.keep_BT]
        output = self.model.output
        if output is None:
            raise ValueError("a model without an output layer cannot be trained")
        if self.model.transform is not None:
            x_ND = self.model.transform(x_ND)
        loss = output_loss(x_ND, output.weight, label_N, self.label_smoothing, output.bias)
        if not self.l0:
            return loss
        return loss._replace(smoothed=loss.smoothed + self.l0 * batch.tokens * expected_open(self.model))

    def _scheduled_sampling(self, batch: Batch) -> Tensor:
        """Hidden states for inputs that are partly replaced by the model's own greedy predictions."""
        state = self.model.encode(batch.source_BS, batch.source_keep_BS)
        tokens_B = batch.input_BT[:, 0]
        hidden: list[Tensor] = []
        for t in range(batch.input_BT.shape[1]):
            if t > 0:
                with torch.no_grad():
                    own_B = self.model.predict(hidden[-1]).argmax(-1).squeeze(1)
                sampled_B = torch.rand(len(own_B), device=own_B.device) < self.scheduled_sampling
                tokens_B = torch.where(sampled_B, own_B, batch.input_BT[:, t])
            x_B1D, state = self.model.read(tokens_B.unsqueeze(1), state)
            hidden.append(x_B1D)
        return torch.cat(hidden, dim=1)
