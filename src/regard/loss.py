"""The training objective: a sum over symbols, divided once by the count of the whole step, however that is split."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from regard.batch import Batch
from regard.model import Model

# Logits worked on at once: few enough to stay in the cache. Writing all logits of a step to memory, reading them back
# for the softmax and again for its gradient, is what a small model with a large vocabulary spends its time on.
CHUNK_ELEMENTS = 1 << 20


class Loss(NamedTuple):
    """Sums over real symbols; divide by the count of the whole step."""

    smoothed: Tensor  # what is minimised
    nll: Tensor  # negative log-probability of the labels, detached
    correct: Tensor  # symbols whose label scored highest, detached


class _Prediction(torch.autograd.Function):
    """Linear layer, softmax and smoothed cross-entropy in one, a cache-sized piece at a time.

    Gradients are made in the forward pass, while a piece of logits is at hand, and only scaled in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, label_N: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, vocab = len(x_ND), len(weight_VD)
        rows = _rows_at_once(weight_VD)
        x_grad_ND = torch.empty_like(x_ND)
        weight_grad_VD = torch.zeros_like(weight_VD)
        smoothed, nll, correct = (x_ND.new_zeros((), dtype=torch.float32) for _ in range(3))
        for start in range(0, count, rows):
            x, label = x_ND[start : start + rows], label_N[start : start + rows].unsqueeze(1)
            logits = (x @ weight_VD.T).float()
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
        ctx.save_for_backward(x_grad_ND, weight_grad_VD)
        ctx.mark_non_differentiable(nll, correct)
        return smoothed, nll, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_grad_ND, weight_grad_VD = ctx.saved_tensors
        scale = grads[0]
        return x_grad_ND * scale.to(x_grad_ND.dtype), weight_grad_VD * scale.to(weight_grad_VD.dtype), None, None


def predict_and_compare(x_ND: Tensor, weight_VD: Tensor, label_N: Tensor, smoothing: float) -> Loss:
    """Loss of predicting `label_N` from `x_ND`: the smoothed target puts `smoothing` evenly on all symbols."""
    if torch.is_grad_enabled() and not torch.is_autocast_enabled(x_ND.device.type):
        return Loss(*_Prediction.apply(x_ND, weight_VD, label_N, smoothing))
    total = Loss(*(x_ND.new_zeros((), dtype=torch.float32) for _ in Loss._fields))
    rows = _rows_at_once(weight_VD)
    for x, label in zip(x_ND.split(rows), label_N.split(rows), strict=True):
        logits = F.linear(x, weight_VD).float()
        nll = F.cross_entropy(logits, label, reduction="sum")
        smoothed = F.cross_entropy(logits, label, reduction="sum", label_smoothing=smoothing) if smoothing else nll
        correct = (logits.gather(1, label.unsqueeze(1)).squeeze(1) == logits.amax(-1)).sum()
        total = Loss(total.smoothed + smoothed, total.nll + nll.detach(), total.correct + correct)
    return total


def _rows_at_once(weight_VD: Tensor) -> int:
    return max(16, CHUNK_ELEMENTS // len(weight_VD))


class Objective(nn.Module):
    """A model together with what it is trained for; wrapping both lets data-parallel training see one module."""

    def __init__(self, model: Model, label_smoothing: float = 0.0, scheduled_sampling: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing
        self.scheduled_sampling = scheduled_sampling

    def forward(self, batch: Batch) -> Loss:
        if self.training and self.scheduled_sampling:
            x_BTD = self._partly_own(batch)
        else:
            x_BTD = self.model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT)
        if batch.keep_BT is None:
            x_ND, label_N = x_BTD.flatten(0, 1), batch.label_BT.flatten()
        else:  # nothing is predicted where there is nothing to compare with
            x_ND, label_N = x_BTD[batch.keep_BT], batch.label_BT[batch.keep_BT]
        return predict_and_compare(x_ND, self.model.output.weight, label_N, self.label_smoothing)

    def _partly_own(self, batch: Batch) -> Tensor:
        """Teacher forcing in which some inputs are what the model itself would have said."""
        state = self.model.encode(batch.source_BS, batch.source_keep_BS)
        tokens_B = batch.input_BT[:, 0]
        outs: list[Tensor] = []
        for t in range(batch.input_BT.shape[1]):
            if t > 0:
                with torch.no_grad():
                    own_B = self.model.predict(outs[-1]).argmax(-1).squeeze(1)
                mine_B = torch.rand(len(own_B), device=own_B.device) < self.scheduled_sampling
                tokens_B = torch.where(mine_B, own_B, batch.input_BT[:, t])
            x_B1D, state = self.model.read(tokens_B.unsqueeze(1), state)
            outs.append(x_B1D)
        return torch.cat(outs, dim=1)
