"""Phrases that an output must, may not or may last contain, as automata over a vocabulary."""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from regard.text.tokenizer import Tokenizer

Letters = tuple[int, ...]
NEVER = 30_000  # more tokens than any output has
BOUNDARY = 0x110000  # a letter beyond all characters, which marks the end of a character


class PhraseTexts(NamedTuple):
    """The phrases of a request."""

    require: tuple[tuple[str, ...], ...] = ()  # the output must contain at least one phrase of each tuple
    forbid: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


class Spelling:
    """The letters of every token of a vocabulary, and which tokens may be produced before the end token."""

    def __init__(self, letters: Sequence[Sequence[int]], usable: Sequence[bool], eos: int) -> None:
        self.letters_VL = np.full((len(letters), max(map(len, letters), default=0)), -1, dtype=np.int64)  # padded: -1
        for row, word in zip(self.letters_VL, letters, strict=True):
            row[: len(word)] = list(word)
        self.usable_V = np.asarray(usable, dtype=bool)
        self.eos = eos


class Speller:
    """Spells tokens and phrases as letters: bytes, or whole tokens if the vocabulary separates them by spaces.

    If tokens are parts of characters (scheme nfd), the letters are these parts, with `BOUNDARY` before each part that
    begins a character and at the end, so `e` does not match in `é`.
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
        letters += [[]] * (vocab - tokenizer.size)
        letters[eos] = [BOUNDARY] if self.decomposed else []
        unusable = {*blocked, eos}
        self.spelling = Spelling(letters, [index not in unusable for index in range(vocab)], eos)

    def spell(self, phrase: str) -> Letters:
        if self.spaced:
            return tuple(self.tokenizer.encode([phrase.strip(" ")])[0])
        if self.decomposed:
            return (*_character_parts(unicodedata.normalize("NFD", phrase)), BOUNDARY) if phrase else ()
        return tuple(phrase.encode("utf-8", "replace"))


def is_combining(part: str) -> bool:
    """Whether a code point combines with the one before it: a diacritic, or a later part of a Hangul syllable."""
    return unicodedata.category(part).startswith("M") or "\u1161" <= part <= "\u1175" or "\u11a8" <= part <= "\u11c2"


def _character_parts(text: str) -> list[int]:
    return [letter for part in text for letter in ((ord(part),) if is_combining(part) else (BOUNDARY, ord(part)))]


@dataclass(frozen=True, eq=False)
class Phrases:
    """The automaton of some phrases over a vocabulary, with Q states and M = 2^requirements subsets of requirements."""

    next_QV: np.ndarray
    met_QV: np.ndarray  # bits of the requirements that the token meets
    ban_QV: np.ndarray  # whether the token completes a forbidden phrase, or is not usable
    stop_QV: np.ndarray  # if the token completes a stop string: letters from its start to the end of the token; else 0
    need_MQ: np.ndarray  # fewest tokens until the output may end with every requirement met
    held_Q: np.ndarray  # number of last letters that may begin a stop string
    letters_V: np.ndarray  # number of letters of a token
    eos: int

    def find_stop(self, ids: Sequence[int]) -> tuple[int, int] | None:
        """Find the first stop string -> the number of tokens up to its end, and how many of them begin before it."""
        state = 0
        for position, index in enumerate(ids):
            if last := int(self.stop_QV[state, index]):
                *starts, total = self._ends(ids[: position + 1])
                return position + 1, bisect_left(starts, total - last)
            state = int(self.next_QV[state, index])
        return None

    def tokens_certain(self, ids: Sequence[int]) -> int:
        """The number of first `ids` that cannot be part of a stop string that later tokens complete."""
        state = 0
        for index in ids:
            state = int(self.next_QV[state, index])
        _, *ends = self._ends(ids)
        return bisect_right(ends, ends[-1] - int(self.held_Q[state])) if ends else 0

    def _ends(self, ids: Sequence[int]) -> list[int]:
        """The number of letters before the first of `ids` and after each of them."""
        return list(accumulate((int(self.letters_V[index]) for index in ids), initial=0))

    def tokens_needed(self, ids: Sequence[int], not_next: Sequence[int] = ()) -> int | None:
        """Fewest tokens between `ids` and the end if none of `not_next` follows; None if `ids` break a rule."""
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
    """Build the automaton; a requirement is met by any one of its phrases."""
    require = list(dict.fromkeys(tuple(dict.fromkeys(each)) for each in require))
    letters = sorted({x for word in (*(word for each in require for word in each), *forbid, *stop) for x in word})
    classes = {letter: i + 1 for i, letter in enumerate(letters)}
    delta_QC, met_Q, ban_Q, stop_Q, held_Q = _letter_automaton(require, forbid, stop, classes)
    states = len(delta_QC)
    vocab = len(spelling.letters_VL)
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
        if stop:  # the first stop string counts, and the longest of several that end at the same letter
            before = stop_QV[:, tokens]
            here = stop_Q[moved]
            after = here + (letters_V[tokens] - position - 1)
            stop_QV[:, tokens] = np.where((before == 0) & (here > 0), after, before)
    end_met_Q = met_QV[:, spelling.eos].copy()
    end_ban_Q = ban_QV[:, spelling.eos].copy()
    ban_QV |= ~spelling.usable_V
    ban_QV[:, spelling.eos] = True  # on the way to the end
    need_MQ = _fewest_tokens(next_QV, met_QV, ban_QV, stop_QV > 0, end_met_Q, end_ban_Q, len(require))
    ban_QV[:, spelling.eos] = end_ban_Q
    return Phrases(
        next_QV.astype(np.int32), met_QV.astype(np.int16), ban_QV, stop_QV, need_MQ, held_Q, letters_V, spelling.eos
    )


def _letter_automaton(
    require: Sequence[Sequence[Letters]], forbid: Sequence[Letters], stop: Sequence[Letters], classes: dict[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Build the Aho-Corasick automaton of the phrases over letters.

    Returns the transitions and, per state: the bits of the requirements just met, whether a forbidden phrase was just
    completed, the length of the longest stop string just completed, how many of the last letters may begin one.
    """
    children: list[dict[int, int]] = [{}]

    def add(word: Letters) -> list[int]:
        """Add the states of a phrase -> these states."""
        path = [0]
        for letter in word:
            if letter not in children[path[-1]]:
                children[path[-1]][letter] = len(children)
                children.append({})
            path.append(children[path[-1]][letter])
        return path

    require_ends = [[add(word)[-1] for word in phrases] for phrases in require]
    forbid_ends = [add(word)[-1] for word in forbid]
    stop_paths = [add(word) for word in stop]
    met = np.zeros(len(children), np.int32)
    ban = np.zeros(len(children), bool)
    stopped = np.zeros(len(children), np.int16)
    held = np.zeros(len(children), np.int16)
    for i, ends in enumerate(require_ends):
        met[ends] |= 1 << i
    ban[forbid_ends] = True
    for path in stop_paths:
        stopped[path[-1]] = len(path) - 1
        held[path] = range(len(path))
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
    return delta_QC, met, ban, stopped, held


def _fewest_tokens(
    next_QV: np.ndarray,
    met_QV: np.ndarray,
    ban_QV: np.ndarray,
    stops_QV: np.ndarray,
    end_met_Q: np.ndarray,  # requirements that the end token meets
    end_ban_Q: np.ndarray,
    count: int,
) -> np.ndarray:
    """Shortest paths from every state and subset of met requirements to a state in which the output may end.

    Breadth-first search backwards from these states: every edge is visited once per subset.
    """
    states = len(next_QV)
    full = (1 << count) - 1
    subset_M1 = np.arange(full + 1)[:, None]
    may_end_MQ = ((subset_M1 | end_met_Q) == full) & ~end_ban_Q
    need_MQ = np.where(may_end_MQ, 0, NEVER).astype(np.int16)
    if not need_MQ.any():
        return need_MQ
    edges = []  # from, to, requirements met, whether it completes a stop string; without duplicates
    for node in range(states):
        usable = ~ban_QV[node]
        to, met, stops = (x[node, usable].astype(np.int64) for x in (next_QV, met_QV, stops_QV))
        pairs = np.unique(to << 32 | met << 1 | stops)
        edges.append(np.stack((np.full(len(pairs), node), pairs >> 32, (pairs & 0xFFFFFFFF) >> 1, pairs & 1)))
    table = np.concatenate(edges, axis=1)
    table = table[:, np.argsort(table[1], kind="stable")]
    steps = []  # subsets before an edge that meets some requirements: those with and without each of them
    for met in np.unique(table[2]).tolist():
        begin, to, _, stops = table[:, table[2] == met]
        starts = np.searchsorted(to, np.arange(states + 1))
        steps += [(met, part, begin, stops, starts) for part in range(met + 1) if part & met == part]
    subset, state = np.nonzero(may_end_MQ)
    for need in range(1, NEVER):
        reached = [np.zeros(0, np.int64)]
        for met, part, begin, stops, starts in steps:
            fits = subset & met == met
            after = subset[fits]
            to = state[fits]
            number = starts[to + 1] - starts[to]
            edge = np.arange(number.sum()) + np.repeat(starts[to + 1] - number.cumsum(), number)
            last = np.repeat(may_end_MQ[after, to], number)  # else no token may complete a stop string here
            reached.append(((np.repeat(after, number) & ~part) * states + begin[edge])[last | (stops[edge] == 0)])
        places = np.unique(np.concatenate(reached))
        places = places[need_MQ.reshape(-1)[places] == NEVER]
        if not len(places):
            break
        need_MQ.reshape(-1)[places] = need
        subset, state = np.divmod(places, states)
    return need_MQ
