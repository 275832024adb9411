"""Beam search: the best few hypotheses of every sentence, side by side, as tensors.

Shapes: A sentences in the batch, G groups, W hypotheses per group, C candidates, N = A*G*W rows, V vocabulary, F
finished hypotheses.

A hypothesis ends when its end token is among the `width` best candidates of its step. A sentence ends when `width`
hypotheses have ended and no live one is better as it stands than the best of them (waived by `exact`), or when no live
hypothesis can overtake the kept ones: values only fall, so the best that a live one can reach is its present sum over
the longest length allowed. Counting ends alone would not do: a model that is sure of one continuation has only poor
candidates beside it, early ends among them, and these would soon be `width`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.decode.hypothesis import DecodedIds
from regard.decode.options import Options
from regard.decode.request import SearchInput
from regard.decode.rules import PhraseConstraint, Rule, steer
from regard.decode.scorer import Scorer, best, select, should_leave

if TYPE_CHECKING:
    from regard.decode.alignment import Coverage


class Picked(NamedTuple):
    """The hypotheses of one group of every sentence that carry on, and those that end."""

    sum_AW: Tensor  # of values, minus infinity where there is no hypothesis
    parent_AW: Tensor  # within the group
    token_AW: Tensor
    ended_AC: Tensor  # of the first candidates: whether it is an end that counts
    ended_sum_AC: Tensor
    ended_parent_AC: Tensor


Stages = tuple[Tensor, Tensor]  # towards required phrases (A, W, V): the stage after a token, and if it comes nearer


def pick(sum_AW: Tensor, value_AWV: Tensor, eos: int, width: int, stages: Stages | None = None) -> Picked:
    """Choose the best `width` continuations; ends among the best `width` candidates take no slot of the beam.

    With stages, every row also offers its best tokens that come nearer, and the slots go round the stages: the best of
    each, then the second best of each, so that no stage of progress dies out.
    """
    sentences, rows, vocab = value_AWV.shape
    end_AW = sum_AW + value_AWV[:, :, eos]
    value_AWV[:, :, eos] = -math.inf
    each = min(width, vocab)
    if stages is None:
        top_NK, token_NK = best(value_AWV.reshape(-1, vocab), each)
    else:
        stage_AWV, nearer_AWV = stages
        steps = [best(value_AWV.masked_fill(m, -math.inf).flatten(0, 1), each) for m in (nearer_AWV, ~nearer_AWV)]
        top_NK, token_NK = (torch.cat(both, 1) for both in zip(*steps, strict=True))
        each *= 2
    token_AC = token_NK.view(sentences, -1)
    go_AC = (sum_AW.unsqueeze(-1) + top_NK.view(sentences, rows, each)).flatten(1)
    # Ends come first and rows in order: equal values are taken in the order end, row, rank, in any batch.
    sum_AC, index_AC = torch.cat((end_AW, go_AC), 1).sort(dim=1, descending=True, stable=True)
    if stages is not None:
        stage_AWK = stage_AWV.gather(2, token_NK.view(sentences, rows, each))
        stage_AC = torch.cat((torch.zeros_like(token_AC[:, :rows]), stage_AWK.flatten(1)), 1).gather(1, index_AC)
        turn_AC = _turns(stage_AC).masked_fill(sum_AC == -math.inf, sum_AC.shape[1])
        order_AC = turn_AC.argsort(dim=1, stable=True)
        sum_AC, index_AC = sum_AC.gather(1, order_AC), index_AC.gather(1, order_AC)
    sum_AC, index_AC = sum_AC[:, : 2 * width], index_AC[:, : 2 * width]
    is_end_AC = index_AC < rows
    ended_AC = (is_end_AC & (sum_AC > -math.inf))[:, :width]
    carried = min(width, rows * each)
    order_AW = is_end_AC.byte().argsort(dim=1, stable=True)[:, :carried]
    from_AW = index_AC.gather(1, order_AW) - rows
    return Picked(
        sum_AC.gather(1, order_AW),
        from_AW // each,
        token_AC.gather(1, from_AW),
        ended_AC,
        sum_AC[:, :width],
        index_AC[:, :width],
    )


def _turns(stage_AC: Tensor) -> Tensor:
    """How many earlier candidates are at the same stage."""
    sorted_AC, order_AC = stage_AC.sort(dim=1, stable=True)
    index_AC = torch.arange(stage_AC.shape[1], device=stage_AC.device).expand_as(stage_AC)
    turn_AC = index_AC - torch.searchsorted(sorted_AC, sorted_AC)
    return torch.empty_like(turn_AC).scatter_(1, order_AC, turn_AC)


class Finished:
    """The best finished hypotheses of every group of every sentence: their values, and the step and row of each end."""

    def __init__(self, sentences: int, groups: int, count: int, device: torch.device) -> None:
        self.value_BGF = torch.full((sentences, groups, count), -math.inf, device=device)
        self.end_BGF2 = torch.zeros((sentences, groups, count, 2), dtype=torch.long, device=device)  # step, row

    def add(self, alive_A: Tensor, value_AGC: Tensor, t: int, row_AGC: Tensor) -> None:
        """Offer the hypotheses that ended at step `t` in these rows; of equal values the earlier stays."""
        end_AGC2 = torch.stack((torch.full_like(row_AGC, t), row_AGC), -1)
        value_AGX = torch.cat((self.value_BGF[alive_A], value_AGC), 2)
        end_AGX2 = torch.cat((self.end_BGF2[alive_A], end_AGC2), 2)
        value_AGX, index_AGX = value_AGX.sort(dim=2, descending=True, stable=True)
        count = self.value_BGF.shape[2]
        self.value_BGF[alive_A] = value_AGX[..., :count]
        self.end_BGF2[alive_A] = end_AGX2.gather(2, index_AGX[..., :count, None].expand(-1, -1, -1, 2))


class BackPointers:
    """The parents and tokens chosen at every step, from which the hypotheses are read back at the end."""

    def __init__(self) -> None:
        self.steps: list[list[np.ndarray]] = []  # per row: its parent, token, score
        self.ends: list[np.ndarray] = []  # per row of a step: the score of ending there

    def read(self, at: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and scores of the hypotheses that end at steps `at` in `rows`, left-aligned, without their ends."""
        tokens = np.zeros((len(at), at.max(initial=0)), dtype=np.int64)
        scores = np.zeros(tokens.shape)
        rows = rows.copy()
        for t in range(tokens.shape[1] - 1, -1, -1):
            longer = at > t
            parents, step_tokens, step_scores = self.steps[t]
            tokens[longer, t], scores[longer, t] = step_tokens[rows[longer]], step_scores[rows[longer]]
            rows[longer] = parents[rows[longer]]
        return tokens, scores


def beam_search(
    scorer: Scorer,
    inputs: Sequence[SearchInput],
    rules: Sequence[Rule],
    options: Options,
    extra: int = 0,
    coverage: Coverage | None = None,
) -> list[list[DecodedIds]]:
    """The n-best outputs of every input, best first; fewer if fewer ended.

    Each group is `extra` wider than the options say, and may be closed when as many hypotheses have ended as they say.
    """
    device, groups, penalty = scorer.device, options.groups, options.length_penalty
    enough, keep = options.beam // groups, options.mbr or options.nbest
    width = enough + extra
    constraint = next((rule for rule in rules if isinstance(rule, PhraseConstraint)), None)
    alive_A = torch.arange(len(inputs), device=device)
    limit_B = torch.tensor([item.limit for item in inputs], device=device)
    longest_B = (limit_B + 1).float() ** penalty
    states = tuple(state.with_prefix_tree(len(inputs), device) for state in scorer.start(inputs))
    if groups > 1:
        first_N = alive_A.repeat_interleave(groups)
        states = select(states, first_N)
        if coverage is not None:
            coverage.select(first_N)
        for rule in rules:
            rule.spread(first_N)
    tokens: Tensor | list[Tensor] = scorer.first(inputs, groups)
    stop_B = torch.tensor([item.limit if item.open_end else math.inf for item in inputs], device=device)
    sum_AGW = torch.zeros((len(inputs), groups, 1), device=device)
    ended_BG = torch.zeros((len(inputs), groups), dtype=torch.long, device=device)
    finished = Finished(len(inputs), groups, keep if groups == 1 else width, device)
    pointers = BackPointers()
    for t in range(max(item.limit for item in inputs) + 1):
        logp_NV, states = scorer.step(tokens, states)
        pointers.ends.append(logp_NV[:, scorer.eos].numpy(force=True).copy())
        if coverage is not None:
            coverage.add()
        value_AGWV = steer(logp_NV, rules, t, alive_A).view(*sum_AGW.shape, -1)
        stages = constraint.stages(alive_A) if constraint is not None and constraint.requires else None
        picks = _pick_groups(sum_AGW, value_AGWV, scorer.eos, width, options.diversity, stages)
        parent_AGW = torch.stack([p.parent_AW for p in picks], 1)
        sum_next_AGW = torch.stack([p.sum_AW for p in picks], 1)
        tokens_N = torch.stack([p.token_AW for p in picks], 1).flatten()
        ended_AGC = torch.stack([p.ended_AC for p in picks], 1)
        first_row_AG1 = torch.arange(len(alive_A) * groups, device=device).view(-1, groups, 1) * sum_AGW.shape[2]
        if bool(ended_AGC.any()):
            row_AGC = torch.stack([p.ended_parent_AC for p in picks], 1) + first_row_AG1
            row_AGC = row_AGC.masked_fill(~ended_AGC, 0)
            length_AGC = (stop_B[alive_A] - t).clamp(0, 1)[:, None, None].expand(row_AGC.shape)  # 1: has an end token
            if constraint is not None and constraint.stop_QV is not None:
                length_AGC = length_AGC.masked_fill(constraint.stopped_N[row_AGC], 0)
            length_AGC = (length_AGC + t).clamp(min=1)
            value_AGC = torch.stack([p.ended_sum_AC for p in picks], 1) / length_AGC**penalty
            if coverage is not None:
                value_AGC += coverage.value(alive_A).flatten()[row_AGC]
            value_AGC = value_AGC.masked_fill(~ended_AGC, -math.inf)
            finished.add(alive_A, value_AGC, t, row_AGC)
            ended_BG[alive_A] += ended_AGC.sum(2)
        if not options.exact:
            better_AG = sum_next_AGW.amax(2) / (t + 1) ** penalty > finished.value_BGF[alive_A, :, 0]
            closed_AG = (ended_BG[alive_A] >= enough) & ~better_AG
            sum_next_AGW = sum_next_AGW.masked_fill(closed_AG.unsqueeze(2), -math.inf)
        bound_AG = sum_next_AGW.amax(2) / longest_B[alive_A].unsqueeze(1)
        stay_A = (bound_AG > finished.value_BGF[alive_A, :, -1]).any(1)  # above the worst that is kept
        rows_N = (parent_AGW + first_row_AG1).flatten()
        sentences = None
        if not bool(stay_A.any()):
            break
        if not bool(stay_A.all()):
            sum_next_AGW = sum_next_AGW.masked_fill(~stay_A[:, None, None], -math.inf)
            if should_leave(~stay_A, limit_B[alive_A] <= t):
                sentences = stay_A.nonzero().squeeze(1)
                stay_N = stay_A.repeat_interleave(len(rows_N) // len(alive_A))
                rows_N, tokens_N = rows_N[stay_N], tokens_N[stay_N]
                alive_A, sum_next_AGW = alive_A[sentences], sum_next_AGW[sentences]
        pointers.steps.append([x.numpy(force=True) for x in (rows_N, tokens_N, logp_NV[rows_N, tokens_N])])
        states = select(states, rows_N, sentences)
        if coverage is not None:
            coverage.select(rows_N)
        for rule in rules:
            rule.advance(rows_N, tokens_N)
        tokens, sum_AGW = tokens_N, sum_next_AGW
    return [outputs[:keep] for outputs in _read(finished, pointers, inputs, scorer.eos)]


def _pick_groups(
    sum_AGW: Tensor, value_AGWV: Tensor, eos: int, width: int, diversity: float, stages: Stages | None
) -> list[Picked]:
    """Pick for one group after the other; a token costs `diversity` for every earlier group that just took it."""
    picks: list[Picked] = []
    taken_AV = torch.zeros_like(value_AGWV[:, 0, 0]) if sum_AGW.shape[1] > 1 else None
    for g in range(sum_AGW.shape[1]):
        value_AWV = value_AGWV[:, g]
        here = None if stages is None else (stages[0].view_as(value_AGWV)[:, g], stages[1].view_as(value_AGWV)[:, g])
        if taken_AV is None:
            return [pick(sum_AGW[:, g], value_AWV, eos, width, here)]
        picked = pick(sum_AGW[:, g], value_AWV - diversity * taken_AV.unsqueeze(1), eos, width, here)
        # The cost decides which tokens are taken; it is not part of their sums.
        cost_AW = diversity * taken_AV.gather(1, picked.token_AW)
        picks.append(picked._replace(sum_AW=picked.sum_AW + cost_AW))
        taken_AV.scatter_add_(1, picked.token_AW, (picked.sum_AW > -math.inf).to(taken_AV.dtype))
    return picks


def _read(
    finished: Finished, pointers: BackPointers, inputs: Sequence[SearchInput], eos: int
) -> list[list[DecodedIds]]:
    """The finished hypotheses of every sentence, best first, each output once."""
    order_BF = finished.value_BGF.flatten(1).argsort(dim=1, descending=True, stable=True)
    value_BF = finished.value_BGF.flatten(1).gather(1, order_BF).numpy(force=True)
    end_BF2 = finished.end_BGF2.flatten(1, 2).numpy(force=True)
    sentence, rank = np.nonzero(value_BF > -math.inf)
    at, rows = end_BF2[sentence, order_BF.numpy(force=True)[sentence, rank]].T
    tokens, scores = pointers.read(at, rows)
    results: list[dict[tuple[int, ...], DecodedIds]] = [{} for _ in inputs]
    for i, (b, r, t, row) in enumerate(zip(sentence.tolist(), rank.tolist(), at.tolist(), rows.tolist(), strict=True)):
        limited = t == inputs[b].limit
        ids, token_scores = tuple(tokens[i, :t].tolist()), tuple(scores[i, :t].tolist())
        if not (limited and inputs[b].open_end):
            ids, token_scores = (*ids, eos), (*token_scores, float(pointers.ends[t][row]))
        results[b].setdefault(ids, DecodedIds(ids, token_scores, float(value_BF[b, r]), limited))
    return [list(outputs.values()) for outputs in results]
