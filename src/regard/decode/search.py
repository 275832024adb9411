"""Search over token ids: greedy search (the default), sampling, beam search, and alternatives at one position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.decode.constraints import Length, NoRepeat, PhraseConstraint, Prefix, Repetition, Rule, steer
from regard.decode.cross_attention import Coverage
from regard.decode.ensemble import Scorer, States
from regard.decode.hypothesis import DecodedIds
from regard.decode.request import Options
from regard.decode.search_inputs import SearchInput, complete_alternatives, sampling_noise

Choose = Callable[[Tensor, int, Tensor], Tensor]  # values (N, V), step, original row numbers -> tokens (N,)
MIN_TEMPERATURE = 1e-30  # lower ones underflow to zero in single precision
NBEST_GROWTH = 1.25  # multiple of its length to which a live hypothesis may still grow, at no cost, to enter an n-best


def best(value_NV: Tensor, count: int, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """The `count` highest values of each row, in order, and their indices.

    The highest `count` values lie within the `count` chunks of the highest maxima. For a large vocabulary, finding
    these chunks first is several times faster than one `topk`.
    """
    rows, vocab = value_NV.shape
    chunks = vocab // chunk
    if rows * vocab < 1 << 15 or vocab < 1024 or count > chunks // 2:
        return _top(value_NV, count)
    chunks_NCW = value_NV[:, : chunks * chunk].view(rows, chunks, chunk)
    _, which_NK = _top(chunks_NCW.amax(-1), count)
    near_NKW = chunks_NCW.gather(1, which_NK.unsqueeze(-1).expand(-1, -1, chunk))
    index_NKW = which_NK.unsqueeze(-1) * chunk + torch.arange(chunk, device=value_NV.device)
    near = near_NKW.flatten(1)
    index = index_NKW.flatten(1)
    if chunks * chunk < vocab:
        rest = torch.arange(chunks * chunk, vocab, device=value_NV.device).expand(rows, -1)
        near = torch.cat((near, value_NV[:, chunks * chunk :]), 1)
        index = torch.cat((index, rest), 1)
    value_NK, order_NK = _top(near, count)
    return value_NK, index.gather(1, order_NK)


def _top(value_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if count == 1:  # the first of equal values, which topk does not guarantee
        value_N, index_N = value_NV.max(-1)
        return value_N.unsqueeze(1), index_N.unsqueeze(1)
    value_NK, index_NK = value_NV.topk(count)
    return value_NK, index_NK


def top_tokens(logp_NV: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` most probable tokens of every row with their log-probabilities, without blocked tokens."""
    if not count:
        return [[] for _ in logp_NV]
    logp_NK, index_NK = best(logp_NV, min(count, logp_NV.shape[1]))
    rows = zip(index_NK.tolist(), logp_NK.tolist(), strict=True)
    return [[(i, x) for i, x in zip(*row, strict=True) if x > -math.inf] for row in rows]


def select(states: States, rows: Tensor, sentences: Tensor | None = None) -> States:
    """Keep these rows (and, if some sentences leave, these sentences) in the state of every model."""
    return tuple(state.select(rows, sentences) for state in states)


def should_leave(done_A: Tensor, full_A: Tensor) -> bool:
    """Whether finished sentences leave the batch, which copies the state; full ones must, for lack of positions."""
    return int(done_A.sum()) * 8 >= len(done_A) or bool((done_A & full_A).any())


def _spread(tokens: list[Tensor], states: States, rules: Sequence[Rule], rows_N: Tensor) -> tuple[list[Tensor], States]:
    """Start several hypotheses per sentence, copied from these rows."""
    for rule in rules:
        rule.spread(rows_N)
    return [token[rows_N] for token in tokens], select(states, rows_N)


class Picked(NamedTuple):
    """The hypotheses of one group of every sentence that continue, and the hypotheses that end."""

    sum_AW: Tensor  # of values; minus infinity in unused slots
    parent_AW: Tensor  # row within the group
    token_AW: Tensor
    ended_AC: Tensor  # whether a candidate is a possible end
    ended_sum_AC: Tensor
    ended_parent_AC: Tensor


Stages = tuple[Tensor, Tensor]  # of phrases (A, W, V): the stage after a token, and whether it is nearer


def pick(sum_AW: Tensor, value_AWV: Tensor, eos: int, width: int, stages: Stages | None = None) -> Picked:
    """Choose the best `width` continuations. Ends among the best `width` candidates take no slot of the beam.

    With stages, the candidates of every row include its best tokens that bring a phrase nearer. The stages share the
    slots in turn (the best of each, then the second best of each), so that none dies out.
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
    # Ends first, then rows in order: equal values are taken in the order end, row, rank in any batch.
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
    slots = min(width, rows * each)
    order_AW = is_end_AC.byte().argsort(dim=1, stable=True)[:, :slots]
    from_AW = index_AC.gather(1, order_AW) - rows
    ends = ended_AC, sum_AC[:, :width], index_AC[:, :width]
    return Picked(sum_AC.gather(1, order_AW), from_AW // each, token_AC.gather(1, from_AW), *ends)


def _turns(stage_AC: Tensor) -> Tensor:
    """The number of better candidates at the same stage."""
    sorted_AC, order_AC = stage_AC.sort(dim=1, stable=True)
    index_AC = torch.arange(stage_AC.shape[1], device=stage_AC.device).expand_as(stage_AC)
    turn_AC = index_AC - torch.searchsorted(sorted_AC, sorted_AC)
    return torch.empty_like(turn_AC).scatter_(1, order_AC, turn_AC)


class BeamSearch:
    """A beam search over a batch. Each group is `extra` wider than its share of the beam."""

    def __init__(
        self,
        scorer: Scorer,
        inputs: Sequence[SearchInput],
        rules: Sequence[Rule],
        options: Options,
        extra: int = 0,
        coverage: Coverage | None = None,
    ) -> None:
        device = scorer.device
        groups = options.groups
        self.scorer = scorer
        self.inputs = inputs
        self.rules = rules
        self.options = options
        self.coverage = coverage
        self.constraint = next((rule for rule in rules if isinstance(rule, PhraseConstraint)), None)
        self.beam = options.beam // groups  # hypotheses after whose end a group may close
        self.width = self.beam + extra
        self.keep = options.mbr or options.nbest
        self.limit_B = torch.tensor([item.limit for item in inputs], device=device)
        self.longest_B = (self.limit_B + 1).float() ** options.length_penalty
        open_ends = [item.limit if item.open_end else math.inf for item in inputs]
        self.open_end_B = torch.tensor(open_ends, device=device)  # the step at which an output ends without end token
        self.alive_A = torch.arange(len(inputs), device=device)
        self.sum_AGW = torch.zeros((len(inputs), groups, 1), device=device)
        self.ended_BG = torch.zeros((len(inputs), groups), dtype=torch.long, device=device)
        self.closed_BG = torch.zeros((len(inputs), groups), dtype=torch.bool, device=device)  # the best is final
        # The best finished hypotheses of every group: their values, and the step and row of their ends.
        shape = (len(inputs), groups, self.keep if groups == 1 else self.width)
        self.value_BGF = torch.full(shape, -math.inf, device=device)
        self.end_BGF2 = torch.zeros((*shape, 2), dtype=torch.long, device=device)
        self.steps: list[list[np.ndarray]] = []  # parent, token and score of each row
        self.end_scores: list[np.ndarray] = []  # scores of the end token in each row, of every step
        tokens, states = scorer.start(inputs)
        self.tokens: Tensor | list[Tensor] = tokens
        self.states = tuple(state.with_prefix_tree(len(inputs), device) for state in states)
        if groups > 1:
            rows_N = self.alive_A.repeat_interleave(groups)
            self.tokens, self.states = _spread(tokens, self.states, rules, rows_N)
            if coverage is not None:
                coverage.select(rows_N)

    def run(self) -> list[list[DecodedIds]]:
        """The n-best outputs of every input, best first; fewer if fewer ended."""
        eos = self.scorer.eos
        for t in range(max(item.limit for item in self.inputs) + 1):
            logp_NV, self.states = self.scorer.step(self.tokens, self.states)
            self.end_scores.append(logp_NV[:, eos].numpy(force=True).copy())
            if self.coverage is not None:
                self.coverage.add()
            value_AGWV = steer(logp_NV, self.rules, t, self.alive_A).view(*self.sum_AGW.shape, -1)
            stages = None if self.constraint is None else self.constraint.stages(self.alive_A)
            picked = self._pick(value_AGWV, stages)
            if bool(picked.ended_AC.any()):
                self._finish(picked, t)
            if not self._advance(picked, logp_NV, t):
                break
        return [outputs[: self.keep] for outputs in self._outputs()]

    def _pick(self, value_AGWV: Tensor, stages: Stages | None) -> Picked:
        """Pick for each group in turn -> tensors (A, G, ...). A token costs `diversity` per earlier group with it."""
        sum_AGW = self.sum_AGW
        diversity = self.options.diversity
        eos = self.scorer.eos
        groups = sum_AGW.shape[1]
        if groups == 1:
            return Picked(*(x.unsqueeze(1) for x in pick(sum_AGW[:, 0], value_AGWV[:, 0], eos, self.width, stages)))
        picks: list[Picked] = []
        chosen_AV = torch.zeros_like(value_AGWV[:, 0, 0])
        for g in range(groups):
            group_stages = stages and (stages[0].view_as(value_AGWV)[:, g], stages[1].view_as(value_AGWV)[:, g])
            value_AWV = value_AGWV[:, g] - diversity * chosen_AV.unsqueeze(1)
            picked = pick(sum_AGW[:, g], value_AWV, eos, self.width, group_stages)
            # The cost affects the choice of tokens only; it is not part of their sums.
            cost_AW = diversity * chosen_AV.gather(1, picked.token_AW)
            picks.append(picked._replace(sum_AW=picked.sum_AW + cost_AW))
            # A closed group continues only for lower ranks, which must not change the outputs of other groups.
            counts_AW = (picked.sum_AW > -math.inf) & ~self.closed_BG[self.alive_A, g, None]
            chosen_AV.scatter_add_(1, picked.token_AW, counts_AW.to(chosen_AV.dtype))
        return Picked(*(torch.stack(x, 1) for x in zip(*picks, strict=True)))

    def _rows(self, parent_AGX: Tensor) -> Tensor:
        """Rows within the batch from rows within the group."""
        sentences, groups, width = self.sum_AGW.shape
        first_row_AG1 = torch.arange(sentences * groups, device=parent_AGX.device).view(-1, groups, 1) * width
        return parent_AGX + first_row_AG1

    def _finish(self, picked: Picked, t: int) -> None:
        """Add the hypotheses that end at step `t`, ranked by length-normalised value and coverage."""
        ended_AGC = picked.ended_AC
        row_AGC = self._rows(picked.ended_parent_AC).masked_fill(~ended_AGC, 0)
        end_AGC = (self.open_end_B[self.alive_A] - t).clamp(0, 1)[:, None, None].expand(row_AGC.shape)  # 1: end token
        if self.constraint is not None and self.constraint.stop_QV is not None:
            end_AGC = end_AGC.masked_fill(self.constraint.stopped_N[row_AGC], 0)
        length_AGC = (end_AGC + t).clamp(min=1)
        value_AGC = picked.ended_sum_AC / length_AGC**self.options.length_penalty
        if self.coverage is not None:
            value_AGC += self.coverage.value(self.alive_A).flatten()[row_AGC]
        value_AGC = value_AGC.masked_fill(~ended_AGC, -math.inf)
        end_AGC2 = torch.stack((torch.full_like(row_AGC, t), row_AGC), -1)
        value_AGX = torch.cat((self.value_BGF[self.alive_A], value_AGC), 2)
        end_AGX2 = torch.cat((self.end_BGF2[self.alive_A], end_AGC2), 2)
        key_AGX = value_AGX.clone()
        key_AGX[..., 0].masked_fill_(self.closed_BG[self.alive_A], math.inf)  # the first remains first
        index_AGX = key_AGX.argsort(dim=2, descending=True, stable=True)  # of equal values, the earlier first
        count = self.value_BGF.shape[2]
        self.value_BGF[self.alive_A] = value_AGX.gather(2, index_AGX[..., :count])
        self.end_BGF2[self.alive_A] = end_AGX2.gather(2, index_AGX[..., :count, None].expand(-1, -1, -1, 2))
        self.ended_BG[self.alive_A] += ended_AGC.sum(2)

    def _advance(self, picked: Picked, logp_NV: Tensor, t: int) -> bool:
        """Continue the hypotheses that can still enter the n-best -> whether any continues."""
        alive_A = self.alive_A
        sum_AGW = picked.sum_AW
        finished_AGF = self.value_BGF[alive_A]
        if not self.options.exact:
            penalty = self.options.length_penalty
            top_AG = sum_AGW.amax(2)
            better_AG = top_AG / (t + 1) ** penalty > finished_AGF[..., 0]
            closed_AG = self.closed_BG[alive_A] | (self.ended_BG[alive_A] >= self.beam) & ~better_AG
            self.closed_BG[alive_A] = closed_AG
            if self.keep > 1:
                last_A1 = finished_AGF.flatten(1).topk(self.keep)[0][:, -1:]
                closed_AG = closed_AG & ~(top_AG / (NBEST_GROWTH * (t + 1)) ** penalty > last_A1)
            sum_AGW = sum_AGW.masked_fill(closed_AG.unsqueeze(2), -math.inf)
        bound_AG = sum_AGW.amax(2) / self.longest_B[alive_A].unsqueeze(1)
        stay_A = (bound_AG > finished_AGF[..., -1]).any(1)
        if not bool(stay_A.any()):
            return False
        rows_N = self._rows(picked.parent_AW).flatten()
        tokens_N = picked.token_AW.flatten()
        sentences = None
        if not bool(stay_A.all()):
            sum_AGW = sum_AGW.masked_fill(~stay_A[:, None, None], -math.inf)
            if should_leave(~stay_A, self.limit_B[alive_A] <= t):
                sentences = stay_A.nonzero().squeeze(1)
                stay_N = stay_A.repeat_interleave(len(rows_N) // len(alive_A))
                rows_N, tokens_N = rows_N[stay_N], tokens_N[stay_N]
                self.alive_A = alive_A[sentences]
                sum_AGW = sum_AGW[sentences]
        self.steps.append([x.numpy(force=True) for x in (rows_N, tokens_N, logp_NV[rows_N, tokens_N])])
        self.states = select(self.states, rows_N, sentences)
        if self.coverage is not None:
            self.coverage.select(rows_N)
        for rule in self.rules:
            rule.advance(rows_N, tokens_N)
        self.tokens = tokens_N
        self.sum_AGW = sum_AGW
        return True

    def _outputs(self) -> list[list[DecodedIds]]:
        """The finished hypotheses of every sentence, best first, without duplicates."""
        key_BGF = self.value_BGF.minimum(self.value_BGF[..., :1])  # the first of a group is its best
        order_BF = key_BGF.flatten(1).argsort(dim=1, descending=True, stable=True)
        value_BF = self.value_BGF.flatten(1).gather(1, order_BF).numpy(force=True)
        end_BF2 = self.end_BGF2.flatten(1, 2).numpy(force=True)
        sentence, rank = np.nonzero(value_BF > -math.inf)
        at, rows = end_BF2[sentence, order_BF.numpy(force=True)[sentence, rank]].T
        tokens = np.zeros((len(at), at.max(initial=0)), dtype=np.int64)  # left-aligned, without the end tokens
        scores = np.zeros(tokens.shape)
        row_at = rows.copy()
        for t in range(tokens.shape[1] - 1, -1, -1):
            longer = at > t
            parents, step_tokens, step_scores = self.steps[t]
            tokens[longer, t] = step_tokens[row_at[longer]]
            scores[longer, t] = step_scores[row_at[longer]]
            row_at[longer] = parents[row_at[longer]]
        results: list[dict[tuple[int, ...], DecodedIds]] = [{} for _ in self.inputs]
        ended = zip(sentence.tolist(), rank.tolist(), at.tolist(), rows.tolist(), strict=True)
        for i, (b, r, t, row) in enumerate(ended):
            limited = t == self.inputs[b].limit
            ids, token_scores = tuple(tokens[i, :t].tolist()), tuple(scores[i, :t].tolist())
            if not (limited and self.inputs[b].open_end):
                ids, token_scores = (*ids, self.scorer.eos), (*token_scores, float(self.end_scores[t][row]))
            results[b].setdefault(ids, DecodedIds(ids, token_scores, float(value_BF[b, r]), limited))
        return [list(outputs.values()) for outputs in results]


class Step(NamedTuple):
    """The tokens chosen at one step; may still include rows that have ended."""

    rows_N: Tensor  # original row numbers
    tokens_N: Tensor
    scores_N: Tensor  # log-probabilities of these tokens; minus infinity if no token was allowed
    logp_NV: Tensor  # log-probabilities of all tokens


def greedy(value_NV: Tensor, step: int, rows_N: Tensor) -> Tensor:
    """The token of the highest value; of equal values, the lowest id."""
    return best(value_NV, 1)[1].squeeze(1)


def steps(
    scorer: Scorer, inputs: Sequence[SearchInput], rules: Sequence[Rule], choose: Choose = greedy, count: int = 1
) -> Iterator[Step]:
    """Greedy search and sampling: one token per row and step, `count` rows per input, until all have ended."""
    first_tokens, states = scorer.start(inputs)
    alive_B = torch.arange(len(inputs), device=scorer.device)
    limit_B = torch.tensor([item.limit for item in inputs], device=scorer.device)
    rows_N = torch.arange(len(inputs) * count, device=scorer.device)
    if count > 1:
        first_tokens, states = _spread(first_tokens, states, rules, rows_N // count)
    done_N = torch.zeros_like(rows_N, dtype=torch.bool)
    tokens: Tensor | list[Tensor] = first_tokens
    for t in range(max(item.limit for item in inputs) + 1):
        logp_NV, states = scorer.step(tokens, states)
        value_NV = steer(logp_NV, rules, t, alive_B)
        tokens_N = choose(value_NV, t, rows_N)
        scores_N = logp_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1)
        if value_NV is not logp_NV:  # a row ends if the rules allow no token
            dead_N = value_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1) == -math.inf
            tokens_N = torch.where(dead_N, scorer.eos, tokens_N)
            scores_N = torch.where(dead_N, -math.inf, scores_N)
        yield Step(rows_N, tokens_N, scores_N, logp_NV)
        done_N = done_N | (tokens_N == scorer.eos)
        done_B = done_N.view(-1, count).all(1)
        if bool(done_B.all()):
            return
        stay_M = torch.arange(len(rows_N), device=scorer.device)
        if should_leave(done_B, limit_B[alive_B] <= t):
            stay_B = (~done_B).nonzero().squeeze(1)
            stay_M = (stay_B.unsqueeze(1) * count + torch.arange(count, device=scorer.device)).flatten()
            states = select(states, stay_M, stay_B)
            alive_B = alive_B[stay_B]
            rows_N, tokens_N, done_N = (x[stay_M] for x in (rows_N, tokens_N, done_N))
        for rule in rules:
            rule.advance(stay_M, tokens_N)
        tokens = tokens_N


def decode_paths(
    scorer: Scorer, inputs: Sequence[SearchInput], rules: Sequence[Rule], choose: Choose = greedy, count: int = 1
) -> list[list[DecodedIds]]:
    """The outputs of greedy search or sampling, `count` per input, except outputs that the rules did not let end."""
    tokens = np.full((len(inputs) * count, max(item.limit for item in inputs) + 1), -1, dtype=np.int64)
    scores = np.zeros(tokens.shape)
    for t, step in enumerate(steps(scorer, inputs, rules, choose, count)):
        rows = step.rows_N.numpy(force=True)
        tokens[rows, t] = step.tokens_N.numpy(force=True)
        scores[rows, t] = step.scores_N.numpy(force=True)
    lengths = (tokens == scorer.eos).argmax(1) + 1  # up to the first end token
    results: list[list[DecodedIds]] = [[] for _ in inputs]
    for row, length in enumerate(lengths.tolist()):
        token_scores = tuple(scores[row, :length].tolist())
        if token_scores[-1] > -math.inf:
            ids = tuple(tokens[row, :length].tolist())
            item = inputs[row // count]
            limited = length - 1 == item.limit
            if limited and item.open_end:
                ids, token_scores = ids[:-1], token_scores[:-1]
            results[row // count].append(DecodedIds(ids, token_scores, sum(token_scores), limited))
    return results


class Sampler:
    """Draws tokens with random numbers that depend on the seed, the input and the number of the sample only."""

    def __init__(self, inputs: Sequence[SearchInput], count: int, options: Options, device: torch.device) -> None:
        self.options = options
        self.noise_RT = torch.from_numpy(sampling_noise(inputs, count, options.seed)).flatten(0, 1).to(device)

    def __call__(self, value_NV: Tensor, t: int, rows_N: Tensor) -> Tensor:
        behind_NV = value_NV - value_NV.amax(-1, keepdim=True)  # avoids overflow at low temperatures
        prob_NV = (behind_NV / max(self.options.temperature, MIN_TEMPERATURE)).softmax(-1)
        prob_NV, index_NV = prob_NV.sort(dim=-1, descending=True, stable=True)
        cumulative_NV = truncate(prob_NV, self.options).cumsum(-1)
        at_N1 = self.noise_RT[rows_N, t, None] * cumulative_NV[:, -1:]
        rank_N1 = torch.searchsorted(cumulative_NV, at_N1, right=True).clamp_(max=value_NV.shape[1] - 1)
        token_N: Tensor = index_NV.gather(1, rank_N1).squeeze(1)
        return token_N


def truncate(prob_NV: Tensor, options: Options) -> Tensor:
    """Set descending probabilities to zero according to top_k, top_p and min_p; never the first."""
    prob_NV = prob_NV.nan_to_num(0.0)  # a row without an allowed token, which ends with any draw
    if options.top_k:
        prob_NV[:, options.top_k :] = 0.0
    if options.top_p < 1:
        before_NV = prob_NV.cumsum(-1) - prob_NV
        prob_NV = prob_NV.masked_fill(before_NV >= options.top_p * prob_NV.sum(-1, keepdim=True), 0.0)
    if options.min_p:
        prob_NV = prob_NV.masked_fill(prob_NV < options.min_p * prob_NV[:, :1], 0.0)
    return prob_NV


@torch.inference_mode()
def search(scorer: Scorer, inputs: Sequence[SearchInput], options: Options) -> list[list[DecodedIds]]:
    """The n-best outputs of every input (samples in the order drawn); none if its rules allow none."""
    if not inputs:
        return []
    if options.alternatives:
        find = partial(_next_tokens, scorer, options=options)
        return complete_alternatives(inputs, options, scorer.eos, partial(search, scorer), find)
    if options.samples:
        count = options.mbr or options.nbest
        rules = make_rules(scorer, inputs, options, one_path=True)
        return decode_paths(scorer, inputs, rules, Sampler(inputs, count, options, scorer.device), count)
    results: list[list[DecodedIds]] = [[] for _ in inputs]
    for extra in sorted({item.stages for item in inputs}):  # so that no output depends on the rest of the batch
        indices = [i for i, item in enumerate(inputs) if item.stages == extra]
        for i, outputs in zip(indices, _best(scorer, [inputs[i] for i in indices], options, extra), strict=True):
            results[i] = outputs
    return results


def _best(scorer: Scorer, inputs: Sequence[SearchInput], options: Options, extra: int) -> list[list[DecodedIds]]:
    """Greedy or beam search; each group of the beam is `extra` wider than in the options."""
    if options.beam == 1 and not extra:
        return decode_paths(scorer, inputs, make_rules(scorer, inputs, options, one_path=True))
    rules = make_rules(scorer, inputs, options, one_path=False)
    if not options.coverage_penalty:
        return BeamSearch(scorer, inputs, rules, options, extra).run()
    coverage = Coverage(scorer.models[0], [item.sources[0] for item in inputs], options)
    with coverage.record():
        return BeamSearch(scorer, inputs, rules, options, extra, coverage).run()


def make_rules(scorer: Scorer, inputs: Sequence[SearchInput], options: Options, one_path: bool) -> list[Rule]:
    """The active rules, in order: a later rule may override an earlier one."""
    device = scorer.device
    rules: list[Rule] = []
    if options.repetition_penalty > 1:
        rules.append(Repetition(inputs, options.repetition_penalty, device))
    if options.no_repeat_ngram:
        rules.append(NoRepeat(inputs, options.no_repeat_ngram, device))
    rules.append(Length(inputs, scorer.eos, device))
    prefix = [Prefix(inputs, device)] if any(item.prefix for item in inputs) else []
    if any(item.phrases is not None for item in inputs):
        rules += prefix  # also before the phrases, which depend on the tokens that cannot follow the prefix
        rules.append(PhraseConstraint(inputs, scorer.eos, scorer.vocab, device, redistribute=one_path))
    return rules + prefix


def _next_tokens(scorer: Scorer, inputs: Sequence[SearchInput], options: Options) -> list[list[int]]:
    """The best tokens directly after the prefix of each input, under its rules."""
    results: list[list[int]] = [[] for _ in inputs]
    lengths = torch.tensor([len(item.prefix) for item in inputs], device=scorer.device)

    def note(value_NV: Tensor, t: int, rows_N: Tensor) -> Tensor:
        value_NK, token_NK = best(value_NV, min(options.alternatives, value_NV.shape[1]))
        for n in (lengths[rows_N] == t).nonzero().flatten().tolist():
            allowed = value_NK[n] > -torch.inf
            results[int(rows_N[n])] = token_NK[n][allowed].tolist()
        return token_NK[:, 0]

    loop = steps(scorer, inputs, make_rules(scorer, inputs, options, one_path=True), note)
    for _ in islice(loop, int(lengths.max()) + 1):
        pass
    return results
