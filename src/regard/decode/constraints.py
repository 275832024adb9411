"""Rules that steer a search: they change the values by which tokens are chosen, never the scores that are reported."""

from __future__ import annotations

import math
import unicodedata
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

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


MAX_STAGES = 48  # stages of progress towards required phrases that a beam keeps apart


@dataclass(frozen=True)
class SearchInput:
    """One source to decode, in token ids; with flags it is not decoded, and its output is empty."""

    sources: tuple[Sequence[int], ...]  # per run, each with its end token; of a language model the prompt, not empty
    limit: int = 0  # most output tokens, the end not counted
    minimum: int = 0
    prefix: tuple[int, ...] = ()
    not_after_prefix: tuple[int, ...] = ()  # tokens that would change the last character of the prefix
    phrases: Phrases | None = None
    stop: tuple[str, ...] = ()  # strings before which the text ends; the phrases know them too
    key: int = 0  # of its random numbers, together with the seed
    seed: int | None = None  # None: that of the options
    open_end: bool = False  # a continuation: at the limit it stops without an end token
    unknown: tuple[str, ...] = ()  # what the source has outside the vocabulary: tokens, and names of features
    flags: dict[str, str] = field(default_factory=dict)  # why it is not decoded: name -> reason

    @property
    def stages(self) -> int:
        """Stages of progress from the beginning to where all required phrases are met."""
        return 0 if self.phrases is None else min(self.phrases.tokens_needed(()) or 0, MAX_STAGES)


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
