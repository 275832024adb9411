"""Phrases that must or must not occur in an output, as one automaton that reads tokens of the vocabulary.

Phrases are sequences of letters: bytes of text, or whole tokens where a vocabulary separates them by spaces. The
automaton knows, whatever was produced so far, which phrases any next token would complete and how many tokens it
takes at least to complete the rest. Because it reads the letters of a token, a phrase is recognised however it is cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Letters = tuple[int, ...]
MOST = 10  # required phrases at once: the automaton remembers which subset was met
NEVER = 30_000  # tokens: more than any output has


@dataclass(frozen=True)
class Spelling:
    """The letters of every token of a vocabulary, the end included, and which tokens may be produced before it."""

    letters_VL: np.ndarray  # padded with -1
    usable_V: np.ndarray
    eos: int

    @classmethod
    def of(cls, letters: Sequence[Sequence[int]], usable: Sequence[bool] | np.ndarray, eos: int) -> Spelling:
        longest = max(map(len, letters), default=0)
        table = np.full((len(letters), longest), -1, dtype=np.int64)
        for row, word in zip(table, letters, strict=True):
            row[: len(word)] = list(word)
        return cls(table, np.asarray(usable, dtype=bool), eos)


@dataclass(frozen=True, eq=False)
class Phrases:
    """Q states of the automaton, M = 2^phrases subsets of required phrases met."""

    next_QV: np.ndarray
    met_QV: np.ndarray  # bits of the required phrases that the token completes
    ban_QV: np.ndarray  # the token completes a forbidden phrase, or is not usable
    need_MQ: np.ndarray  # fewest tokens until it may end: with every required phrase met, the end's letters included
    eos: int

    def walk(self, ids: Sequence[int], apart: Sequence[int] = ()) -> int | None:
        """How many more tokens are needed at least between `ids` and the end; None if they break a rule.

        None of `apart` comes directly after `ids`.
        """
        state = met = 0
        for index in ids:
            if self.ban_QV[state, index]:
                return None
            met |= int(self.met_QV[state, index])
            state = int(self.next_QV[state, index])
        need = int(self.need_MQ[met, state])
        if need == 0 or not apart:
            return need
        after_V = self.need_MQ[met | self.met_QV[state], self.next_QV[state]].astype(int)
        after_V[self.ban_QV[state]] = NEVER
        after_V[[*apart, self.eos]] = NEVER
        return min(NEVER, 1 + int(after_V.min()))


def make_phrases(require: Sequence[Letters], forbid: Sequence[Letters], spelling: Spelling) -> Phrases:
    """The automaton of some phrases over a vocabulary."""
    require = list(dict.fromkeys(require))
    forbid = list(dict.fromkeys(forbid))
    classes = {letter: i + 1 for i, letter in enumerate(sorted({x for word in (*require, *forbid) for x in word}))}
    delta_QC, met_Q, ban_Q = _trie(require, forbid, classes)
    states, vocab = len(delta_QC), len(spelling.letters_VL)
    next_QV = np.repeat(np.arange(states)[:, None], vocab, axis=1)
    met_QV = np.zeros((states, vocab), dtype=np.int32)
    ban_QV = np.zeros((states, vocab), dtype=bool)
    class_VL = np.zeros_like(spelling.letters_VL)
    for letter, i in classes.items():
        class_VL[spelling.letters_VL == letter] = i
    for place in range(class_VL.shape[1]):
        on = np.nonzero(spelling.letters_VL[:, place] >= 0)[0]
        moved = delta_QC[next_QV[:, on], class_VL[on, place]]
        next_QV[:, on] = moved
        met_QV[:, on] |= met_Q[moved]
        ban_QV[:, on] |= ban_Q[moved]
    end_Q = met_QV[:, spelling.eos].copy(), ban_QV[:, spelling.eos].copy()
    ban_QV |= ~spelling.usable_V
    ban_QV[:, spelling.eos] = True  # not on the way
    need_MQ = _needs(next_QV, met_QV, ban_QV, end_Q, len(require))
    ban_QV[:, spelling.eos] = end_Q[1]
    return Phrases(next_QV.astype(np.int32), met_QV.astype(np.int16), ban_QV, need_MQ, spelling.eos)


def _trie(
    require: Sequence[Letters], forbid: Sequence[Letters], classes: dict[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States remember the longest end of the text that begins a phrase -> moves, phrases met, whether forbidden."""
    children: list[dict[int, int]] = [{}]
    met, ban = [0], [False]
    for i, word in enumerate((*require, *forbid)):
        node = 0
        for letter in word:
            if letter not in children[node]:
                children[node][letter] = len(children)
                children.append({})
                met.append(0)
                ban.append(False)
            node = children[node][letter]
        if i < len(require):
            met[node] |= 1 << i
        else:
            ban[node] = True
    delta_QC = np.zeros((len(children), len(classes) + 1), dtype=np.int64)
    back = [0] * len(children)
    queue = deque([0])
    while queue:
        node = queue.popleft()
        if node:
            delta_QC[node] = delta_QC[back[node]]
            met[node] |= met[back[node]]
            ban[node] |= ban[back[node]]
        for letter, child in children[node].items():
            back[child] = int(delta_QC[node, classes[letter]]) if node else 0
            delta_QC[node, classes[letter]] = child
            queue.append(child)
    return delta_QC, np.asarray(met, dtype=np.int32), np.asarray(ban)


def _needs(
    next_QV: np.ndarray, met_QV: np.ndarray, ban_QV: np.ndarray, end: tuple[np.ndarray, np.ndarray], count: int
) -> np.ndarray:
    """Shortest ways to where the end completes the set and nothing forbidden, from every state and every subset met."""
    states, full = len(next_QV), (1 << count) - 1
    subset_M1 = np.arange(full + 1)[:, None]
    need_MQ = np.where(((subset_M1 | end[0]) == full) & ~end[1], 0, NEVER).astype(np.int16)
    if not need_MQ.any():
        return need_MQ
    edges = []  # from, to, phrases met; each once, however many tokens it has
    for state in range(states):
        usable = ~ban_QV[state]
        pairs = np.unique(next_QV[state, usable].astype(np.int64) << 32 | met_QV[state, usable])
        edges.append(np.stack((np.full(len(pairs), state), pairs >> 32, pairs & 0xFFFFFFFF)))
    begin, to, met = np.concatenate(edges, axis=1)
    for subset in range(full, -1, -1):  # more bits are larger numbers: what is met only grows
        after = subset | met
        need = need_MQ[subset]
        while True:
            reach = np.full(states, NEVER, dtype=np.int64)
            np.minimum.at(reach, begin, need_MQ[after, to].astype(np.int64) + 1)
            better = np.minimum(reach, need).astype(np.int16)
            if (better == need).all():
                break
            need[:] = better
    return need_MQ
