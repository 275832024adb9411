"""Search strategies over token ids: greedy search, sampling, beam search, and alternatives at one position.

A search is greedy unless the options ask for another strategy. All strategies run under the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.decode.constraints import Length, NoRepeat, PhraseConstraint, Prefix, Repetition, Rule, SearchInput, steer
from regard.decode.ensemble import Scorer, best, select, should_leave
from regard.decode.hypothesis import DecodedIds
from regard.decode.request import Options

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


Choose = Callable[[Tensor, int, Tensor], Tensor]  # values (N, V), step, rows as numbered at the start -> tokens (N,)
MIN_TEMPERATURE = 1e-30  # a lower one may be zero in single precision; far above it only ties are still drawn from


@torch.inference_mode()
def search(scorer: Scorer, inputs: Sequence[SearchInput], options: Options) -> list[list[DecodedIds]]:
    """The n-best outputs of every input (samples as drawn); none where its rules allow none."""
    if not inputs:
        return []
    if options.alternatives:
        return _alternatives(scorer, inputs, options)
    if options.samples:
        count = options.mbr or options.nbest
        rules = make_rules(scorer, inputs, options, one_path=True)
        return decode_paths(scorer, inputs, rules, make_choice(scorer, inputs, options, count), count)
    # The width of a beam depends on the phrases that an input requires, never on the rest of the batch.
    stages = [item.stages for item in inputs]
    results: list[list[DecodedIds]] = [[] for _ in inputs]
    for extra in sorted(set(stages)):
        indices = [i for i, own in enumerate(stages) if own == extra]
        for i, outputs in zip(indices, _best(scorer, [inputs[i] for i in indices], options, extra), strict=True):
            results[i] = outputs
    return results


def _best(scorer: Scorer, inputs: Sequence[SearchInput], options: Options, extra: int) -> list[list[DecodedIds]]:
    """Greedy or beam search; each group of the beam is `extra` wider than the options ask for."""
    if options.beam == 1 and not extra:
        return decode_paths(scorer, inputs, make_rules(scorer, inputs, options, one_path=True))
    rules = make_rules(scorer, inputs, options, one_path=False)
    if not options.coverage_penalty:
        return beam_search(scorer, inputs, rules, options, extra)
    from regard.decode.alignment import Coverage  # most searches read no attention

    coverage = Coverage(scorer.models[0], [item.sources[0] for item in inputs], options)
    with coverage.record():
        return beam_search(scorer, inputs, rules, options, extra, coverage)


def make_rules(scorer: Scorer, inputs: Sequence[SearchInput], options: Options, one_path: bool) -> list[Rule]:
    """The rules that apply, in the order in which a later one may overrule an earlier."""
    device = scorer.device
    rules: list[Rule] = []
    if options.repetition_penalty > 1:
        rules.append(Repetition(inputs, options.repetition_penalty, device))
    if options.no_repeat_ngram:
        rules.append(NoRepeat(inputs, options.no_repeat_ngram, device))
    rules.append(Length(inputs, scorer.eos, device))
    prefix = [Prefix(inputs, device)] if any(item.prefix for item in inputs) else []
    if any(item.phrases is not None for item in inputs):
        rules += prefix  # phrases must know which tokens cannot follow the prefix; but the prefix overrules them
        rules.append(PhraseConstraint(inputs, scorer.eos, scorer.vocab, device, redistribute=one_path))
    return rules + prefix


class Step(NamedTuple):
    """The tokens chosen at one step; rows that ended earlier may still be among them."""

    rows_N: Tensor  # as numbered at the start
    tokens_N: Tensor
    scores_N: Tensor  # the model's log-probabilities of the tokens; minus infinity where nothing was allowed
    logp_NV: Tensor  # those of all tokens


def greedy(value_NV: Tensor, step: int, rows_N: Tensor) -> Tensor:
    """The token of the highest value; the lowest id of equals."""
    return best(value_NV, 1)[1].squeeze(1)


def steps(
    scorer: Scorer, inputs: Sequence[SearchInput], rules: Sequence[Rule], choose: Choose = greedy, count: int = 1
) -> Iterator[Step]:
    """The greedy / sampling loop: choose one token per row and step, for `count` rows per input, until all have ended.

    The rules must end every row by its limit, as `Length` does.
    """
    states = scorer.start(inputs)
    alive_B = torch.arange(len(inputs), device=scorer.device)
    limit_B = torch.tensor([item.limit for item in inputs], device=scorer.device)
    rows_N = torch.arange(len(inputs) * count, device=scorer.device)
    if count > 1:
        states = select(states, rows_N // count)
        for rule in rules:
            rule.spread(rows_N // count)
    done_N = torch.zeros_like(rows_N, dtype=torch.bool)
    tokens: Tensor | list[Tensor] = scorer.first(inputs, count)
    for t in range(max(item.limit for item in inputs) + 1):
        logp_NV, states = scorer.step(tokens, states)
        value_NV = steer(logp_NV, rules, t, alive_B)
        tokens_N = choose(value_NV, t, rows_N)
        scores_N = logp_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1)
        if value_NV is not logp_NV:  # a row in which the rules allow nothing ends
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
    """The outputs of the sampling loop, `count` per input; those that the rules keep from ending are left out."""
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
            ids, item = tuple(tokens[row, :length].tolist()), inputs[row // count]
            limited = length - 1 == item.limit
            if limited and item.open_end:
                ids, token_scores = ids[:-1], token_scores[:-1]
            results[row // count].append(DecodedIds(ids, token_scores, sum(token_scores), limited))
    return results


def make_choice(scorer: Scorer, inputs: Sequence[SearchInput], options: Options, count: int) -> Choose:
    """How each row chooses its next token: by sampling, or greedily."""
    return Sampler(inputs, count, options, scorer.device) if options.samples else greedy


class Sampler:
    """Draws from the tempered and truncated distribution, by one random number per row and step.

    The numbers of a row are a function of the seed, the key of its input and its number among the samples, so a source
    gives the same samples alone, in a batch, and among more samples.
    """

    def __init__(self, inputs: Sequence[SearchInput], count: int, options: Options, device: torch.device) -> None:
        self.options = options
        longest = max(item.limit for item in inputs) + 1
        noise = np.zeros((len(inputs) * count, longest))
        for row in range(len(noise)):
            item = inputs[row // count]
            seed = options.seed if item.seed is None else item.seed
            rng = np.random.default_rng((seed, item.key, row % count))
            noise[row, : item.limit + 1] = rng.random(item.limit + 1)
        self.noise_RT = torch.from_numpy(noise).float().clamp_(max=1 - 2**-24).to(device)

    def __call__(self, value_NV: Tensor, t: int, rows_N: Tensor) -> Tensor:
        behind_NV = value_NV - value_NV.amax(-1, keepdim=True)  # first, so that a low temperature gives no infinities
        prob_NV = (behind_NV / max(self.options.temperature, MIN_TEMPERATURE)).softmax(-1)
        prob_NV, index_NV = prob_NV.sort(dim=-1, descending=True, stable=True)
        cumulative_NV = truncate(prob_NV, self.options).cumsum(-1)
        at_N1 = self.noise_RT[rows_N, t, None] * cumulative_NV[:, -1:]
        rank_N1 = torch.searchsorted(cumulative_NV, at_N1, right=True).clamp_(max=value_NV.shape[1] - 1)
        token_N: Tensor = index_NV.gather(1, rank_N1).squeeze(1)
        return token_N


def truncate(prob_NV: Tensor, options: Options) -> Tensor:
    """Descending probabilities, zero where top_k, top_p and min_p cut them off; the first always stays."""
    prob_NV = prob_NV.nan_to_num(0.0)  # a row in which nothing is allowed; any token drawn there ends it
    if options.top_k:
        prob_NV[:, options.top_k :] = 0.0
    if options.top_p < 1:
        before_NV = prob_NV.cumsum(-1) - prob_NV
        prob_NV = prob_NV.masked_fill(before_NV >= options.top_p * prob_NV.sum(-1, keepdim=True), 0.0)
    if options.min_p:
        prob_NV = prob_NV.masked_fill(prob_NV < options.min_p * prob_NV[:, :1], 0.0)
    return prob_NV


def _alternatives(scorer: Scorer, inputs: Sequence[SearchInput], options: Options) -> list[list[DecodedIds]]:
    """The best tokens at one position, each completed by the strategy of the other options."""
    plain = options.model_copy(update={"alternatives": 0, "alternatives_at": None})
    bases = [item.prefix for item in inputs]
    at = options.alternatives_at
    further = [i for i, base in enumerate(bases) if at is not None and at > len(base)]
    for i, outputs in zip(further, search(scorer, [inputs[i] for i in further], plain), strict=True):
        bases[i] = outputs[0].ids[:at] if outputs else bases[i]
        phrases = inputs[i].phrases
        if phrases is not None and (found := phrases.find_stop(bases[i])):
            bases[i] = bases[i][: found[1]]
        if bases[i] and bases[i][-1] == scorer.eos:  # the output is shorter: the position is that of its end
            bases[i] = bases[i][:-1]
    based = [
        item if base == item.prefix else replace(item, prefix=base, not_after_prefix=())
        for item, base in zip(inputs, bases, strict=True)
    ]
    variants: list[SearchInput] = []
    owners: list[int] = []
    for i, tokens in enumerate(_next_tokens(scorer, based, options)):
        for token in tokens:
            if token == scorer.eos:
                minimum = min(based[i].minimum, len(bases[i]))
                variants.append(replace(based[i], limit=len(bases[i]), minimum=minimum, open_end=False))
            else:
                variants.append(replace(based[i], prefix=(*bases[i], token), not_after_prefix=()))
            owners.append(i)
    results: list[list[DecodedIds]] = [[] for _ in inputs]
    for start in range(0, len(variants), len(inputs)):  # no larger batches than were asked for
        part = slice(start, start + len(inputs))
        completed = search(scorer, variants[part], plain)
        for i, variant, outputs in zip(owners[part], variants[part], completed, strict=True):
            if outputs:
                limited = outputs[0].limited and variant.limit == inputs[i].limit
                results[i].append(outputs[0]._replace(limited=limited))
    return results


def _next_tokens(scorer: Scorer, inputs: Sequence[SearchInput], options: Options) -> list[list[int]]:
    """The best tokens right after the prefix of each input, under its rules."""
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
