"""A short training of a model that was changed, by what it said before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.batch import Batch
from regard.model import Model
from regard.nn.dropout import MaskPool, use_pool
from regard.settings import Train
from regard.train.optim import learning_rate, make_optimizer, set_rate
from regard.train.weights import Ema, lent

LR = 7e-4
DISTILLED = 0.7  # of what is minimised: how far the model is from its teacher; the rest is the usual loss
DECAY = 0.995  # of the moving average
SMOOTHING = 0.1
JUDGED = 10  # times, on the way


def tune(
    model: Model,
    batches: Iterator[Batch],
    steps: int,
    *,
    teacher: Model | None = None,
    judge: Callable[[], float] | None = None,
    lr: float = LR,
    seed: int = 1,
) -> list[float]:
    """Train in this process for some steps -> the loss per symbol of each; it ends in eval mode.

    With a teacher the model also learns to say what that says, which tells it more than one right symbol does. What is
    kept is a moving average of the weights; with a `judge` (less is better), the best of several on the way, and else
    the last.
    """
    device = next(model.parameters()).device
    train = Train(steps=steps, lr=lr, schedule="cosine", warmup=max(1, steps // 10), seed=seed)
    optimizer, ema = make_optimizer(model, train), Ema(model, DECAY)
    pool = MaskPool(seed)
    use_pool(model.train(), pool)
    losses: list[float] = []
    kept, best = ema.weights, math.inf
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for step, batch in zip(range(1, steps + 1), batches, strict=False):
            torch.manual_seed(seed * 1_000_003 + step)
            pool.begin(step)
            nll, objective = _distil(model, teacher, batch.to(device))
            optimizer.zero_grad(set_to_none=True)
            objective.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            set_rate(optimizer, learning_rate(train, step, (step - 1) / steps, 1))
            optimizer.step()
            ema.update(model, step)
            losses.append(nll)
            if judge is not None and (step == steps or step % max(1, steps // JUDGED) == 0):
                with lent(model.eval(), ema.weights):
                    value = judge()
                model.train()
                if value < best:
                    kept, best = {name: x.clone() for name, x in ema.weights.items()}, value
    use_pool(model.eval(), None)
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=True):
            parameter.copy_(kept[name])
    return losses


def _distil(model: Model, teacher: Model | None, batch: Batch) -> tuple[float, Tensor]:
    """-> loss per symbol, and what is minimised."""
    logits_NV, label_N = _logits(model, batch)
    usual = F.cross_entropy(logits_NV, label_N, label_smoothing=SMOOTHING)
    nll = float(F.cross_entropy(logits_NV.detach(), label_N))
    if teacher is None:
        return nll, usual
    with torch.no_grad():
        wanted_NV = _logits(teacher, batch)[0].log_softmax(-1)
    apart = F.kl_div(logits_NV.log_softmax(-1), wanted_NV, log_target=True, reduction="batchmean")
    return nll, DISTILLED * apart + (1 - DISTILLED) * usual


def _logits(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    x_BTD = model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT)
    keep_BT = torch.ones_like(batch.label_BT, dtype=torch.bool) if batch.keep_BT is None else batch.keep_BT
    return model.predict(x_BTD[keep_BT]).float(), batch.label_BT[keep_BT]
