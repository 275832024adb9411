"""What steers a search: objects that change the values by which a symbol is chosen, never the scores reported."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.decode.scorer import Task


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
        """The hypotheses that carry on: which rows they come from, and the symbol each one appended."""


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

    def __init__(self, tasks: Sequence[Task], eos: int, device: torch.device) -> None:
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
    """The first symbols are given, whatever other rules say (so this one comes last), and what follows is set apart."""

    def __init__(self, tasks: Sequence[Task], device: torch.device) -> None:
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

    def __init__(self, tasks: Sequence[Task], device: torch.device) -> None:
        self.past_NT = torch.zeros((len(tasks), 0), dtype=torch.long, device=device)

    def active(self, t: int) -> bool:
        return t > 0

    def spread(self, rows_N: Tensor) -> None:
        self.past_NT = self.past_NT[rows_N]

    def advance(self, rows_N: Tensor, tokens_N: Tensor) -> None:
        self.past_NT = torch.cat((self.past_NT[rows_N], tokens_N.unsqueeze(1)), 1)


class NoRepeat(Past):
    """No sequence of `size` symbols comes twice."""

    def __init__(self, tasks: Sequence[Task], size: int, device: torch.device) -> None:
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
    """A symbol that was produced before counts `penalty` times its negative log-probability."""

    def __init__(self, tasks: Sequence[Task], penalty: float, device: torch.device) -> None:
        super().__init__(tasks, device)
        self.penalty = penalty

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        value_NV.scatter_(1, self.past_NT, value_NV.gather(1, self.past_NT) * self.penalty)
