"""Rules that steer a search: they change the values by which tokens are chosen, never the scores that are reported."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from regard.decode.phrases import Phrases
from regard.decode.request import SearchInput


class Rule:
    """A rule over values (N, V). N is the alive sentences times the same number of hypotheses each, sentence-major."""

    def active(self, t: int) -> bool:
        """Whether the rule may change values at step `t`."""
        return True

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        """Change values in place; minus infinity forbids. `alive_B` are the sentences left, numbered as at first."""

    def spread(self, rows_N: Tensor) -> None:
        """Before the first step, start several hypotheses per sentence: the row that each one comes from."""

    def advance(self, rows_N: Tensor, tokens_N: Tensor) -> None:
        """The hypotheses that carry on: the rows they come from, and the token that each one appended."""


def steer(logp_NV: Tensor, rules: Sequence[Rule], t: int, alive_B: Tensor) -> Tensor:
    """The values to choose by; the log-probabilities themselves if no rule is active."""
    active = [rule for rule in rules if rule.active(t)]
    if not active:
        return logp_NV
    value_NV = logp_NV.clone()
    for rule in active:
        rule.apply(value_NV, logp_NV, t, alive_B)
    return value_NV


class Length(Rule):
    """No end token before the minimum, nothing else at the limit, where it costs a continuation nothing."""

    def __init__(self, inputs: Sequence[SearchInput], eos: int, device: torch.device) -> None:
        self.eos = eos
        self.minimum_B = torch.tensor([item.minimum for item in inputs], device=device)
        self.limit_B = torch.tensor([item.limit for item in inputs], device=device)
        self.open_B = torch.tensor([item.open_end for item in inputs], device=device)
        self.until = max(item.minimum for item in inputs)
        self.since = min(item.limit for item in inputs)

    def active(self, t: int) -> bool:
        return t < self.until or t >= self.since

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        value_BKV = value_NV.view(len(alive_B), -1, value_NV.shape[1])
        end_BK = value_BKV[:, :, self.eos].clone()
        if t >= self.since:
            full_B = self.limit_B[alive_B] <= t
            value_BKV.masked_fill_(full_B[:, None, None], -math.inf)
            end_BK.masked_fill_((full_B & self.open_B[alive_B])[:, None], 0.0)
        value_BKV[:, :, self.eos] = end_BK.masked_fill((self.minimum_B[alive_B] > t)[:, None], -math.inf)


class Prefix(Rule):
    """Forces the first tokens, whatever other rules say (so it comes last), and rules out what would alter them."""

    def __init__(self, inputs: Sequence[SearchInput], device: torch.device) -> None:
        longest = max(len(item.prefix) for item in inputs)
        table = [list(item.prefix) + [-1] * (longest - len(item.prefix)) for item in inputs]
        self.table_BP = torch.tensor(table, dtype=torch.long, device=device).view(len(inputs), longest)
        self.length_B = torch.tensor([len(item.prefix) for item in inputs], device=device)
        self.never_next = torch.tensor(
            sorted({x for item in inputs for x in item.not_after_prefix}), dtype=torch.long, device=device
        )
        self.until = longest + bool(len(self.never_next))

    def active(self, t: int) -> bool:
        return t < self.until

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        if t > 0 and len(self.never_next):
            ended_B = self.length_B[alive_B] == t
            rows = ended_B.repeat_interleave(len(value_NV) // len(alive_B)).nonzero()
            value_NV[rows, self.never_next] = -math.inf
        if t >= self.table_BP.shape[1]:
            return
        forced_N = self.table_BP[alive_B, t].repeat_interleave(len(value_NV) // len(alive_B))
        rows = (forced_N >= 0).nonzero().squeeze(1)
        value_NV[rows] = -math.inf
        value_NV[rows, forced_N[rows]] = logp_NV[rows, forced_N[rows]]


class PastTokens(Rule):
    """A rule over the tokens that each hypothesis has produced."""

    def __init__(self, inputs: Sequence[SearchInput], device: torch.device) -> None:
        self.past_NT = torch.zeros((len(inputs), 0), dtype=torch.long, device=device)

    def active(self, t: int) -> bool:
        return t > 0

    def spread(self, rows_N: Tensor) -> None:
        self.past_NT = self.past_NT[rows_N]

    def advance(self, rows_N: Tensor, tokens_N: Tensor) -> None:
        self.past_NT = torch.cat((self.past_NT[rows_N], tokens_N.unsqueeze(1)), 1)


class NoRepeat(PastTokens):
    """No sequence of `size` tokens comes twice."""

    def __init__(self, inputs: Sequence[SearchInput], size: int, device: torch.device) -> None:
        super().__init__(inputs, device)
        self.size = size

    def active(self, t: int) -> bool:
        return t >= self.size

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        windows_NWS = self.past_NT.unfold(1, self.size, 1)
        last_N1S = self.past_NT[:, None, self.past_NT.shape[1] - self.size + 1 :]
        row, start = (windows_NWS[:, :, :-1] == last_N1S).all(-1).nonzero(as_tuple=True)
        value_NV[row, windows_NWS[row, start, -1]] = -math.inf


class Repetition(PastTokens):
    """A token that was produced before counts `penalty` times its negative log-probability."""

    def __init__(self, inputs: Sequence[SearchInput], penalty: float, device: torch.device) -> None:
        super().__init__(inputs, device)
        self.penalty = penalty

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        value_NV.scatter_(1, self.past_NT, value_NV.gather(1, self.past_NT) * self.penalty)


class PhraseConstraint(Rule):
    """Required and forbidden phrases and stop strings: runs the automaton of its input along every hypothesis.

    A token is ruled out if it completes a forbidden phrase, or if after it the limit leaves too few tokens for what is
    still required: so any search under this rule ends with every requirement met, or finds nothing. With
    `redistribute`, for greedy search and sampling, the probability of ending too early goes to tokens that bring a
    phrase closer. After a stop string a hypothesis ends, which costs nothing; it may not begin before the end of the
    prefix, the minimum length and what is required.
    """

    def __init__(
        self, inputs: Sequence[SearchInput], eos: int, vocab: int, device: torch.device, redistribute: bool
    ) -> None:
        self.eos, self.redistribute = eos, redistribute
        no_phrases = Phrases.none(vocab, eos)
        automaton_of = [item.phrases or no_phrases for item in inputs]
        automata = list({id(phrases): phrases for phrases in automaton_of}.values())
        first = np.cumsum([0, *(len(p.next_QV) for p in automata)])  # state of each automaton
        base = np.cumsum([0, *(p.need_MQ.size for p in automata)])
        self.next_QV = _tensor([p.next_QV + start for p, start in zip(automata, first[:-1], strict=True)], device)
        self.met_QV = _tensor([p.met_QV for p in automata], device)
        self.ban_QV = _tensor([p.ban_QV for p in automata], device)
        self.stop_QV = _tensor([p.stop_QV for p in automata], device) if any(item.stop for item in inputs) else None
        self.need_X = _tensor([p.need_MQ.flatten() for p in automata], device)
        number = {id(phrases): i for i, phrases in enumerate(automata)}
        which = [number[id(phrases)] for phrases in automaton_of]
        table = [
            (first[i], base[i] - first[i], len(automata[i].next_QV), item.limit, max(item.minimum, len(item.prefix)))
            for i, item in zip(which, inputs, strict=True)
        ]
        self.about_B5 = torch.tensor(np.array(table), dtype=torch.long, device=device)
        self.requires = any(p.need_MQ.any() for p in automata)
        total_B = torch.tensor([item.stages for item in inputs], device=device)
        need_B = self._need(self.about_B5[:, 0], torch.zeros_like(total_B), self.about_B5)
        self.stages_per_token_B = total_B / need_B.clamp(min=1)
        self.state_N = self.about_B5[:, 0]
        self.met_N = torch.zeros_like(self.state_N)
        self.committed_N = torch.zeros_like(self.state_N, dtype=torch.bool)  # to a phrase that was begun
        self.stopped_N = torch.zeros_like(self.committed_N)

    def _need(self, state: Tensor, met: Tensor, about: Tensor) -> Tensor:
        """Fewest tokens to go from states and subsets met, in the automata that `about` describes."""
        return self.need_X[about[..., 1] + met * about[..., 2] + state]

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        about_N5 = self.about_B5[alive_B].repeat_interleave(len(value_NV) // len(alive_B), dim=0)
        if self.stop_QV is not None:
            stop_NV = self.stop_QV[self.state_N]
            # of the tokens, at most one for each letter of a stop string belongs to it; the others come before
            value_NV.masked_fill_((stop_NV > 0) & ((t + 1 - stop_NV).clamp(min=0) < about_N5[:, 4:]), -math.inf)
        if self.requires:
            self._apply_required(value_NV, logp_NV, about_N5, t)
        else:
            value_NV.masked_fill_(self.ban_QV[self.state_N], -math.inf)
        if self.stop_QV is not None:
            value_NV.masked_fill_(self.stopped_N.unsqueeze(1), -math.inf)
            value_NV[:, self.eos].masked_fill_(self.stopped_N, 0.0)

    def _apply_required(self, value_NV: Tensor, logp_NV: Tensor, about_N5: Tensor, t: int) -> None:
        about_N15 = about_N5.unsqueeze(1)
        met_NV = self.met_N.unsqueeze(1) | self.met_QV[self.state_N]
        self.need_NV = self._need(self.next_QV[self.state_N], met_NV, about_N15)
        self.now_N = self._need(self.state_N, self.met_N, about_N5)
        end_N = value_NV[:, self.eos].masked_fill(self.now_N > 0, -math.inf)
        left_N = about_N5[:, 3] - t
        allowed_NV = ~self.ban_QV[self.state_N] & (self.need_NV < left_N.unsqueeze(1))
        if self.stop_QV is not None:
            allowed_NV &= (self.stop_QV[self.state_N] == 0) | (self.need_NV == 0)
        allowed_NV[:, self.eos] = False  # set below
        self.nearer_NV = allowed_NV & (self.need_NV < self.now_N.unsqueeze(1))
        value_NV.masked_fill_(~allowed_NV, -math.inf)
        if self.redistribute:
            self._redistribute(value_NV, logp_NV[:, self.eos])
        value_NV[:, self.eos] = end_N

    def _redistribute(self, value_NV: Tensor, end_N: Tensor) -> None:
        """Give the probability of the end to tokens that come nearer, and complete a phrase that was begun so."""
        near_NV = value_NV.masked_fill(~self.nearer_NV, -math.inf)
        committed_N1 = (self.committed_N & (near_NV > -math.inf).any(1)).unsqueeze(1)
        value_NV.masked_fill_(committed_N1 & ~self.nearer_NV, -math.inf)
        near_N = near_NV.logsumexp(1)
        unmet_N = (self.now_N > 0) & (near_N > -math.inf)
        grown_NV = near_NV + (torch.logaddexp(near_N, end_N) - near_N).unsqueeze(1)
        torch.where(unmet_N.unsqueeze(1) & self.nearer_NV, grown_NV, value_NV, out=value_NV)
        self.wanted_N = unmet_N & (near_N < end_N)

    def spread(self, rows_N: Tensor) -> None:
        self.state_N, self.met_N = self.state_N[rows_N], self.met_N[rows_N]
        self.committed_N, self.stopped_N = self.committed_N[rows_N], self.stopped_N[rows_N]

    def advance(self, rows_N: Tensor, tokens_N: Tensor) -> None:
        state_N, met_N = self.state_N[rows_N], self.met_N[rows_N]
        self.state_N = self.next_QV[state_N, tokens_N].long()
        self.met_N = met_N | self.met_QV[state_N, tokens_N]
        if self.stop_QV is not None:
            self.stopped_N = self.stop_QV[state_N, tokens_N] > 0
        if self.requires and self.redistribute:
            nearer_N = self.nearer_NV[rows_N, tokens_N]
            self.committed_N = (self.committed_N | self.wanted_N)[rows_N] & nearer_N & (self.met_N == met_N)

    def stages(self, alive_B: Tensor) -> tuple[Tensor, Tensor]:
        """For a beam: the stage that each token leads to (0: all phrases are met), and whether it comes nearer."""
        scale_N1 = self.stages_per_token_B[alive_B].repeat_interleave(len(self.need_NV) // len(alive_B)).unsqueeze(1)
        return (self.need_NV * scale_N1).ceil().long(), self.nearer_NV


def _tensor(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device)
