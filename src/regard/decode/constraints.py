"""Rules that steer a search. They change the values that rank tokens, never the reported scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.decode.phrases import Phrases
from regard.decode.search_inputs import SearchInput


class Rule:
    """A rule over values (N, V), where N = alive sentences times hypotheses per sentence, sentence-major."""

    def active(self, t: int) -> bool:
        """Whether the rule may change values at step `t`."""
        return True

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        """Change values in place; minus infinity forbids. `alive_B` are the indices of unfinished sentences."""

    def spread(self, rows_N: Tensor) -> None:
        """Before the first step, start several hypotheses per sentence, copied from these rows."""

    def advance(self, rows_N: Tensor, tokens_N: Tensor) -> None:
        """Continue the hypotheses of these rows, each with the token that it appended."""


def steer(logp_NV: Tensor, rules: Sequence[Rule], t: int, alive_B: Tensor) -> Tensor:
    """The values that rank tokens; the log-probabilities themselves if no rule is active."""
    active = [rule for rule in rules if rule.active(t)]
    if not active:
        return logp_NV
    value_NV = logp_NV.clone()
    for rule in active:
        rule.apply(value_NV, logp_NV, t, alive_B)
    return value_NV


class Length(Rule):
    """Forbids the end token before the minimum, and all others at the limit, where a continuation ends at no cost."""

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
    """Forces the first tokens and forbids tokens that would alter them; comes last and overrides other rules."""

    def __init__(self, inputs: Sequence[SearchInput], device: torch.device) -> None:
        longest = max(len(item.prefix) for item in inputs)
        table = [list(item.prefix) + [-1] * (longest - len(item.prefix)) for item in inputs]
        self.table_BP = torch.tensor(table, dtype=torch.long, device=device).view(len(inputs), longest)
        self.length_B = torch.tensor([len(item.prefix) for item in inputs], device=device)
        never_next = sorted({x for item in inputs for x in item.not_after_prefix})
        self.never_next = torch.tensor(never_next, dtype=torch.long, device=device)
        never = [[x in item.not_after_prefix for x in never_next] for item in inputs]
        self.never_BX = torch.tensor(never, dtype=torch.bool, device=device)
        self.until = longest + bool(len(self.never_next))

    def active(self, t: int) -> bool:
        return t < self.until

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        if t > 0 and len(self.never_next):
            ended_B = self.length_B[alive_B] == t
            never_BX = self.never_BX[alive_B] & ended_B.unsqueeze(1)
            row, which = never_BX.repeat_interleave(len(value_NV) // len(alive_B), 0).nonzero(as_tuple=True)
            value_NV[row, self.never_next[which]] = -math.inf
        if t >= self.table_BP.shape[1]:
            return
        forced_N = self.table_BP[alive_B, t].repeat_interleave(len(value_NV) // len(alive_B))
        rows = (forced_N >= 0).nonzero().squeeze(1)
        value_NV[rows] = -math.inf
        value_NV[rows, forced_N[rows]] = logp_NV[rows, forced_N[rows]]


class PastTokens(Rule):
    """A rule that depends on the tokens of each hypothesis."""

    def __init__(self, inputs: Sequence[SearchInput], device: torch.device) -> None:
        self.past_NT = torch.zeros((len(inputs), 0), dtype=torch.long, device=device)

    def active(self, t: int) -> bool:
        return t > 0

    def spread(self, rows_N: Tensor) -> None:
        self.past_NT = self.past_NT[rows_N]

    def advance(self, rows_N: Tensor, tokens_N: Tensor) -> None:
        self.past_NT = torch.cat((self.past_NT[rows_N], tokens_N.unsqueeze(1)), 1)


class NoRepeat(PastTokens):
    """Forbids any sequence of `size` tokens from occurring twice."""

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
    """Multiplies the negative log-probability of tokens that have occurred by `penalty`."""

    def __init__(self, inputs: Sequence[SearchInput], penalty: float, device: torch.device) -> None:
        super().__init__(inputs, device)
        self.penalty = penalty

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        value_NV.scatter_(1, self.past_NT, value_NV.gather(1, self.past_NT) * self.penalty)


class PhraseProgress(NamedTuple):
    """The distance of hypotheses from meeting their requirements, at one step."""

    need_NV: Tensor  # fewest tokens until all requirements are met, after each token
    nearer_NV: Tensor  # whether a token is allowed and brings a requirement nearer
    pulled_N: Tensor  # whether the end was more probable than all tokens that bring a requirement nearer


class PhraseConstraint(Rule):
    """Enforces required phrases, forbidden phrases and stop strings: runs an automaton along every hypothesis.

    A token is forbidden if it completes a forbidden phrase or leaves too few tokens for the requirements. With
    `redistribute` (greedy search and sampling), the probability of ending too early is moved to tokens that bring a
    phrase nearer. After a stop string, a hypothesis ends at no cost. A stop string may not begin within the prefix or
    the minimum length, or before all requirements are met.
    """

    def __init__(
        self, inputs: Sequence[SearchInput], eos: int, vocab: int, device: torch.device, redistribute: bool
    ) -> None:
        self.eos = eos
        self.redistribute = redistribute
        next_1V = np.zeros((1, vocab), np.int32)
        zeros_1V = np.zeros((1, vocab), np.int16)
        zeros_1 = np.zeros(1, np.int16)
        no_phrases = Phrases(next_1V, zeros_1V, zeros_1V > 0, zeros_1V, zeros_1[None], zeros_1, next_1V[0], eos)
        phrases = [item.phrases or no_phrases for item in inputs]
        automata = list(dict.fromkeys(phrases))
        # The states of all automata are numbered consecutively; tables of fewer subsets are padded.
        ends = list(accumulate(len(each.next_QV) for each in automata))
        first_state = dict(zip(automata, [0, *ends], strict=False))
        subsets = max(len(each.need_MQ) for each in automata)

        def join(tables: list[np.ndarray], axis: int = 0) -> Tensor:
            return torch.from_numpy(np.concatenate(tables, axis)).to(device)

        def per_input(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        self.next_QV = join([each.next_QV + first_state[each] for each in automata])
        self.met_QV = join([each.met_QV for each in automata])
        self.ban_QV = join([each.ban_QV for each in automata])
        self.stop_QV = join([each.stop_QV for each in automata]) if any(item.texts.stop for item in inputs) else None
        needs = [np.pad(each.need_MQ, ((0, subsets - len(each.need_MQ)), (0, 0))) for each in automata]
        self.need_MQ = join(needs, axis=1)
        self.requires = any(each.need_MQ.any() for each in automata)
        self.limit_B = per_input([item.limit for item in inputs])
        self.first_stop_B = per_input([max(item.minimum, len(item.prefix)) for item in inputs])
        # The state of each hypothesis. N is the number of inputs until `spread`.
        self.state_N = per_input([first_state[each] for each in phrases])
        self.met_N = torch.zeros_like(self.state_N)  # subset of requirements
        self.committed_N = torch.zeros_like(self.state_N, dtype=torch.bool)  # to a phrase that it has begun
        self.stopped_N = torch.zeros_like(self.committed_N)
        need_B = self.need_MQ[self.met_N, self.state_N]
        self.stages_per_token_B = per_input([item.stages for item in inputs]) / need_B.clamp(min=1)
        self._progress: PhraseProgress | None = None  # of the latest step

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        sentence_N = alive_B.repeat_interleave(len(value_NV) // len(alive_B))
        if self.stop_QV is not None:
            stop_NV = self.stop_QV[self.state_N]
            # Each letter of a stop string belongs to at most one token, so at least the other tokens come before it.
            before_NV = (t + 1 - stop_NV).clamp(min=0)
            value_NV.masked_fill_((stop_NV > 0) & (before_NV < self.first_stop_B[sentence_N, None]), -math.inf)
        if self.requires:
            self._apply_required(value_NV, logp_NV, self.limit_B[sentence_N] - t)
        else:
            value_NV.masked_fill_(self.ban_QV[self.state_N], -math.inf)
        if self.stop_QV is not None:
            value_NV.masked_fill_(self.stopped_N.unsqueeze(1), -math.inf)
            value_NV[:, self.eos].masked_fill_(self.stopped_N, 0.0)

    def _apply_required(self, value_NV: Tensor, logp_NV: Tensor, left_N: Tensor) -> None:
        """Forbid tokens after which the `left_N` tokens up to the limit are too few."""
        met_NV = self.met_N.unsqueeze(1) | self.met_QV[self.state_N]
        need_NV = self.need_MQ[met_NV, self.next_QV[self.state_N].long()]
        need_N = self.need_MQ[self.met_N, self.state_N]
        end_N = value_NV[:, self.eos].masked_fill(need_N > 0, -math.inf)
        allowed_NV = ~self.ban_QV[self.state_N] & (need_NV < left_N.unsqueeze(1))
        if self.stop_QV is not None:
            allowed_NV &= (self.stop_QV[self.state_N] == 0) | (need_NV == 0)
        allowed_NV[:, self.eos] = False  # its value is set below
        nearer_NV = allowed_NV & (need_NV < need_N.unsqueeze(1))
        value_NV.masked_fill_(~allowed_NV, -math.inf)
        pulled_N = torch.zeros_like(self.committed_N)
        if self.redistribute:
            pulled_N = self._redistribute(value_NV, logp_NV[:, self.eos], need_N > 0, nearer_NV)
        value_NV[:, self.eos] = end_N
        self._progress = PhraseProgress(need_NV, nearer_NV, pulled_N)

    def _redistribute(self, value_NV: Tensor, end_N: Tensor, unmet_N: Tensor, nearer_NV: Tensor) -> Tensor:
        """Move the probability of the end to tokens that bring a requirement nearer, until the phrase is complete."""
        near_NV = value_NV.masked_fill(~nearer_NV, -math.inf)
        committed_N1 = (self.committed_N & (near_NV > -math.inf).any(1)).unsqueeze(1)
        value_NV.masked_fill_(committed_N1 & ~nearer_NV, -math.inf)
        near_N = near_NV.logsumexp(1)
        unmet_N = unmet_N & (near_N > -math.inf)
        grown_NV = near_NV + (torch.logaddexp(near_N, end_N) - near_N).unsqueeze(1)
        torch.where(unmet_N.unsqueeze(1) & nearer_NV, grown_NV, value_NV, out=value_NV)
        return unmet_N & (near_N < end_N)  # the end was more probable than all these tokens together

    def spread(self, rows_N: Tensor) -> None:
        self.state_N = self.state_N[rows_N]
        self.met_N = self.met_N[rows_N]
        self.committed_N = self.committed_N[rows_N]
        self.stopped_N = self.stopped_N[rows_N]

    def advance(self, rows_N: Tensor, tokens_N: Tensor) -> None:
        state_N = self.state_N[rows_N]
        met_N = self.met_N[rows_N]
        self.state_N = self.next_QV[state_N, tokens_N].long()
        self.met_N = met_N | self.met_QV[state_N, tokens_N]
        if self.stop_QV is not None:
            self.stopped_N = self.stop_QV[state_N, tokens_N] > 0
        if self._progress is not None and self.redistribute:
            nearer_N = self._progress.nearer_NV[rows_N, tokens_N]
            committed_N = (self.committed_N | self._progress.pulled_N)[rows_N]
            self.committed_N = committed_N & nearer_N & (self.met_N == met_N)

    def stages(self, alive_B: Tensor) -> tuple[Tensor, Tensor] | None:
        """After `apply`: the stage after each token (0: all met), and whether it is nearer; None without phrases."""
        if self._progress is None:
            return None
        need_AHV, nearer_AHV = (
            x_NV.view(len(alive_B), -1, x_NV.shape[1]) for x_NV in (self._progress.need_NV, self._progress.nearer_NV)
        )
        return (need_AHV * self.stages_per_token_B[alive_B][:, None, None]).ceil().long(), nearer_AHV
