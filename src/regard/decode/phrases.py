"""Phrases that an output must or must not contain, as one automaton over the tokens of a vocabulary.

A phrase is a sequence of letters: bytes of text, or whole tokens where a vocabulary separates them by spaces. For every
prefix of an output the automaton knows which phrases each next token would complete, and how many tokens at least it
takes to complete the rest. It reads the letters of a token, so a phrase is recognised however it is tokenised.
"""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from regard.text.tokenizer import Tokenizer

Letters = tuple[int, ...]
MAX_REQUIRED = 10  # required phrases at once: the automaton has a state for every subset of them
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
    """The automaton: Q states, M = 2^phrases subsets of required phrases that were met."""

    next_QV: np.ndarray
    met_QV: np.ndarray  # bits of the required phrases that the token completes
    ban_QV: np.ndarray  # the token completes a forbidden phrase, or is not usable
    need_MQ: np.ndarray  # fewest tokens until every required phrase is met, those that the end token completes included
    eos: int

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


def make_phrases(require: Sequence[Letters], forbid: Sequence[Letters], spelling: Spelling) -> Phrases:
    """The automaton of some phrases over a vocabulary."""
    require = list(dict.fromkeys(require))
    forbid = list(dict.fromkeys(forbid))
    classes = {letter: i + 1 for i, letter in enumerate(sorted({x for word in (*require, *forbid) for x in word}))}
    delta_QC, met_Q, ban_Q = _letter_automaton(require, forbid, classes)
    states, vocab = len(delta_QC), len(spelling.letters_VL)
    next_QV = np.repeat(np.arange(states)[:, None], vocab, axis=1)
    met_QV = np.zeros((states, vocab), dtype=np.int32)
    ban_QV = np.zeros((states, vocab), dtype=bool)
    class_VL = np.zeros_like(spelling.letters_VL)
    for letter, i in classes.items():
        class_VL[spelling.letters_VL == letter] = i
    for position in range(class_VL.shape[1]):
        tokens = np.nonzero(spelling.letters_VL[:, position] >= 0)[0]
        moved = delta_QC[next_QV[:, tokens], class_VL[tokens, position]]
        next_QV[:, tokens] = moved
        met_QV[:, tokens] |= met_Q[moved]
        ban_QV[:, tokens] |= ban_Q[moved]
    end_Q = met_QV[:, spelling.eos].copy(), ban_QV[:, spelling.eos].copy()
    ban_QV |= ~spelling.usable_V
    ban_QV[:, spelling.eos] = True  # not before the end
    need_MQ = _fewest_tokens(next_QV, met_QV, ban_QV, end_Q, len(require))
    ban_QV[:, spelling.eos] = end_Q[1]
    return Phrases(next_QV.astype(np.int32), met_QV.astype(np.int16), ban_QV, need_MQ, spelling.eos)


def _letter_automaton(
    require: Sequence[Letters], forbid: Sequence[Letters], classes: dict[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The Aho-Corasick automaton of the phrases -> transitions, required phrases met, whether one is forbidden.

    A state stands for the longest suffix of the text that begins a phrase.
    """
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
    suffix = [0] * len(children)
    queue = deque([0])
    while queue:
        node = queue.popleft()
        if node:
            delta_QC[node] = delta_QC[suffix[node]]
            met[node] |= met[suffix[node]]
            ban[node] |= ban[suffix[node]]
        for letter, child in children[node].items():
            suffix[child] = int(delta_QC[node, classes[letter]]) if node else 0
            delta_QC[node, classes[letter]] = child
            queue.append(child)
    return delta_QC, np.asarray(met, dtype=np.int32), np.asarray(ban)


def _fewest_tokens(
    next_QV: np.ndarray, met_QV: np.ndarray, ban_QV: np.ndarray, end: tuple[np.ndarray, np.ndarray], count: int
) -> np.ndarray:
    """Shortest paths from every state and subset to where the end completes all required phrases and none forbidden."""
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
    for subset in range(full, -1, -1):  # supersets, which are larger numbers, first: phrases stay met
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
