"""Search strategies over token ids: greedy search, sampling, beam search, and alternatives at one position.

A search is greedy unless the options ask for another strategy. All strategies run under the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.decode.beam import beam_search
from regard.decode.hypothesis import DecodedIds
from regard.decode.options import Options
from regard.decode.request import SearchInput
from regard.decode.rules import Length, NoRepeat, PhraseConstraint, Prefix, Repetition, Rule, steer
from regard.decode.scorer import Scorer, best, select, should_leave

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
