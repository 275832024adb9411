"""What steers a search: objects that change the values by which a token is chosen, never the scores reported."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from regard.decode.phrases import Phrases
from regard.decode.scorer import SearchInput


class Rule:
    """A rule over values (N, V). N is the alive sentences times the same number of hypotheses each, sentence-major."""

    def active(self, t: int) -> bool:
        """Whether the rule has a say at step `t`."""
        return True

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        """Change values in place; minus infinity forbids. `alive_B` numbers the sentences as at the start."""

    def spread(self, rows_N: Tensor) -> None:
        """Before the first step, make several hypotheses of each: which row each one comes from."""

    def advance(self, rows_N: Tensor, tokens_N: Tensor) -> None:
        """The hypotheses that carry on: which rows they come from, and the token each one appended."""


def steer(logp_NV: Tensor, rules: Sequence[Rule], t: int, alive_B: Tensor) -> Tensor:
    """The values to choose by: the very log-probabilities if no rule has a say."""
    active = [rule for rule in rules if rule.active(t)]
    if not active:
        return logp_NV
    value_NV = logp_NV.clone()
    for rule in active:
        rule.apply(value_NV, logp_NV, t, alive_B)
    return value_NV


class Length(Rule):
    """No end before the minimum, nothing but the end at the limit, where it costs an open-ended task nothing."""

    def __init__(self, tasks: Sequence[SearchInput], eos: int, device: torch.device) -> None:
        self.eos = eos
        self.minimum_B = torch.tensor([task.minimum for task in tasks], device=device)
        self.limit_B = torch.tensor([task.limit for task in tasks], device=device)
        self.open_B = torch.tensor([task.open_end for task in tasks], device=device)
        self.until = max(task.minimum for task in tasks)
        self.since = min(task.limit for task in tasks)

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
    """The first tokens are given, whatever other rules say (so this one comes last), and what follows is set apart."""

    def __init__(self, tasks: Sequence[SearchInput], device: torch.device) -> None:
        longest = max(len(task.prefix) for task in tasks)
        table = [list(task.prefix) + [-1] * (longest - len(task.prefix)) for task in tasks]
        self.table_BP = torch.tensor(table, dtype=torch.long, device=device).view(len(tasks), longest)
        self.length_B = torch.tensor([len(task.prefix) for task in tasks], device=device)
        self.apart = torch.tensor(sorted({x for task in tasks for x in task.apart}), dtype=torch.long, device=device)
        self.until = longest + bool(len(self.apart))

    def active(self, t: int) -> bool:
        return t < self.until

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        if t > 0 and len(self.apart):
            ended_B = self.length_B[alive_B] == t
            rows = ended_B.repeat_interleave(len(value_NV) // len(alive_B)).nonzero()
            value_NV[rows, self.apart] = -math.inf
        if t >= self.table_BP.shape[1]:
            return
        given_N = self.table_BP[alive_B, t].repeat_interleave(len(value_NV) // len(alive_B))
        rows = (given_N >= 0).nonzero().squeeze(1)
        value_NV[rows] = -math.inf
        value_NV[rows, given_N[rows]] = logp_NV[rows, given_N[rows]]


class Past(Rule):
    """A rule that looks back at what each hypothesis has produced."""

    def __init__(self, tasks: Sequence[SearchInput], device: torch.device) -> None:
        self.past_NT = torch.zeros((len(tasks), 0), dtype=torch.long, device=device)

    def active(self, t: int) -> bool:
        return t > 0

    def spread(self, rows_N: Tensor) -> None:
        self.past_NT = self.past_NT[rows_N]

    def advance(self, rows_N: Tensor, tokens_N: Tensor) -> None:
        self.past_NT = torch.cat((self.past_NT[rows_N], tokens_N.unsqueeze(1)), 1)


class NoRepeat(Past):
    """No sequence of `size` tokens comes twice."""

    def __init__(self, tasks: Sequence[SearchInput], size: int, device: torch.device) -> None:
        super().__init__(tasks, device)
        self.size = size

    def active(self, t: int) -> bool:
        return t >= self.size

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        windows_NWS = self.past_NT.unfold(1, self.size, 1)
        last_N1S = self.past_NT[:, None, self.past_NT.shape[1] - self.size + 1 :]
        row, place = (windows_NWS[:, :, :-1] == last_N1S).all(-1).nonzero(as_tuple=True)
        value_NV[row, windows_NWS[row, place, -1]] = -math.inf


class Repetition(Past):
    """A token that was produced before counts `penalty` times its negative log-probability."""

    def __init__(self, tasks: Sequence[SearchInput], penalty: float, device: torch.device) -> None:
        super().__init__(tasks, device)
        self.penalty = penalty

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        value_NV.scatter_(1, self.past_NT, value_NV.gather(1, self.past_NT) * self.penalty)


BANKS = 48  # stages of progress that a beam keeps apart, at most


def banks(task: SearchInput) -> int:
    """How many stages lie between this task's beginning and its required phrases all being met."""
    if task.phrases is None:
        return 0
    return min(task.phrases.walk(()) or 0, BANKS)


class Constraint(Rule):
    """Follows every hypothesis through its task's automaton, and keeps a way open to all required phrases.

    A token is refused if it completes a forbidden phrase, or if after it the length limit leaves too little room for
    what is still required: so whatever search goes on under this rule ends with every phrase met. With `yielding`, for
    searches that follow one path, the probability of ending too early goes to tokens that bring a phrase closer.
    """

    def __init__(
        self, tasks: Sequence[SearchInput], eos: int, vocab: int, device: torch.device, yielding: bool
    ) -> None:
        self.eos, self.yielding = eos, yielding
        nothing = [np.zeros((1, vocab), dtype=kind) for kind in (np.int32, np.int16, bool)]
        free = Phrases(nothing[0], nothing[1], nothing[2], np.zeros((1, 1), dtype=np.int16), eos)
        mine = [task.phrases or free for task in tasks]
        kinds = list({id(phrases): phrases for phrases in mine}.values())
        first = np.cumsum([0, *(len(p.next_QV) for p in kinds)])  # of each automaton's states
        base = np.cumsum([0, *(p.need_MQ.size for p in kinds)])
        self.next_QV = _tensor([p.next_QV + start for p, start in zip(kinds, first[:-1], strict=True)], device)
        self.met_QV = _tensor([p.met_QV for p in kinds], device)
        self.ban_QV = _tensor([p.ban_QV for p in kinds], device)
        self.need_X = _tensor([p.need_MQ.flatten() for p in kinds], device)
        which = [next(i for i, p in enumerate(kinds) if p is phrases) for phrases in mine]
        table = [
            (first[i], base[i] - first[i], len(kinds[i].next_QV), task.limit)
            for i, task in zip(which, tasks, strict=True)
        ]
        self.about_B4 = torch.tensor(np.array(table), dtype=torch.long, device=device)
        self.requires = any(p.need_MQ.any() for p in kinds)
        total_B = torch.tensor([banks(task) for task in tasks], device=device)
        need_B = self._need(self.about_B4[:, 0], torch.zeros_like(total_B), self.about_B4)
        self.bank_B = total_B / need_B.clamp(min=1)
        self.state_N = self.about_B4[:, 0]
        self.met_N = torch.zeros_like(self.state_N)
        self.bound_N = torch.zeros_like(self.state_N, dtype=torch.bool)  # on the way to a phrase that must be completed

    def _need(self, state: Tensor, met: Tensor, about: Tensor) -> Tensor:
        """Fewest tokens to go, for states and subsets of rows that `about` describes."""
        place = about[..., 1] + met * about[..., 2] + state
        return self.need_X[place]

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        about_N4 = self.about_B4[alive_B].repeat_interleave(len(value_NV) // len(alive_B), dim=0)
        ban_NV = self.ban_QV[self.state_N]
        if not self.requires:
            value_NV.masked_fill_(ban_NV, -math.inf)
            return
        about_N14 = about_N4.unsqueeze(1)
        met_NV = self.met_N.unsqueeze(1) | self.met_QV[self.state_N]
        self.need_NV = self._need(self.next_QV[self.state_N], met_NV, about_N14)
        self.now_N = self._need(self.state_N, self.met_N, about_N4)
        end_N = value_NV[:, self.eos].masked_fill(self.now_N > 0, -math.inf)
        room_N = about_N4[:, 3] - t
        allowed_NV = ~ban_NV & (self.need_NV < room_N.unsqueeze(1))
        allowed_NV[:, self.eos] = False  # which is seen to below
        self.nearer_NV = allowed_NV & (self.need_NV < self.now_N.unsqueeze(1))
        value_NV.masked_fill_(~allowed_NV, -math.inf)
        # With no room or nothing else left, what is required wins over what other rules have ruled out.
        stuck_N = (self.now_N >= room_N) | (value_NV.amax(1) == -math.inf)
        must_N1 = (stuck_N & (self.now_N > 0)).unsqueeze(1)
        torch.where(must_N1 & self.nearer_NV, logp_NV, value_NV, out=value_NV)
        if self.yielding:
            self._yield(value_NV, logp_NV[:, self.eos])
        value_NV[:, self.eos] = end_N

    def _yield(self, value_NV: Tensor, end_N: Tensor) -> None:
        """Give the probability of the end to what comes nearer, and stay with a phrase that was begun so."""
        near_NV = value_NV.masked_fill(~self.nearer_NV, -math.inf)
        bound_N1 = (self.bound_N & (near_NV > -math.inf).any(1)).unsqueeze(1)
        value_NV.masked_fill_(bound_N1 & ~self.nearer_NV, -math.inf)
        near_N = near_NV.logsumexp(1)
        unmet_N = (self.now_N > 0) & (near_N > -math.inf)
        grown_NV = near_NV + (torch.logaddexp(near_N, end_N) - near_N).unsqueeze(1)
        torch.where(unmet_N.unsqueeze(1) & self.nearer_NV, grown_NV, value_NV, out=value_NV)
        self.wanted_N = unmet_N & (near_N < end_N)

    def spread(self, rows_N: Tensor) -> None:
        self.state_N, self.met_N, self.bound_N = (x[rows_N] for x in (self.state_N, self.met_N, self.bound_N))

    def advance(self, rows_N: Tensor, tokens_N: Tensor) -> None:
        state_N, met_N = self.state_N[rows_N], self.met_N[rows_N]
        self.state_N = self.next_QV[state_N, tokens_N].long()
        self.met_N = met_N | self.met_QV[state_N, tokens_N]
        if self.requires and self.yielding:
            nearer_N = self.nearer_NV[rows_N, tokens_N]
            self.bound_N = (self.bound_N | self.wanted_N)[rows_N] & nearer_N & (self.met_N == met_N)

    def stages(self, alive_B: Tensor) -> tuple[Tensor, Tensor]:
        """For a beam: the stage that each token leads to (0: all is met), and whether it is a step forward."""
        scale_N1 = self.bank_B[alive_B].repeat_interleave(len(self.need_NV) // len(alive_B)).unsqueeze(1)
        return (self.need_NV * scale_N1).ceil().long(), self.nearer_NV


def _tensor(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device)
