"""Phrases that an output must or must not contain or that end it, as one automaton over the tokens of a vocabulary.

A phrase is a sequence of letters: bytes of text, or whole tokens where a vocabulary separates them by spaces. For every
prefix of an output the automaton knows which phrases each next token would complete, and how many tokens at least it
takes to complete the rest. It reads the letters of a token, so a phrase is recognised however it is tokenised. A
requirement is a list of phrases of which one is enough.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from regard.text.tokenizer import Tokenizer

Letters = tuple[int, ...]
MAX_REQUIRED = 10  # requirements at once: the automaton has a state for every subset of them
MAX_STOP = 1000  # letters of a stop string
NEVER = 30_000  # tokens: more than any output has
BOUNDARY = 0x110000  # a letter beyond all characters: the character before is complete


class Spelling:
    """The letters of every token of a vocabulary, the end token included, and which tokens may come before it."""

    def __init__(self, letters: Sequence[Sequence[int]], usable: Sequence[bool], eos: int) -> None:
        self.letters_VL = np.full((len(letters), max(map(len, letters), default=0)), -1, dtype=np.int64)  # padded: -1
        for row, word in zip(self.letters_VL, letters, strict=True):
            row[: len(word)] = list(word)
        self.usable_V, self.eos = np.asarray(usable, dtype=bool), eos


class Speller:
    """Spells tokens and phrases: in bytes, or in whole tokens where the vocabulary separates them by spaces.

    Where tokens are parts of characters, composed when text is put together, the letters are those parts, with
    `BOUNDARY` before each that begins a character and at the end: so `e` is not found in `é`.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, blocked: Sequence[int], eos: int) -> None:
        self.tokenizer = tokenizer
        self.spaced = tokenizer.scheme == "space"
        self.decomposed = tokenizer.scheme == "nfd"
        letters: list[Sequence[int]] = [*tokenizer.spellings()]
        if self.spaced:
            letters = [[index] for index in range(tokenizer.size)]
        elif self.decomposed:
            letters = [_character_parts(piece) for piece in tokenizer.pieces(range(tokenizer.size))]
        letters = [[] if index in tokenizer.special else spelled for index, spelled in enumerate(letters)]
        letters += [[] for _ in range(vocab - tokenizer.size)]
        letters[eos] = [BOUNDARY] if self.decomposed else []
        unusable = {*blocked, eos}
        self.spelling = Spelling(letters, [index not in unusable for index in range(vocab)], eos)

    def spell(self, phrase: str) -> Letters:
        """The letters of a phrase."""
        if self.spaced:
            return tuple(self.tokenizer.encode([phrase.strip(" ")])[0])
        if self.decomposed:
            return (*_character_parts(unicodedata.normalize("NFD", phrase)), BOUNDARY) if phrase else ()
        return tuple(phrase.encode("utf-8", "replace"))


def is_combining(part: str) -> bool:
    """Whether a part may combine with the character before it: a diacritic, or a later part of a Hangul syllable."""
    return unicodedata.category(part).startswith("M") or "\u1161" <= part <= "\u1175" or "\u11a8" <= part <= "\u11c2"


def combining_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that may change the character before them."""
    if tokenizer.scheme != "nfd":
        return ()
    pieces = tokenizer.pieces(range(tokenizer.size))
    return tuple(index for index, piece in enumerate(pieces) if index not in tokenizer.special and is_combining(piece))


def _character_parts(text: str) -> list[int]:
    return [letter for part in text for letter in ((ord(part),) if is_combining(part) else (BOUNDARY, ord(part)))]


@dataclass(frozen=True, eq=False)
class Phrases:
    """The automaton: Q states, M = 2^requirements subsets of them that were met."""

    next_QV: np.ndarray
    met_QV: np.ndarray  # bits of the requirements that the token meets
    ban_QV: np.ndarray  # the token completes a forbidden phrase, or is not usable
    stop_QV: np.ndarray  # letters from the start of the stop string that the token completes to its own end; 0: none
    need_MQ: np.ndarray  # fewest tokens until every requirement is met, those that the end token completes included
    held_Q: np.ndarray  # last letters read that may be the beginning of a stop string
    letters_V: np.ndarray  # how many letters a token has
    eos: int

    @classmethod
    def none(cls, vocab: int, eos: int) -> Phrases:
        """The automaton of no phrases."""
        next_QV, met_QV, stop_QV = (np.zeros((1, vocab), dtype) for dtype in (np.int32, np.int16, np.int16))
        need_MQ, held_Q = np.zeros((1, 1), np.int16), np.zeros(1, np.int16)
        ban_QV, letters_V = np.zeros((1, vocab), bool), np.zeros(vocab, np.int64)
        return cls(next_QV, met_QV, ban_QV, stop_QV, need_MQ, held_Q, letters_V, eos)

    def find_stop(self, ids: Sequence[int]) -> tuple[int, int] | None:
        """Of the first stop string: the tokens until it is complete, and how many of those begin before it."""
        state = 0
        for position, index in enumerate(ids):
            if last := int(self.stop_QV[state, index]):
                *starts, total = self._ends(ids[: position + 1])
                return position + 1, bisect_left(starts, total - last)
            state = int(self.next_QV[state, index])
        return None

    def tokens_certain(self, ids: Sequence[int]) -> int:
        """How many of `ids`, which complete no stop string, cannot be a part of one that comes next."""
        state = 0
        for index in ids:
            state = int(self.next_QV[state, index])
        _, *ends = self._ends(ids)
        return bisect_right(ends, ends[-1] - int(self.held_Q[state])) if ends else 0

    def _ends(self, ids: Sequence[int]) -> list[int]:
        """How many letters there are before the first of `ids` and after each of them."""
        return list(accumulate((int(self.letters_V[index]) for index in ids), initial=0))

    def tokens_needed(self, ids: Sequence[int], not_next: Sequence[int] = ()) -> int | None:
        """Fewest tokens between `ids` and the end, if none of `not_next` follows `ids`; None: they break a rule."""
        state = met = 0
        for index in ids:
            if self.ban_QV[state, index]:
                return None
            met |= int(self.met_QV[state, index])
            state = int(self.next_QV[state, index])
        need = int(self.need_MQ[met, state])
        if need == 0 or not not_next:
            return need
        after_V = self.need_MQ[met | self.met_QV[state], self.next_QV[state]].astype(int)
        after_V[self.ban_QV[state]] = NEVER
        after_V[[*not_next, self.eos]] = NEVER
        return min(NEVER, 1 + int(after_V.min()))


def make_phrases(
    require: Sequence[Sequence[Letters]], forbid: Sequence[Letters], spelling: Spelling, stop: Sequence[Letters] = ()
) -> Phrases:
    """The automaton of some phrases over a vocabulary; of each requirement one phrase is enough."""
    require = list(dict.fromkeys(tuple(dict.fromkeys(each)) for each in require))
    letters = sorted({x for word in (*(word for each in require for word in each), *forbid, *stop) for x in word})
    classes = {letter: i + 1 for i, letter in enumerate(letters)}
    delta_QC, met_Q, ban_Q, stop_Q, held_Q = _letter_automaton(require, forbid, stop, classes)
    states, vocab = len(delta_QC), len(spelling.letters_VL)
    letters_V = (spelling.letters_VL >= 0).sum(1)
    next_QV = np.repeat(np.arange(states)[:, None], vocab, axis=1)
    met_QV = np.zeros((states, vocab), dtype=np.int32)
    ban_QV = np.zeros((states, vocab), dtype=bool)
    stop_QV = np.zeros((states, vocab), dtype=np.int16)
    class_VL = np.zeros_like(spelling.letters_VL)
    for letter, i in classes.items():
        class_VL[spelling.letters_VL == letter] = i
    for position in range(class_VL.shape[1]):
        tokens = np.nonzero(letters_V > position)[0]
        moved = delta_QC[next_QV[:, tokens], class_VL[tokens, position]]
        next_QV[:, tokens] = moved
        met_QV[:, tokens] |= met_Q[moved]
        ban_QV[:, tokens] |= ban_Q[moved]
        if stop:  # the first that is complete counts, and of several the longest
            before, here = stop_QV[:, tokens], stop_Q[moved]
            after = here + (letters_V[tokens] - position - 1)
            stop_QV[:, tokens] = np.where((before == 0) & (here > 0), after, before)
    end_Q = met_QV[:, spelling.eos].copy(), ban_QV[:, spelling.eos].copy()
    ban_QV |= ~spelling.usable_V
    ban_QV[:, spelling.eos] = True  # not before the end
    need_MQ = _fewest_tokens(next_QV, met_QV, ban_QV, stop_QV > 0, end_Q, len(require))
    ban_QV[:, spelling.eos] = end_Q[1]
    return Phrases(
        next_QV.astype(np.int32), met_QV.astype(np.int16), ban_QV, stop_QV, need_MQ, held_Q, letters_V, spelling.eos
    )


def _letter_automaton(
    require: Sequence[Sequence[Letters]], forbid: Sequence[Letters], stop: Sequence[Letters], classes: dict[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The Aho-Corasick automaton of the phrases -> transitions, and of every state what was just completed.

    That is: the requirements met, whether a phrase is forbidden, the length of the longest stop string; and how much of
    a stop string may have begun. A state stands for the longest suffix of the text that begins a phrase.
    """
    children: list[dict[int, int]] = [{}]
    met, ban, stopped, held = [0], [False], [0], [0]

    def add(word: Letters, begins_stop: bool = False) -> int:
        node = 0
        for depth, letter in enumerate(word, start=1):
            if letter not in children[node]:
                children[node][letter] = len(children)
                children.append({})
                for values in (met, stopped, held):
                    values.append(0)
                ban.append(False)
            node = children[node][letter]
            if begins_stop:
                held[node] = depth
        return node

    for i, phrases in enumerate(require):
        for word in phrases:
            met[add(word)] |= 1 << i
    for word in forbid:
        ban[add(word)] = True
    for word in stop:
        stopped[add(word, begins_stop=True)] = len(word)
    delta_QC = np.zeros((len(children), len(classes) + 1), dtype=np.int64)
    suffix = [0] * len(children)
    queue = deque([0])
    while queue:
        node = queue.popleft()
        if node:
            delta_QC[node] = delta_QC[suffix[node]]
            met[node] |= met[suffix[node]]
            ban[node] |= ban[suffix[node]]
            stopped[node] = stopped[node] or stopped[suffix[node]]
            held[node] = held[node] or held[suffix[node]]
        for letter, child in children[node].items():
            suffix[child] = int(delta_QC[node, classes[letter]]) if node else 0
            delta_QC[node, classes[letter]] = child
            queue.append(child)
    met_Q, stop_Q, held_Q = np.asarray(met, np.int32), np.asarray(stopped, np.int16), np.asarray(held, np.int16)
    return delta_QC, met_Q, np.asarray(ban), stop_Q, held_Q


def _fewest_tokens(
    next_QV: np.ndarray,
    met_QV: np.ndarray,
    ban_QV: np.ndarray,
    stops_QV: np.ndarray,
    end: tuple[np.ndarray, np.ndarray],
    count: int,
) -> np.ndarray:
    """Shortest paths from every state and subset to where the end meets all requirements and nothing is forbidden.

    A token that completes a stop string is the last one.
    """
    states, full = len(next_QV), (1 << count) - 1
    subset_M1 = np.arange(full + 1)[:, None]
    may_end_MQ = ((subset_M1 | end[0]) == full) & ~end[1]
    need_MQ = np.where(may_end_MQ, 0, NEVER).astype(np.int16)
    if not need_MQ.any():
        return need_MQ
    edges = []  # from, to, requirements met, whether it stops; each once, however many tokens it has
    for state in range(states):
        usable = ~ban_QV[state]
        to, met, stops = (x[state, usable].astype(np.int64) for x in (next_QV, met_QV, stops_QV))
        pairs = np.unique(to << 32 | met << 1 | stops)
        edges.append(np.stack((np.full(len(pairs), state), pairs >> 32, (pairs & 0xFFFFFFFF) >> 1, pairs & 1)))
    begin, to, met, stops = np.concatenate(edges, axis=1)
    for subset in range(full, -1, -1):  # supersets, which are larger numbers, first: what was met stays met
        after = subset | met
        closed = (stops > 0) & ~may_end_MQ[after, to]
        need = need_MQ[subset]
        while True:
            reach = np.full(states, NEVER, dtype=np.int64)
            np.minimum.at(reach, begin, np.where(closed, NEVER, need_MQ[after, to].astype(np.int64) + 1))
            better = np.minimum(reach, need).astype(np.int16)
            if (better == need).all():
                break
            need[:] = better
    return need_MQ
