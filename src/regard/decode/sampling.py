"""Drawing symbols at random, in a way that does not depend on what else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from regard.decode.options import Options
from regard.decode.scorer import Task

COLDEST = 1e-30  # below, a temperature may be zero in single precision; only ties are drawn from long before


class Sampler:
    """Draws from the tempered, cut-off distribution, by one random number per row and step.

    The numbers of a row are a function of the seed, the task's key and which of its samples it is, so the same source
    gives the same samples alone, in a batch, and among more samples.
    """

    def __init__(self, tasks: Sequence[Task], count: int, options: Options, device: torch.device) -> None:
        self.options = options
        longest = max(task.limit for task in tasks) + 1
        noise = np.zeros((len(tasks) * count, longest))
        for row in range(len(noise)):
            task = tasks[row // count]
            rng = np.random.default_rng((options.seed, task.key, row % count))
            noise[row, : task.limit + 1] = rng.random(task.limit + 1)
        self.noise_RT = torch.from_numpy(noise).float().clamp_(max=1 - 2**-24).to(device)

    def __call__(self, value_NV: Tensor, t: int, rows_N: Tensor) -> Tensor:
        behind_NV = value_NV - value_NV.amax(-1, keepdim=True)  # first, lest all become infinite when it is very cold
        prob_NV = (behind_NV / max(self.options.temperature, COLDEST)).softmax(-1)
        prob_NV, place_NV = prob_NV.sort(dim=-1, descending=True, stable=True)
        cumulative_NV = kept(prob_NV, self.options).cumsum(-1)
        at_N1 = self.noise_RT[rows_N, t, None] * cumulative_NV[:, -1:]
        rank_N1 = torch.searchsorted(cumulative_NV, at_N1, right=True).clamp_(max=value_NV.shape[1] - 1)
        token_N: Tensor = place_NV.gather(1, rank_N1).squeeze(1)
        return token_N


def kept(prob_NV: Tensor, options: Options) -> Tensor:
    """Descending probabilities with what top_k, top_p and min_p cut off set to zero; the first always stays."""
    prob_NV = prob_NV.nan_to_num(0.0)  # a row in which nothing is allowed; whatever is drawn there ends it
    if options.top_k:
        prob_NV[:, options.top_k :] = 0.0
    if options.top_p < 1:
        before_NV = prob_NV.cumsum(-1) - prob_NV
        prob_NV = prob_NV.masked_fill(before_NV >= options.top_p * prob_NV.sum(-1, keepdim=True), 0.0)
    if options.min_p:
        prob_NV = prob_NV.masked_fill(prob_NV < options.min_p * prob_NV[:, :1], 0.0)
    return prob_NV
