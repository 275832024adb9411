"""One path per hypothesis: greedy search and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.decode.hypothesis import DecodedIds
from regard.decode.options import Options
from regard.decode.rules import Rule, steer
from regard.decode.scorer import Scorer, SearchInput, best, select, time_to_leave

Choose = Callable[[Tensor, int, Tensor], Tensor]  # values (N, V), step, rows as numbered at the start -> tokens (N,)


class Step(NamedTuple):
    """What was decided at one step; rows whose end was decided earlier may still be among them."""

    rows_N: Tensor  # as numbered at the start
    tokens_N: Tensor
    scores_N: Tensor  # the model's log-probabilities of the tokens; minus infinity where nothing was allowed


def greedy(value_NV: Tensor, step: int, rows_N: Tensor) -> Tensor:
    """The highest value; the lowest id of equals."""
    return best(value_NV, 1)[1].squeeze(1)


def steps(
    scorer: Scorer, tasks: Sequence[SearchInput], rules: Sequence[Rule], choose: Choose = greedy, count: int = 1
) -> Iterator[Step]:
    """Decide one token per row and step, for `count` rows per task, until every row has ended.

    The rules must make it end by the limit, as `Length` does.
    """
    states = scorer.start(tasks)
    alive_B = torch.arange(len(tasks), device=scorer.device)
    limit_B = torch.tensor([task.limit for task in tasks], device=scorer.device)
    rows_N = torch.arange(len(tasks) * count, device=scorer.device)
    if count > 1:
        states = select(states, rows_N // count)
        for rule in rules:
            rule.spread(rows_N // count)
    done_N = torch.zeros_like(rows_N, dtype=torch.bool)
    tokens: Tensor | list[Tensor] = scorer.first(tasks, count)
    for t in range(max(task.limit for task in tasks) + 1):
        logp_NV, states = scorer.step(tokens, states)
        value_NV = steer(logp_NV, rules, t, alive_B)
        tokens_N = choose(value_NV, t, rows_N)
        scores_N = logp_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1)
        if value_NV is not logp_NV:  # where the rules left nothing, end
            dead_N = value_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1) == -math.inf
            tokens_N = torch.where(dead_N, scorer.eos, tokens_N)
            scores_N = torch.where(dead_N, -math.inf, scores_N)
        yield Step(rows_N, tokens_N, scores_N)
        done_N = done_N | (tokens_N == scorer.eos)
        left_B = done_N.view(-1, count).all(1)
        if bool(left_B.all()):
            return
        stay_M = torch.arange(len(rows_N), device=scorer.device)
        if time_to_leave(left_B, limit_B[alive_B] <= t):
            stay_B = (~left_B).nonzero().squeeze(1)
            stay_M = (stay_B.unsqueeze(1) * count + torch.arange(count, device=scorer.device)).flatten()
            states = select(states, stay_M, stay_B)
            alive_B = alive_B[stay_B]
            rows_N, tokens_N, done_N = (x[stay_M] for x in (rows_N, tokens_N, done_N))
        for rule in rules:
            rule.advance(stay_M, tokens_N)
        tokens = tokens_N


def follow(
    scorer: Scorer, tasks: Sequence[SearchInput], rules: Sequence[Rule], choose: Choose = greedy, count: int = 1
) -> list[list[DecodedIds]]:
    """The whole outputs, `count` per task in the order of their rows; what could not end by the rules is missing."""
    total = len(tasks) * count
    tokens = np.full((total, max(task.limit for task in tasks) + 1), -1, dtype=np.int64)
    scores = np.zeros(tokens.shape)
    for t, step in enumerate(steps(scorer, tasks, rules, choose, count)):
        rows = step.rows_N.numpy(force=True)
        tokens[rows, t] = step.tokens_N.numpy(force=True)
        scores[rows, t] = step.scores_N.numpy(force=True)
    lengths = (tokens == scorer.eos).argmax(1) + 1  # the first end
    found: list[list[DecodedIds]] = [[] for _ in tasks]
    for row, length in enumerate(lengths.tolist()):
        token_scores = tuple(scores[row, :length].tolist())
        if token_scores[-1] > -math.inf:
            ids, task = tuple(tokens[row, :length].tolist()), tasks[row // count]
            limited = length - 1 == task.limit
            if limited and task.open_end:
                ids, token_scores = ids[:-1], token_scores[:-1]
            found[row // count].append(DecodedIds(ids, token_scores, sum(token_scores), limited))
    return found


COLDEST = 1e-30  # below, a temperature may be zero in single precision; only ties are drawn from long before


class Sampler:
    """Draws from the tempered, cut-off distribution, by one random number per row and step.

    The numbers of a row are a function of the seed, the task's key and which of its samples it is, so the same source
    gives the same samples alone, in a batch, and among more samples.
    """

    def __init__(self, tasks: Sequence[SearchInput], count: int, options: Options, device: torch.device) -> None:
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
