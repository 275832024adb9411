"""Hypotheses of one sentence as a tree: what they remember is held once, and nothing of it moves when they part.

A sentences   W hypotheses of each, side by side   P symbols that a sentence remembers, of all its hypotheses
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """Which of the symbols that a sentence remembers are the past of which hypothesis."""

    seen_AWP: Tensor
    pos_AP: Tensor
    next_A1: Tensor  # the position of the symbol to come; one row where all sentences agree

    def grow(self, memory: int) -> Tree:
        """Every hypothesis gets its next symbol, and sees no farther back than its `memory` (0: all the way)."""
        sentences, width, _ = self.seen_AWP.shape
        own_AWW = torch.eye(width, dtype=torch.bool, device=self.seen_AWP.device).expand(sentences, -1, -1)
        seen_AWP = torch.cat((self.seen_AWP, own_AWW), dim=2)
        pos_AP = torch.cat((self.pos_AP, self.next_A1.expand(sentences, width)), dim=1)
        if memory:
            seen_AWP = seen_AWP & (pos_AP >= self.next_A1 - memory).unsqueeze(1)
        return Tree(seen_AWP, pos_AP, self.next_A1 + 1)

    def select(self, rows_N: Tensor, sentences_A: Tensor | None) -> Tree:
        """Carry on these hypotheses, as many of each sentence; `sentences_A` are those left if some have gone."""
        count = len(self.seen_AWP) if sentences_A is None else len(sentences_A)
        seen_NP = self.seen_AWP.flatten(0, 1).index_select(0, rows_N)
        tree = replace(self, seen_AWP=seen_NP.unflatten(0, (count, len(rows_N) // count)))
        if sentences_A is None:
            return tree
        next_A1 = self.next_A1 if len(self.next_A1) == 1 else self.next_A1[sentences_A]
        return replace(tree, pos_AP=self.pos_AP[sentences_A], next_A1=next_A1)

    def alive(self) -> Tensor:
        """Places (A, L) of the symbols that some hypothesis comes from, filled up with others where they are fewer."""
        alive_AP = self.seen_AWP.any(1)
        most = int(alive_AP.sum(1).max())
        return alive_AP.byte().argsort(dim=1, descending=True, stable=True)[:, :most]

    def take(self, place_AL: Tensor) -> Tree:
        """Remember these symbols of every sentence, which must be all that are alive."""
        place_AWL = place_AL.unsqueeze(1).expand(-1, self.seen_AWP.shape[1], -1)
        return replace(self, seen_AWP=self.seen_AWP.gather(2, place_AWL), pos_AP=self.pos_AP.gather(1, place_AL))
